"""AMD devices as the kernel shows them: KFD topology and DRM in sysfs. Needs no ROCm.

KFD topology: https://github.com/torvalds/linux/blob/master/drivers/gpu/drm/amd/amdkfd/kfd_topology.c
Files of a device: https://docs.kernel.org/gpu/amdgpu/driver-misc.html, https://docs.kernel.org/gpu/amdgpu/thermal.html
and https://docs.kernel.org/gpu/amdgpu/ras.html
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from assay.devices.model import Reading, Value
from assay.errors import DeviceError

NODES = "class/kfd/kfd/topology/nodes"
PROCESSES = "class/kfd/kfd/proc"
AMD = 0x1002
XGMI = "11"  # CRAT_IOLINK_TYPE_XGMI in kfd_crat.h
PARTITION = re.compile(r"amdgpu_xcp[._]\d+")  # platform device of a partition other than the first

NAMES = {
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X VF",
    0x74B9: "AMD Instinct MI325X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}


@dataclass(frozen=True)
class Agent:
    """A GPU node of the KFD topology: what HIP makes a device of."""

    node: int
    gpu_id: int | None
    pci: str
    partition: int
    render: int | None
    unique_id: int
    device_id: int | None
    links: frozenset[int] | None  # nodes that XGMI reaches directly; None: not told
    folder: Path | None  # of the PCI device in sysfs, where it has a DRM node

    @property
    def address(self) -> str:
        """PCI address with the partition as its function."""
        return self.pci[:-1] + str(self.partition) if self.partition else self.pci


@dataclass(frozen=True)
class Topology:
    """GPU nodes in the order of HIP, and nodes that may not be read here."""

    agents: tuple[Agent, ...]
    hidden: tuple[int, ...]


def topology(sysfs: Path) -> Topology | None:
    """The KFD topology, or None where there is none (no amdgpu driver), or it may not be read.

    ROCr numbers its agents by node. A node that may not be read, or is not there, is hidden by the device cgroup of
    this container or job, and has no number.

    Raises:
        DeviceError: a node that can be read is incomplete, or what the kernel says of it does not agree.
    """
    try:
        nodes = sorted((sysfs / NODES).iterdir(), key=lambda path: int(path.name))
    except OSError:
        return None
    links = [link.resolve() for link in sorted((sysfs / "class/drm").glob("*/device"))]
    folders = {folder.name: folder for folder in links}
    agents, hidden = [], []
    for path in nodes:
        gpu_id = _read(path / "gpu_id")
        if gpu_id is None:
            hidden.append(int(path.name))
        elif gpu_id != "0":  # that of a CPU
            agents.append(_agent(path, gpu_id, folders))
    for agent in agents:
        _check(agent, agents, sysfs)
    return Topology(tuple(agents), tuple(hidden))


def _agent(path: Path, gpu_id: str, folders: Mapping[str, Path]) -> Agent:
    text = _read(path / "properties")
    if text is None:
        raise DeviceError(f"{path}/properties cannot be read though gpu_id can: which device it is cannot be told")
    found = _properties(text)
    try:
        location, domain = int(found["location_id"]), int(found["domain"])
        pci = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
        return Agent(
            node=int(path.name),
            gpu_id=int(gpu_id),
            pci=pci,
            partition=location >> 28,
            render=int(found["drm_render_minor"]),
            unique_id=int(found["unique_id"]),
            device_id=int(found["device_id"]),
            links=_links(path),
            folder=folders.get(pci),
        )
    except (KeyError, ValueError) as error:
        raise DeviceError(f"{path}: {error}: missing, or no number; which device it is cannot be told") from None


def _links(path: Path) -> frozenset[int] | None:
    """Nodes at the other ends of a node's XGMI links."""
    texts = [_read(link / "properties") for link in sorted((path / "io_links").glob("*"))]
    links = [_properties(text) for text in texts if text is not None]
    if not links:
        return None
    return frozenset(int(link["node_to"]) for link in links if link.get("type") == XGMI)


def _properties(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)


