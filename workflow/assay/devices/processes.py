"""What /proc says of the processes that hold a device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from assay.devices.model import Holder

RENDER = re.compile(r"/dev/dri/renderD(\d+)")


def described(holder: Holder, proc: Path) -> Holder:
    """`holder` with its name, control group, state and start time, as far as `proc` may tell."""
    folder = proc / str(holder.pid)
    # "PID (NAME) STATE PPID ... STARTTIME ...": the name may hold spaces and brackets; fields 3 and 22 of proc(5).
    fields = (_read(folder / "stat") or "").rpartition(")")[2].split()
    return replace(
        holder,
        name=holder.name or _read(folder / "comm"),
        cgroup=(_read(folder / "cgroup") or "").rpartition("/")[2] or None,
        state=fields[0] if fields else None,
        started=int(fields[19]) if len(fields) > 19 else None,
    )


def render_holders(proc: Path) -> dict[int, set[int]]:
    """Minor number of a render node -> ids of the processes that have it open, of those we may look at."""
    found: dict[int, set[int]] = {}
    for folder in proc.iterdir() if proc.is_dir() else ():
        if folder.name.isdigit():
            for target in _open_files(folder):
                if render := RENDER.fullmatch(target):
                    found.setdefault(int(render[1]), set()).add(int(folder.name))
    return found


def _open_files(folder: Path) -> Iterator[str]:
    try:
        for link in (folder / "fd").iterdir():
            yield str(link.readlink())
    except OSError:  # of another user, or gone
        return


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
