"""Whose containers an engine runs: ours by label, and of those the ones that a killed run left behind."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from docker import DockerClient
from docker.errors import NotFound

from assay.engines.images import ENGINE_ERRORS, told
from assay.engines.server import boot_id

log = logging.getLogger(__name__)

OWNER = "assay.owner"  # what names the process that launched a container, for ever; see `owner`
CONFIG = "assay.config"
HEAL_GRACE_S = 10

_START_TICKS = 19  # /proc/<pid>/stat: index of `starttime` (field 22) behind the command, see proc_pid_stat(5)


def owner(pid: int) -> str | None:
    """What names process `pid` for ever: boot, pid namespace, our user, pid and start time. None: no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return f"{boot_id()}:{_pid_namespace()}:{os.getuid()}:{pid}:{fields[_START_TICKS]}"


def abandoned(label: str, running: bool) -> bool:
    """Whether the owner that `label` names is certainly gone.

    Of a process of another user or pid namespace that cannot be told. One of another boot is gone, unless its container
    runs, in which case another machine uses this engine.
    """
    parts = label.split(":")
    if len(parts) != 5 or not parts[3].isdigit():
        return False
    boot, namespace, user, pid, _ = parts
    if boot != boot_id():
        return not running
    return (namespace, user) == (_pid_namespace(), str(os.getuid())) and label != owner(int(pid))


def heal(engine: DockerClient) -> list[str]:
    """Stop and remove the containers of runs of ours that were killed; nobody else's is touched.

    What cannot be removed is logged and left: it is not in the way of a start, and the next one tries again.

    Returns:
        ids of the containers that were removed.
    """
    removed = []
    for container in engine.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        if not abandoned(container.labels[OWNER], container.status == "running"):
            continue
        what = f"container {container.short_id} of config {container.labels.get(CONFIG)}"
        try:
            container.stop(timeout=HEAL_GRACE_S)
            container.remove(force=True, v=True)
        except NotFound:
            continue  # another run of ours was faster
        except ENGINE_ERRORS as error:
            log.warning("%s was left behind by a killed run and cannot be removed: %s", what, told(error))
            continue
        log.warning("removed %s: a killed run had left it behind", what)
        removed.append(container.id)
    return removed


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)
