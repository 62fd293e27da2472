"""Where a result came from: rule, inputs, effective options, tool, host and times. Every stage writes one."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import assay
from assay.canonical import sha256_file, sha256_json

VERSION = metadata.version("assay")
LIBRARIES = ("torch", "transformers", "tokenizers")  # of the project's environment: what a model's numbers depend on


@dataclass(frozen=True)
class GitState:
    """Where a module stands in the git checkout that tracks it; all null where none does."""

    commit: str | None  # of the whole checkout
    tree: str | None  # of the module's own folder as committed: it changes only with what lies in that folder
    dirty: bool | None  # whether anything in that folder differs from its commit


def git_state(file: str | Path) -> GitState:
    """State of the git checkout that *tracks* `file`, and of the folder that `file` lies in.

    A package installed inside a checkout (`.venv/lib/...`) lies in its tree without belonging to it: that is unknown.
    """
    path = Path(file)
    if _git(path.parent, "ls-files", "--error-unmatch", path.name) is None:
        return GitState(commit=None, tree=None, dirty=None)
    return folder_state(path.parent)


def folder_state(folder: str | Path) -> GitState:
    """State of the git checkout that `folder` lies in, and of the folder itself."""
    changes = _git(Path(folder), "status", "--porcelain", "--", ".")
    return GitState(
        commit=_git(Path(folder), "rev-parse", "HEAD"),
        tree=_git(Path(folder), "rev-parse", "HEAD:./"),
        dirty=None if changes is None else bool(changes),
    )


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of distributions in this environment; null: not installed."""
    return {name: _version(name) for name in sorted(names)}


@functools.cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def provenance(rule: str, inputs: Iterable[str | Path], options: Mapping[str, Any]) -> dict[str, Any]:
    """The record that goes into a result's metadata (JSON-able).

    Args:
        rule: name of the rule that writes the result.
        inputs: files it was made from; each is hashed.
        options: every option that was in effect, defaults included.

    `started_utc` is the start of this process (a stage is one process), `finished_utc` is now.
    """
    return {
        "rule": rule,
        "tool": {"name": "assay", "version": VERSION, **asdict(git_state(assay.__file__))},
        "inputs": {str(path): sha256_file(path) for path in inputs},
        "options": dict(options),
        "options_sha256": sha256_json(dict(options)),
        "host": {
            "python": platform.python_version(),
            "system": platform.system(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "started_utc": datetime.fromtimestamp(psutil.Process().create_time(), UTC).isoformat(timespec="seconds"),
        "finished_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command in `folder`, or None where there is no git or it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
