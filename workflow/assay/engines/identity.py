"""What a running server is, measured from the server itself. What cannot be measured is null, never taken from config.

Read from the kernel (`/proc/<pid>`), from the server's own interpreter where the server runs and under its environment,
from the git tree its module lies in, from its version route and, for a container, from the engine that runs it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import httpx
import psutil

from assay.canonical import sha256_lines
from assay.engines.server import Image, Server, boot_id, listeners
from assay.engines.tree import native_modules
from assay.provenance import GitState, git_state

ROUTE_LIMIT_S = 30
HIDDEN = "(hidden)"

_SECRET = re.compile(r"(^|_)(TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)($|_)", re.IGNORECASE)

# Runs in the server's interpreter. The module is found, not imported: importing an engine can take a minute.
_ASK_INTERPRETER = """
import importlib.metadata as metadata, importlib.util as util, json, platform, sys
module, distribution = sys.argv[1:]
spec = util.find_spec(module)
try:
    version = metadata.version(distribution)
except metadata.PackageNotFoundError:
    version = None
print(json.dumps({
    "python": platform.python_version(),
    "prefix": sys.prefix,
    "file": spec and (spec.origin or next(iter(spec.submodule_search_locations or []), None)),
    "version": version,
    "packages": sorted({f"{item.name}=={item.version}" for item in metadata.distributions()}),
}))
"""


@dataclass(frozen=True)
class Identity:
    """One measurement of a running server. Null: could not be measured."""

    measured_utc: str
    boot_id: str | None
    pid: int
    started_utc: str | None  # of the process: with pid and boot_id it names one process for ever
    argv: list[str] | None
    exe: str | None
    cwd: str | None
    image: Image | None  # what a container was made from; a process has none
    env_set: dict[str, str] | None  # of the plan's, and any other that differs from ours or the image's; secrets hidden
    env_removed: list[str] | None
    listener_pids: list[int] | None
    listener_is_ours: bool | None
    python: str | None
    prefix: str | None
    module_file: str | None
    version: str | None  # of the distribution
    commit: str | None  # of the git checkout that tracks the module, where there is one
    tree: str | None  # of the module's own folder in it
    dirty: bool | None  # whether that folder differs from its commit
    packages_sha256: str | None  # of "name==version" of every distribution the interpreter sees
    packages: int | None
    version_route: Any  # what the server itself answers
    health: int | None  # HTTP status of its health route
    native: dict[str, list[str]] | None  # extension module of the arm's tree -> files of it that are mapped


def measure(server: Server, plan: Mapping[str, Any], base: Mapping[str, str]) -> Identity:
    """Measure `server`.

    Args:
        server: a ready server.
        plan: its serve plan, which says what to look for: module, distribution, version route, names in `env`.
        base: the environment we run in, for the difference (of a container: the difference is from its image's).
    """
    spec = plan["identity"]
    process = _process(server.pid)
    env = process.get("environ") or server.told_env()
    base = server.base_env(base)
    asked = _ask_interpreter(server, env, spec["module"], spec["distribution"])
    file = server.on_host(asked["file"]) if asked.get("file") else None
    state = git_state(file) if file else GitState(None, None, None)
    found = listeners(server.launch.host, server.port)
    return Identity(
        measured_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        boot_id=boot_id(),
        pid=server.pid,
        started_utc=process.get("started_utc"),
        argv=process.get("cmdline"),
        exe=process.get("exe"),
        cwd=process.get("cwd"),
        image=server.image(),
        env_set=None if env is None else _env_set(env, base, plan["env"]),
        env_removed=None if env is None else sorted(set(base) - set(env)),
        listener_pids=sorted(pid for pid in found if pid is not None) or None,
        listener_is_ours=not server.strangers() if found else None,
        python=asked.get("python"),
        prefix=asked.get("prefix"),
        module_file=asked.get("file"),
        version=asked.get("version"),
        commit=state.commit,
        tree=state.tree,
        dirty=state.dirty,
        packages_sha256=sha256_lines(asked["packages"]) if "packages" in asked else None,
        packages=len(asked["packages"]) if "packages" in asked else None,
        version_route=_ask_route(server.base_url, spec["version_route"]),
        health=_ask_health(server.base_url, spec["health_route"]),
        native=native_modules(server.tree(), spec["native"]),
    )


def changed(start: Identity, end: Identity) -> list[str]:
    """Names of the fields that differ between two measurements of what should be one server.

    A commit to another folder of the module's checkout changes nothing that serves: `tree` and `dirty` tell. An
    extension module may be loaded late: `assay.engines.tree` judges both measurements by themselves.
    """
    first, second = asdict(start), asdict(end)
    passed_over = ("measured_utc", "commit", "native")
    return [name for name in first if name not in passed_over and first[name] != second[name]]


def _process(pid: int) -> dict[str, Any]:
    """What the kernel knows of a process; empty when it is gone or not ours to look at."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        started = datetime.fromtimestamp(process.create_time(), UTC)
        return {
            "started_utc": started.isoformat(timespec="milliseconds"),
            **process.as_dict(["cmdline", "exe", "cwd", "environ"]),
        }
    return {}


def _env_set(env: Mapping[str, str], base: Mapping[str, str], planned: Container[str]) -> dict[str, str]:
    return {
        name: HIDDEN if _SECRET.search(name) else value
        for name, value in sorted(env.items())
        if name in planned or base.get(name) != value
    }


def _ask_interpreter(server: Server, env: Mapping[str, str] | None, module: str, distribution: str) -> dict[str, Any]:
    """What the server's interpreter finds under the server's environment; empty when it cannot be asked."""
    if env is None:
        return {}
    answer = server.output_of([server.interpreter(), "-c", _ASK_INTERPRETER, module, distribution], env)
    try:
        return json.loads(answer or "")
    except ValueError:
        return {}


def _ask_route(base_url: str, route: str | None) -> Any:
    if route is None:
        return None
    try:
        response = httpx.get(base_url + route, timeout=ROUTE_LIMIT_S, trust_env=False).raise_for_status()
    except httpx.HTTPError:
        return None
    try:
        return response.json()
    except ValueError:
        return response.text[:1000]


def _ask_health(base_url: str, route: str | None) -> int | None:
    if route is None:
        return None
    try:
        return httpx.get(base_url + route, timeout=ROUTE_LIMIT_S, trust_env=False).status_code
    except httpx.HTTPError:
        return None
