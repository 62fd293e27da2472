"""The log of a stage, and what of an earlier start it keeps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.stage import stage


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def _log_twice(log: Path) -> list[str]:
    for start in ("first", "second"):
        with stage(log):
            logging.getLogger("assay").info(start)
    return [line.split()[-1] for line in log.read_text().splitlines()]


def test_a_job_that_is_run_again_logs_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert _log_twice(tmp_path / "logs" / "stage.log") == ["second"]


def test_a_job_that_slurm_queued_again_keeps_what_its_earlier_start_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert _log_twice(tmp_path / "logs" / "stage.log") == ["first", "second"]
