"""The container launcher: a server in a container of an engine that speaks the Docker API.

The image is checked against its pin before and after the start (`assay.engines.images`). The container carries labels
that name its owner, so that a later run can clear up after one that was killed (`assay.engines.tenants`). Its processes
are found by their cgroup, which no fork leaves, and named by pid and start time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import psutil
from docker import DockerClient, types
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.models.images import Image as EngineImage

from assay.engines import images, tenants
from assay.engines.images import ENGINE_ERRORS, engine_told, told
from assay.engines.server import (
    COMMAND_LIMIT_S,
    POLL_S,
    Cleanup,
    Death,
    Image,
    Launch,
    Server,
    StartFailure,
    alive,
    can_bind,
    end_survivors,
)
from assay.engines.watchdog import LAST_GRACE_S, described
from assay.errors import ServerError
from assay.records import FailureKind

log = logging.getLogger(__name__)

SETTLE_S = 10  # from the end of a container's first process to the engine's word on it
OOM_WORD_S = 5  # from that word to the one that memory was why, which comes by another way, and on a busy machine late
LOG_END_S = 5
KILLED = 128 + signal.SIGKILL
NO_COMMAND = (126, 127)  # exit codes of the init, and of shells, for a command that cannot be run or found
PORT_HOLDERS = {"docker-proxy", "dockerd", "rootlesskit"}  # what listens for a container whose port is published

_LISTEN = "0A"

# Runs in the container's interpreter, where processes of another user of ours can be looked into.
_SOCKETS = """
import glob, os
for link in glob.glob("/proc/[0-9]*/fd/*"):
    try:
        print(os.readlink(link))
    except OSError:
        pass
