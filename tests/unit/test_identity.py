import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.canonical import sha256_lines
from assay.engines import identity
from assay.engines.identity import changed, measure
from assay.engines.process import ProcessServer

BASE = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "GONE": "x"}


@pytest.fixture
def measured(monkeypatch):
    """A function that measures this very process as if it were a server."""

    def look(module="assay", distribution="assay", python=sys.executable, environ=None, route=None):
        monkeypatch.setattr(identity, "listeners", lambda host, port: {os.getpid()})
        real = identity._process
        env = dict(os.environ) if environ is None else environ
        monkeypatch.setattr(identity, "_process", lambda pid: real(pid) | {"environ": env})
        server = SimpleNamespace(
            pid=os.getpid(),
            argv=[python],
            port=1,
            base_url="http://127.0.0.1:1",
            launch=SimpleNamespace(host="127.0.0.1"),
            tree=lambda: {os.getpid()},
            strangers=set,
            image=lambda: None,
            base_env=lambda ours: ours,
            told_env=lambda: None,
            on_host=lambda file: file,
            interpreter=lambda: python,
            output_of=lambda command, env: ProcessServer.output_of(None, command, env),
        )
        plan = {
            "identity": {
                "module": module,
                "distribution": distribution,
                "version_route": route,
                "health_route": route,
                "native": [],
            }
        }
        return measure(server, plan | {"env": {"OMP_NUM_THREADS": "1"}}, BASE)

    return look


def test_what_the_interpreter_finds_is_what_is_reported(measured):
    found = measured(module="psutil", distribution="psutil")
    import psutil

    assert Path(found.module_file).samefile(psutil.__file__)
    assert found.version == psutil.__version__
    assert found.commit is None  # installed in no tree of its own


def test_what_cannot_be_measured_is_null(measured):
    absent = measured(module="no_such_module", distribution="no-such-distribution", route="/version")
    assert (absent.module_file, absent.version, absent.commit, absent.version_route) == (None, None, None, None)
    assert absent.packages_sha256 is not None
    no_python = measured(python="/bin/true")
    assert (no_python.python, no_python.version, no_python.packages_sha256) == (None, None, None)


def test_a_process_that_is_gone_is_all_null():
    assert identity._process(2**22 + 1) == {}


def test_the_environment_difference_lists_what_was_planned_added_changed_and_removed(measured):
    environ = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "NEW": "y",
        "HF_TOKEN": "hush",
        "OPENAI_API_KEY": "hush",
        "DB_PASSWORD": "hush",
        "TOKENIZERS_PARALLELISM": "false",
        "KEYBOARD": "us",
    }
    found = measured(environ=environ)
    assert found.env_set == {
        "DB_PASSWORD": "(hidden)",
        "HF_TOKEN": "(hidden)",
        "KEYBOARD": "us",
        "NEW": "y",
        "OMP_NUM_THREADS": "1",  # equal to ours, but planned
        "OPENAI_API_KEY": "(hidden)",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert found.env_removed == ["GONE"]


def test_a_server_that_changed_under_way_is_told_field_by_field(measured):
    start = measured()
    assert changed(start, replace(start, measured_utc="later")) == []
    assert changed(start, replace(start, commit="of another folder's change")) == []
    assert changed(start, replace(start, native={"late": ["/t/late.so"]})) == []
    assert changed(start, replace(start, health=503)) == ["health"]
    end = replace(
        start,
        tree="b",
        dirty=not start.dirty,
        pid=1,
        packages_sha256=sha256_lines(["x==1"]),
        version_route={"version": "2"},
    )
    assert changed(start, end) == ["pid", "tree", "dirty", "packages_sha256", "version_route"]
