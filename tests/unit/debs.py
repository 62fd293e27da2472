"""A tiny Debian package for tests of what apt does, and a repository of it that apt takes for its only one."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from assay.canonical import sha256_file

FILES = {
    "./usr/share/tiny/a.txt": b"real content\n" * 200,
    "./usr/share/tiny/b.bin": bytes(range(256)),
    "./usr/share/doc/tiny/copyright": b"CC0-1.0\n",
}


def make_deb(folder: Path, version: str = "1.0-1", files: dict[str, bytes] = FILES) -> Path:
    """A real package `tiny` (deb(5)): an `ar` archive of a format number and two compressed `tar` archives."""
    folder.mkdir(parents=True, exist_ok=True)
    control = f"Package: tiny\nVersion: {version}\nArchitecture: all\nMaintainer: nobody\nDescription: a tiny package\n"
    members = {
        "debian-binary": b"2.0\n",
        "_note": b"odd",  # deb(5) lets others add such a member; one of odd length is padded
        "control.tar.xz": _tar({"./control": control.encode()}),
        "data.tar.xz": _tar(files),
    }
    path = folder / f"tiny_{version.replace(':', '%3a')}_all.deb"
    with path.open("wb") as target:
        target.write(b"!<arch>\n")
        for name, content in members.items():
            target.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode())
            target.write(content + b"\n" * (len(content) % 2))
    return path


def _tar(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def write_index(repository: Path) -> None:
    """List the packages in `repository` as they are now."""
    entries = (
        f"Package: tiny\nVersion: {path.name.split('_')[1].replace('%3a', ':')}\nArchitecture: all\n"
        f"Maintainer: nobody\nDescription: a tiny package\nFilename: ./{path.name}\nSize: {path.stat().st_size}\n"
        f"SHA256: {sha256_file(path)}\n"
        for path in sorted(repository.glob("*.deb"))
    )
    (repository / "Packages").write_text("\n".join(entries))


def write_apt_config(folder: Path, repository: Path) -> Path:
    """A configuration under which apt knows `repository` only, and keeps its state under `folder`."""
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb [trusted=yes] file:{repository} ./\n")
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": os.devnull,
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
    }
    path = folder / "apt.conf"
    path.write_text("".join(f'{key} "{value}";\n' for key, value in settings.items()))
    return path
