import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import httpx
import psutil
import pytest
from processes import FAKE, alive, probe, wait_until
from serving import failure_of, run

from assay.engines.process import ProcessLaunch
from assay.engines.server import free_port, listeners, serve
from assay.errors import StoreError
from assay.records import FailureKind

HOST = "127.0.0.1"


def fake(*flags, start_limit_s=20.0, stop_grace_s=5.0):
    argv = (sys.executable, str(FAKE), "--port={port}", *map(str, flags))
    return ProcessLaunch(argv, dict(os.environ), HOST, start_limit_s, stop_grace_s)


def test_a_server_is_ready_after_a_real_generation_and_gone_afterwards(tmp_path):
    seen = []
    [cleanup] = run(fake(), tmp_path, lambda server: seen.append((server.pid, server.port, server.death())))
    pid, port, death = seen[0]
    assert death is None
    assert (cleanup.stopped_by, cleanup.exit_code, cleanup.leftover) == ("SIGINT", -signal.SIGINT, [])
    assert cleanup.orphans == []
    assert cleanup.clean and cleanup.port_free
    assert not alive(pid) and listeners(HOST, port) == set()


def test_a_server_that_dies_while_loading_is_reported_at_once_with_its_code_and_log(tmp_path):
    started = time.monotonic()
    failure, [cleanup] = failure_of(fake("--die-loading", start_limit_s=60), tmp_path)
    assert time.monotonic() - started < 10
    assert (failure.kind, failure.exit_code) == (FailureKind.EXITED, 1)
    assert "exited with code 1 before it was ready" in str(failure)
    assert "cannot find tensor lm_head.weight" in str(failure)
    assert failure.log_tail.splitlines() == ["loading weights", "cannot find tensor lm_head.weight"]
    assert (cleanup.stopped_by, cleanup.exit_code, cleanup.clean) == ("exited", 1, True)


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--never-listen", "nothing listens on its port"),
        ("--health-only", "HTTP 503"),
        ("--hang", "its first generation did not end"),
    ],
)
def test_a_server_without_a_generation_in_time_is_not_ready_whatever_its_health_route_says(tmp_path, flag, why):
    failure, [cleanup] = failure_of(fake(flag, start_limit_s=5), tmp_path)
    assert failure.kind == FailureKind.NOT_READY
    assert "start_limit_s = 5 s" in str(failure) and why in str(failure)
    assert cleanup.clean


def test_a_command_that_does_not_exist_cannot_start(tmp_path):
    launch = ProcessLaunch(("/nowhere/python", "{port}"), dict(os.environ), HOST, 5, 5)
    failure, [cleanup] = failure_of(launch, tmp_path)
    assert failure.kind == FailureKind.CANNOT_START
    assert "/nowhere/python" in str(failure) and "No such file" in str(failure)
    assert cleanup.clean


def test_a_server_that_ignores_sigint_and_sigterm_is_killed(tmp_path):
    [cleanup] = run(fake("--stubborn", stop_grace_s=0.5), tmp_path)
    assert (cleanup.stopped_by, cleanup.exit_code, cleanup.clean) == ("SIGKILL", -signal.SIGKILL, True)
    assert cleanup.seconds >= 1.0  # two graces
    assert cleanup.orphans == []  # it did not outlive itself


def test_a_server_whose_first_thread_ends_first_is_waited_for_to_its_last(tmp_path):
    [cleanup] = run(fake("--linger", 0.7, stop_grace_s=5), tmp_path)
    assert (cleanup.stopped_by, cleanup.exit_code, cleanup.clean) == ("SIGINT", 0, True)
    assert cleanup.seconds >= 0.7


def test_a_worker_that_forked_twice_into_its_own_session_is_found_and_ended(tmp_path):
    worker = tmp_path / "worker"
    pids = []

    def body(server):
        assert wait_until(worker.exists)
        pids.append(int(worker.read_text()))
        assert pids[0] in server.tree() and os.getsid(pids[0]) != os.getsid(server.pid)

    [cleanup] = run(fake("--escape", worker, stop_grace_s=0.5), tmp_path, body)
    assert cleanup.stopped_by == "SIGTERM"  # the worker ignores SIGINT
    assert cleanup.clean and not alive(pids[0])
    assert [orphan["pid"] for orphan in cleanup.orphans] == pids


def test_workers_left_by_a_server_that_died_are_ended_and_named_by_pid_and_start_time(tmp_path):
    worker = tmp_path / "worker"
    pids, started = [], []

    def body(server):
        assert wait_until(worker.exists)
        pids.append(int(worker.read_text()))
        started.append(psutil.Process(pids[0]).create_time())
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(server.death)
        assert server.death().message == "the server exited with signal SIGKILL"

    [cleanup] = run(fake("--escape", worker, stop_grace_s=0.5), tmp_path, body)
    assert (cleanup.exit_code, cleanup.clean) == (-signal.SIGKILL, True)
    assert not alive(pids[0])
    [orphan] = cleanup.orphans
    assert orphan["pid"] == pids[0] and "fake_server.py" in orphan["command"]
    assert datetime.fromisoformat(orphan["started_utc"]).timestamp() == pytest.approx(started[0], abs=0.001)


