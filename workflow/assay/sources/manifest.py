"""The manifest of a fetched source: which pin it came from and what every file of it is."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.canonical import sha256_file, sha256_weights
from assay.config import Source
from assay.errors import SourceError, StoreError
from assay.store import read_json, write_json

MANIFEST = "manifest.json"
STAMP = ".verified.json"
SETTLED_S = 2  # a file touched later than this before it was hashed may change again within one tick of its file system

Status = list[int]


@dataclass(frozen=True)
class SourceFile:
    """One file of a source."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a source directory holds."""

    source: str
    kind: str
    pin: dict[str, Any]  # the source's entry in config/sources.yaml, less kind and licence
    licence: str
    files: dict[str, SourceFile]  # path relative to the directory -> file


def pin_of(source: Source) -> dict[str, Any]:
    """What makes `source` immutable: its configuration without kind and licence."""
    return source.model_dump(mode="json", exclude={"kind", "licence"})


def make_manifest(name: str, source: Source, directory: Path) -> Manifest:
    """The manifest of the files now in `directory`."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {
        path.relative_to(directory).as_posix(): SourceFile(sha256_file(path), path.stat().st_size) for path in paths
    }
    return Manifest(name, source.kind, pin_of(source), source.licence, files)


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write `manifest` into `directory`."""
    text = json.dumps(asdict(manifest), indent=2, sort_keys=True, ensure_ascii=False)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a fetched source.

    Raises:
        SourceError: the directory was not fetched, or its manifest is damaged.
    """
    path = Path(directory) / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        files = {name: SourceFile(**file) for name, file in values.pop("files").items()}
        return Manifest(files=files, **values)
    except OSError as error:
        raise SourceError(f"{directory} holds no fetched source ({path.name}: {error.strerror}); fetch it") from None
    except (ValueError, KeyError, TypeError):
        raise SourceError(f"{path} is damaged; remove {directory} and fetch it again") from None


def verify_manifest(directory: str | Path) -> Manifest:
    """The manifest of `directory`, after hashing every file again.

    Raises:
        SourceError: a file is missing or changed since it was fetched.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    for path, file in sorted(manifest.files.items()):
        found = sha256_file(directory / path) if (directory / path).is_file() else "no file"
        if found != file.sha256:
            raise SourceError(
                f"{directory / path} is not what was fetched: expected sha256 {file.sha256}, found {found}; "
                f"remove {directory} and run again, which fetches it anew"
            )
    return manifest


def verify_weights(directory: str | Path) -> str:
    """SHA-256 that names the model in `directory`, after making sure that its files are those that were fetched.

    Called before every load. Files are hashed the first time; then a stamp beside the manifest holds what the file
    system says of each, and as long as it says the same, nothing is hashed again. Any write through the file system
    changes a file's ctime, which no program can set back, whatever it does to mtime. Not seen: a disk that returns
    other bytes than were written to it, a write to the block device below a mounted file system, a clock that was set
    back on purpose to the nanosecond. Remove the stamp to have everything hashed again.

    Raises:
        SourceError: a file is missing or changed since it was fetched.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    name = sha256_weights(asdict(manifest))
    began = time.time_ns()
    now = _statuses(directory, manifest)
    with contextlib.suppress(StoreError):
        if now is not None and read_json(directory / STAMP) == {"weights_sha256": name, "files": now}:
            return name
    verify_manifest(directory)
    if now is not None and now == _statuses(directory, manifest) and _settled(now, began):
        with contextlib.suppress(StoreError):  # a folder that may only be read: it is hashed each time
            write_json(directory / STAMP, {"weights_sha256": name, "files": now})
    return name


def _statuses(directory: Path, manifest: Manifest) -> dict[str, Status] | None:
    """Path -> size, mtime, inode and ctime of the file behind it; None where one cannot be had.

    A link is followed: another file behind it has another inode.
    """
    try:
        found = {path: (directory / path).stat() for path in manifest.files}
    except OSError:
        return None
    return {path: [one.st_size, one.st_mtime_ns, one.st_ino, one.st_ctime_ns] for path, one in found.items()}


def _settled(statuses: Mapping[str, Status], now_ns: int) -> bool:
    return all(ctime + SETTLED_S * 10**9 < now_ns for *_, ctime in statuses.values())


def only(origins: Sequence[Path]) -> Path:
    """The one origin of a converter that takes no more. Raises SourceError where there are several."""
    if len(origins) != 1:
        raise SourceError(f"this converter takes one origin, not {len(origins)}; correct `origins`")
    return origins[0]


def check_hashes(name: str, directory: Path, expected: Mapping[str, str]) -> None:
    """Raise SourceError for the first file of `expected` (path -> sha256) that is missing or differs."""
    for path, sha256 in sorted(expected.items()):
        file = directory / path
        if not file.is_file():
            raise SourceError(f"source '{name}': file {path} is missing in {directory.name or directory}")
        check_sha256(name, path, sha256, sha256_file(file))


def check_sha256(name: str, what: str, expected: str, found: str) -> None:
    """Raise SourceError unless `found` is the `expected` sha256."""
    if found != expected:
        raise SourceError(
            f"source '{name}': wrong sha256 of {what}: expected {expected}, found {found}. Nothing was kept. "
            "Fetch again in case it was damaged on the way; if it was replaced upstream on purpose, check the new "
            "content and pin its hash in config/sources.yaml."
        )


@contextmanager
def staged_directory(destination: Path) -> Iterator[Path]:
    """Yield a new directory beside `destination`; move it there on success, remove it otherwise.

    What a killed process left of an earlier attempt is removed first. What stood at `destination` is replaced at the
    end only. Files get mode 0644 and directories 0755, whatever wrote them.

    Raises:
        SourceError: the disk is full or the place is not writable.
    """
    staging: Path | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        for left in destination.parent.glob(f".{destination.name}.*.partial"):
            shutil.rmtree(left)
        prefix = f".{destination.name}."
        staging = Path(tempfile.mkdtemp(prefix=prefix, suffix=".partial", dir=destination.parent))
        yield staging
        staging.chmod(0o755)
        for path in staging.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
        if destination.exists():
            shutil.rmtree(destination)
        staging.rename(destination)
    except OSError as error:
        raise SourceError(f"cannot write {destination}: {error.strerror or error}. Nothing was kept.") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
