"""AMD devices: which HIP number is which PCI device, and what is known of each.

The order of HIP comes from the KFD topology: ROCr numbers GPU nodes by node
(https://github.com/ROCm/ROCR-Runtime/blob/master/runtime/hsa-runtime/core/runtime/amd_topology.cpp). `amd-smi` numbers
the same devices by PCI address, so the two numbers differ on some machines; they meet in the PCI address alone.
It is a prediction until a process on the device says its own PCI address (hipDeviceGetPCIBusId).

Values are asked of sysfs, then of the amdsmi library, `amd-smi` and `rocm-smi`, in this order, as long as some are
missing. A source that cannot be used is passed over and named; one that leaves out a device, or contradicts another
about which device is which, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from assay.config import DeviceOptions
from assay.devices import kfd, processes, smi
from assay.devices.model import Device, Holder, Known, Node, Reading, Vendor
from assay.devices.smi import NoAnswer, Row
from assay.errors import DeviceError, NoDeviceError

SYSFS, PREDICTED = "sysfs", "position by PCI address"
# Known of the PCI device, not of its partitions.
WHOLE = {Reading.MEMORY_USED, Reading.MEMORY_TOTAL, Reading.PARTITION_MODE}


def discover(options: DeviceOptions, need: Collection[Reading] = tuple(Reading)) -> Node:
    """The AMD devices that can be seen here, in the order of HIP, masks not yet applied.

    Args:
        options: roots and tools.
        need: readings that are wanted. Tools, which take seconds, are asked only while one of them is missing.

    Raises:
        NoDeviceError: there is none; nothing here falls back to the CPU.
        DeviceError: which is which cannot be told.
    """
    sysfs = Path(options.sysfs_root)
    found = kfd.topology(sysfs)
    agents = found.agents if found else ()
    state = {SYSFS: _state(found, sysfs)}
    answers: dict[str, Mapping[str, Row]] = {}
    if agents:
        rows = [_sysfs_row(agent) for agent in agents]
        answers[SYSFS] = {row.address: row for row in rows}
    tools: dict[str, Callable[[], list[Row]]] = {
        "amdsmi": lambda: smi.amdsmi_library(options.tools.amdsmi_python),
        "amd-smi": lambda: smi.amd_smi(options.tools.amd_smi),
        "rocm-smi": lambda: smi.rocm_smi(options.tools.rocm_smi),
    }
    for name, ask in tools.items():
        if (found and not agents) or (agents and not _missing(agents, answers, need)):
            state[name] = "not asked"
            continue
        try:
            answer = ask()
        except NoAnswer as error:
            state[name] = str(error)
            continue
        if not answer:
            state[name] = "lists no device"
            continue
        agents = agents or _agents(answer, name)
        _check(agents, answer, name)
        answers[name] = {row.address: row for row in answer}
        state[name] = "read"
    if not agents:
        raise NoDeviceError(
            "no AMD device is found, and nothing falls back to the CPU: "
            + "; ".join(f"{name}: {why}" for name, why in state.items())
        )
    return _node(agents, answers, state, Path(options.proc_root), sysfs)


def _state(found: kfd.Topology | None, sysfs: Path) -> str:
    if found is None:
        return f"no {sysfs / kfd.NODES}: the driver amdgpu is not loaded, or hidden from us"
    if not found.agents:
        return f"KFD has no GPU node{_hidden(found)}"
    return f"read{_hidden(found)}"


def _hidden(found: kfd.Topology) -> str:
    return f" (hidden here: nodes {', '.join(map(str, found.hidden))})" if found.hidden else ""


def _sysfs_row(agent: kfd.Agent) -> Row:
    return Row(agent.address, node=agent.node, gpu_id=agent.gpu_id, readings=kfd.readings(agent))


def _missing(
    agents: Collection[kfd.Agent], answers: Mapping[str, Mapping[str, Row]], need: Collection[Reading]
) -> bool:
    return any(_known(agent, reading, answers).value is None for agent in agents for reading in need)


def _agents(answer: list[Row], source: str) -> tuple[kfd.Agent, ...]:
    """Agents from a tool, where sysfs has no topology: in the order of the KFD nodes that it names."""
    if any(row.node is None for row in answer):
        raise DeviceError(
            f"{source} lists {len(answer)} devices and not their KFD nodes, and sysfs has no {kfd.NODES}: which HIP "
            "number each has cannot be told. Run where sysfs can be read"
        )
    return tuple(
        kfd.Agent(
            node=row.node or 0,
            gpu_id=row.gpu_id,
            pci=row.address[:-1] + "0" if row.partition else row.address,
            partition=row.partition or 0,
            render=None,
            unique_id=row.unique_id or 0,
            device_id=None,
            links=None,
            folder=None,
        )
        for row in sorted(answer, key=lambda row: row.node or 0)
    )


def _check(agents: Collection[kfd.Agent], answer: list[Row], source: str) -> None:
    """Refuse an answer that leaves out an agent, or says that one is another.

    A device that only the tool sees is no fault: a container may list more than HIP gets.
    """
    addresses = [row.address for row in answer]
    if len(set(addresses)) != len(addresses):
        raise DeviceError(f"{source} gives one PCI address to several devices: {', '.join(sorted(addresses))}")
    rows = {row.address: row for row in answer}
    for agent in agents:
        row = rows.get(agent.address)
        if row is None:
            raise DeviceError(
                f"{source} says nothing of {agent.address} (KFD node {agent.node}); it has {', '.join(sorted(rows))}. "
                "Partial output is not used: it hides devices"
            )
        for name, theirs, ours in (
            ("KFD node", row.node, agent.node),
            ("KFD id", row.gpu_id, agent.gpu_id),
            ("unique id", row.unique_id, agent.unique_id),
        ):
            if theirs and ours and theirs != ours:
                raise DeviceError(f"{source} gives {agent.address} the {name} {theirs}, sysfs says {ours}")
    by_index = sorted(answer, key=lambda row: row.index or 0)
    vouched = all(row.node is not None or row.gpu_id is not None for row in answer)
    if not vouched and [_bus(row.address) for row in by_index] != sorted(_bus(row.address) for row in by_index):
        raise DeviceError(
            f"{source} numbers its devices in another order than by PCI address: "
            + ", ".join(f"{row.index} = {row.address}" for row in by_index)
        )


def _bus(address: str) -> str:
    """A PCI address without its function: tools sort by this, all digits being padded."""
    return address.rpartition(".")[0]


def _known(agent: kfd.Agent, reading: Reading, answers: Mapping[str, Mapping[str, Row]]) -> Known:
    """The first answer's value of a reading."""
    address = agent.pci if reading in WHOLE else agent.address
    for source, rows in answers.items():
        value = rows[address].readings.get(reading) if address in rows else None
        if value is not None:
            return Known(value, source)
    return Known(None, f"not told by {', '.join(answers) or 'any source'}")