def test_a_worker_that_ends_with_its_server_is_none_that_was_left(tmp_path):
    pids = []

    def body(server):
        assert wait_until((tmp_path / "worker").exists)
        pids.append(int((tmp_path / "worker").read_text()))
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(server.death)

    [cleanup] = run(fake("--worker", tmp_path / "worker", stop_grace_s=0.5), tmp_path, body)
    assert (cleanup.stopped_by, cleanup.orphans, cleanup.clean) == ("exited", [], True)
    assert not alive(pids[0])


def test_nothing_is_left_when_the_watchdog_itself_is_killed(tmp_path):
    worker = tmp_path / "worker"
    pids = []

    def body(server):
        assert wait_until(worker.exists)
        pids.extend([server.pid, int(worker.read_text())])
        os.kill(psutil.Process(server.pid).ppid(), signal.SIGKILL)
        assert wait_until(lambda: server.death() is not None)
        assert "watchdog was killed" in server.death().message

    [cleanup] = run(fake("--escape", worker), tmp_path, body)
    assert cleanup.clean and cleanup.stopped_by == "SIGKILL"
    assert not any(alive(pid) for pid in pids)
    assert [orphan["pid"] for orphan in cleanup.orphans] == pids[1:]


@pytest.mark.parametrize("flag", ["--stubborn", "--never-listen"])  # one dies of the busy port, one never binds it
def test_a_stranger_that_answers_on_the_port_is_refused_and_left_alone(tmp_path, stranger, flag):
    failure, stops = failure_of(fake(flag, stop_grace_s=0.5), tmp_path, pick_port=lambda host: stranger)
    assert failure.kind == FailureKind.PORT_TAKEN
    assert f"port {stranger} is held by a process that is not the server's" in str(failure)
    assert [cleanup.leftover for cleanup in stops] == [[], [], []]  # three attempts
    assert not stops[-1].port_free and not stops[-1].clean
    assert httpx.get(f"http://{HOST}:{stranger}/health", trust_env=False).status_code == 200


def test_a_port_taken_in_the_meantime_is_given_up_for_another(tmp_path, stranger):
    ports = iter([stranger, free_port(HOST)])
    seen = []
    stops = run(fake(), tmp_path, lambda server: seen.append(server.port), pick_port=lambda host: next(ports))
    assert len(seen) == 1 and seen[0] != stranger
    assert len(stops) == 2 and stops[-1].clean


def test_two_instances_at_once_get_different_ports_and_stop_independently(tmp_path):
    with serve(fake(), tmp_path / "a.log", probe, lambda _: None) as first:
        with serve(fake(), tmp_path / "b.log", probe, lambda _: None) as second:
            assert first.port != second.port
            assert not first.tree() & second.tree()
        assert not alive(second.pid) and alive(first.pid) and first.death() is None
    assert not alive(first.pid)


def test_the_server_is_stopped_when_the_block_raises(tmp_path):
    pids, stops = [], []
    with pytest.raises(ZeroDivisionError), serve(fake(), tmp_path / "server.log", probe, stops.append) as server:
        pids.append(server.pid)
        raise ZeroDivisionError
    assert stops[0].clean and not alive(pids[0])


def test_a_log_that_cannot_be_written_is_one_clear_message(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StoreError, match="No server was started"),
        serve(fake(), tmp_path / "file" / "server.log", probe, lambda _: None),
    ):
        pass


OWNER = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/.."]
from test_process import fake, probe, serve
folder = Path(sys.argv[2])
def record(cleanup):
    (folder / "cleanup.json").write_text(json.dumps(asdict(cleanup)))
with serve(fake(*sys.argv[3:], stop_grace_s=0.5), folder / "server.log", probe, record) as server:
    (folder / "pids.json").write_text(json.dumps(sorted(server.tree())))
    time.sleep(600)
"""


def owner(tmp_path, *flags):
    """Another process that serves; returns it and the pids of its server tree."""
    command = [sys.executable, "-c", OWNER, str(Path(__file__).parent), str(tmp_path), *map(str, flags)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pids = tmp_path / "pids.json"
    assert wait_until(lambda: pids.exists() and pids.read_text(), limit_s=60)
    return process, json.loads(pids.read_text())


def test_sigkill_of_the_owner_leaves_no_server_behind(tmp_path):
    process, pids = owner(tmp_path, "--stubborn", "--escape", tmp_path / "worker")
    assert any(map(alive, pids))
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(alive, pids)))
    assert wait_until(lambda: not alive(int((tmp_path / "worker").read_text())))


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP), (signal.SIGINT, -signal.SIGINT)],
)
def test_a_signal_to_the_owner_stops_the_server_records_it_and_goes_on(tmp_path, number, code):
    process, pids = owner(tmp_path)
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    cleanup = json.loads((tmp_path / "cleanup.json").read_text())
    assert cleanup["clean"] and cleanup["stopped_by"] == "SIGINT"
    assert not any(map(alive, pids))


def test_a_second_sigterm_breaks_off_neither_the_grace_nor_the_proof(tmp_path):
    process, pids = owner(tmp_path, "--stubborn")  # two graces of 0.5 s
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    cleanup = json.loads((tmp_path / "cleanup.json").read_text())
    assert cleanup["clean"] and cleanup["stopped_by"] == "SIGKILL" and cleanup["seconds"] >= 1
    assert not any(map(alive, pids))
