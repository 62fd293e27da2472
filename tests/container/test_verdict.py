"""The same server gets the same verdict in a pinned container as in a process, through the whole workflow."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from built_image import python_mounts
from workspaces import copy_workflow

from assay.gate import read_verdict
from assay.records import Status
from assay.store import read_json, read_rows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return copy_workflow(tmp_path_factory.mktemp("contained"))


def contain(workspace, registry, digest):
    """Give the workspace a config whose arm is the embedded one, in a container."""
    arm = yaml.safe_load((workspace.path / "config/arms/embedded.yaml").read_text())
    code = str(workspace.path / "workflow")
    arm.pop("process")
    arm["container"] = {"mounts": [asdict(mount) for mount in python_mounts()] + [{"source": code, "target": code}]}
    arm["devices"] = {"cpu": {"image": {"repository": registry.repository, "tag": "1", "digest": digest}}}
    arm["argv"] = [sys.executable if word == "{python}" else word for word in arm["argv"]]
    arm["env"] |= {"PYTHONPATH": code, "HOME": "/tmp"}
    (workspace.path / "config/arms/contained.yaml").write_text(yaml.safe_dump(arm))
    site = workspace.path / "config/sites/embedded.yaml"
    content = yaml.safe_load(site.read_text()) | {"container": {"runtime": "docker"}}
    content["arms"] = sorted({*content["arms"], "contained"})
    site.write_text(yaml.safe_dump(content))
    configs = workspace.path / "config/configs.yaml"
    entry = (
        "{family: smollm2_135m_faults, arm: contained, deployment: false, instances: [[{name: load, concurrency: 16}]]}"
    )
    configs.write_text(configs.read_text().split("\ncontained:")[0] + f"\ncontained: {entry}\n")


def test_a_container_and_a_process_reach_the_same_verdict(client, registry, image, workspace):
    contain(workspace, registry, image.digest)
    workspace.snakemake("results/verdicts/contained.json", "results/verdicts/faults_32.json")
    folder = workspace.path / "results"
    inside, outside = (read_verdict(folder / f"verdicts/{name}.json") for name in ("contained", "faults_32"))
    assert inside.verdict is outside.verdict is Status.PASS_WITH_CAVEAT
    assert [caveat.code for caveat in inside.caveats] == ["single_instance"]
    gates = [[(gate.id, gate.arm, gate.status) for gate in verdict.gates] for verdict in (inside, outside)]
    assert gates[0] == gates[1]
    assert len(read_rows(folder / "outputs/contained/0.parquet", "responses")) == 32
    identity = read_json(folder / "outputs/contained/0.identity.json")
    assert identity["changed"] == []
    assert identity["start"]["image"]["repo_digests"] == [f"{registry.repository}@{image.digest}"]
    assert identity["start"]["module_file"] == str(workspace.path / "workflow/assay/__init__.py")
    assert read_json(folder / "outputs/contained/0.cleanup.json")["clean"]


def test_an_image_that_is_not_the_pinned_one_is_an_error_that_says_which(client, registry, image, workspace):
    wrong = "sha256:" + "0" * 64
    contain(workspace, registry, wrong)
    workspace.snakemake("results/verdicts/contained.json")
    verdict = read_verdict(Path(workspace.path / "results/verdicts/contained.json"))
    assert verdict.verdict is Status.ERROR
    assert wrong in verdict.reason and "nothing was measured" in verdict.reason
