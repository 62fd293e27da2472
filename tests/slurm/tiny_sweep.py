"""A sweep that is real and small: a model of 0.1 million weights on two devices of every node, four prompts."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tiny
import yaml
from gpu import build, case
from private_slurm import PrivateSlurm
from workspaces import Workspace, copy_workflow

from assay.canonical import sha256_file
from assay.samples.build import write_lock

SITE = "cluster"
TOO_FEW_GIB = 0.3  # a server that has loaded torch takes more
CONFIGS = ("tiny", "tiny_too", "tiny+rope_theta", "tiny+second_best")
VERDICTS = tuple(f"results/verdicts/{name}.json" for name in CONFIGS)
HUNGRY = "hungry"  # a config whose jobs are given too little memory
OPTIONS = ("--config", f"site={SITE}", "--")
SOURCES = ("django", "lm_eval", "more_itertools", "smollm2_135m")


def make(path: Path, fetched: Path) -> Workspace:
    """A workspace in `path` with a site that has SLURM, a tiny model and configs on it.

    Args:
        path: an empty folder.
        fetched: the folder that holds the sources of the prompts.
    """
    workspace = copy_workflow(path)
    (path / "resources").unlink()
    (path / "resources").mkdir()
    for name in SOURCES:
        (path / "resources" / name).symlink_to(fetched / name)
    model = tiny.build(path / "model")
    settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(settings))
    machine = build(case("01"), path / "machine", tools=False)
    (machine.sysfs / "class/kfd/kfd/proc").mkdir(parents=True)
    _write(path / f"config/sites/{SITE}.yaml", _site(machine.options))
    arm = yaml.safe_load((path / "config/arms/embedded.yaml").read_text())
    # One request at a time: what is served is then the same bytes in every run, and so is the verdict.
    changes = {
        "devices": {"amd": {}},
        "gpus": 1,
        "instances": [[{"name": "alone", "concurrency": 1}]],
        "stop_grace_s": 2,
    }
    _write(path / "config/arms/embedded-amd.yaml", arm | changes)
    family = yaml.safe_load((path / "config/families/smollm2_135m_faults.yaml").read_text())
    family["model"] |= {"name": "Tiny", "weights": {"transformers": "tiny"}}
    family["sets"] = {"smoke": ["tiny"]}
    needs = {"memory_gib": 2, "minutes": 30}
    for name, gib in (("tiny", 2), (HUNGRY, TOO_FEW_GIB)):
        served = needs | {"memory_gib": gib}
        _write(path / f"config/families/{name}.yaml", family | {"needs": {"serve": served, "judge": needs}})
    entry = {"arm": "embedded-amd", "deployment": False}
    families = {"tiny": "tiny", "tiny_too": "tiny", HUNGRY: HUNGRY}
    _write(path / "config/configs.yaml", {name: entry | {"family": family} for name, family in families.items()})
    sources = yaml.safe_load((path / "config/sources.yaml").read_text())
    files = {file.name: sha256_file(file) for file in sorted(model.iterdir())}
    sources["tiny"] = {"kind": "local", "path": str(model), "files": files, "licence": "none"}
    _write(path / "config/sources.yaml", sources)
    _write(
        path / "samplesets/tiny.yaml",
        {"description": "Four prompts", "subset_of": "text_release", "counts": {"chat": 4}},
    )
    write_lock("tiny", path / "samplesets", path / "resources")
    return workspace


@dataclass(frozen=True)
class SlurmWorkspace(Workspace):
    """A workspace whose runs go to a cluster, and where they find it."""

    cluster: PrivateSlurm

    def command(self, *arguments):
        """The snakemake command line for `arguments`."""
        return [sys.executable, "-m", "snakemake", "--workflow-profile", "profiles/slurm", *arguments]

    @property
    def env(self):
        """The workspace's, with the cluster's commands."""
        ours = super().env
        found = self.cluster.env
        return ours | found | {"PYTHONPATH": f"{ours['PYTHONPATH']}:{found['PYTHONPATH']}"}


def on(cluster: PrivateSlurm, workspace: Workspace) -> SlurmWorkspace:
    """`workspace`, run by `cluster`."""
    return SlurmWorkspace(workspace.path, cluster)


def _site(options) -> dict[str, object]:
    devices = json.loads(options.model_dump_json())
    # Both nodes are this machine: what is local to a node is told apart by the node's name.
    devices |= {"lock_dir": f"{options.lock_dir}/$SLURMD_NODENAME", "settle_s": 0, "poll_s": 0.1}
    return {
        "description": "Two nodes with two devices each",
        "device": "amd",
        "arms": ["embedded-amd"],
        "threads": 1,
        "reference_gpus": 0,  # nothing answers behind these devices
        "cache_dir": "resources/caches",
        "devices": devices,
        "slurm": {"partition": "gpu", "gres": "gpu:toy"},
    }


def give_memory(workspace: Workspace) -> None:
    """Let the config that had too little have enough."""
    workspace.edit(f"config/families/{HUNGRY}.yaml", f"memory_gib: {TOO_FEW_GIB}", "memory_gib: 2")


def _write(path: Path, content: object) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def unserved(done: Workspace, path: Path) -> Workspace:
    """A copy, in `path`, of a workspace that has run: with its reference, and nothing of what was served."""
    shutil.copytree(done.path, path, symlinks=True, dirs_exist_ok=True)
    results = path / "results"
    for served in (*results.iterdir(), *(results / "judged").iterdir(), path / "logs"):
        if served.is_file():
            served.unlink()
        elif served.name not in ("reference", "judged"):
            shutil.rmtree(served)
    return Workspace(path)
