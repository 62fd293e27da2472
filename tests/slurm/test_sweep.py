"""A sweep over two nodes with two devices each, on a real SLURM that does to its jobs what clusters do.

Of four jobs that serve at once, one is cancelled, one runs out of time, one is preempted and one loses its node; a
fifth is given too little memory, and is preempted for good when it has enough. The next run goes on from what is left.
"""

import json
from itertools import combinations

import pytest
from disturbed import Disturbed, Held, evidence
from tiny_sweep import CONFIGS, HUNGRY, VERDICTS, on, unserved

from assay.gate import read_verdict
from assay.records import Status

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

COMPARED = {"verdict", "reason", "claim", "coverage", "gates", "controls", "evidence", "samples"}
ENDED = {"cancelled": "CANCELLED", "out of time": "TIMEOUT"}
QUEUED_AGAIN = ("preempted", "node lost")


@pytest.fixture(scope="module")
def sweep(local, cluster, tmp_path_factory):
    """The sweep, after both runs."""
    found = Disturbed(on(cluster, unserved(local[0], tmp_path_factory.mktemp("sweep"))))
    found.play()
    return found


def overlap(held):
    """Pairs that held one device of one node at one moment."""
    return [
        (one, other)
        for one, other in combinations(held, 2)
        if one.node == other.node
        and one.devices & other.devices
        and one.since <= other.until
        and other.since <= one.until
    ]


def test_a_run_of_such_a_site_that_does_not_use_slurm_says_so(local):
    done = local[1]
    assert "site 'cluster' has SLURM, and this run does not use it" in done.stdout + done.stderr


@pytest.mark.parametrize("what", ENDED)
def test_a_job_that_slurm_ends_stops_its_server_and_is_an_error_with_its_cause(sweep, what):
    job, run = sweep.jobs[what], sweep.runs[0]
    assert job.processes == ()
    error = run.errors[job.config]
    assert error.verdict is Status.ERROR
    assert f"SLURM job {job.number} of rule generate is {ENDED[what]}: " in error.reason
    assert f"logs/generate/{job.config}/0.log" in error.reason
    assert f"verdicts/{job.config}.json" not in run.files and f"outputs/{job.config}/0.parquet" not in run.files


@pytest.mark.parametrize("what", [*ENDED, "preempted for good"])
def test_what_was_seen_of_its_server_outlives_the_job(sweep, what):
    log = sweep.jobs[what].log
    assert "the server was stopped (SIG" in log and "nothing of it is left" in log
    assert "POST /v1/" in log.rpartition("the log of its server, until here:")[2]


def test_a_job_that_takes_more_memory_than_it_asked_for_is_an_error_that_says_so(sweep):
    error = sweep.runs[0].errors[HUNGRY]
    assert error.verdict is Status.ERROR
    assert "of rule generate is OUT_OF_MEMORY: " in error.reason and "raise memory_gib" in error.reason


@pytest.mark.parametrize("what", QUEUED_AGAIN)
def test_a_job_that_is_preempted_or_loses_its_node_is_queued_again_and_the_run_goes_on(sweep, what):
    job, run = sweep.jobs[what], sweep.runs[0]
    assert job.processes == ()
    assert job.config not in run.errors and f"verdicts/{job.config}.json" in run.files
    slurm = json.loads((sweep.workspace.path / f"results/outputs/{job.config}/0.identity.json").read_text())["slurm"]
    assert slurm["job"] == job.number and slurm["node"] != job.held.node
    assert job.slurm_log.count("localrule generate:") == 2  # what it printed at first is kept
    assert ("DUE TO PREEMPTION" in job.slurm_log) == (what == "preempted")


def test_a_run_that_was_disturbed_says_what_became_of_every_config(sweep):
    first, second = sweep.runs
    assert first.errors.keys() == {HUNGRY, *(sweep.jobs[what].config for what in ENDED)}
    assert second.errors.keys() == {HUNGRY}
    for run in sweep.runs:
        assert all(f"{config}: ERROR: {error.reason}" in run.said for config, error in run.errors.items())


def test_a_job_that_is_preempted_and_not_queued_again_ends_the_run_and_says_so(sweep):
    job = sweep.jobs["preempted for good"]
    assert job.processes == ()
    assert f"SLURM job {job.number} of rule generate is PREEMPTED: " in sweep.runs[1].errors[job.config].reason


@pytest.mark.parametrize(("config", "target"), zip(CONFIGS, VERDICTS, strict=True), ids=CONFIGS)
def test_the_next_run_goes_on_and_says_what_a_local_run_says(local, sweep, config, target):
    ours, theirs = (read_verdict(workspace.path / target) for workspace in (local[0], sweep.workspace))
    assert theirs.model_dump(include=COMPARED) == ours.model_dump(include=COMPARED)
    assert [caveat.code for caveat in theirs.caveats] == [caveat.code for caveat in ours.caveats]
    assert (theirs.verdict is Status.FAIL) == ("+" in config)


def test_no_two_servers_ever_share_a_device(sweep):
    at_once = [sweep.jobs[what].held for what in (*ENDED, *QUEUED_AGAIN)]
    assert {held.node for held in at_once} == {"n1", "n2"}
    assert len({(held.node, held.devices) for held in at_once}) == 4
    assert max(held.since for held in at_once) < min(held.until for held in at_once)
    served = evidence(sweep.workspace)
    assert len(served) == len(CONFIGS)
    assert overlap([*served, *(job.held for job in sweep.jobs.values())]) == []


def test_devices_that_were_shared_would_be_seen():
    def held(node, device, since, until):
        return Held(node, frozenset([device]), f"{since}", f"{until}")

    assert overlap([held("n1", "a", 0, 2), held("n1", "a", 1, 3)])
    assert not overlap([held("n1", "a", 0, 2), held("n1", "b", 1, 3), held("n2", "a", 0, 2)])
    assert not overlap([held("n1", "a", 0, 1), held("n1", "a", 2, 3)])
