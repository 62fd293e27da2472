"""Room for what a server writes is there before it starts, or the run says what is missing."""

import shutil
import tempfile
from collections import namedtuple

import pytest
from sites import checkouts, on, pinned

from assay.engines.plan import GIB, serve_plan
from assay.engines.room import require_room
from assay.engines.server import StartFailure

Usage = namedtuple("Usage", "total used free")
TMP = tempfile.gettempdir()
PLAN = {"arm": "vllm", "caches": {"triton": "caches/triton"}, "needs": {"disk_bytes": 10 * GIB, "shm_bytes": 32 * GIB}}


def with_free(monkeypatch, **places):
    def usage(place):
        name = {TMP: "tmp", "caches/triton": "caches", "shm": "shm"}[place]
        if places[name] is None:
            raise PermissionError
        return Usage(0, 0, int(places[name] * GIB))

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_a_server_starts_where_there_is_just_room_enough(monkeypatch):
    with_free(monkeypatch, tmp=10, caches=10, shm=32)
    assert require_room(PLAN, "shm") == {"caches/triton": 10 * GIB, TMP: 10 * GIB, "shm": 32 * GIB}


@pytest.mark.parametrize(
    ("short", "message"),
    [
        ({"caches": 9.5}, r"arm 'vllm' needs 10 GiB free in caches/triton, and there are 9\.5"),
        ({"tmp": 1}, f"needs 10 GiB free in {TMP}, and there are 1"),
        ({"shm": 31}, "needs 32 GiB free in shm, and there are 31"),
    ],
)
def test_too_little_room_is_a_start_that_failed_and_says_where(monkeypatch, short, message):
    with_free(monkeypatch, **({"tmp": 10, "caches": 10, "shm": 32} | short))
    with pytest.raises(StartFailure, match=message) as caught:
        require_room(PLAN, "shm")
    assert caught.value.kind == "cannot_start"


def test_room_that_cannot_be_read_is_unknown_and_none_that_nobody_needs_is_asked(monkeypatch):
    with_free(monkeypatch, tmp=None, caches=None, shm=None)
    assert require_room(PLAN, "shm") == dict.fromkeys(["caches/triton", TMP, "shm"])
    assert require_room({**PLAN, "needs": {"disk_bytes": None, "shm_bytes": None}}, "shm") == {}


@pytest.mark.parametrize(("runtime", "gib"), [("docker", None), ("apptainer", 32)])
def test_a_container_with_shared_memory_of_its_own_needs_none_of_the_machines(tmp_path, runtime, gib):
    site = {"docker": "mi300x", "apptainer": "mi325x"}[runtime]
    config = pinned(on(site, trees=checkouts(tmp_path)))
    assert config.site.container.runtime == runtime
    assert serve_plan(config, "qwen3_5_9b_vllm")["needs"]["shm_bytes"] == (gib and gib * GIB)
