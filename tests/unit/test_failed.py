"""Jobs that failed become ERROR verdicts that say why; what a later run does is not touched by them."""

import logging

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from assay.failed import FailedJob, FailedJobs, forget, write_errors
from assay.gate import read_verdict
from assay.records import Status


def heard(**fields):
    """What is kept of one event of Snakemake's log."""
    listener = FailedJobs()
    log = logging.Logger("test")
    log.addHandler(listener)
    log.error("x", extra={"event": LogEvent.JOB_ERROR, "jobid": 3, "rule_name": "generate"} | fields)
    return listener.jobs


def slurm(state):
    message = f"SLURM-job '17' failed, SLURM status is: '{state}'. Detailed failure reason unavailable"
    return heard(rule_msg=message, aux={"external_jobid": "17"}, log=["logs/generate/x/0.log"])[3]


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ("CANCELLED", "was cancelled"),
        ("TIMEOUT", "raise `minutes`"),
        ("OUT_OF_MEMORY", "raise memory_gib"),
        ("NODE_FAIL", "its node failed"),
        ("BOOT_FAIL", "did not start"),
        ("DEADLINE", "its deadline"),
    ],
)
def test_what_slurm_did_to_a_job_is_its_cause(state, what):
    cause = slurm(state).cause
    assert f"SLURM job 17 of rule generate is {state}: " in cause
    assert what in cause and "logs/generate/x/0.log" in cause


def test_a_job_that_failed_by_itself_points_to_its_log():
    assert slurm("FAILED").cause == "rule generate failed (log: logs/generate/x/0.log)"
    assert heard(rule_msg=None, aux={}, log=[])[3].cause == "rule generate failed"


def test_other_events_are_no_failures():
    assert heard(event=LogEvent.JOB_FINISHED) == {}
    assert heard(event=None) == {}


def test_each_config_without_a_verdict_gets_an_error_with_every_cause_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lost, broken = FailedJob("generate", "17", "NODE_FAIL", ()), FailedJob("judge", None, None, ("j.log",))
    lines = write_errors({"b": ("family", [lost, broken, lost]), "a+fault": (None, [broken])})
    assert [line.split(": ")[:2] for line in lines] == [["a+fault", "ERROR"], ["b", "ERROR"]]
    verdict = read_verdict("results/errors/b.json")
    assert (verdict.verdict, verdict.config.family) == (Status.ERROR, "family")
    assert verdict.reason.count("NODE_FAIL") == 1 and "rule judge failed (log: j.log)" in verdict.reason
    assert verdict.coverage.planned == 0
    forget()
    assert not (tmp_path / "results/errors").exists()
    forget()  # nothing there is no fault
