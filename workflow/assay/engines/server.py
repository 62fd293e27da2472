"""What every server under test is, whatever it runs in: ours from start to proof of absence.

`serve` starts what a launch describes, waits for a real generation, and on the way out, whatever the way, stops it and
proves that nothing of it is left and the port is free again. How a server is started, seen and ended is its launcher's
part: `assay.engines.process` for a process tree, `assay.engines.container` for a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import SEEK_END
from pathlib import Path
from typing import Any, NoReturn

import psutil

from assay.errors import ServerError, StoreError
from assay.records import FailureKind

log = logging.getLogger(__name__)

POLL_S = 0.2
PORT_ATTEMPTS = 3
COMMAND_LIMIT_S = 120  # of a command that is run where the server runs
TAIL_LINES, TAIL_BYTES = 30, 8192

Probe = Callable[[str], Awaitable[str | None]]
"""Asks the server at a base URL for one real generation; None when it came, else why it did not."""


class StartFailure(ServerError):
    """The server never became ready: data for the verdict, not a fault of the run."""

    def __init__(self, kind: FailureKind, message: str, exit_code: int | None = None, log_tail: str = "") -> None:
        super().__init__(message)
        self.kind, self.exit_code, self.log_tail = kind, exit_code, log_tail
        self.seconds = 0.0  # from the first step to this; set by `serve`


@dataclass(frozen=True)
class Launch(ABC):
    """What to start."""

    argv: tuple[str, ...]  # `{port}` is filled at start
    env: Mapping[str, str]
    host: str  # where we reach it
    start_limit_s: float
    stop_grace_s: float  # after each signal but SIGKILL

    @abstractmethod
    def server(self, port: int, log_path: Path) -> Server:
        """The server this describes; `serve` awaits and stops it."""


@dataclass(frozen=True)
class Death:
    """A server that ended by itself."""

    message: str
    exit_code: int | None  # minus the signal (of a container: 128 + it) when one ended it; None: not learned
    log_tail: str
    kind: FailureKind = FailureKind.EXITED


@dataclass(frozen=True)
class Cleanup:
    """How a server was stopped, and the proof that it is gone."""

    stopped_by: str  # "exited", or the last signal that was needed
    seconds: float
    exit_code: int | None
    orphans: list[dict[str, Any]]  # outlived the server's first process and were ended by us, see `watchdog.described`
    leftover: list[dict[str, Any]]  # processes of ours still alive, alike
    port_free: bool
    clean: bool


NOT_STARTED = Cleanup("not started", 0.0, None, [], [], port_free=True, clean=True)


@dataclass(frozen=True)
class Image:
    """What a container was made from and runs as, as its engine tells (and the kernel, of `cgroup`)."""

    reference: str  # what was asked for
    id: str
    repo_digests: list[str]
    container: str  # id
    container_image: str  # id of the image that the container runs
    init_pid: int
    cgroup: list[str] | None  # of the first process, as /proc/<pid>/cgroup has it


class Server(ABC):
    """A server under test. Made by `serve` only."""

    def __init__(self, launch: Launch, port: int, log_path: Path) -> None:
        self.launch, self.port, self.log_path = launch, port, log_path
        self._log = log_path.open("rb")  # Snakemake may remove the file while we stop: what is open stays readable
        self.base_url = f"http://{launch.host}:{port}"
        self.argv: list[str] = [word.replace("{port}", str(port)) for word in launch.argv]
        self.ready_s: float | None = None
        self._started = time.monotonic()  # set again by a launcher that has to fetch something first
        self._seen: set[psutil.Process] = set()  # every process of the tree, once seen

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id, on this machine, of the server's first process.

        Raises:
            ServerError: it was not started.
        """

    @abstractmethod
    def death(self) -> Death | None:
        """How the server ended, or None while it lives."""

    @abstractmethod
    def processes(self) -> set[psutil.Process]:
        """The server and everything that came of it, as far as it lives."""

    @abstractmethod
    def interpreter(self) -> str:
        """The command that runs the server's own Python, where the server runs."""

    @abstractmethod
    def output_of(self, command: Sequence[str], env: Mapping[str, str]) -> str | None:
        """What a command prints that is run where the server runs; None when it fails.

        Args:
            command: program and arguments.
            env: the server's environment.
        """

    def image(self) -> Image | None:
        """What it was made from, measured now; None for what is no container."""
        return None

    def base_env(self, ours: Mapping[str, str]) -> Mapping[str, str]:
        """The environment that the server's was made from: `ours`, or an image's."""
        return ours

    def told_env(self) -> Mapping[str, str] | None:
        """The environment as whoever started the server tells, for one whose processes we may not look into."""
        return None

    def on_host(self, file: str) -> str | None:
        """Where a file that the server sees lies on this machine; None when it lies in an image."""
        return file

    @abstractmethod
    def _start(self) -> None:
        """Start it.

        Raises:
            StartFailure: it could not be started.
        """

    @abstractmethod
    def _stop(self) -> Cleanup:
        """End all of it, started or not, and prove it gone."""

    def tree(self) -> set[int]:
        """Process ids of the server and of everything that came of it."""
        found = self.processes()
        self._seen |= found
        return {process.pid for process in found}

    def strangers(self) -> set[int | None]:
        """Process ids that listen on the server's port and are not of its tree; None for one we may not look at."""
        found = self._foreign()
        if found:
            # Looked at twice: a socket opened between the system's two tables has no owner yet.
            time.sleep(POLL_S)
            found &= self._foreign()
        return found

    def _foreign(self) -> set[int | None]:
        before = self.tree()
        return listeners(self.launch.host, self.port) - before - self.tree()

    def listening(self) -> bool:
        """Whether anybody takes requests to the server."""
        return bool(listeners(self.launch.host, self.port))

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        self._log.seek(max(0, self._log.seek(0, SEEK_END) - TAIL_BYTES))
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])

    def _wait_ready(self, probe: Probe) -> None:
        """Start the server; return when `probe` succeeded and only processes of ours listen on the port.

        Raises:
            StartFailure: anything else.
        """
        begun = time.monotonic()
        try:
            self._start()
            asyncio.run(self._probe_until_ready(probe))
        except StartFailure as failure:
            failure.seconds = time.monotonic() - begun
            raise
        self.ready_s = time.monotonic() - self._started

    def _cleanup(
        self,
        started: float,
        stopped_by: str,
        exit_code: int | None,
        leftover: list[dict[str, Any]],
        orphans: Sequence[dict[str, Any]] = (),
    ) -> Cleanup:
        """What a launcher returns from `_stop`, which it began at `started`."""
        port_free = can_bind(self.launch.host, self.port)
        return Cleanup(
            stopped_by=stopped_by,
            seconds=round(time.monotonic() - started, 3),
            exit_code=exit_code,
            orphans=list(orphans),
            leftover=leftover,
            port_free=port_free,
            clean=port_free and not leftover,
        )

    async def _probe_until_ready(self, probe: Probe) -> None:
        heard: str | None = None  # what the last probe that ended was answered
        while True:
            self._check_start(heard or "nothing listens on its port")
            if self.listening():
                # The check runs beside the probe, so a server that dies does not keep us until the probe times out.
                task = asyncio.ensure_future(probe(self.base_url))
                try:
                    while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
                        self._check_start(heard or "its first generation did not end")
                finally:
                    task.cancel()
                heard = task.result()
                if heard is None:
                    self._check_start(None)
                    return
            await asyncio.sleep(POLL_S)

    def _check_start(self, answer: str | None) -> None:
        death = self.death()
        if strangers := self.strangers():
            self._fail(
                FailureKind.PORT_TAKEN,
                f"port {self.port} is held by a process that is not the server's ({name(strangers.pop())}); whatever "
                "it answers is not the server's answer",
            )
        if death is not None:
            self._fail(death.kind, f"{death.message} before it was ready", death.exit_code)
        if answer is not None and time.monotonic() - self._started > self.launch.start_limit_s:
            limit = f"{self.launch.start_limit_s:g} s"
            self._fail(FailureKind.NOT_READY, f"the server gave no generation within start_limit_s = {limit}: {answer}")

    def _fail(self, kind: FailureKind, message: str, exit_code: int | None = None) -> NoReturn:
        tail = self.log_tail()
        last = f"; its log ends: {tail.splitlines()[-1].strip()}" if tail else ""
        raise StartFailure(kind, f"{message}{last}", exit_code, tail)


