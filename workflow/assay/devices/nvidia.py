"""NVIDIA devices by NVML (https://docs.nvidia.com/deploy/nvml-api/), in the order of the PCI bus.

That is the order of CUDA under `CUDA_DEVICE_ORDER=PCI_BUS_ID`, which `masks.mask_env` sets. A device that the device
cgroup hides has no number in CUDA, and none here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.config import DeviceOptions
from assay.devices import processes
from assay.devices.model import Device, Holder, Known, Node, Reading, Value, Vendor
from assay.errors import DeviceError, NoDeviceError

SOURCE = "NVML"


def discover(options: DeviceOptions, nvml: Any = None) -> Node:
    """The NVIDIA devices that can be seen here, masks not yet applied.

    Args:
        options: root of /proc.
        nvml: the module `pynvml` (package nvidia-ml-py), or what stands in for it.

    Raises:
        NoDeviceError: there is no library, driver or device.
        DeviceError: a device does not answer, or is in MIG mode.
    """
    nvml = nvml or _pynvml()
    with _session(nvml):
        handles, hidden = [], []
        for number in range(nvml.nvmlDeviceGetCount()):
            try:
                handles.append((number, nvml.nvmlDeviceGetHandleByIndex(number)))
            except nvml.NVMLError_NoPermission:
                hidden.append(str(number))
            except nvml.NVMLError as error:
                raise DeviceError(f"NVML device {number} does not answer ({error}); the others are not used") from None
        found = sorted((_read(nvml, number, handle) for number, handle in handles), key=lambda one: _order(one.pci))
    if not found:
        raise NoDeviceError("NVML finds no NVIDIA device, and nothing falls back to the CPU")
    for what in ("pci", "uuid"):
        values = [getattr(one, what) for one in found]
        if len(set(values)) != len(values):
            raise DeviceError(f"NVML gives one {what} to several devices ({', '.join(values)}); no map can be trusted")
    proc = Path(options.proc_root)
    return Node(
        tuple(
            Device(
                vendor=Vendor.NVIDIA,
                index=index,
                pci=one.pci,
                partition=0,
                uuid=one.uuid,
                tool_index=Known(one.number, SOURCE),
                readings={reading: _known(one.readings.get(reading)) for reading in Reading},
                holders=tuple(processes.described(holder, proc) for holder in one.holders or ()),
                holders_source=None if one.holders is None else SOURCE,
            )
            for index, one in enumerate(found)
        ),
        {SOURCE: f"read (hidden here: {', '.join(hidden)})" if hidden else "read"},
    )


def _known(value: Value | None) -> Known:
    return Known(value, SOURCE if value is not None else f"not told by {SOURCE}")


@dataclass(frozen=True)
class _Found:
    number: int
    pci: str
    uuid: str
    readings: dict[Reading, Value]
    holders: tuple[Holder, ...] | None


def normal_pci(bus_id: str) -> str:
    """A PCI address as the kernel writes it: lower case, the domain in four digits (NVML: eight) where they will do."""
    found = re.fullmatch(r"([0-9a-f]{4,8})(:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", bus_id.lower())
    if found is None:
        raise DeviceError(f"NVML gives {bus_id!r} as a bus id, which is no PCI address with domain")
    return f"{int(found[1], 16):04x}{found[2]}"


def _order(pci: str) -> list[int]:
    return [int(part, 16) for part in re.split("[:.]", pci)]


def _read(nvml: Any, number: int, handle: Any) -> _Found:
    def ask(name: str, *arguments: Any) -> Any:
        with suppress(nvml.NVMLError):  # not supported, or not permitted: unknown
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *arguments)
        return None

    def scaled(value: float | None) -> float | None:
        return None if value is None else value / 1000

    memory, utilization = ask("MemoryInfo"), ask("UtilizationRates")
    listed = ask("ComputeRunningProcesses")
    since_load = nvml.NVML_VOLATILE_ECC
    readings: dict[Reading, Value | None] = {
        Reading.NAME: ask("Name"),
        Reading.PARTITION_MODE: _mode(nvml, number, handle),
        Reading.MEMORY_TOTAL: memory and memory.total,
        Reading.MEMORY_USED: memory and memory.used,
        Reading.ACTIVITY: utilization and utilization.gpu,
        Reading.POWER: scaled(ask("PowerUsage")),
        Reading.POWER_CAP: scaled(ask("EnforcedPowerLimit")),
        Reading.POWER_CAP_DEFAULT: scaled(ask("PowerManagementDefaultLimit")),
        Reading.CLOCK: ask("ClockInfo", nvml.NVML_CLOCK_SM),
        Reading.THROTTLE: _throttle(nvml, ask("CurrentClocksEventReasons")),
        Reading.TEMPERATURE: ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
        Reading.ECC_UNCORRECTABLE: ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, since_load),
        Reading.ECC_CORRECTABLE: ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, since_load),
    }
    try:
        pci, uuid = nvml.nvmlDeviceGetPciInfo(handle).busId, nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError as error:
        raise DeviceError(f"NVML device {number} does not say which it is ({error})") from None
    return _Found(
        number=number,
        pci=normal_pci(pci),
        uuid=uuid,
        readings={reading: value for reading, value in readings.items() if value is not None},
        # usedGpuMemory is None in containers; that the process is there is known all the same.
        holders=None
        if listed is None
        else tuple(Holder(process.pid, SOURCE, process.usedGpuMemory) for process in listed),
    )


def _throttle(nvml: Any, reasons: int | None) -> str | None:
    """The slowdowns among the reasons for the clocks; idling and a power cap are no slowdown."""
    slowdowns = {
        "hardware": nvml.nvmlClocksEventReasonHwSlowdown,
        "power brake": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        "heat": nvml.nvmlClocksEventReasonHwThermalSlowdown | nvml.nvmlClocksEventReasonSwThermalSlowdown,
    }
    if reasons is None:
        return None
    found = [name for name, bits in slowdowns.items() if reasons & bits]
    return f"THROTTLED: {', '.join(found)}" if found else "UNTHROTTLED"


def _mode(nvml: Any, number: int, handle: Any) -> str | None:
    try:
        on = nvml.nvmlDeviceGetMigMode(handle)[0]
    except nvml.NVMLError_NotSupported:
        return "MIG off"
    except nvml.NVMLError:
        return None
    if on:
        raise DeviceError(
            f"NVML device {number} is in MIG mode, where CUDA numbers instances; Assay needs whole devices"
        )
    return "MIG off"


def _pynvml() -> Any:
    import pynvml

    return pynvml


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDeviceError(
            f"NVML cannot be used ({error}): the NVIDIA driver is not installed or not visible here, and nothing falls "
            "back to the CPU"
        ) from None
    try:
        yield
    finally:
        nvml.nvmlShutdown()
