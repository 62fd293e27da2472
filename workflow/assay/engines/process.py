"""The process launcher: a server that is a process tree of ours, under a watchdog (`assay.engines.watchdog`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from assay.engines import watchdog
from assay.engines.server import (
    COMMAND_LIMIT_S,
    POLL_S,
    Cleanup,
    Death,
    Launch,
    Server,
    alive,
    end_survivors,
)
from assay.engines.watchdog import described
from assay.errors import ServerError
from assay.records import FailureKind

TELL_LIMIT_S = 10  # on a busy machine


@dataclass(frozen=True)
class ProcessLaunch(Launch):
    """A command of this machine. `env` is the whole environment of the server."""

    def server(self, port: int, log_path: Path) -> ProcessServer:
        """The process tree this describes."""
        return ProcessServer(self, port, log_path)


class ProcessServer(Server):
    """A process tree. It is stopped by SIGINT, SIGTERM, SIGKILL, each as needed."""

    def __init__(self, launch: Launch, port: int, log_path: Path) -> None:
        super().__init__(launch, port, log_path)
        self._pid: int | None = None
        self._events: dict[str, dict[str, Any]] = {}
        self._told = b""
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def _watchdog(self) -> subprocess.Popen[bytes]:
        assert self._popen is not None  # `_start` came first
        return self._popen

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        if self._pid is None:
            raise ServerError(f"{self.argv[0]} was not started")
        return self._pid

    def death(self) -> Death | None:
        """How the server ended, or None while it lives."""
        self._listen(0)
        if "exited" not in self._events and self._pid is not None and not _alive(self._pid):
            self._listen(TELL_LIMIT_S)  # the watchdog looks a few times a second and will tell in a moment
        if "exited" in self._events:
            code = self._events["exited"]["exit_code"]
            return Death(f"the server exited with {_describe(code)}", code, self.log_tail())
        if self._watchdog.poll() is not None:
            return Death("the server's watchdog was killed, and the server with it", None, self.log_tail())
        return None

    def processes(self) -> set[psutil.Process]:
        """Everything below the watchdog."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return set() if self._popen is None else set(psutil.Process(self._popen.pid).children(recursive=True))
        return set()

    def interpreter(self) -> str:
        """The first word of the command."""
        return self.argv[0]

    def output_of(self, command: Sequence[str], env: Mapping[str, str]) -> str | None:
        """What a command prints in the environment of the server; None when it fails."""
        try:
            done = subprocess.run(
                command, env=dict(env), capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    def _start(self) -> None:
        self._started = time.monotonic()
        with self.log_path.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", watchdog.__file__, str(self.launch.stop_grace_s), *self.argv],
                env=dict(self.launch.env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        while not self._events and self._watchdog.poll() is None:
            self._listen(POLL_S)
        if "cannot_start" in self._events:
            self._fail(FailureKind.CANNOT_START, self._events["cannot_start"]["message"])

    def _listen(self, timeout_s: float) -> None:
        """Take in what the watchdog tells, waiting at most `timeout_s` for the first of it."""
        pipe = _opened(self._watchdog.stdout)
        while select.select([pipe], [], [], timeout_s)[0]:
            chunk = os.read(pipe.fileno(), 4096)
            if not chunk:
                return
            timeout_s = 0
            *lines, self._told = (self._told + chunk).split(b"\n")
            for event in map(json.loads, lines):
                self._events[event["event"]] = event
                self._pid = event.get("pid", self._pid)

    def _stop(self) -> Cleanup:
        """End the tree and prove it gone."""
        started = time.monotonic()
        if self._popen is None:
            return self._cleanup(started, "exited", None, [])
        self.tree()
        with contextlib.suppress(OSError):
            _opened(self._watchdog.stdin).close()
        limit_s = 2 * self.launch.stop_grace_s + watchdog.LAST_GRACE_S + 10
        while self._watchdog.poll() is None and time.monotonic() - started < limit_s:
            self._listen(POLL_S)
        self._listen(0)
        stopped = self._events.get("stopped", {"stopped_by": "exited", "orphans": []})
        stopped_by, orphans = stopped["stopped_by"], stopped["orphans"]
        if survivors := self._survivors():  # only when the watchdog itself was killed or hangs
            stopped_by, orphans = "SIGKILL", [described(one) for one in survivors if one.pid != self._pid]
            end_survivors(survivors, watchdog.LAST_GRACE_S)
        self._watchdog.wait()
        _opened(self._watchdog.stdout).close()
        exit_code = self._events.get("exited", {}).get("exit_code")
        return self._cleanup(started, stopped_by, exit_code, list(map(described, self._survivors())), orphans)

    def _survivors(self) -> list[psutil.Process]:
        """Living processes of the tree: seen in it before, or in the session that was made for it."""
        self.tree()
        session = {process for process in psutil.process_iter() if _session(process.pid) == self._watchdog.pid}
        return sorted((process for process in self._seen | session if alive(process)), key=lambda process: process.pid)


def _alive(pid: int) -> bool:
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _describe(exit_code: int) -> str:
    return f"code {exit_code}" if exit_code >= 0 else f"signal {signal.Signals(-exit_code).name}"


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # Popen was given PIPE
    return pipe
