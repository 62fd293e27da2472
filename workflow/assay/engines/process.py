"""A server process tree that is ours from start to proof of absence.

`serve` starts the server under a watchdog (`assay.engines.watchdog`), waits for a real generation, and on the way out,
whatever the way, ends the whole tree and proves that nothing of it is left and the port is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from assay.engines import watchdog
from assay.errors import ServerError, StoreError

log = logging.getLogger(__name__)

POLL_S = 0.2
PORT_ATTEMPTS = 3
TAIL_LINES, TAIL_BYTES = 30, 8192

Probe = Callable[[str], Awaitable[str | None]]
"""Asks the server at a base URL for one real generation; None when it came, else why it did not."""


class FailureKind(StrEnum):
    """Why a server never became ready."""

    CANNOT_START = "cannot_start"  # no such program, or it may not be run
    EXITED = "exited"
    NOT_READY = "not_ready"  # no generation within the start limit
    PORT_TAKEN = "port_taken"  # somebody else answers on the port


class StartFailure(ServerError):
    """The server never became ready: data for the verdict, not a fault of the run."""

    def __init__(self, kind: FailureKind, message: str, seconds: float, exit_code: int | None, log_tail: str) -> None:
        super().__init__(message)
        self.kind, self.seconds, self.exit_code, self.log_tail = kind, seconds, exit_code, log_tail


@dataclass(frozen=True)
class Launch:
    """What to start."""

    argv: tuple[str, ...]  # `{port}` is filled at start
    env: Mapping[str, str]  # the whole environment of the server
    host: str
    start_limit_s: float
    stop_grace_s: float  # after SIGINT, and again after SIGTERM


@dataclass(frozen=True)
class Death:
    """A server that ended by itself."""

    message: str
    exit_code: int | None  # minus the signal number when a signal ended it; None when it could not be learned
    log_tail: str


@dataclass(frozen=True)
class Cleanup:
    """How a server was stopped, and the proof that it is gone."""

    stopped_by: str  # "exited", or the last signal that was needed
    seconds: float
    exit_code: int | None
    leftover: list[dict[str, Any]]  # pid and command of each process of ours still alive
    port_free: bool
    clean: bool


class Server:
    """A running server. Made by `serve` only."""

    def __init__(self, launch: Launch, port: int, log_path: Path) -> None:
        self.launch, self.port, self.log_path = launch, port, log_path
        self.argv = [argument.replace("{port}", str(port)) for argument in launch.argv]
        self.base_url = f"http://{launch.host}:{port}"
        self.ready_s: float | None = None
        self._pid: int | None = None
        self._events: dict[str, dict[str, Any]] = {}
        self._told = b""
        self._seen: set[psutil.Process] = set()
        with log_path.open("ab") as output:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-P", watchdog.__file__, str(launch.stop_grace_s), *self.argv],
                env=dict(launch.env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

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
            self._listen(1)  # the watchdog looks a few times a second and will tell in a moment
        if "exited" in self._events:
            code = self._events["exited"]["exit_code"]
            return Death(f"the server exited with {_describe(code)}", code, self.log_tail())
        if self._watchdog.poll() is not None:
            return Death("the server's watchdog was killed, and the server with it", None, self.log_tail())
        return None

    def tree(self) -> set[int]:
        """Process ids of the server and of everything that came of it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self._watchdog.pid).children(recursive=True)
            self._seen.update(found)
            return {process.pid for process in found}
        return set()

    def strangers(self) -> set[int | None]:
        """Process ids that listen on the server's port and are not of its tree; None for one we may not look at."""
        before = self.tree()
        found = listeners(self.launch.host, self.port) - before - self.tree()
        if found:
            # Looked at twice: a socket opened between the system's two tables has no owner yet.
            time.sleep(POLL_S)
            found &= listeners(self.launch.host, self.port) - self.tree()
        return found

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        with self.log_path.open("rb") as handle:
            handle.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
            return "\n".join(handle.read().decode(errors="replace").splitlines()[-TAIL_LINES:])

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

    def _wait_ready(self, probe: Probe) -> None:
        """Return when `probe` succeeded and only processes of ours listen on the port.

        Raises:
            StartFailure: anything else.
        """
        started = time.monotonic()
        while not self._events and self._watchdog.poll() is None:
            self._listen(POLL_S)
        if "cannot_start" in self._events:
            self._fail(FailureKind.CANNOT_START, self._events["cannot_start"]["message"], started)
        asyncio.run(self._probe_until_ready(probe, started))
        self.ready_s = time.monotonic() - started

    async def _probe_until_ready(self, probe: Probe, started: float) -> None:
        answer: str | None = "nothing listens on its port"
        while True:
            self._check_start(started, answer)
            if listeners(self.launch.host, self.port):
                # The check runs beside the probe, so a server that dies does not keep us until the probe times out.
                task = asyncio.ensure_future(probe(self.base_url))
                try:
                    while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                        self._check_start(started, "its first generation did not end")
                finally:
                    task.cancel()
                answer = task.result()
                if answer is None:
                    self._check_start(started, answer)
                    return
            await asyncio.sleep(POLL_S)

    def _check_start(self, started: float, answer: str | None) -> None:
        death = self.death()
        if strangers := self.strangers():
            self._fail(
                FailureKind.PORT_TAKEN,
                f"port {self.port} is held by a process that is not the server's ({_name(strangers.pop())}); whatever "
                "it answers is not the server's answer",
                started,
            )
        if death is not None:
            self._fail(FailureKind.EXITED, f"{death.message} before it was ready", started, death.exit_code)
        if answer is not None and time.monotonic() - started > self.launch.start_limit_s:
            limit = f"{self.launch.start_limit_s:g} s"
            self._fail(
                FailureKind.NOT_READY,
                f"the server gave no generation within start_limit_s = {limit}: {answer}",
                started,
            )

    def _fail(self, kind: FailureKind, message: str, started: float, exit_code: int | None = None) -> NoReturn:
        tail = self.log_tail()
        last = f"; its log ends: {tail.splitlines()[-1].strip()}" if tail else ""
        raise StartFailure(kind, f"{message}{last}", time.monotonic() - started, exit_code, tail)

    def _stop(self) -> Cleanup:
        """End the tree and prove it gone."""
        started = time.monotonic()
        self.tree()
        with contextlib.suppress(OSError):
            _opened(self._watchdog.stdin).close()
        limit_s = 2 * self.launch.stop_grace_s + watchdog.LAST_GRACE_S + 10
        while self._watchdog.poll() is None and time.monotonic() - started < limit_s:
            self._listen(POLL_S)
        self._listen(0)
        stopped_by = self._events.get("stopped", {}).get("stopped_by", "exited")
        if survivors := self._survivors():  # only when the watchdog itself was killed or hangs
            stopped_by = "SIGKILL"
            for process in survivors:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(survivors, timeout=watchdog.LAST_GRACE_S)
        self._watchdog.wait()
        _opened(self._watchdog.stdout).close()
        leftover = [{"pid": process.pid, "command": _name(process.pid)} for process in self._survivors()]
        port_free = _can_bind(self.launch.host, self.port)
        return Cleanup(
            stopped_by=stopped_by,
            seconds=round(time.monotonic() - started, 3),
            exit_code=self._events.get("exited", {}).get("exit_code"),
            leftover=leftover,
            port_free=port_free,
            clean=port_free and not leftover,
        )

    def _survivors(self) -> list[psutil.Process]:
        """Living processes of the tree: seen in it before, or in the session that was made for it."""
        self.tree()
        session = {process for process in psutil.process_iter() if _session(process.pid) == self._watchdog.pid}
        return sorted((process for process in self._seen | session if _alive(process)), key=lambda process: process.pid)


