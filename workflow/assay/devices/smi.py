"""AMD devices as ROCm's tools show them: the amdsmi library, `amd-smi` and `rocm-smi`. All optional.

The shapes of `amd-smi --json` differ between releases (bare list or {"gpu_data": [...]}; {"value", "unit"}, a number,
"283 MB" or "N/A"), and text may come before the JSON. What does not parse, or comes with an exit status, is no answer;
an answer that leaves out a device is refused.
https://rocm.docs.amd.com/projects/amdsmi/en/latest/how-to/amdsmi-cli-tool.html
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.devices import ask_amdsmi
from assay.devices.model import Holder, Reading, Value
from assay.errors import DeviceError

LIMIT_S = 60  # for one command
UUID = re.compile(r"GPU-([0-9a-fA-F]{16})")  # as ROCr masks take it
UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}  # as the tools use the words

# Reading -> command and the paths at which releases have its value.
AMD_SMI: dict[Reading, tuple[str, tuple[str, ...]]] = {
    Reading.NAME: ("static", ("asic.market_name",)),
    Reading.MEMORY_TOTAL: ("metric", ("mem_usage.total_vram",)),
    Reading.MEMORY_USED: ("metric", ("mem_usage.used_vram",)),
    Reading.ACTIVITY: ("metric", ("usage.gfx_activity",)),
    Reading.POWER: (
        "metric",
        ("power.socket_power", "power.current_socket_power", "power.average_socket_power"),
    ),
    Reading.POWER_CAP: ("static", ("limit.socket_power",)),
    Reading.POWER_CAP_DEFAULT: ("static", ("limit.default_power_cap", "limit.max_power")),
    Reading.PERFORMANCE_LEVEL: ("metric", ("perf_level", "performance_level")),
    Reading.CLOCK: ("metric", ("clock.gfx_0.clk",)),
    Reading.TEMPERATURE: ("metric", ("temperature.hotspot",)),
    Reading.MEMORY_TEMPERATURE: ("metric", ("temperature.mem",)),
    Reading.THROTTLE: ("metric", ("power.throttle_status",)),
    Reading.ECC_UNCORRECTABLE: ("metric", ("ecc.total_uncorrectable_count",)),
    Reading.ECC_DEFERRED: ("metric", ("ecc.total_deferred_count",)),
    Reading.ECC_CORRECTABLE: ("metric", ("ecc.total_correctable_count",)),
}
ROCM_SMI: dict[Reading, tuple[str, ...]] = {
    Reading.NAME: ("Card Series", "Card series"),
    Reading.MEMORY_TOTAL: ("VRAM Total Memory (B)",),
    Reading.MEMORY_USED: ("VRAM Total Used Memory (B)",),
    Reading.ACTIVITY: ("GPU use (%)",),
    Reading.POWER: ("Current Socket Graphics Package Power (W)", "Average Graphics Package Power (W)"),
}
WORDS = {Reading.NAME, Reading.PERFORMANCE_LEVEL, Reading.THROTTLE, Reading.PARTITION_MODE}  # the others are numbers

# What slows a device down for heat, in the section `throttle` of `amd-smi metric`; a power cap is no fault.
HEAT = ("prochot", "socket_thermal", "vr_thermal", "hbm_thermal")
NO_PAGES = "No bad pages found."

STATES = {"False": "UNTHROTTLED", "0": "UNTHROTTLED", "True": "THROTTLED"}  # of releases that tell no word


class NoAnswer(Exception):
    """A source cannot be had here, and why."""


@dataclass(frozen=True)
class Row:
    """What one source says of one device."""

    address: str  # PCI address with the partition as its function
    index: int | None = None  # the source's own number
    node: int | None = None  # of the KFD topology
    gpu_id: int | None = None  # of the KFD
    partition: int | None = None
    unique_id: int | None = None
    readings: Mapping[Reading, Value] = field(default_factory=dict)
    processes: tuple[Holder, ...] | None = None  # None: not told


def amdsmi_library(python: str | None) -> list[Row]:
    """Rows from the amdsmi library of the interpreter `python` (None: ours).

    Raises:
        NoAnswer: it cannot be used here.
    """
    answer = _run([python or sys.executable, ask_amdsmi.__file__])
    try:
        return [
            Row(
                address=row["address"].lower(),
                index=row["index"],
                node=row["node"],
                gpu_id=row["gpu_id"],
                partition=row["partition"],
                readings=_clean({Reading(name): [value] for name, value in row["readings"].items()}),
                processes=None
                if row["processes"] is None
                else tuple(
                    _holder(entry["pid"], entry["name"], entry["memory"], "amdsmi") for entry in row["processes"]
                ),
            )
            for row in json.loads(answer)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"its answer makes no sense ({error!r})") from None


def amd_smi(tool: str) -> list[Row]:
    """Rows from the command `amd-smi`.

    Raises:
        NoAnswer: it cannot be used here.
        DeviceError: one of its commands leaves out a device that it lists.
    """
    try:
        listed = _by_gpu(_json([tool, "list", "-e", "--json"]), "list")
    except NoAnswer:  # before ROCm 6.4 there is no -e
        listed = _by_gpu(_json([tool, "list", "--json"]), "list")
    tables = {}
    for command in ("static", "metric", "process", "partition", "bad-pages"):
        try:
            tables[command] = _by_gpu(_json([tool, command, "--json"]), command)
        except NoAnswer:
            tables[command] = {}
        if tables[command] and (missing := sorted(listed.keys() - tables[command].keys())):
            address = listed[missing[0]].get("bdf")
            raise DeviceError(
                f"`{tool} {command}` says nothing of GPU {missing[0]} ({address}), which `{tool} list` has: partial "
                "output is not used. Run it by hand to see why"
            )
    return [
        Row(
            address=str(entry.get("bdf")).lower(),
            index=gpu,
            node=_integer(entry.get("node_id")),
            gpu_id=_integer(entry.get("kfd_id")),
            partition=_integer(entry.get("partition_id")),
            unique_id=int(uuid[1], 16) if (uuid := UUID.fullmatch(str(entry.get("hip_uuid")))) else None,
            readings=smi_readings({name: table[gpu] for name, table in tables.items() if table}),
            processes=_processes(tables["process"][gpu]) if tables["process"] else None,
        )
        for gpu, entry in sorted(listed.items())
    ]


def smi_readings(tables: Mapping[str, Mapping[str, Any]]) -> dict[Reading, Value]:
    """Readings of one device from its entry in the answers to `amd-smi static`, `metric`, `partition`, `bad-pages`."""
    partition, now = tables.get("static", {}), tables.get("partition", {})
    compute = (
        _at(partition, "partition.accelerator_partition")
        or _at(partition, "partition.compute_partition")
        or _at(now, "accelerator_type")
    )
    memory = _at(partition, "partition.memory_partition") or _at(now, "memory")
    found = {
        reading: [_at(tables.get(command, {}), path) for path in paths] for reading, (command, paths) in AMD_SMI.items()
    }
    throttle = _at(tables.get("metric", {}), "throttle")
    found[Reading.THROTTLE].append(_throttle(throttle))
    return _clean(
        found
        | {
            Reading.PARTITION_MODE: [f"{compute}/{memory}" if compute and memory else None],
            Reading.THROTTLED_TICKS: [_ticks(throttle)],
            Reading.BAD_PAGES_PENDING: [_pages(_at(tables.get("bad-pages", {}), "pending"))],
        }
    )


def _throttle(entry: Any) -> str | None:
    """Whether heat slows a device down; null where no release says so."""
    if not isinstance(entry, Mapping):
        return None
    states = {name: entry.get(f"{name}_violation_status") for name in HEAT}
    if hot := [name for name, state in states.items() if state == "ACTIVE"]:
        return f"THROTTLED: {', '.join(hot)}"
    return "UNTHROTTLED" if "NOT ACTIVE" in states.values() else None


def _ticks(entry: Any) -> float | None:
    """Ticks for which heat slowed a device down; null unless all are told."""
    counts = [number(entry.get(f"{name}_accumulated")) if isinstance(entry, Mapping) else None for name in HEAT]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _pages(leaf: Any) -> int | None:
    """How many pages are listed: a sentence says that there is none, and one alone is without its list."""
    if leaf == NO_PAGES:
        return 0
    if isinstance(leaf, Mapping):
        return 1
    return len(leaf) if isinstance(leaf, list) else None


def rocm_smi(tool: str) -> list[Row]:
    """Rows from the command `rocm-smi`, the oldest of the tools. Numbers are the same as those of `amd-smi`.

    Raises:
        NoAnswer: it cannot be used here.
    """
    options = ["--showbus", "--showproductname", "--showmeminfo", "vram", "--showuse", "--showpower", "--json"]
    answer = _json([tool, *options])
    entries = answer.items() if isinstance(answer, dict) else ()
    cards = {key: card for key, card in entries if re.fullmatch(r"card\d+", key)}
    if not all(isinstance(card, dict) and "PCI Bus" in card for card in cards.values()):
        raise NoAnswer("a card has no PCI Bus")
    return [
        Row(
            address=card["PCI Bus"].lower(),
            index=int(key.removeprefix("card")),
            readings=_clean({reading: [card.get(name) for name in names] for reading, names in ROCM_SMI.items()}),
        )
        for key, card in cards.items()
    ]


def parse_json(text: str) -> Any:
    """The JSON document that `text` ends with; warnings may come before it, nothing after it.

    Raises:
        ValueError: there is none.
    """
    for start in re.finditer(r"^[\[{]", text, re.MULTILINE):
        try:
            return json.loads(text[start.start() :])
        except ValueError:
            continue
    raise ValueError("no JSON in it")


def number(leaf: Any) -> float | None:
    """A number with its unit taken out (memory: bytes), of any of the shapes that releases use; None: not told."""
    if isinstance(leaf, Mapping):
        value = number(leaf.get("value"))
        return None if value is None else value * UNITS.get(str(leaf.get("unit")), 1)
    if isinstance(leaf, bool):
        return None
    if isinstance(leaf, int | float):
        return leaf
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*", leaf) if isinstance(leaf, str) else None
    return float(found[1]) * UNITS.get(found[2], 1) if found else None


def _clean(found: Mapping[Reading, Sequence[Any]]) -> dict[Reading, Value]:
    """The first of each reading's leaves that tells something, as a number or a plain word; others are left out."""
    readings: dict[Reading, Value] = {}
    for reading, leaves in found.items():
        told = (_word(leaf) if reading in WORDS else number(leaf) for leaf in leaves)
        value = next((value for value in told if value is not None), None)
        if value is not None:
            readings[reading] = value
    if level := readings.get(Reading.PERFORMANCE_LEVEL):
        readings[Reading.PERFORMANCE_LEVEL] = str(level).removeprefix("AMDSMI_DEV_PERF_LEVEL_").upper()
    if (throttle := readings.get(Reading.THROTTLE)) in STATES:
        readings[Reading.THROTTLE] = STATES[str(throttle)]
    return readings


