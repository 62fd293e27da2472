"""What a container is, measured from it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from serving import run

import assay
from assay.engines.container import ContainerServer, Mount
from assay.engines.identity import changed, measure


def plan(module, distribution):
    return {
        "identity": {
            "module": module,
            "distribution": distribution,
            "version_route": "/version",
            "health_route": None,
            "native": [],
        },
        "env": {"FROM_PLAN": "yes"},
    }


def test_the_identity_of_a_container_is_read_in_it_and_from_its_engine(launch, client, image, tmp_path):
    def body(server):
        found = measure(server, plan("served", "served"), dict(os.environ))
        assert (found.module_file, found.version) == ("/app/served.py", "1.2.3")
        assert (found.commit, found.tree, found.dirty) == (None, None, None)  # it is in no tree of this machine
        assert found.packages > 1 and found.version_route == {"status": "ok", "version": "9.9"}
        assert found.argv == server.argv and found.listener_is_ours
        # Against the image's own environment: what the image set is not told, what we have and it has not neither.
        assert found.env_set["FROM_PLAN"] == "yes" and "PYTHONPATH" not in found.env_set
        assert found.env_removed == []
        [running] = client.containers.list()
        assert found.image.reference == launch.reference
        assert found.image.id == found.image.container_image == image.id
        assert found.image.repo_digests == [launch.reference]
        assert found.image.container == running.id
        assert found.image.init_pid == running.attrs["State"]["Pid"]
        assert any(running.id in line for line in found.image.cgroup)
        assert changed(found, measure(server, plan("served", "served"), dict(os.environ))) == []

    run(launch, tmp_path, body)


def test_the_tree_of_a_module_in_a_mount_is_the_machines(launch, tmp_path):
    """The checkout lies at another place in the container than on the machine."""
    package = Path(assay.__file__).parent.parent
    mounted = replace(
        launch, mounts=(*launch.mounts, Mount(str(package), "/code")), env=dict(launch.env) | {"PYTHONPATH": "/code"}
    )

    def body(server):
        found = measure(server, plan("assay", "assay"), dict(os.environ))
        assert found.module_file == "/code/assay/__init__.py"
        assert found.commit is not None and len(found.tree) == 40

    run(mounted, tmp_path, body)


def test_processes_that_may_not_be_looked_into_are_told_by_the_engine(launch, tmp_path, monkeypatch):
    """As for a user who is not root."""
    monkeypatch.setattr("assay.engines.identity._process", lambda pid: {"environ": None})

    def body(server):
        found = measure(server, plan("served", "served"), dict(os.environ))
        assert found.env_set["FROM_PLAN"] == "yes" and found.version == "1.2.3"
        assert (found.exe, found.cwd, found.started_utc) == (None, None, None)

    run(launch, tmp_path, body)


def test_a_server_that_gave_itself_a_title_is_asked_through_the_program_it_runs(launch, tmp_path, monkeypatch):
    real = ContainerServer.interpreter

    def body(server):
        assert real(server) == launch.argv[0]
        monkeypatch.setattr("psutil.Process.cmdline", lambda process: ["engine::server"])
        assert real(server) == os.path.realpath(launch.argv[0])

    run(launch, tmp_path, body)


@pytest.mark.parametrize("command", [["/nowhere/program"], ["{python}", "-c", "raise SystemExit(1)"]])
def test_a_command_that_fails_in_the_container_tells_nothing(launch, tmp_path, command):
    def body(server):
        assert server.output_of([word.replace("{python}", server.interpreter()) for word in command], {}) is None

    run(launch, tmp_path, body)
