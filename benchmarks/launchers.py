"""Seconds that each launcher adds to the start and stop of a server, over the bare command.

    python benchmarks/launchers.py [--runs 5] [--engine resources/container-engine]

The server is the tests' fake one, which needs no time itself; it has started when it has answered one generation. The
image's first pull is not counted. Containers need root and dockerd (tests/container/fetch_engine.sh); without them the
process launcher alone is measured. Other work on the machine counts: its load is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.table import Table

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "container")]

from built_image import SERVED, build, python_mounts  # noqa: E402
from loopback_registry import LoopbackRegistry  # noqa: E402
from private_engine import PrivateEngine, find_dockerd  # noqa: E402
from processes import FAKE, probe  # noqa: E402

from assay.engines.container import ContainerLaunch, Mount  # noqa: E402
from assay.engines.process import ProcessLaunch  # noqa: E402
from assay.engines.server import Launch, free_port, serve  # noqa: E402

HOST = "127.0.0.1"
POLL_S = 0.01
COMMAND = (sys.executable, str(FAKE), "--host={host}", "--port={port}")


class Seconds(NamedTuple):
    """Of one run."""

    start: float
    stop: float


def main(
    runs: Annotated[int, typer.Option(min=1, help="Of each launcher")] = 5,
    engine: Annotated[Path, typer.Option(help="Folder with an unpacked container engine")] = Path(
        "resources/container-engine"
    ),
) -> None:
    """Print medians, and what each launcher adds to the bare command."""
    console = Console()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    with contextlib.ExitStack() as stack:
        ways: dict[str, Callable[[], Seconds]] = {"bare": bare, "process": lambda: launched(_process())}
        path, missing = find_dockerd(engine.resolve())
        if missing:
            console.print(f"containers are left out: {missing}")
        else:
            container = stack.enter_context(_container(path))
            ways["container, network of its own"] = lambda: launched(container)
            ways["container, network of the machine"] = lambda: launched(replace(container, host_network=True))
        for way in ways.values():
            way()  # the first of each warms file caches, and pulls
        found = {name: [way() for _ in range(runs)] for name, way in ways.items()}
    console.print(_table(found, runs))
    console.print(f"load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def bare() -> Seconds:
    """Start and stop the command as a shell would."""
    port = free_port(HOST)
    began = time.perf_counter()
    command = [word.format(host=HOST, port=port) for word in COMMAND]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not _answers(f"http://{HOST}:{port}"):
        time.sleep(POLL_S)
    ready = time.perf_counter()
    server.send_signal(signal.SIGINT)
    server.wait()
    return Seconds(ready - began, time.perf_counter() - ready)


def launched(launch: Launch) -> Seconds:
    """Start and stop it by one of our launchers."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with serve(launch, Path(folder) / "log", probe, lambda _: None):
            ready = time.perf_counter()
        return Seconds(ready - began, time.perf_counter() - ready)


def _answers(url: str) -> bool:
    try:
        return asyncio.run(probe(url)) is None
    except httpx.TransportError:
        return False


def _process() -> ProcessLaunch:
    argv = tuple(word.replace("{host}", HOST) for word in COMMAND)
    return ProcessLaunch(argv=argv, env=dict(os.environ), host=HOST, start_limit_s=60, stop_grace_s=5)


@contextlib.contextmanager
def _container(path: list[str]) -> Iterator[ContainerLaunch]:
    """A launch in an engine and from a registry of our own; both gone afterwards."""
    image = build(SERVED, {"PYTHONPATH": "/app"})
    with PrivateEngine(path) as engine, LoopbackRegistry() as registry:
        os.environ["DOCKER_HOST"] = engine.url
        registry.push(image, "1")
        yield ContainerLaunch(
            argv=COMMAND,
            env={},
            host=HOST,
            start_limit_s=60,
            stop_grace_s=5,
            config="benchmark",
            runtime="docker",
            repository=registry.repository,
            digest=image.digest,
            mounts=(*python_mounts(), Mount(str(FAKE.parent), str(FAKE.parent))),
        )


def _table(found: dict[str, list[Seconds]], runs: int) -> Table:
    table = Table(f"launched (n = {runs})", "start, s", "stop, s", "over bare: start, s", "stop, s")
    base = _medians(found["bare"])
    for name, seconds in found.items():
        own = _medians(seconds)
        over = ("", "") if name == "bare" else (f"{own.start - base.start:.2f}", f"{own.stop - base.stop:.2f}")
        table.add_row(name, f"{own.start:.2f}", f"{own.stop:.2f}", *over)
    return table


def _medians(seconds: list[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(values) for values in zip(*seconds, strict=True)))


if __name__ == "__main__":
    typer.run(main)
