"""Debian packages: downloaded by apt by name and version, checked by hash, unpacked in Python, never installed."""

from __future__ import annotations

import fnmatch
import io
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path

from assay.canonical import sha256_file
from assay.config import AptSource
from assay.errors import SourceError
from assay.sources.manifest import check_sha256

COPIES = "packages"  # folder beside the sources where a user may put packages that apt no longer has
_UNKNOWN = re.compile(r"Unable to locate package|Version '.*' for '.*' was not found")
_NO_NETWORK = re.compile(r"Could not (resolve|connect|handshake)|Temporary failure|Connection (failed|timed out)")
_MAGIC = b"!<arch>\n"
_HEADER = 60  # bytes before each member: name 16, time 12, owner 6, group 6, mode 8, size 10, end mark 2


def fetch(name: str, source: AptSource, directory: Path) -> None:
    """Put the files of the package that match `source.files` into `directory`, under their paths in the package.

    A copy of the package in the folder `packages` beside the sources is taken before anything is downloaded.

    Raises:
        SourceError: no apt, version unknown, wrong hash, damaged package, or a pattern without a file.
    """
    copy = directory.parent / COPIES / _file_name(source)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as scratch:
        package = copy if copy.is_file() else _download(name, source, copy, Path(scratch))
        what = str(copy) if package == copy else f"{source.package}={source.version}"
        check_sha256(name, what, source.sha256, sha256_file(package))
        _unpack(name, source, package, directory)


def _file_name(source: AptSource) -> str:
    """As apt names it: the colon of an epoch is escaped. Data packages are of no architecture."""
    return f"{source.package}_{source.version.replace(':', '%3a')}_all.deb"


def _download(name: str, source: AptSource, copy: Path, scratch: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise _unavailable(name, source, copy, "there is no apt-get on this machine")
    wanted = f"{source.package}={source.version}"
    run = _apt(scratch, "download", wanted)
    if _UNKNOWN.search(run.stderr):
        # The system's index may be empty or old. One of our own needs no root and changes nothing of the system's.
        (scratch / "lists" / "partial").mkdir(parents=True)
        own = [f"-oDir::State::Lists={scratch / 'lists'}", f"-oDir::Cache={scratch / 'cache'}"]
        update = _apt(scratch, *own, "update")
        run = _apt(scratch, *own, "download", wanted)
        run.stderr += update.stderr
    if run.returncode != 0:
        raise _unavailable(name, source, copy, decisive_line(run.stderr))
    return next(scratch.glob("*.deb"))


def _apt(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["apt-get", "-q=2", "-oAcquire::Retries=1", *arguments]
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def decisive_line(output: str) -> str:
    """The one line of apt's errors that says why it failed, without the host that it was talking to."""
    if _NO_NETWORK.search(output):
        return "the package index cannot be reached; check the network and apt's own settings"
    lines = [line.removeprefix("E:").strip() for line in output.splitlines() if line.startswith("E:")]
    return re.sub(r"\b(\w+://|file:/)\S+", "(index)", lines[0]) if lines else "apt-get gave no reason"


def _unavailable(name: str, source: AptSource, copy: Path, why: str) -> SourceError:
    return SourceError(
        f"source '{name}': {copy.name} (sha256 {source.sha256}) cannot be downloaded: {why}. Put a copy of that "
        f"file at {copy} and fetch again; snapshots of the distribution keep every version."
    )


def _unpack(name: str, source: AptSource, package: Path, directory: Path) -> None:
    try:
        part, content = _data_member(package.read_bytes())
    except ValueError as error:
        raise _unreadable(name, package, str(error)) from None
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            files = {entry.name.removeprefix("./"): entry for entry in archive if entry.isfile()}
            for pattern in source.files:
                found = fnmatch.filter(files, pattern)
                if not found:
                    raise SourceError(
                        f"source '{name}': no file in {package.name} matches '{pattern}'; correct `files`"
                    )
                archive.extractall(directory, [files[path] for path in found], filter="data")
    except (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
        why = str(error).partition("\n")[0].removesuffix(":")  # behind it: what each kind of compression says
        raise _unreadable(name, package, f"{part}: {why}") from None


def _unreadable(name: str, package: Path, why: str) -> SourceError:
    return SourceError(
        f"source '{name}': {package.name} cannot be unpacked ({why}), although its sha256 is the pinned one: the pin "
        "was taken from a damaged file, or from one in a compression that this Python cannot read. Pin a good one."
    )


def _data_member(package: bytes) -> tuple[str, bytes]:
    """Name and content of the archive `data.tar.*` in a package, which is an `ar` archive (deb(5)).

    Raises:
        ValueError: there is none whole.
    """
    place = len(_MAGIC)
    while package.startswith(_MAGIC) and place + _HEADER <= len(package):
        header = package[place : place + _HEADER]
        start, size = place + _HEADER, int(header[48:58])
        if header.startswith(b"data.tar") and start + size <= len(package):
            return header[:16].decode().strip(), package[start : start + size]
        place = start + size + size % 2  # members begin at even places
    raise ValueError("no whole data.tar in it")
