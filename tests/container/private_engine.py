"""A container engine of the tests' own: private socket, data and bridge, gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import docker
import psutil
import pytest
from docker.errors import DockerException
from requests.exceptions import RequestException

REQUIRED = "REQUIRE_DOCKER"  # set by .ci/run
UP_LIMIT_S, DOWN_LIMIT_S = 60, 60
# The machine's firewall and forwarding stay as they are; published ports work by proxy.
LEAVE_THE_MACHINE_ALONE = ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]


def find_dockerd(folder: Path) -> tuple[list[str], str | None]:
    """Folders to put on PATH for the engine in `folder` or installed, and why there is none that we could run."""
    if os.geteuid() != 0:
        return [], "it needs root"
    if tools := [tool for tool in ("ip", "setpriv") if shutil.which(tool) is None]:
        return [], f"{' and '.join(tools)} cannot be found"
    unpacked = [str(folder / "usr/sbin"), str(folder / "usr/bin")]
    found = shutil.which("dockerd", path=os.pathsep.join(unpacked)) or shutil.which("dockerd")
    if found is None:
        return [], f"there is no dockerd; get one with tests/container/fetch_engine.sh {folder}"
    return (unpacked if Path(found).is_relative_to(folder) else []), None


def give_up(missing: str) -> NoReturn:
    """Skip, or fail where an engine must be."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set and there is no container engine: {missing}")
    pytest.skip(f"no container engine can be started here: {missing}")


class PrivateEngine:
    """A dockerd of our own. As a context: started, and on the way out stopped and proven gone."""

    def __init__(self, path: list[str], bridge: bool = True) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="assay-engine-"))
        self.url = f"unix://{self.root}/socket"
        self._path = path
        self._bridge = f"assay{os.getpid()}" if bridge else None
        self._dockerd: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivateEngine:
        if self._bridge is not None:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("addr", "add", f"172.31.{os.getpid() % 256}.1/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        try:
            self.start()
        except RuntimeError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(DockerException, RequestException), contextlib.closing(self.client()) as client:
            for container in client.containers.list(all=True):
                container.remove(force=True, v=True)
        self.stop()
        if self._bridge is not None:
            _ip("link", "del", self._bridge)
        for folder in Path("/sys/fs/cgroup").glob("*/docker"):
            with contextlib.suppress(OSError):
                folder.rmdir()
        left = [process for process in psutil.process_iter(["pid", "cmdline"]) if self._owns(process)]
        for process in left:
            process.kill()
        shutil.rmtree(self.root)
        assert not left, f"the test engine left behind: {[process.info for process in left]}"

    def client(self) -> docker.DockerClient:
        """A client of this engine."""
        return docker.DockerClient(base_url=self.url, timeout=60)

    def start(self) -> None:
        """Start dockerd on what may be there of an earlier start; back when it answers."""
        options = ["--data-root", self.root / "data", "--exec-root", self.root / "run", "--host", self.url]
        options += ["--pidfile", self.root / "pid", "--bridge", self._bridge or "none", *LEAVE_THE_MACHINE_ALONE]
        with (self.root / "log").open("ab") as log:
            self._dockerd = subprocess.Popen(
                # A test run that is killed takes its engine with it.
                ["setpriv", "--pdeathsig", "TERM", "dockerd", *map(str, options)],
                env={**os.environ, "PATH": os.pathsep.join([*self._path, os.environ["PATH"]])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + UP_LIMIT_S
        while True:
            try:
                self.client().close()
                return
            except DockerException:
                if self._dockerd.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(f"dockerd does not come up: {(self.root / 'log').read_text()[-800:]}") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """End dockerd by SIGKILL: its containers live on, as a crash leaves them."""
        # Its containerd, too: one that is about to end for want of its parent is in the way of the next.
        processes = [*psutil.Process(self._dockerd.pid).children(), self._dockerd]
        for process in processes:
            if process is self._dockerd or process.name() == "containerd":
                process.kill()
                process.wait()

    def stop(self) -> None:
        """End dockerd; containers that run are stopped by it."""
        if self._dockerd is not None and self._dockerd.poll() is None:
            self._dockerd.send_signal(signal.SIGTERM)
            try:
                self._dockerd.wait(DOWN_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for held in reversed([path for path in mounts if path.startswith(f"{self.root}/")]):
            subprocess.run(["umount", held], check=True)

    def _owns(self, process: psutil.Process) -> bool:
        words = process.info["cmdline"] or [""]
        engine = Path(words[0]).name in ("dockerd", "containerd", "containerd-shim-runc-v2", "docker-proxy")
        return engine and any(str(self.root) in word for word in words)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
