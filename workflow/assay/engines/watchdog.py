"""Keeper of one server: starts it, adopts its orphans, and stops the whole tree when the pipe from its owner closes.

Closing standard input is the one and only stop command. The kernel gives it too when the owner is killed, so no way
of ending the owner leaves a server behind. Run as a script, in a session of its own, by `assay.engines.process`:

    python -P watchdog.py GRACE_SECONDS COMMAND...

What happens is told on standard output, one JSON object a line, `event` being `started` (pid), `cannot_start`
(message), `exited` (exit_code; minus the signal number when a signal ended it), `stopped` (stopped_by, orphans: the
processes that outlived the server, see `described`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_S = 0.05
LAST_GRACE_S = 10  # after SIGKILL: a process in uninterruptible sleep dies late
SETTLE_S = 1  # what ends with its server ends within this


def main(grace_s: float, command: list[str]) -> None:
    """Run `command` until standard input closes, then stop it and everything that came of it."""
    # Handlers, not SIG_IGN: what is ignored stays ignored across exec, and the server must hear its signals.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # A worker that forks twice to get away is re-parented to us instead of init.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 (safe: there is one thread)
        )
    except OSError as error:
        _tell(event="cannot_start", message=f"cannot run {command[0]}: {error.strerror}")
        return
    _tell(event="started", pid=server.pid)
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        _reap(server.pid)
    stopped_by, orphans = _stop(server.pid, grace_s)
    _tell(event="stopped", stopped_by=stopped_by, orphans=orphans)


def described(process: psutil.Process) -> dict[str, Any]:
    """A process for the record: by pid and start time it is named for ever. Null: it ended, or may not be looked at."""
    with process.oneshot(), contextlib.suppress(psutil.Error):
        started = datetime.fromtimestamp(process.create_time(), UTC).isoformat(timespec="milliseconds")
        return {"pid": process.pid, "started_utc": started, "command": " ".join(process.cmdline())[:120]}
    return {"pid": process.pid, "started_utc": None, "command": None}


def _stop(server: int, grace_s: float) -> tuple[str, list[dict[str, Any]]]:
    """End every descendant.

    Returns:
        the name of the last signal that was needed, or "exited"; what lived on when the server had ended: for
        `SETTLE_S` after it ended by itself, or through the grace in which it ended.
    """
    stopped_by = "exited"
    orphans: dict[psutil.Process, dict[str, Any]] = {}

    def note(tree: set[psutil.Process]) -> None:
        if server not in {process.pid for process in tree}:
            orphans.update({process: described(process) for process in tree - orphans.keys()})

    _reap(server)
    deadline = time.monotonic() + SETTLE_S
    while not psutil.pid_exists(server) and _descendants() and time.monotonic() < deadline:
        time.sleep(POLL_S)
        _reap(server)
    note(_descendants())
    for number, wait_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, grace_s), (signal.SIGKILL, LAST_GRACE_S)):
        _reap(server)
        told: set[psutil.Process] = set()
        deadline = time.monotonic() + wait_s
        while (tree := _descendants()) and time.monotonic() < deadline:
            stopped_by = number.name
            for process in tree - told:  # also those forked since
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            told |= tree
            time.sleep(POLL_S)
            _reap(server)
        if not tree:
            break
        note(tree)
    return stopped_by, sorted(orphans.values(), key=lambda orphan: orphan["pid"])


def _descendants() -> set[psutil.Process]:
    """Living processes below this one.

    A zombie of a deeper level is its parent's to collect. One of our own children is still dying until it is collected:
    a process whose first thread ended is shown as a zombie while its other threads hold its sockets.
    """
    alive = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE or process.ppid() == os.getpid():
                alive.add(process)
    return alive


def _reap(server: int) -> None:
    """Collect dead children, adopted ones included; tell when the server is among them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == server:
                _tell(event="exited", exit_code=os.waitstatus_to_exitcode(status))


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _tell(**event: Any) -> None:
    # The owner may be gone; the work goes on.
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
