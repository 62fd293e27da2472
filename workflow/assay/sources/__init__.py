"""Fetching: one pinned source becomes one directory with a manifest, or one clear error and nothing at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from assay.config import (
    AptSource,
    ConvertedSource,
    HuggingFaceSource,
    LocalSource,
    PypiSource,
    SeededSource,
    Source,
    UrlSource,
    lookup,
)
from assay.errors import SourceError
from assay.sources import apt, converters, huggingface, local, pypi, seeded, url
from assay.sources.manifest import (
    Manifest,
    SourceFile,
    check_hashes,
    make_manifest,
    read_manifest,
    staged_directory,
    verify_manifest,
    write_manifest,
)

__all__ = ["Manifest", "SourceFile", "fetch", "read_manifest", "verify_manifest"]


def fetch(name: str, source: Source, destination: str | Path, origins: Mapping[str, Path] | None = None) -> Manifest:
    """Make `destination` hold the files of `source` and their `manifest.json`; what stood there is replaced.

    Everything is built beside `destination` and moved into place at the end: an interrupted fetch leaves nothing.
    `origins` maps the name of a fetched source to its directory, for sources made from others.

    Raises:
        SourceError: the source cannot be had, its pin moves, or its content is not what the pin says.
    """
    with staged_directory(Path(destination)) as directory:
        _fill(name, source, directory, origins or {})
        manifest = make_manifest(name, source, directory)
        write_manifest(manifest, directory)
    return manifest


def _fill(name: str, source: Source, directory: Path, origins: Mapping[str, Path]) -> None:
    match source:
        case PypiSource():
            pypi.fetch(name, source, directory)
        case AptSource():
            apt.fetch(name, source, directory)
        case UrlSource():
            url.fetch(name, source, directory)
        case HuggingFaceSource():
            huggingface.fetch(name, source, directory)
        case LocalSource():
            local.fetch(name, source, directory)
        case SeededSource():
            builder = lookup(seeded.BUILDERS, source.builder, "builder of seeded sources")
            builder(directory, source.seed, source.options)
            check_hashes(name, directory, source.sha256)
        case ConvertedSource():
            convert = lookup(converters.CONVERTERS, source.converter, "converter")
            for origin in source.origins:
                if origin not in origins:
                    raise SourceError(f"source '{name}' is made from '{origin}': fetch that one first")
            convert([origins[origin] for origin in source.origins], directory)
            check_hashes(name, directory, source.sha256)
