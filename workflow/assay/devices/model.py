"""What is known of the accelerators of a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from assay.errors import DeviceError


class Vendor(StrEnum):
    """Who made a device, and so which runtime numbers it."""

    AMD = "amd"
    NVIDIA = "nvidia"

    @property
    def runtime(self) -> str:
        """Name of the runtime whose numbers `Device.index` are."""
        return {Vendor.AMD: "HIP", Vendor.NVIDIA: "CUDA"}[self]

    @property
    def tool(self) -> str:
        """Name of the tool whose numbers `Device.tool_index` are."""
        return {Vendor.AMD: "amd-smi", Vendor.NVIDIA: "NVML"}[self]


class Reading(StrEnum):
    """A value that can be read from a device. The memory readings are those of its whole PCI device."""

    NAME = "name"
    PARTITION_MODE = "partition_mode"  # compute/memory, as SPX/NPS1; NVIDIA: MIG off
    MEMORY_TOTAL = "memory_total"  # bytes
    MEMORY_USED = "memory_used"  # bytes
    ACTIVITY = "activity"  # percent
    POWER = "power"  # W
    POWER_CAP = "power_cap"  # W
    POWER_CAP_DEFAULT = "power_cap_default"  # W
    PERFORMANCE_LEVEL = "performance_level"  # AUTO, MANUAL, ...
    CLOCK = "clock"  # MHz, of the compute engines
    TEMPERATURE = "temperature"  # degrees Celsius, hottest spot of the die
    MEMORY_TEMPERATURE = "memory_temperature"  # degrees Celsius
    THROTTLE = "throttle"  # UNTHROTTLED, or why it is slowed down
    THROTTLED_TICKS = "throttled_ticks"  # of slowing down for heat, since the driver was loaded
    ECC_UNCORRECTABLE = "ecc_uncorrectable"  # errors since the driver was loaded
    ECC_DEFERRED = "ecc_deferred"
    ECC_CORRECTABLE = "ecc_correctable"
    BAD_PAGES_PENDING = "bad_pages_pending"


Value = float | int | str


@dataclass(frozen=True)
class Known:
    """A value and where it was read; None: unknown, and where it was looked for."""

    value: Value | None
    source: str


@dataclass(frozen=True)
class Holder:
    """A process that has a device open."""

    pid: int  # of the host
    source: str
    memory: int | None = None  # bytes on this device
    # A process with an open render node may use another device: ROCr opens every one it may.
    certain: bool = True
    name: str | None = None
    cgroup: str | None = None
    state: str | None = None  # as in /proc/PID/stat: R, S, D, Z, ...
    started: int | None = None  # clock ticks after boot: with the pid it names one process

    def __str__(self) -> str:
        memory = "memory unknown" if self.memory is None else gigabytes(self.memory)
        return f"pid {self.pid} ({', '.join(filter(None, [self.name, self.cgroup, memory]))})"


@dataclass(frozen=True)
class Device:
    """One device as its runtime numbers it."""

    vendor: Vendor
    index: int  # the runtime's, where no mask is set; CUDA: under CUDA_DEVICE_ORDER=PCI_BUS_ID
    pci: str  # domain:bus:device.function, lower case, four digits of domain; what is leased
    partition: int  # 0 where there is one device on its PCI device
    uuid: str | None  # as the runtime's mask takes it; None where it has none of its own (partitions share one)
    tool_index: Known
    readings: Mapping[Reading, Known]
    holders: tuple[Holder, ...] = ()
    # Sources that list every process on the device. Without one an empty `holders` says nothing.
    holders_source: str | None = None
    render: int | None = None  # minor number of /dev/dri/renderD*
    node: int | None = None  # of the KFD topology
    links: frozenset[int] | None = None  # KFD nodes that XGMI reaches directly; None: not told

    def __getitem__(self, reading: Reading) -> Known:
        return self.readings[reading]

    @property
    def address(self) -> str:
        """PCI address with the partition as its function, as AMD's tools print it."""
        return self.pci[:-1] + str(self.partition) if self.partition else self.pci

    @property
    def memory_used(self) -> int | None:
        """Memory in use on the whole PCI device [bytes]."""
        value = self[Reading.MEMORY_USED].value
        return None if value is None else int(value)

    def __str__(self) -> str:
        return f"{self.vendor.runtime} {self.index} ({self.address})"


@dataclass(frozen=True)
class Node:
    """All devices that can be seen here, in the order of their runtime."""

    devices: tuple[Device, ...]
    sources: Mapping[str, str] = field(default_factory=dict)  # source -> "read", or why it could not be

    def siblings(self, device: Device) -> tuple[Device, ...]:
        """Every device on the PCI device of `device`, itself included."""
        return tuple(other for other in self.devices if other.pci == device.pci)

    def pick(self, indices: Iterable[int]) -> tuple[Device, ...]:
        """The devices with these runtime numbers, in this order.

        Raises:
            DeviceError: there is no such device.
        """
        by_index = {device.index: device for device in self.devices}
        indices = list(indices)
        if unknown := [index for index in indices if index not in by_index]:
            raise DeviceError(f"no device {unknown[0]}; there are {', '.join(map(str, self.devices)) or 'none'}")
        return tuple(by_index[index] for index in indices)


def gigabytes(count: float) -> str:
    """Bytes for people: 137.9 GB (10^9)."""
    return f"{count / 1e9:.1f} GB"