@contextmanager
def serve(
    launch: Launch,
    log_path: Path,
    probe: Probe,
    on_stop: Callable[[Cleanup], None],
    on_made: Callable[[Server], object] = lambda _: None,
    pick_port: Callable[[str], int] | None = None,
) -> Iterator[Server]:
    """Start a server, yield it when it is ready, stop it. Main thread only: it takes over SIGINT, SIGTERM and SIGHUP.

    Args:
        launch: what to start.
        log_path: file for the server's output; begun anew.
        probe: one real generation. A health route is no proof: it may answer long before the model is loaded, or for
            another process.
        on_made: given each server before it is started, so that its processes can be known from the first on.
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
                server = stack.enter_context(_stopped(launch.server(port, log_path), on_stop))
                on_made(server)
                server._wait_ready(probe)
                break
            except StartFailure as failure:
                stack.close()
                if failure.kind != FailureKind.PORT_TAKEN or attempt == PORT_ATTEMPTS:
                    raise
                log.warning("%s; trying another port", failure)
        yield server


@contextmanager
def _stopped(server: Server, on_stop: Callable[[Cleanup], None]) -> Iterator[Server]:
    try:
        yield server
    except StartFailure:  # tells the end of the log itself
        raise
    except BaseException:  # the log is removed with all that the job was to make
        log.info("the job ends; the log of its server, until here:\n%s", server.log_tail())
        raise
    finally:
        cleanup = server._stop()
        log.info("server stopped by %s after %.1f s, clean: %s", cleanup.stopped_by, cleanup.seconds, cleanup.clean)
        on_stop(cleanup)
        server._log.close()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into exceptions, so that `finally` runs.

    A SIGINT after another breaks off our waiting and the proof, not the stopping: that is the launcher's. A SIGTERM
    after another does nothing: SLURM sends it twice, of itself and by way of srun.
    """

    def end(number: int, _: object) -> NoReturn:
        for repeated in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(repeated, signal.SIG_IGN)
        raise SystemExit(128 + number)

    # SIGINT too: a shell's background job inherits it ignored.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: end, signal.SIGHUP: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def boot_id() -> str | None:
    """What names this boot of this machine."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def free_port(host: str) -> int:
    """A port of `host` that was free a moment ago."""
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """Ports of `host`, no two the same, that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def listeners(host: str, port: int) -> set[int | None]:
    """Process ids that listen on `port` for connections to `host`; None for one of another user."""
    wanted = {(address, port) for address in (host, f"::ffff:{host}", "0.0.0.0", "::")}
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and tuple(connection.laddr) in wanted
    }


def can_bind(host: str, port: int) -> bool:
    """Whether nothing holds `port` of `host`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections in TIME_WAIT do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def alive(process: psutil.Process) -> bool:
    """Whether this very process (pid and start time) runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_survivors(survivors: Sequence[psutil.Process], limit_s: float) -> None:
    """Kill processes and wait for them, at most `limit_s`. What we may not kill is left."""
    for process in survivors:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(survivors, timeout=limit_s)


def name(pid: int | None) -> str:
    """A process as a person knows it."""
    if pid is None:
        return "of another user"
    try:
        return f"pid {pid}: {' '.join(psutil.Process(pid).cmdline())[:120]}"
    except psutil.Error:
        return f"pid {pid}"
