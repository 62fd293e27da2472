"""Jobs that failed become ERROR verdicts that say why; what a later run does is not touched by them."""

import logging

import pytest
from snakemake_interface_logger_plugins.common import LogEvent

from assay.failed import FailedJob, FailedJobs, forget, without_files, write_errors
from assay.gate import read_verdict
from assay.records import Status


def heard(**fields):
    """What is kept of one event of Snakemake's log."""
    listener = FailedJobs()
    log = logging.Logger("test")
    log.addHandler(listener)
    log.error("x", extra={"event": LogEvent.JOB_ERROR, "jobid": 3, "rule_name": "generate"} | fields)
    return listener.jobs


def slurm(state, logs=("logs/generate/x/0.log",)):
    message = f"SLURM-job '17' failed, SLURM status is: '{state}'. Detailed failure reason unavailable"
    return heard(rule_msg=message, aux={"external_jobid": "17"}, log=list(logs))[3]


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ("CANCELLED", "was cancelled"),
        ("TIMEOUT", "raise `minutes`"),
        ("OUT_OF_MEMORY", "raise memory_gib"),
        ("NODE_FAIL", "its node failed"),
        ("BOOT_FAIL", "did not start"),
        ("DEADLINE", "its deadline"),
        ("PREEMPTED", "not queued again"),
    ],
)
def test_what_slurm_did_to_a_job_is_its_cause(state, what):
    cause = slurm(state).cause
    assert f"SLURM job 17 of rule generate is {state}: " in cause
    assert what in cause and "logs/generate/x/0.log" in cause


def test_a_job_that_failed_by_itself_points_to_its_log():
    assert slurm("FAILED").cause == "SLURM job 17 of rule generate failed (log: logs/generate/x/0.log)"
    assert heard(rule_msg=None, aux={}, log=[])[3].cause == "rule generate failed"


def test_a_job_that_slurm_killed_for_its_memory_is_no_mere_failure(tmp_path):
    log = tmp_path / "17.log"
    log.write_text(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=17.0. Some of the step tasks have been OOM Killed.\n"
    )
    assert "of rule generate is OUT_OF_MEMORY: " in slurm("FAILED", ["logs/generate/x/0.log", str(log)]).cause


def test_a_job_that_slurm_does_not_take_says_what_slurm_said():
    message = (
        "SLURM sbatch failed. The error message was 'sbatch: error: invalid partition specified: gpus'.\n    sbatch "
        "call:\n        sbatch --parsable\nFor further error details see the cluster/cloud log"
    )
    cause = heard(rule_msg=message, aux={}, log=["logs/generate/x/0.log"])[3].cause
    assert cause == "rule generate was not taken by SLURM: sbatch: error: invalid partition specified: gpus"


def test_jobs_that_were_one_job_for_slurm_all_have_its_cause(tmp_path):
    log = tmp_path / "17.log"
    log.write_text("slurmstepd-n1: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-30T13:19:49 DUE TO TIME LIMIT ***\n")
    listener, logger = FailedJobs(), logging.Logger("test")
    logger.addHandler(listener)
    members = [
        {"jobid": number, "rule_name": rule, "rule_msg": None, "log": [f"{rule}.log"], "aux": {"external_jobid": "17"}}
        for number, rule in enumerate(["score", "verdict"])
    ]
    logger.error("x", extra={"event": LogEvent.GROUP_ERROR, "job_error_info": members, "aux_logs": [str(log)]})
    for member in members:
        logger.error("x", extra={"event": LogEvent.JOB_ERROR} | member | {"aux": {}})
    assert listener.jobs.keys() == {0, 1}
    for rule, job in zip(["score", "verdict"], listener.jobs.values(), strict=True):
        assert f"SLURM job 17 of rule {rule} is TIMEOUT: " in job.cause and f"{rule}.log, {log}" in job.cause


def test_a_job_that_ended_well_and_left_files_unwritten_names_them(tmp_path):
    here = tmp_path / "here"
    here.touch()
    cause = without_files("score", [str(here), "results/scores/x.parquet"], ["logs/score/x.log"]).cause
    assert cause.startswith(
        "rule score ended, and its files did not appear within latency-wait: results/scores/x.parquet "
    )
    assert cause.endswith("(log: logs/score/x.log)")


def test_other_events_are_no_failures():
    assert heard(event=LogEvent.JOB_FINISHED) == {}
    assert heard(event=None) == {}


def test_each_config_without_a_verdict_gets_an_error_with_every_cause_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lost, broken = FailedJob("generate", "is NODE_FAIL", slurm_job="17"), FailedJob("judge", "failed", ("j.log",))
    lines = write_errors({"b": ("family", [lost, broken, lost]), "a+fault": (None, [broken])})
    assert [line.split(": ")[:2] for line in lines] == [["a+fault", "ERROR"], ["b", "ERROR"]]
    verdict = read_verdict("results/errors/b.json")
    assert (verdict.verdict, verdict.config.family) == (Status.ERROR, "family")
    assert verdict.reason.count("NODE_FAIL") == 1 and "rule judge failed (log: j.log)" in verdict.reason
    assert verdict.coverage.planned == 0
    forget()
    assert not (tmp_path / "results/errors").exists()
    forget()  # nothing there is no fault
