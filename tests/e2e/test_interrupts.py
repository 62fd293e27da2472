"""A run that is interrupted leaves no server, loses nothing that was finished, and goes on cleanly."""

import os
import signal
import subprocess
import time

import psutil
import pytest

from assay.gate import read_verdict
from assay.records import Status

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

NAME = "faults_32+rerun"
TARGET = f"results/verdicts/{NAME}.json"
OUTPUT = f"results/outputs/{NAME}/0.parquet"


def servers(workspace):
    """Embedded servers and watchdogs that were started from this workspace."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["cwd"] == str(workspace.path) and ("assay.embedded" in line or "watchdog" in line):
            found.append(process)
    return found


@pytest.fixture
def serving(workspace):
    """A run of one instance, caught while its server answers."""
    workspace.snakemake(f"results/serve/{NAME}.json", "samplesets/text_smoke.parquet")
    run = subprocess.Popen(
        workspace.command(OUTPUT), cwd=workspace.path, env=workspace.env, start_new_session=True, stderr=subprocess.PIPE
    )
    log = workspace.path / f"results/outputs/{NAME}/0.server.log"
    deadline = time.monotonic() + 180
    while not (log.exists() and "POST /v1/chat/completions" in log.read_text()):
        assert run.poll() is None, run.stderr.read().decode()
        assert time.monotonic() < deadline, "the server never answered"
        time.sleep(0.5)
    yield run
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)


def wait_until_gone(workspace, seconds):
    deadline = time.monotonic() + seconds
    while servers(workspace) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert servers(workspace) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "sigkill"])
def test_an_interrupted_run_leaves_no_server_and_keeps_what_was_done(workspace, serving, how):
    before = (workspace.path / f"results/serve/{NAME}.json").read_bytes()
    os.killpg(serving.pid, how)
    serving.wait(60)
    assert serving.returncode != 0
    wait_until_gone(workspace, 60)
    assert not (workspace.path / OUTPUT).exists()
    assert (workspace.path / f"results/serve/{NAME}.json").read_bytes() == before


def test_the_next_run_goes_on_and_reaches_its_verdict(workspace):
    workspace.snakemake("--unlock")
    workspace.snakemake(TARGET)
    assert read_verdict(workspace.path / TARGET).verdict in (Status.PASS, Status.PASS_WITH_CAVEAT)