@contextmanager
def serve(
    launch: Launch,
    log_path: Path,
    probe: Probe,
    on_stop: Callable[[Cleanup], None],
    pick_port: Callable[[str], int] | None = None,
) -> Iterator[Server]:
    """Start a server, yield it when it is ready, stop it. Main thread only: it takes over SIGINT, SIGTERM and SIGHUP.

    Args:
        launch: what to start.
        log_path: file for the server's output; begun anew.
        probe: one real generation. A health route is no proof: it may answer long before the model is loaded, or for
            another process.
        on_stop: told how each started server was stopped, also when starting failed or we were interrupted.
        pick_port: gives a port for a host; the kernel by default. A port that somebody else took in the meantime is
            given up for another, a few times.

    Raises:
        StartFailure: it never became ready.
        StoreError: the log cannot be written.
        KeyboardInterrupt, SystemExit: we were interrupted or told to end; the server is stopped first.
    """
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.write_bytes(b"")
    except OSError as error:
        raise StoreError(f"cannot write {log_path}: {error.strerror}. No server was started.") from error
    with _interruptible(), contextlib.ExitStack() as stack:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port = (pick_port or free_port)(launch.host)
            try:
                server = stack.enter_context(_running(Server(launch, port, log_path), on_stop))
                server._wait_ready(probe)
                break
            except StartFailure as failure:
                stack.close()
                if failure.kind != FailureKind.PORT_TAKEN or attempt == PORT_ATTEMPTS:
                    raise
                log.warning("%s; trying another port", failure)
        yield server


@contextmanager
def _running(server: Server, on_stop: Callable[[Cleanup], None]) -> Iterator[Server]:
    try:
        yield server
    finally:
        cleanup = server._stop()
        log.info("server stopped by %s after %.1f s, clean: %s", cleanup.stopped_by, cleanup.seconds, cleanup.clean)
        on_stop(cleanup)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into exceptions, so that `finally` runs.

    A second one breaks off our waiting and the proof, not the stopping: that is the watchdog's.
    """

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    # SIGINT too: a shell's background job inherits it ignored.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: end, signal.SIGHUP: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port(host: str) -> int:
    """A port of `host` that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def listeners(host: str, port: int) -> set[int | None]:
    """Process ids that listen on `port` for connections to `host`; None for one of another user."""
    wanted = {(address, port) for address in (host, f"::ffff:{host}", "0.0.0.0", "::")}
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr) in wanted
    }


def _can_bind(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections in TIME_WAIT do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _alive(process: psutil.Process | int) -> bool:
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _name(pid: int | None) -> str:
    if pid is None:
        return "of another user"
    try:
        return f"pid {pid}: {' '.join(psutil.Process(pid).cmdline())[:120]}"
    except psutil.Error:
        return f"pid {pid}"


def _describe(exit_code: int) -> str:
    return f"code {exit_code}" if exit_code >= 0 else f"signal {signal.Signals(-exit_code).name}"


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # Popen was given PIPE
    return pipe
