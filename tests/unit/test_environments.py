"""Environments hold exactly their lock, or do not exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import make_wheel

from assay.environments import build_environment, installed, python_in, read_lock
from assay.errors import SourceError


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index, with tiny 1.0, 1.1 and 2.0+local in it."""
    folder = tmp_path / "index"
    for version in ("1.0", "1.1", "2.0+local"):
        make_wheel(folder, version)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def lock(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "lock.txt"
    path.write_text(text)
    return path


def test_an_environment_holds_its_lock_and_nothing_else(index: Path, tmp_path: Path) -> None:
    manifest = build_environment("it", lock(tmp_path, "# why\nTiny==1.0  # pinned\n"), tmp_path / "envs" / "it")
    assert manifest.distributions == {"tiny": "1.0"}
    written = json.loads((tmp_path / "envs" / "it" / "manifest.json").read_text())
    assert written["lock_sha256"] == manifest.lock_sha256
    assert written["python"] == ".".join(map(str, sys.version_info[:3]))
    python = python_in(tmp_path / "envs" / "it")
    where = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert where.stdout.strip() == str(tmp_path / "envs" / "it")


def test_a_local_build_satisfies_the_version_it_is_of(index: Path, tmp_path: Path) -> None:
    manifest = build_environment("it", lock(tmp_path, "tiny==2.0\n"), tmp_path / "it")
    assert manifest.distributions == {"tiny": "2.0+local"}


def test_a_half_built_environment_is_removed_and_rebuilt(index: Path, tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "left over").write_text("from a killed run")
    build_environment("it", lock(tmp_path, "tiny==1.0\n"), tmp_path / "it")
    assert not (tmp_path / "it" / "left over").exists()


def test_a_pin_that_cannot_be_had_is_named_and_leaves_nothing(index: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"environment 'it' cannot be installed: .*tiny==9\.9") as caught:
        build_environment("it", lock(tmp_path, "tiny==9.9\n"), tmp_path / "it")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "it").exists()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "tiny==1.0 is not installed"),
        ({"tiny": "1.1"}, "tiny 1.1 is installed where tiny==1.0 is locked"),
        ({"tiny": "1.0", "stray": "3"}, "stray 3 is installed and not locked"),
    ],
)
def test_any_difference_from_the_lock_fails_by_name(
    found: dict[str, str], message: str, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.environments.installed", lambda _: found)
    with pytest.raises(SourceError, match=message):
        build_environment("it", lock(tmp_path, "tiny==1.0\n"), tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_what_is_installed_is_read_from_the_environment_itself(index: Path, tmp_path: Path) -> None:
    build_environment("it", lock(tmp_path, "tiny==1.1\n"), tmp_path / "it")
    assert installed(tmp_path / "it") == {"tiny": "1.1"}


@pytest.mark.parametrize("line", ["tiny>=1.0", "tiny", "tiny==1.*", "tiny==1.0,<2", "-r other.txt", "tiny @ file:///x"])
def test_a_line_that_is_not_an_exact_pin_is_refused_by_number(line: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"lock\.txt, line 2: .* is not an exact pin"):
        read_lock(lock(tmp_path, f"# first\n{line}\n"))


def test_an_empty_or_absent_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="names no distribution"):
        read_lock(lock(tmp_path, "# nothing\n"))
    with pytest.raises(SourceError, match="cannot read lock"):
        read_lock(tmp_path / "absent.txt")


def test_the_committed_locks_are_exact() -> None:
    for path in sorted((Path(__file__).parents[2] / "config" / "environments").glob("*.txt")):
        assert read_lock(path)