def _processes(entry: Mapping[str, Any]) -> tuple[Holder, ...] | None:
    """Processes of one device; an idle one has a sentence where the process would be."""
    listed = entry.get("process_list")
    if isinstance(listed, str):
        return ()
    if not isinstance(listed, list):
        return None
    found = [item.get("process_info") if isinstance(item, dict) else item for item in listed]
    if any(isinstance(item, dict) and number(item.get("pid")) is None for item in found):
        return None
    return tuple(
        _holder(item["pid"], item.get("name"), _at(item, "memory_usage.vram_mem") or item.get("mem_usage"), "amd-smi")
        for item in found
        if isinstance(item, dict)
    )


def _holder(pid: Any, name: Any, memory: Any, source: str) -> Holder:
    used = _integer(memory)
    # A process that has the driver open and uses no memory here uses another device, or none.
    return Holder(pid=int(pid), source=source, memory=used, name=_word(name), certain=used != 0)


def _by_gpu(answer: Any, command: str) -> dict[int, dict[str, Any]]:
    """GPU number -> its entry in an answer."""
    rows = next((answer[key] for key in ("gpu_data", "current_partition") if key in answer), answer)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise NoAnswer(f"{command}: no list of devices")
    numbers = [_integer(row.get("gpu", row.get("gpu_id"))) for row in rows]
    found = {number: row for number, row in zip(numbers, rows, strict=True) if number is not None}
    if len(found) != len(rows):
        raise DeviceError(f"amd-smi {command}: GPU numbers {numbers} are not one for each device")
    return found


def _at(entry: Mapping[str, Any], path: str) -> Any:
    """What lies at a dotted path; None where a part of it is not there, or says that it does not know."""
    found: Any = entry
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return None if found == "N/A" else found


def _integer(leaf: Any) -> int | None:
    value = number(leaf)
    return None if value is None else int(value)


def _word(leaf: Any) -> str | None:
    return None if leaf in (None, "", "N/A") else str(leaf)


def _json(command: Sequence[str]) -> Any:
    try:
        return parse_json(_run(command))
    except ValueError as error:
        raise NoAnswer(f"{' '.join(command[1:2])}: {error}") from None


def _run(command: Sequence[str]) -> str:
    """Standard output of a command that ended well.

    Raises:
        NoAnswer: it did not.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {LIMIT_S} s") from None
    except FileNotFoundError:
        raise NoAnswer(f"there is no command {command[0]}") from None
    except OSError as error:
        raise NoAnswer(error.strerror or str(error)) from None
    if done.returncode != 0:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise NoAnswer(f"exit status {done.returncode}{': ' + said[-1].strip() if said else ''}")
    return done.stdout
