"""A machine without an engine: a skip with the reason, and a failure where one must be."""

import pytest
from private_engine import REQUIRED, find_dockerd, give_up


def test_a_machine_without_an_engine_is_told_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr("private_engine.os.geteuid", lambda: 0)
    monkeypatch.setattr("private_engine.shutil.which", lambda tool, path=None: None if tool == "dockerd" else tool)
    path, missing = find_dockerd(tmp_path)
    assert path == [] and f"tests/container/fetch_engine.sh {tmp_path}" in missing
    monkeypatch.setattr("private_engine.os.geteuid", lambda: 1000)
    assert find_dockerd(tmp_path) == ([], "it needs root")


def test_no_engine_is_a_skip_and_where_one_must_be_a_failure(monkeypatch):
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no container engine can be started here: for a test"):
        give_up("for a test")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="REQUIRE_DOCKER is set and there is no container engine"):
        give_up("for a test")
