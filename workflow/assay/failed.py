"""Jobs that failed, and the ERROR verdicts of the configs that therefore have none.

A verdict is decided by its job; when a job before it fails (a fault of ours, a node that is lost, a time limit), there
is nothing to decide from. What is known then, the cause, goes into a verdict beside the others, under `results/errors`:
no rule makes it and nothing depends on it, so the next run goes on as if it were not there, and forgets it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from assay.records import Status
from assay.store import write_json

FOLDER = Path("results/errors")
_STATE = re.compile(r"SLURM status is: '(\w+)'")
_ADVICE = {
    "CANCELLED": "it was cancelled; run again",
    "DEADLINE": "its deadline came; run again",
    "NODE_FAIL": "its node failed; run again",
    "BOOT_FAIL": "its node did not start; run again",
    "OUT_OF_MEMORY": "it used more memory than it asked for; raise memory_gib (docs/sites.md), then run again",
    "TIMEOUT": "it ran longer than it asked for; raise `minutes` (docs/sites.md), then run again",
}


@dataclass(frozen=True)
class FailedJob:
    """One job as Snakemake tells of it."""

    rule: str
    slurm_job: str | None
    slurm_state: str | None
    logs: tuple[str, ...]

    @property
    def cause(self) -> str:
        """What happened to it, for a person."""
        where = f" (log: {', '.join(self.logs)})" if self.logs else ""
        if self.slurm_state in _ADVICE:
            what = f"SLURM job {self.slurm_job} of rule {self.rule} is {self.slurm_state}"
            return f"{what}: {_ADVICE[self.slurm_state]}{where}"
        return f"rule {self.rule} failed{where}"


class FailedJobs(logging.Handler):
    """Listens to Snakemake's log; `jobs` are those that failed, by Snakemake's number."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.jobs: dict[int, FailedJob] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take in one event of Snakemake's."""
        if getattr(getattr(record, "event", None), "value", None) != "job_error":
            return
        fields = record.__dict__
        state = _STATE.search(fields.get("rule_msg") or "")
        self.jobs[fields["jobid"]] = FailedJob(
            rule=fields["rule_name"],
            slurm_job=(fields.get("aux") or {}).get("external_jobid"),
            slurm_state=state[1] if state else None,
            logs=tuple(fields.get("log") or ()),
        )


def forget() -> None:
    """Remove what an earlier run left here."""
    shutil.rmtree(FOLDER, ignore_errors=True)


def write_errors(blocked: Mapping[str, tuple[str | None, list[FailedJob]]]) -> list[str]:
    """Write an ERROR verdict for each config; returns a line for each.

    Args:
        blocked: config -> its family, and the failed jobs without which it has no verdict.
    """
    from assay.verdict import failed  # not before it is needed: every start of Snakemake reads this module

    lines = []
    for config, (family, jobs) in sorted(blocked.items()):
        cause = "; ".join(dict.fromkeys(job.cause for job in jobs))
        write_json(FOLDER / f"{config}.json", failed(config, family, cause).model_dump(mode="json"))
        lines.append(f"{config}: {Status.ERROR}: {cause}")
    return lines
