"""The Apptainer launcher: its command, and its life under a stand-in that runs the command without a container."""

import os
import sys
from dataclasses import replace

import psutil
import pytest
from processes import FAKE, alive, probe

from assay.engines.apptainer import apptainer_command, apptainer_environment
from assay.engines.container import ContainerLaunch, Mount
from assay.engines.server import StartFailure, serve
from assay.errors import ConfigError
from assay.records import FailureKind

DIGEST = "sha256:" + "a" * 64
IMAGE = f"docker://registry.example/served@{DIGEST}"
LAUNCH = ContainerLaunch(
    runtime="apptainer",
    config="text",
    repository="registry.example/served",
    digest=DIGEST,
    argv=(sys.executable, str(FAKE), "--host={host}", "--port={port}"),
    env={"FROM_PLAN": "yes"},
    start_limit_s=20,
    stop_grace_s=5,
)

# Takes the options that we give, and runs what follows the image. `true` is how an image is fetched.
STAND_IN = """#!/bin/bash
[ "$1" = exec ] && shift || exit 90
while [ "${1#--}" != "$1" ]; do
  case $1 in --bind|--pwd|--memory|--pids-limit) shift 2;; --containall|--cleanenv|--nv) shift;; *) exit 91;; esac
done
[ "$1" = "EXPECTED" ] || { echo "INFO: looking" >&2; echo "FATAL: no such image: $1" >&2; exit 255; }
shift
exec env FROM_PLAN="$APPTAINERENV_FROM_PLAN" "$@"
"""


def test_the_command_holds_the_image_by_digest_and_nothing_of_ours_but_what_is_asked_for():
    launch = replace(
        LAUNCH,
        mounts=(Mount("/host/models", "/models"), Mount("/host/cache", "/cache", read_only=False)),
        devices=("/dev/kfd", "/dev/dri"),
        gpus=("GPU-1",),
        workdir="/models",
        memory_bytes=1024,
        pids_limit=64,
    )
    assert " ".join(apptainer_command(launch, ["serve", "x"])) == (
        "apptainer exec --containall --cleanenv "
        "--bind /host/models:/models:ro --bind /host/cache:/cache:rw --bind /dev/kfd --bind /dev/dri "
        f"--nv --pwd /models --memory 1024 --pids-limit 64 {IMAGE} serve x"
    )
    assert apptainer_command(LAUNCH, []) == ["apptainer", "exec", "--containall", "--cleanenv", IMAGE]


def test_the_container_sees_the_plans_variables_and_none_that_a_user_forces_on_containers():
    base = {"PATH": "/bin", "APPTAINERENV_LEAK": "1", "APPTAINER_BINDPATH": "/secret", "APPTAINER_CACHEDIR": "/cache"}
    assert apptainer_environment(LAUNCH, base) == {
        "PATH": "/bin",
        "APPTAINER_CACHEDIR": "/cache",
        "APPTAINERENV_FROM_PLAN": "yes",
    }


@pytest.mark.parametrize("path", ["/a,b", "/a:b"])
def test_a_path_that_the_option_cannot_express_is_refused(path):
    with pytest.raises(ConfigError, match="comma or a colon"):
        apptainer_command(replace(LAUNCH, mounts=(Mount(path, "/models"),)), [])


def test_another_user_is_refused():
    with pytest.raises(ConfigError, match="Apptainer runs as its caller"):
        apptainer_command(replace(LAUNCH, user="1000"), [])


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    command = tmp_path / "bin" / "apptainer"
    command.parent.mkdir()
    command.write_text(STAND_IN.replace("EXPECTED", IMAGE))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")


def failure_of(launch, tmp_path):
    stops = []
    with pytest.raises(StartFailure) as caught, serve(launch, tmp_path / "server.log", probe, stops.append):
        pytest.fail("the server counted as ready")
    assert [cleanup.clean for cleanup in stops] == [True]
    return caught.value


def test_a_server_under_it_lives_and_ends_as_a_process_of_ours(stand_in, tmp_path):
    stops = []
    with serve(LAUNCH, tmp_path / "server.log", probe, stops.append) as server:
        pid = server.pid
        assert server.death() is None and pid in server.tree()
        ask = [server.interpreter(), "-c", "import os; print(os.environ['FROM_PLAN'])"]
        assert server.output_of(ask, psutil.Process(pid).environ()) == "yes\n"
        assert server.output_of(["/nowhere/python"], os.environ) is None
    assert stops[0].clean and not alive(pid)


def test_an_image_that_cannot_be_fetched_is_told_before_the_start(stand_in, tmp_path):
    failure = failure_of(replace(LAUNCH, digest="sha256:" + "b" * 64), tmp_path)
    assert failure.kind == FailureKind.IMAGE_MISSING
    assert "cannot be run by apptainer: FATAL: no such image" in str(failure)


def test_a_site_without_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    failure = failure_of(LAUNCH, tmp_path)
    assert failure.kind == FailureKind.ENGINE_UNREACHABLE and "apptainer is not on PATH" in str(failure)


def test_a_server_that_dies_while_loading_is_told(stand_in, tmp_path):
    failure = failure_of(replace(LAUNCH, argv=(*LAUNCH.argv, "--die-loading")), tmp_path)
    assert (failure.kind, failure.exit_code) == (FailureKind.EXITED, 1)


def test_a_mount_that_is_not_there_is_told(stand_in, tmp_path):
    failure = failure_of(replace(LAUNCH, mounts=(Mount(str(tmp_path / "none"), "/models"),)), tmp_path)
    assert failure.kind == FailureKind.CANNOT_START and "is not there" in str(failure)
