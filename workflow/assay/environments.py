"""Environments of engines and references, installed from exact locks: nothing is resolved."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from assay.canonical import sha256_file
from assay.errors import SourceError
from assay.sources.pypi import decisive_line

MANIFEST = "manifest.json"
_LIST = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)


@dataclass(frozen=True)
class EnvironmentManifest:
    """What an environment holds."""

    name: str
    lock_sha256: str
    python: str
    distributions: dict[str, str]  # normalised name -> version, as found installed


def build_environment(name: str, lock_path: str | Path, destination: str | Path) -> EnvironmentManifest:
    """Make `destination` a virtual environment that holds exactly the distributions of a lock, and its manifest.

    What stood there, whole or half built, is removed first; the manifest is written last, so that an environment
    without one is not an environment. (It is built in place: a virtual environment cannot be moved.)

    Raises:
        SourceError: the lock has an inexact pin, a pin cannot be installed, or what was installed is not the lock.
    """
    lock_path, destination = Path(lock_path), Path(destination)
    pins = read_lock(lock_path)
    shutil.rmtree(destination, ignore_errors=True)
    try:
        _run(name, [sys.executable, "-m", "venv", "--without-pip", str(destination)])
        options = ["--no-deps", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
        pip = [sys.executable, "-m", "pip", "--python", str(python_in(destination)), "install", *options]
        _run(name, [*pip, "-r", str(lock_path)])
        distributions = installed(destination)
        _compare(name, lock_path, pins, distributions)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    manifest = EnvironmentManifest(name, sha256_file(lock_path), platform.python_version(), distributions)
    text = json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n"
    (destination / MANIFEST).write_text(text, encoding="utf-8")
    return manifest


def python_in(directory: Path) -> Path:
    """The interpreter of the virtual environment in `directory`."""
    return directory / "bin" / "python"


def installed(directory: Path) -> dict[str, str]:
    """Distributions that the environment's own interpreter finds: normalised name -> version."""
    run = subprocess.run(
        [str(python_in(directory)), "-I", "-c", _LIST],
        capture_output=True,
        text=True,
        check=True,
        env=clean_environment(),
    )
    return {canonicalize_name(name): version for name, version in sorted(json.loads(run.stdout).items())}


def read_lock(path: Path) -> dict[str, Requirement]:
    """The pins of a lock file: normalised name -> `name==version`.

    Raises:
        SourceError: the file cannot be read, is empty, or a line is not an exact pin.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SourceError(f"cannot read lock {path}: {error.strerror}") from None
    pins: dict[str, Requirement] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if text:
            pin = _pin(path, number, text)
            pins[canonicalize_name(pin.name)] = pin
    if not pins:
        raise SourceError(f"lock {path} names no distribution")
    return pins


def _pin(path: Path, number: int, text: str) -> Requirement:
    try:
        pin = Requirement(text)
    except InvalidRequirement:
        pin = None
    specifiers = list(pin.specifier) if pin else []
    if pin is None or len(specifiers) != 1 or specifiers[0].operator != "==" or specifiers[0].version.endswith("*"):
        raise SourceError(f"{path}, line {number}: '{text}' is not an exact pin; write name==version")
    return pin


def _compare(name: str, lock_path: Path, pins: dict[str, Requirement], found: dict[str, str]) -> None:
    wrong = [f"{pin} is not installed" for key, pin in pins.items() if key not in found]
    wrong += [f"{key} {version} is installed and not locked" for key, version in found.items() if key not in pins]
    wrong += [
        f"{key} {found[key]} is installed where {pin} is locked"
        for key, pin in pins.items()
        if key in found and not pin.specifier.contains(found[key], prereleases=True)
    ]
    if wrong:
        raise SourceError(f"environment '{name}' is not what {lock_path} says: {'; '.join(wrong)}")


def _run(name: str, command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
    if run.returncode != 0:
        reason = decisive_line(run.stdout + run.stderr)
        raise SourceError(f"environment '{name}' cannot be installed: {reason}. Nothing was kept.")


def clean_environment() -> dict[str, str]:
    """Our environment variables without those that would lead another interpreter to our modules."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
