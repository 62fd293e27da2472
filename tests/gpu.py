"""Machines with accelerators, made of files: each case of tests/data/gpu as a sysfs, a /proc and tools to ask.

The cases have the shapes of public captures; serials, pids and values are invented, `expected` was worked out by hand.
"""

import json
import os
import stat
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from assay.config import DeviceOptions, DeviceTools
from assay.devices.model import Known, Node

FOLDER = Path(__file__).parent / "data/gpu"
NO_TOOL = "no-such-tool"
DEVICE_FILES = (
    "vendor",
    "device",
    "unique_id",
    "mem_info_vram_total",
    "mem_info_vram_used",
    "gpu_busy_percent",
    "current_compute_partition",
    "current_memory_partition",
)


def case(number):
    """The content of case `number`, free to be changed."""
    (path,) = FOLDER.glob(f"{number}_*.json")
    return json.loads(path.read_text())


@dataclass
class Machine:
    """A case written out under a folder."""

    root: Path
    options: DeviceOptions

    @property
    def sysfs(self):
        return self.root / "sys"

    @property
    def proc(self):
        return self.root / "proc"

    def pci(self, address):
        """The sysfs folder of a PCI device."""
        return self.sysfs / "devices/pci0000:00" / address

    def compute(self, pid, memory):
        """Let process `pid` use `memory` (KFD id -> bytes), as the KFD shows it."""
        folder = self.sysfs / "class/kfd/kfd/proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        for gpu_id, used in memory.items():
            (folder / f"vram_{gpu_id}").write_text(f"{used}\n")

    def opened(self, pid, target):
        """Let process `pid` have the file `target` open."""
        folder = self.proc / str(pid) / "fd"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "7").symlink_to(target)


def build(content, root, tools=True):
    """Write a case out as files; without `tools` there is sysfs alone."""
    machine = Machine(root, DeviceOptions())
    _topology(content["sysfs"]["kfd_nodes"], machine.sysfs)
    _drm(content["sysfs"]["drm"], machine)
    machine.proc.mkdir(parents=True)
    machine.sysfs.mkdir(exist_ok=True)
    for pid, process in (content.get("proc") or {}).items():
        _process(machine.proc / pid, process)
    (root / "kmsg").touch()
    machine.options = DeviceOptions(
        kernel_log=str(root / "kmsg"),
        sysfs_root=str(machine.sysfs),
        proc_root=str(machine.proc),
        lock_dir=str(root / "locks"),
        tools=DeviceTools(
            amdsmi_python=NO_TOOL, amd_smi=str(amd_smi(content, root)) if tools else NO_TOOL, rocm_smi=NO_TOOL
        ),
    )
    return machine


def amd_smi(content, root):
    """A command that answers like amd-smi on this machine."""
    answers, codes = _answers(content)
    folder = root / "amd-smi.d"
    folder.mkdir(parents=True)
    branches = ""
    for name, text in answers.items():
        path = folder / name.replace(" ", "-")
        path.write_text(text)
        branches += f'"{name}") cat "{path}"; exit {codes.get(name, 0)};;\n'
    return script(
        root / "amd-smi", f'case "${{*% --json}}" in\n{branches}*) echo unknown command >&2; exit 2;;\nesac\n'
    )