def _tool_index(agent: kfd.Agent, agents: Collection[kfd.Agent], answers: Mapping[str, Mapping[str, Row]]) -> Known:
    """The number of `amd-smi`, told by a tool or by the rule that it follows."""
    told = {source: rows[agent.address].index for source, rows in answers.items() if source != SYSFS}
    if len(set(told.values())) > 1:
        raise DeviceError(f"{' and '.join(told)} number {agent.address} differently: {sorted(told.values(), key=str)}")
    for source, index in told.items():
        return Known(index, source)
    ordered = sorted(agents, key=lambda other: _bus(other.pci))
    return Known(ordered.index(agent), PREDICTED)


def _node(
    agents: tuple[kfd.Agent, ...],
    answers: Mapping[str, Mapping[str, Row]],
    state: Mapping[str, str],
    proc: Path,
    sysfs: Path,
) -> Node:
    compute = kfd.process_memory(sysfs, [agent.gpu_id for agent in agents if agent.gpu_id is not None])
    # The KFD knows the memory of every process; open files are second best, and slow to list.
    opened = {} if compute is not None else processes.render_holders(proc)
    ids = [agent.unique_id for agent in agents]
    devices = []
    for index, agent in enumerate(agents):
        holders, source = _holders(agent, answers, compute, opened.get(agent.render or -1, set()))
        devices.append(
            Device(
                vendor=Vendor.AMD,
                index=index,
                pci=agent.pci,
                partition=agent.partition,
                uuid=f"GPU-{agent.unique_id:016x}" if agent.unique_id and ids.count(agent.unique_id) == 1 else None,
                tool_index=_tool_index(agent, agents, answers),
                readings={reading: _known(agent, reading, answers) for reading in Reading},
                holders=tuple(processes.described(holder, proc) for holder in holders),
                holders_source=source,
                render=agent.render,
                node=agent.node,
                links=agent.links,
            )
        )
    return Node(tuple(devices), state)


def _holders(
    agent: kfd.Agent,
    answers: Mapping[str, Mapping[str, Row]],
    compute: Mapping[int, Mapping[int, int]] | None,
    opened: Collection[int],
) -> tuple[list[Holder], str | None]:
    """Who holds an agent, and the source that lists all who do, if there is one.

    An open render node adds holders and never proves that there is none: /proc shows one pid namespace, and only our
    own user's files.
    """
    told: dict[str, Collection[Holder]] = {}
    if compute is not None and agent.gpu_id is not None:
        used = compute[agent.gpu_id]
        told["KFD"] = [Holder(pid, "KFD", memory) for pid, memory in used.items()]
    for source, rows in answers.items():
        listed = rows[agent.address].processes if agent.address in rows else None
        if listed is not None:
            told[source] = listed
    found: dict[int, Holder] = {}
    for holders in told.values():
        for holder in holders:
            found.setdefault(holder.pid, holder)
    for pid in opened:
        found.setdefault(pid, Holder(pid, "open render node", certain=False))
    return sorted(found.values(), key=lambda holder: holder.pid), next(iter(told), None)
