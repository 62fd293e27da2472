"""From a serve plan to what one instance of it is started with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.devices.hold import Held
from assay.devices.masks import without_masks
from assay.devices.model import Vendor
from assay.engines import images, tenants
from assay.engines.container import ContainerLaunch, Mount
from assay.engines.instance import write_files
from assay.engines.plan import fill_instance, server_environment
from assay.engines.process import ProcessLaunch
from assay.engines.server import Launch, free_ports
from assay.records import FailureKind


def launch(plan: Mapping[str, Any], base: Mapping[str, str], folder: Path, held: Held) -> Launch:
    """What to start for one instance of a serve plan; its files are written.

    Args:
        plan: a serve plan.
        base: the environment we run in.
        folder: the instance's own.
        held: its devices.

    Raises:
        StoreError: a file of the instance cannot be written.
    """
    ports = free_ports(plan["host"], len(plan["side_ports"]))
    argv, env, files = fill_instance(plan, str(folder), dict(zip(plan["side_ports"], ports, strict=True)))
    write_files(folder, files)
    if plan["container"] is not None:
        return _in_container(plan, argv, env, held)
    base = without_masks(base) if held.devices else base
    return ProcessLaunch(
        argv=tuple(argv),
        env=server_environment({**plan, "env": {**env, **held.env}}, base),
        host=plan["host"],
        start_limit_s=plan["limits"]["start_limit_s"],
        stop_grace_s=plan["limits"]["stop_grace_s"],
    )


def _in_container(plan: Mapping[str, Any], argv: list[str], env: dict[str, str], held: Held) -> ContainerLaunch:
    spec = plan["container"]
    given = tuple(device.uuid or str(device.index) for device in held.devices if device.vendor == Vendor.NVIDIA)
    # Docker's own GPU support shows the container our devices and no other, so a mask would count them wrong.
    # Apptainer's shows all of them, and /dev/dri holds all of AMD's.
    mask = {} if given and spec["runtime"] == "docker" else held.env
    return ContainerLaunch(
        argv=tuple(argv),
        env={**env, **mask},
        host=plan["host"],
        start_limit_s=plan["limits"]["start_limit_s"],
        stop_grace_s=plan["limits"]["stop_grace_s"],
        config=plan["config"],
        runtime=spec["runtime"],
        repository=spec["repository"],
        digest=spec["digest"],
        tag=spec["tag"],
        container_port=spec["container_port"],
        mounts=(*map(_mount, spec["mounts"]), *_links(Path(plan["model"]["directory"]).resolve())),
        devices=tuple(spec["devices"]),
        gpus=given,
        shm_bytes=spec["shm_bytes"],
        ulimits=spec["ulimits"],
        ipc_host=spec["ipc_host"],
        host_network=spec["host_network"],
        user=spec["user"],
        group_add=tuple(spec["group_add"]),
        cap_add=tuple(spec["cap_add"]),
        security_opt=tuple(spec["security_opt"]),
        memory_bytes=spec["memory_bytes"],
        pids_limit=spec["pids_limit"],
    )


def clear_up(plan: Mapping[str, Any]) -> None:
    """Remove containers that killed runs of ours left: one that lives holds its devices, which are leased next.

    Raises:
        StartFailure: there is no engine to ask.
    """
    if plan["gpus"] and plan["container"] is not None and plan["container"]["runtime"] == "docker":
        engine = images.connect()
        try:
            with images.engine_told(
                FailureKind.ENGINE_UNREACHABLE, "the container engine does not list its containers"
            ):
                tenants.heal(engine)
        finally:
            engine.close()


def _mount(item: Mapping[str, Any]) -> Mount:
    return Mount(str(Path(item["source"]).resolve()), item["target"], item["read_only"])


def _links(weights: Path) -> list[Mount]:
    """Mounts under which links among the weights lead where they lead here: a site's own files are linked."""
    folders = {folder for path in weights.rglob("*") for folder in _folders_behind(path)}
    return [Mount(str(folder), str(folder)) for folder in sorted(folders)]


def _folders_behind(path: Path) -> Iterator[Path]:
    """Folders in which a link, and the links that it leads to, look for what they mean."""
    while path.is_symlink():
        path = Path(os.path.normpath(path.parent / path.readlink()))
        yield path.parent
