"""The same server gets the same verdict in a pinned container as in a process, through the whole workflow."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from built_image import python_mounts

from assay.gate import read_verdict
from assay.records import Status
from assay.store import read_json, read_rows

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]


EDITED = ("config/sites/embedded.yaml", "config/configs.yaml")


@pytest.fixture
def contain(workspace, registry):
    """A function that gives the workspace a config whose arm is the embedded one, in a container of one image."""
    arm_file = workspace.path / "config/arms/contained.yaml"

    def contain(digest):
        arm = yaml.safe_load((workspace.path / "config/arms/embedded.yaml").read_text())
        code = str(workspace.path / "workflow")
        arm.pop("process")
        arm["container"] = {"mounts": [asdict(mount) for mount in python_mounts()] + [{"source": code, "target": code}]}
        arm["devices"] = {"cpu": {"image": {"repository": registry.repository, "tag": "1", "digest": digest}}}
        arm["argv"] = [sys.executable if word == "{python}" else word for word in arm["argv"]]
        arm["env"] |= {"PYTHONPATH": code, "HOME": "/tmp"}
        arm_file.write_text(yaml.safe_dump(arm))
        site = workspace.path / EDITED[0]
        content = yaml.safe_load(site.read_text()) | {"container": {"runtime": "docker"}}
        site.write_text(yaml.safe_dump(content | {"arms": [*content["arms"], "contained"]}))
        entry = "family: smollm2_135m_faults, arm: contained, deployment: false"
        with (workspace.path / EDITED[1]).open("a") as configs:
            configs.write(f"\ncontained: {{{entry}, instances: [[{{name: load, concurrency: 16}}]]}}\n")

    yield contain
    for file in EDITED:
        workspace.restore(file)
    arm_file.unlink()
    for file in (workspace.path / "results/verdicts").glob("contained.json"):
        file.unlink()


def test_a_container_and_a_process_reach_the_same_verdict(client, registry, image, workspace, contain):
    contain(image.digest)
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


def test_an_image_that_is_not_the_pinned_one_is_an_error_that_says_which(client, workspace, contain):
    wrong = "sha256:" + "0" * 64
    contain(wrong)
    workspace.snakemake("results/verdicts/contained.json")
    verdict = read_verdict(Path(workspace.path / "results/verdicts/contained.json"))
    assert verdict.verdict is Status.ERROR
    assert wrong in verdict.reason and "nothing was measured" in verdict.reason
