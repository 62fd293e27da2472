"""Files already on the site's disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

from assay.canonical import sha256_file
from assay.config import LocalSource
from assay.errors import SourceError
from assay.sources.manifest import check_sha256


def fetch(name: str, source: LocalSource, directory: Path) -> None:
    """Link the listed files into `directory`: weights already on disk are hashed, never copied.

    Raises:
        SourceError: an environment variable of the path is not set, or a file is missing or differs.
    """
    root = _expand(name, source.path)
    for path, sha256 in sorted(source.files.items()):
        original = root / path
        if not original.is_file():
            raise SourceError(f"source '{name}': {original} does not exist")
        check_sha256(name, str(original), sha256, sha256_file(original))
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).symlink_to(original.resolve())


def _expand(name: str, path: str) -> Path:
    expanded = os.path.expandvars(path)
    if unset := re.findall(r"\$\{?(\w+)", expanded):
        raise SourceError(f"source '{name}': environment variable {unset[0]} is not set; `path` is {path}")
    return Path(expanded)
