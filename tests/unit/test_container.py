import os
from pathlib import Path

import pytest

from assay.engines.container import ContainerLaunch, Mount, check_paths, host_path
from assay.engines.images import reference
from assay.engines.server import StartFailure
from assay.engines.tenants import abandoned, owner
from assay.errors import ConfigError
from assay.records import FailureKind

DIGEST = "sha256:" + "a" * 64


def launch(**changes):
    fields = {
        "runtime": "docker",
        "config": "text",
        "repository": "registry.example/served",
        "digest": DIGEST,
        "argv": ("serve", "--port={port}"),
        "env": {},
        "start_limit_s": 5,
        "stop_grace_s": 5,
    }
    return ContainerLaunch(**fields | changes)


# --- names of images ----------------------------------------------------------------------------------------------


def test_a_digest_names_the_image_whatever_the_tag():
    assert launch(tag="v1").reference == f"registry.example/served@{DIGEST}"
    assert launch(tag="v1", digest=None).reference == "registry.example/served:v1"


def test_an_image_with_neither_digest_nor_tag_is_refused_with_the_command_that_finds_one():
    with pytest.raises(ConfigError, match=r"imagetools inspect registry\.example/served:latest`"):
        reference("registry.example/served", None, None)


# --- paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("/code/assay/__init__.py", "/host/tree/assay/__init__.py"),
        ("/code/vendor/x.py", "/host/vendor/x.py"),  # of two mounts, the inner one is seen
        ("/code", "/host/tree"),
        ("/codes/x.py", None),  # beside a mount, not in it
        ("/app/served.py", None),
    ],
)
def test_a_file_of_a_container_is_found_on_the_machine_through_its_mount(inside, outside):
    mounts = (Mount("/host/tree", "/code"), Mount("/host/vendor", "/code/vendor"))
    assert host_path(mounts, inside) == outside


def test_paths_that_are_there_are_accepted_and_relative_ones_are_not():
    check_paths(launch(mounts=(Mount(str(Path(__file__).parent), "/code"),), devices=("/dev/null",)))
    with pytest.raises(StartFailure, match=r"mount workflow of config text is not there .an absolute path"):
        check_paths(launch(mounts=(Mount("workflow", "/code"),)))


class Ended:
    """A container as its engine tells of it, from one look to the next; the last is told for ever."""

    def __init__(self, *told):
        self.told = [{"Status": "exited", "ExitCode": code, "OOMKilled": memory} for code, memory in told]
        self.looks = 0

    def reload(self):
        self.attrs = {"State": self.told[min(self.looks, len(self.told) - 1)]}
        self.looks += 1


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ([(137, True)], FailureKind.OUT_OF_MEMORY),
        ([(137, False), (137, False), (137, True)], FailureKind.OUT_OF_MEMORY),  # it comes by another way, and later
        ([(137, False)], FailureKind.EXITED),
        ([(7, False), (7, True)], FailureKind.EXITED),
    ],
)
def test_an_engine_may_say_late_that_a_killed_server_ran_out_of_memory(tmp_path, monkeypatch, told, kind):
    monkeypatch.setattr("assay.engines.container.OOM_WORD_S", 0.5)
    monkeypatch.setattr("assay.engines.container.POLL_S", 0.01)
    (tmp_path / "log").touch()
    server = launch().server(1, tmp_path / "log")
    server._container = Ended(*told)
    assert server.death().kind == kind
    looks = server._container.looks
    assert server.death().kind == kind and server._container.looks == looks  # a death is told once


# --- owners -------------------------------------------------------------------------------------------------------


def changed(label, index, value):
    parts = label.split(":")
    parts[index] = value
    return ":".join(parts)


BOOT, NAMESPACE, USER, PID, TICKS = range(5)


@pytest.fixture
def label():
    return owner(os.getpid())


def test_a_living_owner_is_not_gone_and_one_whose_pid_is_another_process_now_is(label):
    assert not abandoned(label, running=True)
    assert abandoned(changed(label, TICKS, "1"), running=True)
    assert abandoned(changed(label, PID, str(2**22 + 1)), running=True)


@pytest.mark.parametrize(("part", "value"), [(NAMESPACE, "1"), (USER, "4321")])
def test_an_owner_that_cannot_be_seen_from_here_is_left_alone(label, part, value):
    gone = changed(label, TICKS, "1")
    assert abandoned(gone, running=True) and not abandoned(changed(gone, part, value), running=True)


def test_an_owner_of_another_boot_is_gone_unless_its_container_runs_on_another_machine(label):
    before = changed(label, BOOT, "00000000-0000-0000-0000-000000000000")
    assert abandoned(before, running=False) and not abandoned(before, running=True)


@pytest.mark.parametrize("text", ["", "me", "a:b:c", "a:b:c:d:e", "a:b:c:1:2:3"])
def test_a_label_that_is_not_of_our_form_is_left_alone(text):
    assert not abandoned(text, running=False)


def test_a_process_that_ended_or_never_was_has_no_owner_label():
    assert owner(2**22 + 1) is None
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is a zombie now
    assert owner(child) is None
    os.waitpid(child, 0)
