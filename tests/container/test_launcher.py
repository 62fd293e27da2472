"""The container launcher on a real engine: from start to proof of absence, and everything that may come between."""

import os
import signal
import socket
from dataclasses import replace

import httpx
import psutil
import pytest
from private_engine import PrivateEngine
from processes import FAKE, alive, wait_until
from serving import failure_of, run

from assay.engines import container
from assay.engines.container import Mount
from assay.engines.server import free_port, listeners
from assay.records import FailureKind

HOST = "127.0.0.1"


def generate(port):
    """Status of one more generation; None when the server broke off."""
    try:
        url = f"http://{HOST}:{port}/v1/chat/completions"
        return httpx.post(url, json={"messages": []}, trust_env=False).status_code
    except httpx.TransportError:
        return None


@pytest.mark.parametrize("host_network", [False, True])
def test_a_server_is_ready_after_a_real_generation_and_gone_afterwards(launch, client, tmp_path, host_network):
    seen = []

    def body(server):
        seen.extend([server.tree(), server.port])
        assert server.death() is None and server.strangers() == set()
        assert server.pid in server.tree() and psutil.Process(server.pid).cmdline() == server.argv
        assert len(client.containers.list()) == 1 and listeners(HOST, server.port)

    [cleanup] = run(replace(launch, host_network=host_network), tmp_path, body)
    pids, port = seen
    assert (cleanup.stopped_by, cleanup.exit_code, cleanup.leftover) == ("SIGTERM", 128 + signal.SIGTERM, [])
    assert cleanup.clean and cleanup.port_free
    assert len(pids) == 2 and not any(map(alive, pids)) and listeners(HOST, port) == set()
    assert (tmp_path / "server.log").read_text() == "loading weights\n"


def test_a_server_that_dies_while_loading_is_reported_at_once_with_its_code_and_log(with_flags, tmp_path):
    failure, [cleanup] = failure_of(with_flags("--die-loading"), tmp_path)
    assert (failure.kind, failure.exit_code) == (FailureKind.EXITED, 1)
    assert "exited with code 1 before it was ready" in str(failure)
    # The engine takes output and errors from two pipes: their order is lost.
    assert set(failure.log_tail.splitlines()) == {"loading weights", "cannot find tensor lm_head.weight"}
    assert failure.seconds < 20
    assert (cleanup.stopped_by, cleanup.clean) == ("exited", True)


@pytest.mark.parametrize(
    ("flag", "limit_s", "why"),
    [
        ("--never-listen", 2, "nothing listens on its port"),
        # Long enough for a busy machine to let the server listen.
        ("--health-only", 10, "HTTP 503"),
        ("--hang", 10, "its first generation did not end"),
    ],
)
def test_a_server_without_a_generation_in_time_is_not_ready(with_flags, tmp_path, flag, limit_s, why):
    failure, [cleanup] = failure_of(with_flags(flag, start_limit_s=limit_s), tmp_path)
    assert failure.kind == FailureKind.NOT_READY and cleanup.clean
    assert f"start_limit_s = {limit_s} s" in str(failure) and why in str(failure)


def test_out_of_memory_while_loading_is_told_as_such(with_flags, tmp_path):
    failure, [cleanup] = failure_of(with_flags("--hoard-loading", memory_bytes=64 * 2**20), tmp_path)
    assert (failure.kind, failure.exit_code) == (FailureKind.OUT_OF_MEMORY, 128 + signal.SIGKILL)
    assert "out of memory, it needed more than the 64 MiB of memory_bytes" in str(failure)
    assert cleanup.clean


def test_out_of_memory_while_serving_is_told_as_such(with_flags, tmp_path):
    deaths = []

    def body(server):
        assert generate(server.port) is None
        assert wait_until(lambda: server.death() is not None)
        deaths.append(server.death())

    [cleanup] = run(with_flags("--hoard-at-request", 2, memory_bytes=64 * 2**20), tmp_path, body)
    assert (deaths[0].kind, deaths[0].exit_code) == (FailureKind.OUT_OF_MEMORY, 128 + signal.SIGKILL)
    assert "out of memory" in deaths[0].message
    assert cleanup.clean and cleanup.stopped_by == "exited"


def test_a_server_that_dies_at_work_is_told_with_its_code_and_is_not_out_of_memory(with_flags, tmp_path):
    deaths = []

    def body(server):
        assert generate(server.port) is None
        assert wait_until(lambda: server.death() is not None)
        deaths.append(server.death())

    [cleanup] = run(with_flags("--die-at-request", 2, memory_bytes=256 * 2**20), tmp_path, body)
    assert (deaths[0].kind, deaths[0].exit_code) == (FailureKind.EXITED, 7)
    assert deaths[0].message == "the server exited with code 7" and deaths[0].log_tail.endswith("out of memory")
    assert (cleanup.stopped_by, cleanup.exit_code, cleanup.clean) == ("exited", 7, True)


def test_a_server_that_ignores_sigterm_is_killed(with_flags, tmp_path):
    [cleanup] = run(with_flags("--stubborn", stop_grace_s=0.5), tmp_path)
    assert (cleanup.stopped_by, cleanup.exit_code, cleanup.clean) == ("SIGKILL", 128 + signal.SIGKILL, True)
    assert cleanup.seconds >= 0.5


