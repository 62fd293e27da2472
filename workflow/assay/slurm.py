"""A site's SLURM: what jobs ask of it, what it gave one of them, and whether a run that should use it does."""

from __future__ import annotations

import argparse
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.config import Site
from assay.errors import ConfigError

PROFILE = "profiles/slurm"
LONGEST_S = 180  # between two looks of Snakemake's plugin at the queue
_START = "Building DAG of jobs..."  # Snakemake says so when a job starts, before anything of its own
# What SLURM writes into the log of a job that it ends -> the state of the job. Its processes are cancelled whatever the
# cause, and one that ran out of memory may be called FAILED or even COMPLETED, as its script went on or not.
_WORDS = {
    re.compile(r"oom.kill event|exceeded (job )?memory limit|: Out Of Memory", re.IGNORECASE): "OUT_OF_MEMORY",
    re.compile(r"CANCELLED AT \S+ DUE TO TIME LIMIT"): "TIMEOUT",
    re.compile(r"CANCELLED AT \S+ DUE TO PREEMPTION"): "PREEMPTED",
    re.compile(r"CANCELLED AT \S+ DUE TO NODE FAILURE"): "NODE_FAIL",
    re.compile(r"\*\*\* (JOB|STEP) \S+ ON \S+ CANCELLED AT "): "CANCELLED",
}


def resources(site: Site) -> dict[str, str]:
    """Snakemake resources of every job that a site's SLURM runs, under the names that its plugin reads."""
    if site.slurm is None:
        return {}
    named = {
        "slurm_partition": site.slurm.partition,
        "slurm_account": site.slurm.account,
        "constraint": site.slurm.constraint,
        # What a job printed before it was queued again is evidence.
        "slurm_extra": "--open-mode=append",
    }
    return {name: value for name, value in named.items() if value is not None}


def gres(site: Site, devices: int) -> str | None:
    """The request for devices, all of them on one node; None where SLURM is not to be asked for any."""
    return f"{site.slurm.gres}:{devices}" if site.slurm and devices else None


def allocation(env: Mapping[str, str]) -> dict[str, Any] | None:
    """What SLURM gave the job that runs under `env`; None outside of it."""
    if "SLURM_JOB_ID" not in env:
        return None
    return {
        "job": env["SLURM_JOB_ID"],
        "node": env.get("SLURMD_NODENAME"),
        "devices": env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS"),
    }


def ended_by(log: str) -> str | None:
    """The state in which SLURM ended a job, by its own words in what the job printed; None where it did not end it.

    Args:
        log: what the job printed, that of earlier starts included; only the last one counts.
    """
    last = [line for line in log.rpartition(_START)[2].splitlines() if line.startswith(("slurmstepd", "srun: error"))]
    return next((state for words, state in _WORDS.items() if any(words.search(line) for line in last)), None)


def end_preempted(plugin: ModuleType) -> None:
    """Have Snakemake's plugin end a job that was preempted and is not queued again.

    It waits for ever for a job in the state PREEMPTED, the last one of a job whose partition cancels what it preempts;
    one that is queued again is PENDING.

    Args:
        plugin: `snakemake_executor_plugin_slurm`.
    """
    query: Callable[..., Awaitable[tuple[dict[str, str] | None, float | None]]] = plugin.query_job_status

    async def states(command: str, logger: object) -> tuple[dict[str, str] | None, float | None]:
        found, seconds = await query(command, logger)
        return found and {job: "CANCELLED" if state == "PREEMPTED" else state for job, state in found.items()}, seconds

    plugin.query_job_status = states  # type: ignore[attr-defined]


def warnings(site: Site, name: str, local: bool, min_job_age_s: int | None = None) -> list[str]:
    """What a person should hear about how a run is started.

    Args:
        site: where it runs, by `name`.
        local: whether jobs run on this machine.
        min_job_age_s: for how long SLURM knows a job that has ended; None if that is not known.
    """
    if site.slurm and local:
        return [
            f"site '{name}' has SLURM, and this run does not use it: every job runs on this machine. For SLURM: "
            f"snakemake --workflow-profile {PROFILE}"
        ]
    if site.slurm is None and not local:
        return [
            f"jobs are submitted, and site '{name}' has no `slurm` section: they ask for no partition, account or "
            f"devices. Add it to config/sites/{name}.yaml"
        ]
    if not local and min_job_age_s is not None and min_job_age_s <= LONGEST_S:
        return [
            f"SLURM forgets a job {min_job_age_s} s after its end (MinJobAge), and Snakemake may look only every "
            f"{LONGEST_S} s: should the run wait for a job that is not in the queue, press Ctrl-C and run again"
        ]
    return []


def check_profile(argv: Sequence[str], folder: Path) -> None:
    """Refuse a workflow profile that is not there: Snakemake passes over one without a word.

    Args:
        argv: Snakemake's arguments.
        folder: the workflow's.

    Raises:
        ConfigError: there is none of that name.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--workflow-profile", default="none")
    name = parser.parse_known_args(argv)[0].workflow_profile
    if name != "none" and not any(path.exists() for path in (Path(name), folder / "profiles" / name, folder / name)):
        known = ", ".join(sorted(str(path.relative_to(folder)) for path in (folder / "profiles").iterdir()))
        raise ConfigError(
            f"there is no workflow profile '{name}', and Snakemake would go on without it; known: {known}"
        )
