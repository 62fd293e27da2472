"""What belongs to one instance of a server alone, and what it finds left from earlier ones."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from assay.errors import StoreError

State = Literal["cold", "warm"]


@contextmanager
def instance_folder(plan: Mapping[str, Any]) -> Iterator[Path]:
    """A folder for the sockets, uploads and whatever else of one instance; gone with it.

    It lies among the temporary files, because the path of a Unix socket has at most 107 characters. Under `hub` are
    the weights as a Hugging Face cache, for an engine that takes a model by name only.

    Raises:
        StoreError: it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="assay-")))
            if plan["model"]["hub"]:
                lay_out_hub(folder / "hub", plan["model"]["directory"], **plan["model"]["hub"])
        except OSError as error:
            raise StoreError(f"cannot make a folder for the instance: {error}") from error
        yield folder


def lay_out_hub(cache: Path, directory: str | Path, repo: str, revision: str) -> None:
    """Show the files in `directory` as revision `revision` of `repo` in a Hugging Face cache, by links.

    Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(Path(directory).resolve(), target_is_directory=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files that an engine reads at its start: name -> content."""
    for name, content in files.items():
        try:
            (folder / name).write_text(content, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"cannot write {folder / name}: {error.strerror}") from error


def make_cache_folders(plan: Mapping[str, Any]) -> None:
    """Make the plan's cache folders: not every engine makes its own, and none can be mounted before it is there."""
    for folder in plan["caches"].values():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make cache folder {folder}: {error.strerror}") from error


def cache_states(plan: Mapping[str, Any]) -> dict[str, State | None]:
    """Kind of cache -> whether its folder holds anything yet; null: it cannot be read."""
    return {kind: _state(folder) for kind, folder in plan["caches"].items()}


def _state(folder: str) -> State | None:
    def unreadable(error: OSError) -> None:
        raise error

    try:
        return "warm" if any(files for _, _, files in os.walk(folder, onerror=unreadable)) else "cold"
    except FileNotFoundError:
        return "cold"
    except OSError:
        return None