def test_a_worker_that_forked_twice_into_its_own_session_is_found_and_ended(with_flags, tmp_path):
    inner = tmp_path / "worker"
    workers = []

    def body(server):
        assert wait_until(inner.exists)
        first = {server.pid, psutil.Process(server.pid).ppid()}
        [worker] = filter(alive, server.tree() - first)  # the process between the two forks is a zombie
        assert psutil.Process(worker).ppid() != server.pid
        workers.append(worker)

    launch = with_flags("--escape", inner)
    writable = replace(launch, mounts=(*launch.mounts, Mount(str(tmp_path), str(tmp_path), read_only=False)))
    [cleanup] = run(writable, tmp_path, body)
    assert cleanup.clean and not alive(workers[0])


# --- ports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_network", [False, True])
def test_a_port_that_a_process_holds_is_given_up_for_another(launch, tmp_path, stranger, host_network):
    ports = iter([stranger, free_port(HOST)])
    served = []
    stops = run(
        replace(launch, host_network=host_network),
        tmp_path,
        lambda server: served.append(server.port),
        pick_port=lambda host: next(ports),
    )
    assert served != [stranger] and len(stops) == 2 and stops[-1].clean


@pytest.mark.parametrize("host_network", [False, True])
def test_a_port_that_a_process_never_gives_up_is_told(launch, tmp_path, stranger, host_network):
    failure, stops = failure_of(replace(launch, host_network=host_network), tmp_path, pick_port=lambda host: stranger)
    assert failure.kind == FailureKind.PORT_TAKEN and len(stops) == 3
    assert f"port {stranger} is held by a process that is not the server's" in str(failure)
    assert generate(stranger) == 200  # the stranger is well


def test_a_port_that_another_container_holds_is_told(launch, tmp_path):
    def body(server):
        failure, _ = failure_of(launch, tmp_path / "second", pick_port=lambda host: server.port)
        assert failure.kind == FailureKind.PORT_TAKEN and f"port {server.port} is held" in str(failure)
        assert server.death() is None

    run(launch, tmp_path, body)


def test_a_stranger_that_takes_a_published_port_is_seen(launch, tmp_path):
    def body(server):
        [proxy] = listeners(HOST, server.port)
        psutil.Process(proxy).kill()
        assert wait_until(lambda: listeners(HOST, server.port) == set())
        with socket.create_server((HOST, server.port)):
            assert server.strangers() == {os.getpid()}
        assert server.strangers() == set()

    run(launch, tmp_path, body)


def test_a_listener_that_may_not_be_looked_at_is_asked_for_from_within(launch, tmp_path, monkeypatch):
    """As for a user who is not root, who does not see whose sockets those of a container's root are."""
    monkeypatch.setattr("assay.engines.server.listeners", lambda host, port: {None})

    def body(server):
        assert server.strangers() == set()
        with socket.create_server((HOST, 0)) as other:
            server.port = other.getsockname()[1]
            assert server.strangers() == {None}

    run(replace(launch, host_network=True), tmp_path, body)


def test_two_containers_at_once_share_nothing(launch, tmp_path):
    def body(first):
        def inner(second):
            assert first.port != second.port and not first.tree() & second.tree()

        run(launch, tmp_path / "second", inner)
        assert first.death() is None and generate(first.port) == 200

    run(launch, tmp_path, body)


# --- starts that fail leave nothing (`client` looks) ----------------------------------------------------------------


def test_a_command_that_is_not_in_the_image_cannot_start(launch, tmp_path):
    failure, [cleanup] = failure_of(replace(launch, argv=("/nowhere/python", "{port}")), tmp_path)
    assert failure.kind == FailureKind.CANNOT_START and cleanup.clean
    assert "/nowhere/python is not in the image" in str(failure) and "No such file" in str(failure)


def test_a_mount_that_is_not_there_is_told_before_anything_is_made(launch, tmp_path):
    missing = tmp_path / "weights"
    failure, [cleanup] = failure_of(replace(launch, mounts=(Mount(str(missing), "/weights"),)), tmp_path)
    assert failure.kind == FailureKind.CANNOT_START and cleanup.clean
    assert f"mount {missing} of config text is not there" in str(failure)
    assert not missing.exists()


def test_a_device_that_is_not_there_is_told_before_anything_is_made(launch, tmp_path):
    failure, [cleanup] = failure_of(replace(launch, devices=("/dev/kfd-nowhere",)), tmp_path)
    assert failure.kind == FailureKind.CANNOT_START and cleanup.clean
    assert "device /dev/kfd-nowhere of config text is not there" in str(failure)


def test_what_the_engine_will_not_start_is_told_in_its_words(launch, tmp_path):
    failure, [cleanup] = failure_of(replace(launch, devices=(str(FAKE),)), tmp_path)
    assert failure.kind == FailureKind.CANNOT_START and cleanup.clean
    assert "cannot be started" in str(failure) and "not a device node" in str(failure)


