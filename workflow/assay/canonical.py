"""Content hashes over canonical rows (RFC 8785 JSON), never over file bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rfc8785


def canonical_json(value: Any) -> str:
    """`value` as RFC 8785 canonical JSON text. Raises `rfc8785.CanonicalizationError` on NaN or infinity."""
    return rfc8785.dumps(value).decode()


def sha256_json(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(rfc8785.dumps(value)).hexdigest()


def sha256_bytes(content: bytes) -> str:
    """SHA-256 (hex) of bytes."""
    return hashlib.sha256(content).hexdigest()


def sha256_text(text: str) -> str:
    """SHA-256 (hex) of the UTF-8 bytes of `text`."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: str | Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sha256_weights(manifest: Mapping[str, Any]) -> str:
    """SHA-256 (hex) that names a model: of the paths and hashes of the files in its source's `manifest.json`."""
    return sha256_json({path: file["sha256"] for path, file in manifest["files"].items()})


def sha256_lines(digests: Iterable[str]) -> str:
    """SHA-256 (hex) of sorted digests, one a line: the identity of a set whatever its order."""
    return sha256_text("".join(f"{digest}\n" for digest in sorted(digests)))
