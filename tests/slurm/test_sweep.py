"""A sweep over two nodes with two devices each, on a real SLURM: it says what a local run says, and shares nothing."""

import json
import signal
import subprocess
from itertools import combinations

import psutil
import pytest
from processes import wait_until
from tiny_sweep import CONFIGS, OPTIONS, VERDICTS

from assay.gate import read_verdict
from assay.records import Status

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ONE = VERDICTS[0]
LIMIT_S = 300  # on a busy machine
SERVED = "results/outputs/tiny/0"
COMPARED = {"verdict", "reason", "claim", "coverage", "gates", "controls", "evidence", "samples"}


def verdict(workspace, target):
    return read_verdict(workspace.path / target)


@pytest.fixture
def running(on_slurm):
    """A run of one config, caught while its server answers; with the number of its SLURM job."""
    yield from caught(on_slurm)


@pytest.fixture
def running_alone(on_slurm):
    """The same, of a run that only serves."""
    yield from caught(on_slurm, f"{SERVED}.parquet")


def caught(workspace, target=ONE):
    log = (workspace.path / "snakemake.log").open("wb")
    run = subprocess.Popen(
        workspace.command(*OPTIONS, target), cwd=workspace.path, env=workspace.env, stdout=log, stderr=log
    )
    served = workspace.path / f"{SERVED}.server.log"
    try:
        assert wait_until(lambda: served.exists() and "/v1/" in served.read_text(), LIMIT_S), said(workspace)
        (job,) = workspace.cluster.run("squeue", "-h", "-o", "%i").split()
        yield workspace, run, job
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
        run.wait()
        for left in workspace.cluster.run("squeue", "-h", "-o", "%i").split():
            workspace.cluster.run("scancel", left)


def state(workspace, job):
    return workspace.cluster.run("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()


def said(workspace):
    return (workspace.path / "snakemake.log").read_text()


def servers(workspace):
    """What lives of the servers that were started in this workspace."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["cwd"] == str(workspace.path) and ("assay.embedded" in line or "watchdog" in line):
            found.append(process)
    return found


def held(workspace):
    """Of each served instance: its node, its devices, and when it was watched, from the evidence alone."""
    for file in sorted((workspace.path / "results/outputs").glob("*/0.identity.json")):
        identity = json.loads(file.read_text())
        looks = [json.loads(line)["utc"] for line in file.with_name("0.devices.jsonl").read_text().splitlines()]
        devices = {device["pci"] for device in identity["devices"]["leased"]}
        yield identity["slurm"], devices, (min(looks), max(looks))


def overlap(evidence):
    """Pairs of instances that held one device of one node at one moment."""
    return [
        (one, other)
        for one, other in combinations(evidence, 2)
        if one[0]["node"] == other[0]["node"]
        and one[1] & other[1]
        and one[2][0] <= other[2][1]
        and other[2][0] <= one[2][1]
    ]


def test_a_sweep_says_what_a_local_run_says_and_no_two_servers_share_a_device(local, on_slurm):
    here, done = local
    assert "site 'cluster' has SLURM, and this run does not use it" in done.stdout + done.stderr
    on_slurm.snakemake(*OPTIONS, *VERDICTS)
    for name, target in zip(CONFIGS, VERDICTS, strict=True):
        ours, theirs = verdict(here, target), verdict(on_slurm, target)
        assert theirs.model_dump(include=COMPARED) == ours.model_dump(include=COMPARED), name
        assert [caveat.code for caveat in theirs.caveats] == [caveat.code for caveat in ours.caveats]
        assert (theirs.verdict is Status.FAIL) == ("+" in name)
    evidence = list(held(on_slurm))
    assert len(evidence) == len(CONFIGS)
    assert {slurm["node"] for slurm, *_ in evidence} == {"n1", "n2"}
    assert len({slurm["job"] for slurm, *_ in evidence}) == len(CONFIGS)
    assert overlap(evidence) == []


def test_devices_that_were_shared_would_be_seen():
    node = {"node": "n1"}
    assert overlap([(node, {"a"}, (0, 2)), (node, {"a"}, (1, 3))])
    assert not overlap([(node, {"a"}, (0, 2)), (node, {"b"}, (1, 3)), ({"node": "n2"}, {"a"}, (0, 2))])
    assert not overlap([(node, {"a"}, (0, 1)), (node, {"a"}, (2, 3))])


def test_a_cancelled_job_stops_its_server_and_is_an_error_with_its_cause_and_the_next_run_goes_on(running):
    workspace, run, job = running
    workspace.cluster.run("scancel", job)
    assert wait_until(lambda: servers(workspace) == [], 60)
    assert run.wait(LIMIT_S) == 1
    assert "the server was stopped (SIGINT)" in (workspace.path / "logs/generate/tiny/0.log").read_text()
    error = verdict(workspace, "results/errors/tiny.json")
    assert error.verdict is Status.ERROR
    assert f"SLURM job {job} of rule generate is CANCELLED" in error.reason
    assert not (workspace.path / f"{SERVED}.parquet").exists() and not (workspace.path / ONE).exists()
    workspace.snakemake(*OPTIONS, ONE)
    assert verdict(workspace, ONE).verdict is not Status.ERROR
    assert not (workspace.path / "results/errors").exists()


def test_a_job_whose_node_is_killed_is_run_again_elsewhere_and_the_run_goes_on(running_alone):
    workspace, run, job = running_alone
    (node,) = workspace.cluster.run("squeue", "-h", "-j", job, "-o", "%N").split()
    workspace.cluster.kill_node(node)
    try:
        assert wait_until(lambda: servers(workspace) == [], 10)
        assert wait_until(lambda: state(workspace, job) == "PENDING", 120)
        workspace.cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")  # SLURM lets it rest for 2 minutes
        assert run.wait(LIMIT_S) == 0, said(workspace)
    finally:
        workspace.cluster.start_node(node)
        workspace.cluster.wait_idle()
    slurm = json.loads((workspace.path / f"{SERVED}.identity.json").read_text())["slurm"]
    assert slurm["job"] == job and slurm["node"] != node
    assert (workspace.path / f"{SERVED}.parquet").exists()


def test_a_job_that_runs_out_of_time_takes_its_hung_server_along_and_says_what_to_raise(running):
    workspace, run, job = running
    for process in servers(workspace):
        if "watchdog" not in " ".join(process.cmdline()):
            process.suspend()
    workspace.cluster.run("scontrol", "update", f"jobid={job}", "timelimit=1")
    assert run.wait(LIMIT_S) == 1
    assert wait_until(lambda: servers(workspace) == [], 10)
    error = verdict(workspace, "results/errors/tiny.json")
    assert error.verdict is Status.ERROR and "is TIMEOUT" in error.reason and "minutes" in error.reason
