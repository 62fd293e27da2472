"""Jobs that failed, and the ERROR verdicts of the configs that therefore have none.

A verdict is decided by its job; when a job before it fails (a fault of ours, a node that is lost, a time limit), there
is nothing to decide from. What is known then, the cause, goes into a verdict beside the others, under `results/errors`:
no rule makes it and nothing depends on it, so the next run goes on as if it were not there, and forgets it.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.records import Status
from assay.slurm import ended_by
from assay.store import write_json

FOLDER = Path("results/errors")
_STATE = re.compile(r"SLURM status is: '(\w+)'")
_REFUSED = re.compile(r"sbatch failed\. The error message was '(.*?)'\.\n", re.DOTALL)
_ADVICE = {
    "CANCELLED": "it was cancelled; run again",
    "DEADLINE": "its deadline came; run again",
    "NODE_FAIL": "its node failed; run again",
    "BOOT_FAIL": "its node did not start; run again",
    "OUT_OF_MEMORY": "it used more memory than it asked for; raise memory_gib (docs/sites.md), then run again",
    "PREEMPTED": "it was preempted, and is not queued again; run again",
    "TIMEOUT": "it ran longer than it asked for; raise `minutes` (docs/sites.md), then run again",
}


@dataclass(frozen=True)
class FailedJob:
    """A job that failed, for a person."""

    rule: str
    what: str  # became of it
    logs: tuple[str, ...] = ()
    slurm_job: str | None = None

    @property
    def cause(self) -> str:
        """What happened to it, and where to look."""
        who = f"SLURM job {self.slurm_job} of rule {self.rule}" if self.slurm_job else f"rule {self.rule}"
        return f"{who} {self.what}" + (f" (log: {', '.join(self.logs)})" if self.logs else "")


def without_files(rule: str, files: Iterable[str], logs: Iterable[str]) -> FailedJob:
    """A job that ended well and left files unwritten, which Snakemake tells of no job."""
    missing = ", ".join(str(file) for file in files if not Path(file).exists())
    return FailedJob(rule, f"ended, and its files did not appear within latency-wait: {missing}", tuple(logs))


class FailedJobs(logging.Handler):
    """Listens to Snakemake's log; `jobs` are those that failed, by Snakemake's number."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.jobs: dict[int, FailedJob] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take in one event of Snakemake's."""
        fields = record.__dict__
        match getattr(fields.get("event"), "value", None):
            case "job_error":
                self._take(fields)
            case "group_error":  # of jobs that are one for SLURM; each is told of again afterwards, but not SLURM's log
                for job in fields["job_error_info"]:
                    self._take({**job, "log": [*job["log"], *fields["aux_logs"]]})

    def _take(self, job: Mapping[str, Any]) -> None:
        self.jobs.setdefault(job["jobid"], _failed_job(job))


def _failed_job(job: Mapping[str, Any]) -> FailedJob:
    message, logs = job["rule_msg"] or "", tuple(job["log"])
    if refusal := _REFUSED.search(message):
        return FailedJob(job["rule_name"], f"was not taken by SLURM: {refusal[1]}")
    told = _STATE.search(message)
    # What SLURM wrote into the log comes first: in the queue, a job that it killed for its memory has just FAILED.
    state = next(filter(None, (ended_by(_text(log)) for log in logs)), told and told[1])
    what = f"is {state}: {_ADVICE[state]}" if state in _ADVICE else "failed"
    return FailedJob(job["rule_name"], what, logs, job["aux"].get("external_jobid"))


def _text(log: str) -> str:
    try:
        return Path(log).read_text(errors="replace")
    except OSError:  # it did not come to write one
        return ""


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