def test_a_gpu_request_without_the_vendors_hook_is_told(launch, tmp_path):
    failure, [cleanup] = failure_of(replace(launch, gpus=("GPU-1",)), tmp_path)
    assert failure.kind == FailureKind.CANNOT_START and cleanup.clean
    assert "could not select device driver" in str(failure)


@pytest.mark.parametrize("host", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:1", "nonsense://x"])
def test_an_engine_that_does_not_answer_is_told(launch, tmp_path, monkeypatch, host):
    monkeypatch.setenv("DOCKER_HOST", host)
    failure, [cleanup] = failure_of(launch, tmp_path)
    assert failure.kind == FailureKind.ENGINE_UNREACHABLE and cleanup.clean
    assert "is it running" in str(failure) and "DOCKER_HOST" in str(failure)


def test_an_engine_whose_processes_cannot_be_seen_is_refused(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(container, "_cgroup", lambda pid: ["0::/"])
    failure, [cleanup] = failure_of(launch, tmp_path)
    assert failure.kind == FailureKind.ENGINE_UNREACHABLE and cleanup.clean
    assert "cannot be seen from here" in str(failure)


def test_an_engine_that_dies_leaves_no_process_and_the_container_is_reported(launch, engine, client, tmp_path):
    pids = []

    def body(server):
        pids.extend(server.tree())
        engine.kill()
        assert server.death() is None and any(map(alive, pids))

    try:
        [cleanup] = run(launch, tmp_path, body)
        assert not cleanup.clean and cleanup.stopped_by == "SIGKILL" and not any(map(alive, pids))
        [entry] = cleanup.leftover
        assert entry["pid"] is None and entry["command"].startswith("container ")
    finally:
        engine.start()
    [left] = client.containers.list(all=True)
    assert left.status == "exited"
    left.remove()


# --- what reaches the container -----------------------------------------------------------------------------------


def test_every_option_of_a_launch_reaches_the_container(launch, client, tmp_path):
    options = {
        "devices": ("/dev/null",),
        "shm_bytes": 128 * 2**20,
        "ulimits": {"stack": 67108864},
        "workdir": "/app",
        "user": "1000:1000",
        "group_add": ("1234",),
        "cap_add": ("SYS_NICE",),
        "security_opt": ("seccomp=unconfined",),
        "memory_bytes": 256 * 2**20,
        "pids_limit": 64,
        "labels": {"assay.run": "abc"},
    }
    script = (
        "import json, os, resource, sys; shm = os.statvfs('/dev/shm');"
        "print(json.dumps([os.getuid(), os.getgroups(), shm.f_blocks * shm.f_frsize, os.getcwd(),"
        "resource.getrlimit(resource.RLIMIT_STACK)[0], os.environ['FROM_PLAN'], os.access(sys.argv[1], os.W_OK)]))"
    )

    def body(server):
        inside = server.output_of([server.interpreter(), "-c", script, str(FAKE)], {})
        assert inside.strip() == '[1000, [1000, 1234], 134217728, "/app", 67108864, "yes", false]'
        [found] = client.containers.list()
        host = found.attrs["HostConfig"]
        assert found.labels["assay.config"] == "text" and found.labels["assay.run"] == "abc"
        assert host["Devices"][0]["PathInContainer"] == "/dev/null"
        assert (host["CapAdd"], host["SecurityOpt"]) == (["SYS_NICE"], ["seccomp=unconfined"])
        assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (268435456, 268435456, 64)
        assert host["Init"] and not host["AutoRemove"]
        assert found.ports == {"8000/tcp": [{"HostIp": HOST, "HostPort": str(server.port)}]}

    run(replace(launch, **options), tmp_path, body)


def test_the_machines_ipc_and_network_are_shared_when_asked(launch, client, tmp_path):
    def body(server):
        [found] = client.containers.list()
        assert (found.attrs["HostConfig"]["IpcMode"], found.attrs["HostConfig"]["NetworkMode"]) == ("host", "host")

    run(replace(launch, ipc_host=True, host_network=True), tmp_path, body)


# --- an engine with a vendor's hook and without a bridge -----------------------------------------------------------


@pytest.fixture
def other_engine(dockerd_path, tmp_path, monkeypatch):
    """An engine that finds a GPU hook, which does nothing, and has no bridge network."""
    hook = tmp_path / "hook/nvidia-container-runtime-hook"
    hook.parent.mkdir()
    hook.write_text("#!/bin/sh\nexit 0\n")
    hook.chmod(0o755)
    with PrivateEngine([*dockerd_path, str(hook.parent)], bridge=False) as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        yield engine


def test_gpus_are_requested_by_id_and_a_published_port_that_is_dropped_is_told(launch, other_engine, tmp_path):
    def body(server):
        environment = psutil.Process(server.pid).environ()
        assert environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"

    run(replace(launch, gpus=("GPU-1", "GPU-2"), host_network=True), tmp_path, body)
    failure, [cleanup] = failure_of(launch, tmp_path)
    assert failure.kind == FailureKind.CANNOT_START and cleanup.clean
    assert "published no port" in str(failure)
