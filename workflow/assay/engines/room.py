"""Whether there is room for what a server writes, on disk and in shared memory.

One that runs out of either fails somewhere in the middle, and seldom says of what.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

from assay.engines.plan import GIB
from assay.engines.server import StartFailure
from assay.records import FailureKind

SHM = "/dev/shm"


def require_room(plan: Mapping[str, Any], shm: str = SHM) -> dict[str, int | None]:
    """Free bytes of every place for which a serve plan says what its server needs; None where that cannot be read.

    Args:
        plan: a serve plan; `needs` says how much, on the file systems of its caches and of temporary files
            (`disk_bytes`), and in the machine's shared memory (`shm_bytes`).
        shm: the machine's shared memory.

    Raises:
        StartFailure: there is less than that in one of them.
    """
    disk, shared = plan["needs"]["disk_bytes"], plan["needs"]["shm_bytes"]
    wanted = {place: disk for place in (*plan["caches"].values(), tempfile.gettempdir()) if disk}
    wanted |= {shm: shared} if shared else {}
    free = {place: _free(place) for place in wanted}
    for place, need in wanted.items():
        found = free[place]
        if found is not None and found < need:
            raise StartFailure(
                FailureKind.CANNOT_START,
                f"arm '{plan['arm']}' needs {need / GIB:.3g} GiB free in {place}, and there are {found / GIB:.3g}",
            )
    return free


def _free(place: str) -> int | None:
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
