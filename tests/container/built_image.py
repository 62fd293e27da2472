"""Images made of nothing but bytes of ours, the same on every machine, so that their digest can be committed.

There is no interpreter in them: the machine's own is mounted (`python_mounts`).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from assay.engines.container import Mount

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar.gzip"  # said of a plain tar too
_LONG_AGO = "1970-01-01T00:00:00Z"

SERVED = {
    "app/served.py": '"""The module that an identity is read of."""\n',
    "app/served-1.2.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: served\nVersion: 1.2.3\n",
}


@dataclass(frozen=True)
class BuiltImage:
    """An image as a registry holds it."""

    layer: bytes
    config: bytes
    manifest: bytes

    @property
    def digest(self) -> str:
        """What the image is pinned by."""
        return sha256(self.manifest)

    @property
    def id(self) -> str:
        """What an engine with the classic image store calls it."""
        return sha256(self.config)


def build(files: Mapping[str, str], env: Mapping[str, str]) -> BuiltImage:
    """An image of one layer with these text files (path -> content)."""
    layer = _tar(files)
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": _LONG_AGO,
            "config": {"Env": [f"{key}={value}" for key, value in env.items()]},
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer)]},
            "history": [{"created": _LONG_AGO, "created_by": "tests/container/built_image.py"}],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {"mediaType": _CONFIG_TYPE, "size": len(config), "digest": sha256(config)},
            "layers": [{"mediaType": _LAYER_TYPE, "size": len(layer), "digest": sha256(layer)}],
        }
    )
    return BuiltImage(layer, config, manifest)


def python_mounts() -> tuple[Mount, ...]:
    """This interpreter, with its packages and the libraries it needs, where they lie on the machine."""
    own = {os.path.realpath(sys.base_prefix), sys.prefix} - {"/usr"}
    libraries = [Mount("/usr", "/usr"), *(Mount(os.path.realpath(path), path) for path in ("/lib", "/lib64"))]
    return (*libraries, *(Mount(path, path) for path in sorted(own) if not Path(path).is_relative_to("/usr")))


def sha256(content: bytes) -> str:
    """Digest as registries write it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _tar(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
        for folder in sorted(folders):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, text in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
