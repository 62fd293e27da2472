"""Devices as a table and as JSON, under the masks that are set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from assay.config import HealthLimits
from assay.devices import masks
from assay.devices.health import occupancy
from assay.devices.model import Device, Known, Node, Reading, gigabytes
from assay.errors import DeviceError

UNKNOWN = "unknown"


def warning(node: Node, env: Mapping[str, str]) -> str | None:
    """What is wrong with the masks that are set: nothing can be leased under them."""
    try:
        masks.candidates(node.devices, env)
    except DeviceError as error:
        return str(error)
    return None


def as_json(node: Node, limits: HealthLimits, env: Mapping[str, str]) -> dict[str, Any]:
    """Everything known, each value with its source. `index` is null for a device that masks hide."""
    numbers = _numbers(node, env)
    found = {device.index: occupancy(node, device, limits) for device in node.devices}
    return {
        "devices": [
            {
                "index": numbers.get(device.index),
                "unmasked_index": device.index,
                "vendor": device.vendor.value,
                "pci": device.pci,
                "address": device.address,
                "partition": device.partition,
                "uuid": device.uuid,
                "render": device.render,
                "kfd_node": device.node,
                "tool": device.vendor.tool,
                "tool_index": asdict(device.tool_index),
                **{reading.value: asdict(known) for reading, known in device.readings.items()},
                "holders": [asdict(holder) for holder in device.holders],
                "holders_source": device.holders_source,
                "verdict": found[device.index][0].value,
                "reason": found[device.index][1],
            }
            for device in node.devices
        ],
        "sources": dict(node.sources),
        "warning": warning(node, env),
    }


def as_table(node: Node, limits: HealthLimits, env: Mapping[str, str]) -> Table:
    """One row a device, in the order of the runtime."""
    vendor = node.devices[0].vendor
    table = Table()
    headings = (vendor.runtime, "PCI", vendor.tool, "name", "partition", "memory in use", "held by", "verdict")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == "PCI")  # what devices are told by stays whole
    numbers = _numbers(node, env)
    for device in node.devices:
        number = numbers.get(device.index)
        table.add_row(
            "masked" if number is None else str(number),
            device.address,
            str(device.tool_index.value),
            _text(device[Reading.NAME]),
            _text(device[Reading.PARTITION_MODE]),
            _memory(device),
            _holders(device),
            occupancy(node, device, limits)[0].value,
        )
    return table


def _numbers(node: Node, env: Mapping[str, str]) -> dict[int, int]:
    """Number without masks -> number under those that are set."""
    return {device.index: number for number, device in enumerate(masks.visible(node.devices, env))}


def _text(known: Known) -> str:
    return UNKNOWN if known.value is None else str(known.value)


def _memory(device: Device) -> str:
    used, total = device.memory_used, device[Reading.MEMORY_TOTAL].value
    if used is None:
        return UNKNOWN
    return gigabytes(used) if total is None else f"{gigabytes(used)} of {gigabytes(float(total))}"


def _holders(device: Device) -> str:
    listed = [str(holder) for holder in device.holders if holder.certain]
    return "\n".join(listed) or ("nobody" if device.holders_source else UNKNOWN)
