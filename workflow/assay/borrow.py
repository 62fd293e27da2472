"""Work of a stage on leased devices, as a reference or the judge needs them.

It runs in a process of its own: a driver gives memory back at the end of a process only, so that nobody could tell what
work in our own process left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from assay.devices.health import Outcome
from assay.devices.hold import hold
from assay.devices.masks import without_masks
from assay.errors import AssayError, DeviceError
from assay.stage import errors_told
from assay.store import add_provenance

PR_SET_PDEATHSIG = 1  # linux/prctl.h

Work = Callable[[], None]


def on_devices(want: Mapping[str, Any], samples: Path, output: Path, work: Work) -> None:
    """Do `work`, which writes the table `output`, on devices that are leased for it, and record them in the table.

    Args:
        want: `gpus`, how many, 0 for work on the CPU, which is done here and now; `device`, of which kind;
            `device_options`, how. See `assay.config.Site.borrowed`.
        samples: file for what is seen of the devices meanwhile, JSON lines.
        output: what the devices are for; its provenance gains `devices`.
        work: must not have imported a runtime before it is called: only then the mask of the lease counts.

    Raises:
        DeviceError: no fit devices became free in time, or they had faults, or were not left as they were: `output` is
            removed.
        AssayError: the work failed; why is in the log.
    """
    if not want["gpus"]:
        work()
        return
    with _worker(work) as worker, hold({**want, "config": str(output)}, os.environ, samples) as held:
        held.belong_to(worker)
        worker.run(held.env)
    assert held.evidence is not None  # there are devices
    for when, report in (
        ("had faults meanwhile", held.evidence["during"]["health"]),
        ("are not as before", held.evidence["after"]),
    ):
        if report["outcome"] == Outcome.REFUSE:
            output.unlink(missing_ok=True)
            raise DeviceError(
                f"the devices that {output} was computed on {when}: {_said(report)}. It was not kept; run again"
            )
    add_provenance(output, {"devices": held.evidence})


def _said(report: Mapping[str, Any]) -> str:
    """What refuses: gates, or where unknowns are refused what they could not read; or why there was no look."""

    def by(outcome: Outcome) -> list[str]:
        checks = (one for one in report["checks"] if one["outcome"] == outcome)
        return [f"{one['device']}: {one['gate']}: {one['detail']}" for one in checks]

    return report["error"] or "; ".join(by(Outcome.REFUSE) or by(Outcome.UNKNOWN))


class _Worker:
    """A process that waits for the environment to work under."""

    def __init__(self, process: multiprocessing.process.BaseProcess, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe

    def processes(self) -> set[psutil.Process]:
        """The process and what it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return {process, *process.children(recursive=True)}
        return set()

    def run(self, mask: Mapping[str, str]) -> None:
        """Let it work under `mask`, to its end. Raises AssayError unless that is a good one."""
        with contextlib.suppress(BrokenPipeError):  # it is gone: its exit code tells
            self._pipe.send(dict(mask))
        self._process.join()
        code = self._process.exitcode or 0
        if code < 0:
            raise AssayError(
                f"the process that computes was ended by {signal.Signals(-code).name}; where the machine ran out of "
                "memory, that is how it ends one"
            )
        if code:
            raise AssayError("the process that computes failed; what it said stands above")


@contextmanager
def _worker(work: Work) -> Iterator[_Worker]:
    """A process for `work`; it is gone when the block ends.

    Forked, for `work` need not be picklable, and before there are threads or locks that it would inherit.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(work, theirs, ours, os.getpid()))
    process.start()
    theirs.close()
    try:
        yield _Worker(process, ours)
    finally:
        ours.close()
        process.kill()
        process.join()


def _serve(work: Work, pipe: Connection, other: Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts us both: the parent ends us
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    other.close()
    try:
        mask = pipe.recv()
    except EOFError:  # no devices were to be had
        return
    environment = {**without_masks(os.environ), **mask}
    os.environ.clear()
    os.environ.update(environment)
    with errors_told():
        work()
