"""What the kernel logs of devices while a server runs on them: resets, errors of memory, page faults. It only reads."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from assay.devices.health import Check, Outcome
from assay.devices.model import Device

GATE = "kernel_log"

_RECORD_BYTES = 8192  # no record of /dev/kmsg is longer, and a shorter read of one fails
_ADDRESS = re.compile(r"\b([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})\b", re.IGNORECASE)
# After these a device computed on with other memory, or not at all.
# https://github.com/torvalds/linux/tree/master/drivers/gpu/drm/amd/amdgpu (amdgpu_device.c, amdgpu_ras.c, amdgpu_job.c)
_BROKEN = re.compile(r"GPU reset|VRAM is lost|uncorrectable hardware errors|ring \S+ timeout|HW exception by", re.I)
_SUSPECT = re.compile(r"(?:no-retry|retry) page fault|VM_L2_PROTECTION_FAULT", re.I)
# https://docs.nvidia.com/deploy/xid-errors/: errors of memory, links and the device; others may be the program's own.
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_BROKEN_XIDS = {48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140}


@contextmanager
def kernel_log(path: str) -> Iterator[Callable[[], list[str] | None]]:
    """Give a function that reads the messages logged since the block began; None where the log may not be read.

    Args:
        path: /dev/kmsg, one record "PRIORITY,SEQUENCE,TIME,FLAGS;MESSAGE" a line
            (https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg).
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        yield lambda: None
        return
    try:
        os.lseek(file, 0, os.SEEK_END)
        yield lambda: _messages(file)
    finally:
        os.close(file)


def faults(messages: Sequence[str] | None, devices: Sequence[Device], source: str) -> list[Check]:
    """What the kernel said of `devices`, one check; messages about other devices by address do not count."""
    if messages is None:
        return [Check(GATE, "all", Outcome.UNKNOWN, None, 0, source, "the kernel's log may not be read")]
    ours = {device.pci.rpartition(".")[0] for device in devices}
    found = [(outcome, text) for text in messages if _about(text, ours) and (outcome := _judge(text))]
    if not found:
        return [Check(GATE, "all", Outcome.PASS, 0, 0, source, "no fault is logged")]
    worst = Outcome.REFUSE if any(outcome == Outcome.REFUSE for outcome, _ in found) else Outcome.WARN
    first = next(text for outcome, text in found if outcome == worst)
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return [Check(GATE, "all", worst, len(found), 0, source, f"{first}{others}")]


def _messages(file: int) -> list[str]:
    content = b""
    while True:
        try:
            part = os.read(file, _RECORD_BYTES)
        except BlockingIOError:
            part = b""
        except OSError as error:
            if error.errno != errno.EPIPE:  # records were overwritten before we came; the next read goes on after them
                raise
            continue
        if not part:
            break
        content += part
    # A line that begins with a space says more about the record before it.
    lines = (line for line in content.decode(errors="replace").splitlines() if not line.startswith(" "))
    return [line.partition(";")[2] for line in lines]


def _about(text: str, ours: set[str]) -> bool:
    addresses = {address.lower() for address in _ADDRESS.findall(text)}
    return not addresses or bool(addresses & ours)


def _judge(text: str) -> Outcome | None:
    if xid := _XID.search(text):
        return Outcome.REFUSE if int(xid[1]) in _BROKEN_XIDS else Outcome.WARN
    if _BROKEN.search(text):
        return Outcome.REFUSE
    return Outcome.WARN if _SUSPECT.search(text) else None