def script(path, body):
    """An executable shell script."""
    path.write_text(f"#!/bin/sh\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _answers(content):
    if "raw_stdout" in content:
        return content["raw_stdout"], content["exit_codes"]
    commands = {"list": "list", "list_e": "list -e"}
    found = {
        commands.get(name, name): json.dumps(answer)
        for name, answer in content.get("amd_smi", {}).items()
        if name != "cli_version"
    }
    return found, {}


def _topology(nodes, sysfs):
    for node in nodes:
        folder = sysfs / "class/kfd/kfd/topology/nodes" / str(node["node"])
        folder.mkdir(parents=True)
        if node.get("unreadable"):  # as for one without the right: there is nothing to be read
            continue
        (folder / "gpu_id").write_text(f"{node['gpu_id']}\n")
        lines = [f"{name} {value}\n" for name, value in node["properties"].items()]
        (folder / "properties").write_text("".join(lines))


def _drm(cards, machine):
    for card in cards:
        pci = card["bus_type"] == "pci"
        folder = machine.pci(card["bdf"]) if pci else machine.sysfs / "devices/platform" / card["platform"]
        folder.mkdir(parents=True, exist_ok=True)
        for name in DEVICE_FILES:
            if card.get(name) is not None:
                (folder / name).write_text(f"{card[name]}\n")
        for group, where in (("hwmon", "hwmon/hwmon3"), ("ras", "ras")):
            for name, value in (card.get(group) or {}).items():
                (folder / where).mkdir(parents=True, exist_ok=True)
                (folder / where / name).write_text(f"{value}\n")
        for name in filter(None, (card["card"], card.get("render"))):
            link = machine.sysfs / "class/drm" / name / "device"
            link.parent.mkdir(parents=True)
            link.symlink_to(os.path.relpath(folder, link.parent))


def _process(folder, process):
    folder.mkdir()
    (folder / "comm").write_text(process["comm"] + "\n")
    (folder / "cgroup").write_text(f"0::/system.slice/{process['cgroup']}\n")
    fields = [process.get("state", "S"), *["0"] * 18, "4711"]
    (folder / "stat").write_text(f"{folder.name} ({process['comm']}) {' '.join(fields)}\n")


def without(content, key):
    """A copy of a case without one of amd-smi's answers."""
    changed = deepcopy(content)
    del changed["amd_smi"][key]
    return changed


def with_reading(node, index, reading, value):
    """`node` with one value of one device replaced."""
    device = node.devices[index]
    sick = replace(device, readings={**device.readings, reading: Known(value, "test")})
    return Node(tuple(sick if one.index == index else one for one in node.devices))


# --- NVML ---------------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    """Base of the errors below."""


class NVMLErrorNotSupported(NVMLError):
    """As of a sensor that a device does not have."""


class NVMLErrorNoPermission(NVMLError):
    """As of a device that the device cgroup hides."""


class Nvml:
    """What stands in for the module pynvml: the devices of a case, and errors for what it does not say."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLErrorNotSupported
    NVMLError_NoPermission = NVMLErrorNoPermission
    NVML_VOLATILE_ECC = NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 0
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1

    def __init__(self, devices, driver=True, hidden=(), lost=()):
        self.devices, self.driver, self.hidden, self.lost = devices, driver, hidden, lost
        self.sessions = 0

    def nvmlInit(self):
        if not self.driver:
            raise NVMLError("NVML Shared Library Not Found")
        self.sessions += 1

    def nvmlShutdown(self):
        self.sessions -= 1

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, number):
        if number in self.hidden:
            raise NVMLErrorNoPermission("Insufficient Permissions")
        if number in self.lost:
            raise NVMLError("GPU is lost")
        return Handle(self.devices[number])

    def nvmlDeviceGetPciInfo(self, handle):
        return Handle({"busId": handle.busId})

    def __getattr__(self, name):
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        return lambda handle, *arguments: handle.ask(name.removeprefix("nvmlDeviceGet"), *arguments)


class Handle:
    """A device of a case, and a structure that NVML returns."""

    def __init__(self, fields):
        self.__dict__.update(fields)
        self.fields = fields

    def ask(self, what, *arguments):
        answers = {
            "Name": lambda: self.name,
            "UUID": lambda: self.uuid,
            "MemoryInfo": lambda: Handle({"used": self.memory_used, "total": self.memory_total}),
            "ComputeRunningProcesses": lambda: [Handle(process) for process in self.compute_procs],
            "MigMode": lambda: [self.fields["mig"], 0],
            "CurrentClocksEventReasons": lambda: self.fields["reasons"],
            "PowerUsage": lambda: self.fields["power_mw"],
            "TotalEccErrors": lambda: self.fields["ecc"][arguments[0]],
        }
        try:
            return answers[what]()
        except KeyError:
            raise NVMLErrorNotSupported("Not Supported") from None
