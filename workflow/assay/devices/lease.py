"""Leases: no two jobs of a node on one PCI device at once.

One lock file a PCI device, in a directory that the jobs of a node share. The lock is the kernel's (flock), so it ends
with the process that took it, however that ends. It keeps out other jobs of ours and nobody else: whether a device is
free of strangers is what `health` says.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from assay.devices.masks import mask_env
from assay.devices.model import Device
from assay.errors import DeviceError, StoreError
from assay.store import read_json, write_json

Unfit = Callable[[Device], str | None]
RETRY_S = 0.5  # longest wait before looking again
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Lease:
    """Devices that are ours, and the environment under which a server sees them and nothing else."""

    devices: tuple[Device, ...]
    env: dict[str, str]


@contextmanager
def lease(
    candidates: Sequence[Device],
    count: int,
    lock_dir: str | Path | None,
    timeout_s: float,
    config: str,
    unfit: Unfit = lambda _: None,
    unfit_s: float | None = None,
) -> Iterator[Lease]:
    """Hold the first `count` of `candidates` that nobody holds; all of them or none.

    One job tries at a time, and one that cannot have enough lets go of what it has before it waits: so no two can wait
    for one another.

    Args:
        candidates: devices that will do, in the order of preference.
        count: how many.
        lock_dir: where the locks lie; may use environment variables.
        timeout_s: how long to wait, as in a queue, for jobs that hold some of them.
        config: what they are for; for people.
        unfit: why a device may not be taken although nobody leases it; asked once it is ours. See `health.unfit`.
        unfit_s: how long to wait once no job holds any, so that only unfit ones are in the way; default: `timeout_s`.

    Raises:
        DeviceError: there are too few candidates, or too few became free in time (their holders are named), or the
            locks cannot be had.
    """
    if not 1 <= count <= len(candidates):
        raise DeviceError(f"{count} devices are wanted and {len(candidates)} will do: {_list(candidates)}")
    if lock_dir is None:
        raise DeviceError("the site names no place for leases: set devices.lock_dir to a directory that all jobs share")
    folder = Path(os.path.expandvars(lock_dir)).expanduser()
    patience_s = timeout_s if unfit_s is None else unfit_s
    alone = time.monotonic()  # since when no job holds any of them
    deadline = alone + timeout_s
    with ExitStack() as stack:
        while not (taken := _take(candidates, count, folder, stack, unfit)):
            now = time.monotonic()
            if _any_leased(folder, candidates):
                alone = now
            if now > deadline or now > alone + patience_s:
                raise DeviceError(
                    f"{count} of {_list(candidates)} did not become free within "
                    f"{timeout_s if now > deadline else patience_s:g} s: "
                    + "; ".join(_who(folder, device, unfit) for device in candidates)
                )
            time.sleep(random.uniform(0.1, 1) * min(RETRY_S, max(0.01, deadline - time.monotonic())))
        for pci in dict.fromkeys(device.pci for device in taken):
            stack.enter_context(_signed(folder, pci, config))
        yield Lease(taken, mask_env(taken))


def lock_path(folder: Path, pci: str) -> Path:
    """The lock of a PCI device of this machine; the directory may be on a file system that several share."""
    return folder / f"{BOOT_ID.read_text()[:8]}-{pci.replace(':', '_')}.lock"


def _take(candidates: Sequence[Device], count: int, folder: Path, stack: ExitStack, unfit: Unfit) -> tuple[Device, ...]:
    """`count` devices whose locks are then in `stack`, or none. A lock gives all partitions of its PCI device."""
    with ExitStack() as ours:
        with _turn(folder) as may:
            if not may:
                return ()
            taken: list[Device] = []
            for pci in dict.fromkeys(device.pci for device in candidates):
                with ExitStack() as lock:
                    if len(taken) < count and _try(folder, pci, lock):
                        fit = [device for device in candidates if device.pci == pci and unfit(device) is None]
                        if fit:
                            ours.push(lock.pop_all())
                        taken += fit
            if len(taken) < count:
                return ()
        stack.push(ours.pop_all())
        return tuple(taken[:count])


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Whether it is our turn to try; only for the moment that trying takes."""
    with ExitStack() as stack:
        yield _try(folder, "turn", stack, wait_s=RETRY_S)


def _try(folder: Path, name: str, stack: ExitStack, wait_s: float = 0) -> bool:
    """Take a lock into `stack`, if it is free."""
    path = lock_path(folder, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A lock by the mere existence of its file would outlive a crashed holder. Others may be other users.
        lock = FileLock(path, timeout=wait_s, mode=0o666, fallback_to_soft=False)
        stack.enter_context(lock)
    except Timeout:
        return False
    except (OSError, NotImplementedError) as error:
        raise DeviceError(f"cannot lock {path}: {error}. devices.lock_dir must be writable for all who lease") from None
    return True


@contextmanager
def _signed(folder: Path, pci: str, config: str) -> Iterator[None]:
    """Say beside the lock who holds it: for people only, nothing decides by it."""
    path = lock_path(folder, pci).with_suffix(".json")
    me = psutil.Process()
    note = {
        "pid": me.pid,
        "started": me.create_time(),
        "user": me.username(),
        "config": config,
        "since_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with suppress(StoreError):  # the note of another user that was killed may not be replaced
        write_json(path, note)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _any_leased(folder: Path, candidates: Sequence[Device]) -> bool:
    with ExitStack() as stack:
        return not all(_try(folder, pci, stack) for pci in dict.fromkeys(device.pci for device in candidates))


def _who(folder: Path, device: Device, unfit: Unfit) -> str:
    with ExitStack() as stack:
        if _try(folder, device.pci, stack):
            return f"{device} is {unfit(device) or 'free'}"
    try:
        note = read_json(lock_path(folder, device.pci).with_suffix(".json"))
        return (
            f"{device} is leased by pid {note['pid']} of {note['user']} for {note['config']} since {note['since_utc']}"
        )
    except (StoreError, KeyError):
        return f"{device} is leased"


def _list(devices: Sequence[Device]) -> str:
    return ", ".join(map(str, devices)) or "none"