def _check(agent: Agent, agents: list[Agent], sysfs: Path) -> None:
    """Refuse an agent whose address is another's, or is not that of its own render node or PCI device."""
    where = f"KFD node {agent.node}"
    for other in agents:
        if other.node == agent.node:
            continue
        if other.address == agent.address:
            raise DeviceError(f"{where} and {other.node} both say they are {agent.address}; no map can be trusted")
        if other.render == agent.render:
            raise DeviceError(f"{where} and {other.node} both say they have renderD{agent.render}")
    found = device_name(sysfs, f"renderD{agent.render}")
    if found is not None and found != agent.pci and not (agent.partition and PARTITION.fullmatch(found)):
        raise DeviceError(f"{where} says it is {agent.pci}, its render node renderD{agent.render} is {found}")
    if agent.folder is None:
        return
    # Kernels differ on whether a partition has the id of its device or one of its own.
    whole = not agent.partition and sum(other.pci == agent.pci for other in agents) == 1
    unique_id = agent.unique_id if whole else None
    for name, value in (("unique_id", unique_id), ("device", agent.device_id), ("vendor", AMD)):
        text = _read(agent.folder / name)
        if text and value and text.lower().removeprefix("0x").lstrip("0") != f"{value:x}":
            raise DeviceError(f"{where} has {name} {value:#x}, the PCI device {agent.pci} has {text}")


def device_name(sysfs: Path, node: str) -> str | None:
    """Name of the device behind a DRM node: a PCI address or a platform device; None where there is no such node."""
    link = sysfs / "class/drm" / node / "device"
    return link.resolve().name if link.exists() else None


def readings(agent: Agent) -> dict[Reading, Value]:
    """What sysfs says of an agent's PCI device; what is not there is left out."""
    folder = agent.folder
    found: Mapping[Reading, Value | None] = {Reading.NAME: NAMES.get(agent.device_id or 0)}
    if folder is not None:
        compute, memory = _read(folder / "current_compute_partition"), _read(folder / "current_memory_partition")
        level, pages = _read(folder / "power_dpm_force_performance_level"), _read(folder / "ras/gpu_vram_bad_pages")
        found = {
            Reading.NAME: _read(folder / "product_name") or found[Reading.NAME],
            Reading.PARTITION_MODE: f"{compute}/{memory}" if compute and memory else None,
            Reading.MEMORY_TOTAL: _number(folder / "mem_info_vram_total"),
            Reading.MEMORY_USED: _number(folder / "mem_info_vram_used"),
            Reading.ACTIVITY: _number(folder / "gpu_busy_percent"),
            Reading.POWER: _hwmon(folder, "power1_average", 1e-6) or _hwmon(folder, "power1_input", 1e-6),
            Reading.POWER_CAP: _hwmon(folder, "power1_cap", 1e-6),
            Reading.POWER_CAP_DEFAULT: _hwmon(folder, "power1_cap_default", 1e-6),
            Reading.PERFORMANCE_LEVEL: level and level.upper(),
            Reading.CLOCK: _hwmon(folder, "freq1_input", 1e-6),
            Reading.TEMPERATURE: _hwmon(folder, "temp2_input", 1e-3),
            Reading.MEMORY_TEMPERATURE: _hwmon(folder, "temp3_input", 1e-3),
            Reading.ECC_UNCORRECTABLE: _errors(folder, "ue"),
            Reading.ECC_CORRECTABLE: _errors(folder, "ce"),
            Reading.ECC_DEFERRED: _errors(folder, "de"),
            Reading.BAD_PAGES_PENDING: None if pages is None else len(re.findall(r":\s*P\s*$", pages, re.MULTILINE)),
        }
    return {reading: value for reading, value in found.items() if value is not None}


def process_memory(sysfs: Path, gpu_ids: list[int]) -> dict[int, dict[int, int]] | None:
    """GPU id -> process id of the host -> bytes in use, of every process that uses compute; None if not to be had."""
    try:
        folders = [path for path in (sysfs / PROCESSES).iterdir() if path.name.isdigit()]
    except OSError:
        return None
    found: dict[int, dict[int, int]] = {gpu_id: {} for gpu_id in gpu_ids}
    for path in folders:
        for gpu_id in gpu_ids:
            used = _number(path / f"vram_{gpu_id}")
            if used:
                found[gpu_id][int(path.name)] = int(used)
    return found


def _errors(folder: Path, kind: str) -> int | None:
    """Sum of one kind of error over the blocks of a device (ras/*_err_count)."""
    counts = [
        int(count)
        for path in sorted((folder / "ras").glob("*_err_count"))
        for count in re.findall(rf"^{kind}:\s*(\d+)", _read(path) or "", re.MULTILINE)
    ]
    return sum(counts) if counts else None


def _hwmon(folder: Path, name: str, scale: float) -> float | None:
    values = (_number(path) for path in sorted(folder.glob(f"hwmon/*/{name}")))
    return next((round(value * scale, 3) for value in values if value is not None), None)


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _read(path: Path) -> str | None:
    """The text of a file, or None when it may not be read, is not there, or its device does not answer."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