"""


@dataclass(frozen=True)
class Mount:
    """A file or folder of this machine, seen in the container."""

    source: str  # absolute
    target: str
    read_only: bool = True


@dataclass(frozen=True, kw_only=True)
class ContainerLaunch(Launch):
    """What to start in a container.

    `argv` is the whole command (an image's own entrypoint plays no part); `{port}` and `{host}` in it are where the
    server shall listen. `env` are additions to the image's own.
    """

    runtime: Literal["docker", "apptainer"]
    config: str
    repository: str
    digest: str | None  # sha256:...
    tag: str | None = None  # used without a digest only
    host: str = "127.0.0.1"
    container_port: int = 8000  # where it listens, unless it shares the machine's network
    mounts: tuple[Mount, ...] = ()
    devices: tuple[str, ...] = ()  # paths
    gpus: tuple[str, ...] = ()  # ids for the engine's own GPU support (NVIDIA)
    shm_bytes: int | None = None
    ulimits: Mapping[str, int] = field(default_factory=dict)  # soft and hard; -1: none
    ipc_host: bool = False
    host_network: bool = False
    workdir: str | None = None
    user: str | None = None
    group_add: tuple[str, ...] = ()
    cap_add: tuple[str, ...] = ()
    security_opt: tuple[str, ...] = ()
    memory_bytes: int | None = None
    pids_limit: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """The image's name in full.

        Raises:
            ConfigError: it has neither digest nor tag.
        """
        return images.reference(self.repository, self.digest, self.tag)

    def server(self, port: int, log_path: Path) -> Server:
        """The container this describes."""
        if self.runtime == "apptainer":
            from assay.engines.apptainer import ApptainerServer

            return ApptainerServer(self, port, log_path)
        return ContainerServer(self, port, log_path)


class ContainerServer(Server):
    """A container. It is stopped by SIGTERM, which is what containers are used to, and SIGKILL if it takes that."""

    launch: ContainerLaunch

    def __init__(self, launch: ContainerLaunch, port: int, log_path: Path) -> None:
        super().__init__(launch, port, log_path)
        listen = (launch.host, port) if launch.host_network else ("0.0.0.0", launch.container_port)
        self.argv = [word.replace("{host}", listen[0]).replace("{port}", str(listen[1])) for word in launch.argv]
        self._engine: DockerClient | None = None
        self._image: EngineImage | None = None
        self._container: Container | None = None
        self._init: psutil.Process | None = None  # the container's process 1
        self._log_copy: threading.Thread | None = None
        self._death: Death | None = None

    @property
    def pid(self) -> int:
        """Process id of the server's first process, which the container's init started."""
        if self._init is None:
            raise ServerError(f"{self.argv[0]} was not started")
        with contextlib.suppress(psutil.NoSuchProcess):
            # Orphans are adopted by the init too; the server is its eldest child.
            children = sorted(self._init.children(), key=lambda child: (child.create_time(), child.pid))
            return children[0].pid if children else self._init.pid
        return self._init.pid

    def death(self) -> Death | None:
        """How the server ended, or None while it lives."""
        if self._death is None and not (self._init is not None and alive(self._init)):
            self._death = self._how_it_ended()
        return self._death

    def _how_it_ended(self) -> Death:
        state = self._final_state()
        deadline = time.monotonic() + OOM_WORD_S
        while state and state["ExitCode"] == KILLED and not state["OOMKilled"] and time.monotonic() < deadline:
            time.sleep(POLL_S)
            state = self._final_state()
        if self._log_copy is not None:
            self._log_copy.join(LOG_END_S)
        if state is None:
            return Death("the server's container ended, and its engine does not say how", None, self.log_tail())
        code, kind = state["ExitCode"], FailureKind.EXITED
        message = f"the server exited with {_describe(code)}"
        if state["OOMKilled"]:
            limit = self.launch.memory_bytes
            allowed = f"the {limit / 2**20:.0f} MiB of memory_bytes" if limit else "what the machine had"
            message += f": out of memory, it needed more than {allowed}"
            kind = FailureKind.OUT_OF_MEMORY
        elif code in NO_COMMAND:
            message += f": {self.argv[0]} is not in the image, or may not be run"
            kind = FailureKind.CANNOT_START
        return Death(message, code, self.log_tail(), kind)

    def processes(self) -> set[psutil.Process]:
        """Everything in the container's cgroup."""
        if self._container is None:
            return set()
        found = set()
        for pid in psutil.pids():
            if any(self._container.id in line for line in _cgroup(pid) or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.add(psutil.Process(pid))
        return found

    def listening(self) -> bool:
        """Whether anybody takes requests to the server: its published port is held by the engine from the start."""
        if self.launch.host_network:
            return super().listening()
        return self._init is not None and bool(_listening_sockets(self.launch.container_port, self._init.pid))

    def interpreter(self) -> str:
        """The Python that runs the server, as it was called: a link's place tells which environment it is of."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            called = process.cmdline()[:1]
            if called and PurePosixPath(called[0]).name.startswith("python"):
                return called[0]
            return process.exe()  # it gave itself a title
        return self.argv[0]

    def output_of(self, command: Sequence[str], env: Mapping[str, str]) -> str | None:
        """What a command prints in the container; None when it fails."""
        container, done = self._running_container, []

        def execute() -> None:
            with contextlib.suppress(*ENGINE_ERRORS):
                done.append(container.exec_run(list(command), demux=True))

        # The client knows no limit of time for this.
        thread = threading.Thread(target=execute, daemon=True)
        thread.start()
        thread.join(COMMAND_LIMIT_S)
        code, (output, _) = done[0] if done else (None, (None, None))
        return output.decode(errors="replace") if code == 0 and output is not None else None

    def image(self) -> Image | None:
        """What the container was made from, as its engine tells now; None when that does not answer."""
        container = self._running_container
        assert self._image is not None
        try:
            container.reload()
            self._image.reload()
        except ENGINE_ERRORS:
            return None
        return Image(
            reference=self.launch.reference,
            id=self._image.id,
            repo_digests=images.repo_digests(self._image),
            container=container.id,
            container_image=container.attrs["Image"],
            init_pid=container.attrs["State"]["Pid"],
            cgroup=_cgroup(self.pid),
        )

    def base_env(self, ours: Mapping[str, str]) -> Mapping[str, str]:
        """The environment of the image."""
        assert self._image is not None
        return _variables(self._image.attrs["Config"]["Env"])

    def told_env(self) -> Mapping[str, str] | None:
        """The environment that the engine gave the container."""
        return _variables(self._running_container.attrs["Config"]["Env"])

    def on_host(self, file: str) -> str | None:
        """Where a file of the container lies on this machine: in a mount, or in the image (None)."""
        return host_path(self.launch.mounts, file)

    @property
    def _running_container(self) -> Container:
        if self._container is None:
            raise ServerError(f"{self.argv[0]} was not started")
        return self._container

    def _start(self) -> None:
        launch = self.launch
        self._engine = images.connect()
        with engine_told(FailureKind.ENGINE_UNREACHABLE, "the container engine does not list its containers"):
            tenants.heal(self._engine)
        self._image = images.ensure_image(self._engine, launch.repository, launch.digest, launch.tag)
        check_paths(launch)
        what = f"the container of image {launch.reference}"
        with engine_told(FailureKind.CANNOT_START, f"{what} cannot be created"):
            self._container = self._engine.containers.create(self._image.id, **self._options())
        self._started = time.monotonic()
        try:
            with engine_told(FailureKind.CANNOT_START, f"{what} cannot be started"):
                self._container.start()
        except StartFailure as failure:
            if failure.kind == FailureKind.CANNOT_START and not can_bind(launch.host, self.port):
                message = f"port {self.port} is held by a process that is not the server's: {failure}"
                raise StartFailure(FailureKind.PORT_TAKEN, message) from None
            raise
        self._log_copy = threading.Thread(target=_copy_log, args=(self._container, self.log_path), daemon=True)
        self._log_copy.start()
        with engine_told(FailureKind.ENGINE_UNREACHABLE, f"{what} cannot be inspected"):
            self._check_container()

    def _options(self) -> dict[str, Any]:
        """How the engine is to make the container, in docker-py's words."""
        launch = self.launch
        published = {f"{launch.container_port}/tcp": (launch.host, self.port)}
        owner = tenants.owner(os.getpid())
        assert owner is not None  # we live
        return {
            "entrypoint": self.argv[:1],
            "command": self.argv[1:],
            "environment": dict(launch.env),
            "labels": {**launch.labels, tenants.OWNER: owner, tenants.CONFIG: launch.config},
            "init": True,  # a server as process 1 would be deaf to the signals it has no handler for
            "mounts": [types.Mount(item.target, item.source, "bind", item.read_only) for item in launch.mounts],
            "devices": [f"{path}:{path}:rwm" for path in launch.devices],
            "device_requests": [types.DeviceRequest(device_ids=list(launch.gpus), capabilities=[["gpu"]])]
            if launch.gpus
            else None,
            "shm_size": launch.shm_bytes,
            "ulimits": [types.Ulimit(name=key, soft=value, hard=value) for key, value in launch.ulimits.items()],
            "ipc_mode": "host" if launch.ipc_host else None,
            "network_mode": "host" if launch.host_network else "bridge",
            "ports": None if launch.host_network else published,
            "working_dir": launch.workdir,
            "user": launch.user,
            "group_add": list(launch.group_add),
            "cap_add": list(launch.cap_add),
            "security_opt": list(launch.security_opt),
            "mem_limit": launch.memory_bytes,
            "memswap_limit": launch.memory_bytes,  # else the engine allows as much swap again
            "pids_limit": launch.pids_limit,
            "log_config": types.LogConfig(type=types.LogConfig.types.JSON),  # some of the others cannot be read back
        }

    def _check_container(self) -> None:
        """Hold what was started against what was asked for; of a container that ended already `death` tells."""
        container, image = self._running_container, self._image
        assert image is not None
        container.reload()
        self._init = _first_process(container)
        if container.attrs["Image"] != image.id:
            self._fail(
                FailureKind.IMAGE_MISMATCH,
                f"the container runs image {container.attrs['Image']}, expected {image.id} ({self.launch.reference})",
            )
        if self._init is None:
            container.reload()
            if container.attrs["State"]["Running"]:
                self._fail(
                    FailureKind.ENGINE_UNREACHABLE,
                    "the container engine's processes cannot be seen from here, so nothing of them could be measured "
                    "or proven gone; use the engine of this machine and pid namespace (see DOCKER_HOST)",
                )
        elif not self.launch.host_network and not container.ports.get(f"{self.launch.container_port}/tcp"):
            self._fail(
                FailureKind.CANNOT_START,
                "the container engine published no port, and did not say so: it runs without a bridge network; set "
                "host_network, or give the engine a bridge",
            )

    def _foreign(self) -> set[int | None]:
        found = super()._foreign()
        if not self.launch.host_network:
            # The engine holds a published port, and would not have started the container had it not got it. A holder
            # that ended this moment, with the container, has no program any more.
            return {pid for pid in found if pid is not None and _program(pid) not in (None, *PORT_HOLDERS)}
        return found - {None} if None in found and self._holds_its_port() else found

    def _final_state(self) -> Mapping[str, Any] | None:
        """What the engine says of the ended container; None when it says nothing, or that it runs."""
        deadline = time.monotonic() + (SETTLE_S if self._init else 0)
        while True:
            try:
                self._running_container.reload()
            except ENGINE_ERRORS:
                return None
            state = self._running_container.attrs["State"]
            if state["Status"] in ("exited", "dead"):
                return state
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    def _stop(self) -> Cleanup:
        """End the container, remove it and prove it gone."""
        started = time.monotonic()
        self.tree()
        stopped_by, exit_code = "exited", None
        try:
            if self._container is not None:
                stopped_by = self._end()
                state = self._final_state()
                exit_code = state["ExitCode"] if state else None
        finally:  # also when a second interrupt breaks off the grace
            kept = self._remove()
        if survivors := self._survivors():  # only when the engine is gone or hangs
            stopped_by = "SIGKILL"
            end_survivors(survivors, LAST_GRACE_S)
        return self._cleanup(started, stopped_by, exit_code, kept + list(map(described, self._survivors())))

    def _end(self) -> str:
        """End the container's processes; returns the name of the last signal that was needed, or "exited"."""
        stopped_by = "exited"
        for number, wait_s in ((signal.SIGTERM, self.launch.stop_grace_s), (signal.SIGKILL, LAST_GRACE_S)):
            if self._init is None or not alive(self._init):
                break
            try:
                self._running_container.kill(number.name)
            except APIError as error:  # it ended this moment, most likely
                log.info("%s was not sent: %s", number.name, told(error))
            except ENGINE_ERRORS as error:
                log.error("the container cannot be stopped by its engine: %s", told(error))
                break
            stopped_by = number.name
            psutil.wait_procs([self._init], timeout=wait_s)
        return stopped_by

    def _remove(self) -> list[dict[str, Any]]:
        """Remove the container, if there is one; what `Cleanup.leftover` says of one that could not be."""
        kept = []
        if self._container is not None:
            try:
                self._container.remove(force=True, v=True)
            except NotFound:
                pass
            except ENGINE_ERRORS as error:
                what = f"container {self._container.short_id}: {told(error)}"
                kept = [{"pid": None, "started_utc": None, "command": what}]
        if self._log_copy is not None:
            self._log_copy.join(LOG_END_S)
        if self._engine is not None:
            self._engine.close()
        return kept

    def _survivors(self) -> list[psutil.Process]:
        """Living processes of the container."""
        self.tree()
        return sorted((process for process in self._seen if alive(process)), key=lambda process: process.pid)

    def _holds_its_port(self) -> bool:
        """Whether the sockets that listen on our port are the container's, told from within it."""
        wanted = _listening_sockets(self.port, os.getpid())
        held = self.output_of([self.interpreter(), "-c", _SOCKETS], {})
        return bool(wanted) and held is not None and wanted <= set(held.split())


def host_path(mounts: Sequence[Mount], file: str) -> str | None:
    """Where `file` of a container lies on this machine; None when it lies in no mount."""
    path = PurePosixPath(file)
    under = [mount for mount in mounts if path.is_relative_to(mount.target)]
    if not under:
        return None
    mount = max(under, key=lambda item: len(PurePosixPath(item.target).parts))
    return str(PurePosixPath(mount.source, path.relative_to(mount.target)))


def check_paths(launch: ContainerLaunch) -> None:
    """Raises StartFailure for a mount or device that is not there: some engines would make an empty folder of it."""
    for what, path in [("mount", item.source) for item in launch.mounts] + [
        ("device", item) for item in launch.devices
    ]:
        if not Path(path).is_absolute() or not Path(path).exists():
            raise StartFailure(
                FailureKind.CANNOT_START,
                f"{what} {path} of config {launch.config} is not there (an absolute path that exists is needed); no "
                "container was made",
            )


def _first_process(container: Container) -> psutil.Process | None:
    """Process 1 of a container; None when it ended already, or is none of this machine."""
    pid = container.attrs["State"]["Pid"]
    with contextlib.suppress(psutil.NoSuchProcess):
        if pid and any(container.id in line for line in _cgroup(pid) or ()):
            return psutil.Process(pid)
    return None


def _copy_log(container: Container, path: Path) -> None:
    """Write what the container prints to a file, until it ends."""
    try:
        with path.open("ab") as output:
            for chunk in container.logs(stream=True, follow=True):
                output.write(chunk)
                output.flush()
    except ENGINE_ERRORS as error:
        log.warning("the log of container %s is not copied to its end: %s", container.short_id, error)


def _cgroup(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None


def _listening_sockets(port: int, pid: int) -> set[str]:
    """Sockets that listen on `port` in the network of process `pid`, as /proc/<pid>/fd names them.

    Format: https://docs.kernel.org/networking/proc_net_tcp.html
    """
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                address, state, inode = fields[1], fields[3], fields[9]
                if state == _LISTEN and int(address.rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{inode}]")
    return found


def _program(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return None


def _variables(lines: Sequence[str] | None) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in lines or ())


def _describe(exit_code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"code {exit_code} ({signal.Signals(exit_code - 128).name})"
    return f"code {exit_code}"
