"""Runs that end before they have stopped their server, and what later runs do about it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
from processes import alive, wait_until
from serving import run

from assay.engines.tenants import OWNER, heal, owner

OWNING = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
sys.path[:0] = json.loads(sys.argv[1])
from assay.engines.container import ContainerLaunch, Mount
from assay.engines.identity import measure
from assay.engines.server import serve
from processes import probe
folder = Path(sys.argv[2])
fields = json.loads(sys.argv[3])
launch = ContainerLaunch(**fields | {"mounts": tuple(Mount(**item) for item in fields["mounts"])})
def record(cleanup):
    (folder / "cleanup.json").write_text(json.dumps(asdict(cleanup)))
with serve(launch, folder / "server.log", probe, record) as server:
    probed = {"module": "served", "distribution": "served", "version_route": None, "health_route": None, "native": []}
    asked = {"identity": probed, "env": {}}
    identity = asdict(measure(server, asked, dict(os.environ)))
    (folder / "identity.json").write_text(json.dumps(identity))
    (folder / "pids.json").write_text(json.dumps(sorted(server.tree())))
    time.sleep(600)
"""


@pytest.fixture
def owning(tmp_path):
    """A function that serves a launch from another process; gives that process and the pids of its server."""
    started = []

    def start(launch, *prefix):
        folder = tmp_path / f"owner{len(started)}"
        folder.mkdir()
        command = [*prefix, sys.executable, "-c", OWNING, json.dumps(sys.path), str(folder), json.dumps(asdict(launch))]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        pids = folder / "pids.json"
        assert wait_until(lambda: pids.exists() and pids.read_text(), limit_s=60)
        return started[-1], json.loads(pids.read_text()), folder

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_killed_run_leaves_its_container_and_the_next_start_removes_it(launch, client, owning, tmp_path):
    process, pids, _ = owning(launch)
    process.kill()
    process.wait()
    [left] = client.containers.list()
    assert all(map(alive, pids))
    seen = []
    [cleanup] = run(launch, tmp_path, lambda server: seen.extend(client.containers.list(all=True)))
    assert cleanup.clean and not any(map(alive, pids))
    assert len(seen) == 1 and seen[0].id != left.id


def test_healing_removes_what_is_abandoned_and_touches_nothing_else(launch, client, owning):
    killed, dead_pids, _ = owning(launch)
    living, living_pids, _ = owning(launch)
    killed.kill()
    killed.wait()
    # A container of somebody else, and one that was made and never started by a run that is gone.
    image = client.images.list()[0].id
    others = client.containers.create(image, ["x"], labels={"app": "theirs"})
    boot, namespace, user, _, ticks = owner(os.getpid()).split(":")
    made = client.containers.create(image, ["x"], labels={OWNER: f"{boot}:{namespace}:{user}:{killed.pid}:{ticks}"})
    removed = heal(client)
    kept = {container.id for container in client.containers.list(all=True)}
    assert len(removed) == 2 and made.id in removed and others.id in kept and len(kept) == 2
    assert not any(map(alive, dead_pids)) and all(map(alive, living_pids))
    assert heal(client) == []
    others.remove()
    living.send_signal(signal.SIGTERM)
    assert living.wait(timeout=20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_stops_the_server_and_records_it(launch, owning, number):
    process, pids, folder = owning(launch)
    process.send_signal(number)
    assert process.wait(timeout=20) == (-number if number == signal.SIGINT else 128 + number)
    cleanup = json.loads((folder / "cleanup.json").read_text())
    assert cleanup["clean"] and cleanup["stopped_by"] == "SIGTERM" and not any(map(alive, pids))


def test_a_second_interrupt_cuts_the_grace_short_and_still_removes_the_container(with_flags, client, owning):
    process, pids, _ = owning(with_flags("--stubborn", stop_grace_s=300))
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=20)
    assert client.containers.list(all=True) == [] and not any(map(alive, pids))


@pytest.mark.parametrize("host_network", [False, True])
def test_who_may_not_look_into_a_container_can_serve_from_one(launch, client, owning, host_network):
    """As for a user who is not root: without capabilities, not even our own user's containers can be looked into."""
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    process, pids, folder = owning(replace(launch, host_network=host_network), *powerless)
    identity = json.loads((folder / "identity.json").read_text())
    assert (identity["cwd"], identity["listener_pids"]) == (None, None)
    assert identity["argv"][0] == launch.argv[0] and identity["pid"] in pids and identity["listener_is_ours"]
    assert identity["version"] == "1.2.3" and identity["env_set"]["FROM_PLAN"] == "yes"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert json.loads((folder / "cleanup.json").read_text())["clean"] and not any(map(alive, pids))
