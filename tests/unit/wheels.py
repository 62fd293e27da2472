"""A tiny wheel for tests of what pip does."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, version: str = "1.0") -> Path:
    """A tiny real wheel of the distribution `tiny`."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"tiny-{version}.dist-info"
    members = {
        "tiny/__init__.py": "raise SystemExit('never to be run')\n",
        "tiny/data.txt": "real content\n" * 200,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*members, f"{info}/RECORD"])
    path = folder / f"tiny-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**members, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path
