"""Whether devices are free and in the state in which a measurement means something. It only looks.

A gate compares one value with a limit of the site (`HealthLimits`) and says pass, warn, refuse or unknown, with value,
limit and source. What a gate cannot read is unknown, and the site says whether that refuses (`on_unknown`).

`check` judges a node at one moment, `settle` waits until it is fit, and `compare` says what a run left behind. `watch`
is for the time between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Any

from assay.config import DeviceOptions, HealthLimits
from assay.devices.model import Device, Holder, Node, Reading, Value, Vendor, gigabytes
from assay.errors import DeviceError

CLEAN_LOOKS = 2  # in a row, before devices count as settled
UNBELIEVABLE_W = 2  # a sensor that says this little of an idle accelerator is not believed


class Outcome(StrEnum):
    """What a gate says, worst last."""

    PASS = "pass"
    UNKNOWN = "unknown"
    WARN = "warn"
    REFUSE = "refuse"


class Occupancy(StrEnum):
    """Whether somebody uses a device."""

    FREE = "free"
    BUSY = "busy"
    UNKNOWN = "unknown"


class Phase(StrEnum):
    """When a node is looked at: idle gates do not hold while our own server runs."""

    IDLE = "idle"
    DURING = "during"


@dataclass(frozen=True)
class Check:
    """What one gate says of one device."""

    gate: str
    device: str
    outcome: Outcome
    value: Value | None
    limit: Any
    source: str
    detail: str

    def __str__(self) -> str:
        return f"{self.device}: {self.gate}: {self.outcome}: {self.detail}"


@dataclass(frozen=True)
class Report:
    """What all gates say of the devices asked for, and who is on the others."""

    checks: tuple[Check, ...]
    on_unknown: str
    elsewhere: tuple[tuple[Device, Holder], ...] = ()  # processes of others on devices that were not asked for

    def named(self, outcome: Outcome) -> list[str]:
        """Gates that say `outcome`."""
        return list(dict.fromkeys(check.gate for check in self.checks if check.outcome == outcome))

    @property
    def outcome(self) -> Outcome:
        """The worst of all. An unknown whether a device is, or became, free is a warning; others are only listed."""
        found = {check.outcome for check in self.checks}
        unknown = {check.gate for check in self.checks if check.outcome == Outcome.UNKNOWN}
        if Outcome.REFUSE in found or (unknown and self.on_unknown == "refuse"):
            return Outcome.REFUSE
        if Outcome.WARN in found or unknown & {MEMORY, CO_TENANT, MEMORY_RETURNED}:
            return Outcome.WARN
        return Outcome.PASS

    def require(self) -> None:
        """Raise DeviceError, with every reason, if the devices are refused."""
        if self.outcome == Outcome.REFUSE:
            refusing = {Outcome.REFUSE, Outcome.UNKNOWN} if self.on_unknown == "refuse" else {Outcome.REFUSE}
            said = [str(check) for check in self.checks if check.outcome in refusing]
            raise DeviceError("devices are not fit to measure on:\n  " + "\n  ".join(said))


MEMORY, CO_TENANT, MEMORY_RETURNED = "memory_in_use", "co_tenant", "memory_returned"


def at_most(value: Any, limit: Any) -> bool:
    """Whether a number is within its limit."""
    return value <= limit


def equal(value: Any, limit: Any) -> bool:
    """Whether a word is the one that is wanted."""
    return value == limit


def one_of(value: Any, limit: Any) -> bool:
    """Whether a word is one of those that are wanted."""
    return value in limit


@dataclass(frozen=True)
class Rule:
    """A gate on one reading."""

    gate: str
    reading: Reading
    limit: str  # field of HealthLimits
    passes: Callable[[Any, Any], bool]
    otherwise: Outcome
    phases: tuple[Phase, ...] = (Phase.IDLE, Phase.DURING)
    vendors: tuple[Vendor, ...] = tuple(Vendor)  # whose devices have such a thing


IDLE, DURING = (Phase.IDLE,), (Phase.DURING,)
AMD = (Vendor.AMD,)
# While a server runs, what only makes it slow is a warning: its answers are what they are.
RULES = (
    Rule("activity", Reading.ACTIVITY, "activity_pct", at_most, Outcome.REFUSE, IDLE),
    Rule("idle_power", Reading.POWER, "idle_power_w", at_most, Outcome.REFUSE, IDLE),
    Rule("temperature", Reading.TEMPERATURE, "idle_temperature_c", at_most, Outcome.REFUSE, IDLE),
    Rule("memory_temperature", Reading.MEMORY_TEMPERATURE, "idle_temperature_c", at_most, Outcome.REFUSE, IDLE),
    Rule("temperature", Reading.TEMPERATURE, "load_temperature_c", at_most, Outcome.WARN, DURING),
    Rule("memory_temperature", Reading.MEMORY_TEMPERATURE, "load_temperature_c", at_most, Outcome.WARN, DURING),
    Rule("performance_level", Reading.PERFORMANCE_LEVEL, "performance_level", equal, Outcome.REFUSE, IDLE, AMD),
    Rule("performance_level", Reading.PERFORMANCE_LEVEL, "performance_level", equal, Outcome.WARN, DURING, AMD),
    Rule("throttle", Reading.THROTTLE, "throttle", equal, Outcome.REFUSE, IDLE),
    Rule("throttle", Reading.THROTTLE, "throttle", equal, Outcome.WARN, DURING),
    Rule("partition_mode", Reading.PARTITION_MODE, "partition_modes", one_of, Outcome.REFUSE),
    Rule("ecc_uncorrectable", Reading.ECC_UNCORRECTABLE, "ecc_uncorrectable", at_most, Outcome.REFUSE),
    Rule("ecc_deferred", Reading.ECC_DEFERRED, "ecc_uncorrectable", at_most, Outcome.REFUSE, vendors=AMD),
    Rule("ecc_correctable", Reading.ECC_CORRECTABLE, "ecc_correctable", at_most, Outcome.WARN, IDLE),
    Rule("bad_pages", Reading.BAD_PAGES_PENDING, "bad_pages_pending", at_most, Outcome.REFUSE, vendors=AMD),
)


def check(
    node: Node,
    chosen: Sequence[Device],
    options: DeviceOptions,
    own: Collection[int] = (),
    phase: Phase = Phase.IDLE,
) -> Report:
    """Judge `chosen` of `node`, and the host; `own` are the process ids of our own server."""
    checks: list[Check] = []
    for device in chosen:
        if phase == Phase.IDLE:
            checks += _memory(node, device, options.limits)
        checks += _tenants(node, device, own)
        checks += state(device, options.limits, phase)
        if phase == Phase.IDLE:
            checks += _hung(device)
    checks += _links(chosen, options.limits)
    if phase == Phase.IDLE:
        checks += _host(options)
    ours = {device.pci for device in chosen}
    elsewhere = [
        (device, holder)
        for device in node.devices
        if device.pci not in ours
        for holder in device.holders
        if holder.certain and holder.pid not in own
    ]
    return Report(tuple(checks), options.on_unknown, tuple(elsewhere))


def state(device: Device, limits: HealthLimits, phase: Phase) -> list[Check]:
    """What the gates on its own readings say of one device."""
    rules = (rule for rule in RULES if phase in rule.phases and device.vendor in rule.vendors)
    checks = [_apply(rule, device, limits) for rule in rules if getattr(limits, rule.limit) is not None]
    return [*checks, *_power_cap(device, limits, Outcome.REFUSE if phase == Phase.IDLE else Outcome.WARN)]


def worse(first: Check, second: Check) -> Check:
    """Of what one gate said of one device at two looks, what is to be told: the worse, or the larger value.

    A value that could be read at one of them is known.
    """
    severity = (Outcome.UNKNOWN, Outcome.PASS, Outcome.WARN, Outcome.REFUSE)
    if first.outcome != second.outcome:
        return max(first, second, key=lambda check: severity.index(check.outcome))
    numbers = all(isinstance(check.value, int | float) for check in (first, second))
    return max(first, second, key=lambda check: check.value) if numbers else first  # type: ignore[return-value, arg-type]


def occupancy(node: Node, device: Device, limits: HealthLimits) -> tuple[Occupancy, str]:
    """Whether somebody uses a device, and what says so.

    Memory in use decides: lists of processes may leave some out.
    """
    found = (*_memory(node, device, limits), *_tenants(node, device, ()))
    if busy := [item.detail for item in found if item.outcome == Outcome.REFUSE]:
        return Occupancy.BUSY, "; ".join(busy)
    if device.memory_used is None:
        return Occupancy.UNKNOWN, f"memory in use is {device[Reading.MEMORY_USED].source}"
    return Occupancy.FREE, f"{gigabytes(device.memory_used)} in use"


def unfit(look: Callable[[], Node], limits: HealthLimits) -> Callable[[Device], str | None]:
    """For `lease`: looks at a device and says why it may not be taken, or None where it is free."""

    def why(device: Device) -> str | None:
        node = look()
        state, reason = occupancy(node, node.pick([device.index])[0], limits)
        return None if state == Occupancy.FREE else f"{state}: {reason}"

    return why


def settle(
    look: Callable[[], Node],
    indices: Sequence[int],
    options: DeviceOptions,
    own: Collection[int] = (),
    every_s: float = 5,
) -> tuple[Node, Report]:
    """Wait until two looks in a row refuse nothing, for `options.settle_s` at most; the last look and its report."""
    deadline = time.monotonic() + options.settle_s
    clean = 0
    while True:
        node = look()
        report = check(node, node.pick(indices), options, own)
        clean = 0 if report.outcome == Outcome.REFUSE else clean + 1
        if clean == CLEAN_LOOKS or (not clean and time.monotonic() >= deadline):
            return node, report
        time.sleep(every_s)


def compare(before: Node, after: Node, chosen: Sequence[Device], options: DeviceOptions) -> Report:
    """What a run left behind on `chosen`: memory that did not come back, and errors that it saw.

    Raises:
        DeviceError: a device is gone.
    """
    limits = options.limits
    checks = []
    for then, now in zip(
        before.pick([one.index for one in chosen]), after.pick([one.index for one in chosen]), strict=True
    ):
        if then.address != now.address:
            raise DeviceError(f"{then} was at {then.address} before the run and is at {now.address} after it")
        amd = now.vendor in AMD
        for gate, reading, limit, otherwise in (
            (MEMORY_RETURNED, Reading.MEMORY_USED, limits.memory_return_bytes, Outcome.REFUSE),
            ("throttle_rise", Reading.THROTTLED_TICKS, limits.throttle_rise if amd else None, Outcome.WARN),
            ("ecc_uncorrectable_rise", Reading.ECC_UNCORRECTABLE, limits.ecc_uncorrectable, Outcome.REFUSE),
            ("ecc_deferred_rise", Reading.ECC_DEFERRED, limits.ecc_uncorrectable if amd else None, Outcome.REFUSE),
            ("ecc_correctable_rise", Reading.ECC_CORRECTABLE, limits.ecc_correctable_rise, Outcome.REFUSE),
        ):
            if limit is not None:
                checks.append(_rise(gate, then, now, reading, limit, otherwise))
    return Report(tuple(checks), options.on_unknown)


def _rise(gate: str, then: Device, now: Device, reading: Reading, limit: float, otherwise: Outcome) -> Check:
    first, last = then[reading].value, now[reading].value
    if first is None or last is None:
        detail = f"{reading} could not be read before and after the run"
        return Check(gate, str(now), Outcome.UNKNOWN, None, limit, now[reading].source, detail)
    rise = float(last) - float(first)
    outcome = Outcome.PASS if rise <= limit else otherwise
    return Check(gate, str(now), outcome, rise, limit, now[reading].source, f"{reading} went from {first} to {last}")


def _memory(node: Node, device: Device, limits: HealthLimits) -> list[Check]:
    """Whether more is in use than an idle driver reserves, once for each partition; and nobody who holds it."""
    if limits.memory_in_use_bytes is None:
        return []
    partitions = node.siblings(device)
    limit = limits.memory_in_use_bytes * len(partitions)
    used, source = device.memory_used, device[Reading.MEMORY_USED].source
    if used is None:
        return [Check(MEMORY, str(device), Outcome.UNKNOWN, None, limit, source, f"memory in use is {source}")]
    detail = f"{gigabytes(used)} in use, {gigabytes(limit)} allowed"
    if used <= limit:
        return [Check(MEMORY, str(device), Outcome.PASS, used, limit, source, detail)]
    found = [Check(MEMORY, str(device), Outcome.REFUSE, used, limit, source, detail)]
    if device.holders_source and not any(one.holders for one in partitions):
        nobody = f"{gigabytes(used)} in use and no process holds it: it leaked, or its owner is hidden from us"
        found.append(Check("no_owner_found", str(device), Outcome.REFUSE, 0, None, device.holders_source, nobody))
    return found


def _tenants(node: Node, device: Device, own: Collection[int]) -> list[Check]:
    """Whether processes of others are on the device, or on another partition of its PCI device."""
    source = device.holders_source
    strangers = [holder for holder in device.holders if holder.pid not in own]
    certain = [holder for holder in strangers if holder.certain]
    if certain:
        outcome, detail = Outcome.REFUSE, ", ".join(map(str, certain))
    elif source is None:
        seen = f"; open: {', '.join(map(str, strangers))}" if strangers else ""
        outcome, detail = Outcome.UNKNOWN, f"no source lists all processes{seen}"
    else:
        outcome, detail = Outcome.PASS, "nobody else"
    told = source or "open render nodes"
    checks = [Check(CO_TENANT, str(device), outcome, len(certain) if source else None, 0, told, detail)]
    others = [
        f"{holder} on {other}"
        for other in node.siblings(device)
        if other.index != device.index
        for holder in other.holders
        if holder.certain and holder.pid not in own
    ]
    if others:
        detail = ", ".join(others)
        checks.append(Check("co_tenant_same_device", str(device), Outcome.REFUSE, len(others), 0, told, detail))
    return checks


def _apply(rule: Rule, device: Device, limits: HealthLimits) -> Check:
    known, limit = device[rule.reading], getattr(limits, rule.limit)
    value = known.value
    if rule.reading == Reading.POWER and value is not None and float(value) <= UNBELIEVABLE_W:
        return Check(rule.gate, str(device), Outcome.UNKNOWN, value, limit, known.source, f"{value} W is not believed")
    if value is None:
        return Check(
            rule.gate, str(device), Outcome.UNKNOWN, None, limit, known.source, f"{rule.reading} is {known.source}"
        )
    outcome = Outcome.PASS if rule.passes(value, limit) else rule.otherwise
    return Check(rule.gate, str(device), outcome, value, limit, known.source, f"{value}, wanted: {limit}")


def _power_cap(device: Device, limits: HealthLimits, otherwise: Outcome) -> list[Check]:
    if limits.power_cap_spread_w is None:
        return []
    cap, default = device[Reading.POWER_CAP], device[Reading.POWER_CAP_DEFAULT]
    if cap.value is None or default.value is None:
        source = (cap if cap.value is None else default).source
        return [
            Check(
                "power_cap", str(device), Outcome.UNKNOWN, cap.value, default.value, source, f"cap or default {source}"
            )
        ]
    close = abs(float(cap.value) - float(default.value)) <= limits.power_cap_spread_w
    outcome, detail = Outcome.PASS if close else otherwise, f"{cap.value} W, default {default.value} W"
    return [Check("power_cap", str(device), outcome, cap.value, default.value, cap.source, detail)]


def _hung(device: Device) -> list[Check]:
    """Processes on the device that can neither run nor end: the driver may hang."""
    hung = [holder for holder in device.holders if holder.state in ("D", "Z")]
    return [
        Check("hung", str(device), Outcome.REFUSE, holder.pid, None, "proc", f"{holder} is in state {holder.state}")
        for holder in hung
    ]


def _links(chosen: Sequence[Device], limits: HealthLimits) -> list[Check]:
    """Whether devices that work together are joined by XGMI, each with each."""
    amd = [device for device in chosen if device.node is not None]
    if not limits.xgmi or len({device.pci for device in amd}) < 2:
        return []
    pairs = [(a, b) for a, b in combinations(amd, 2) if a.pci != b.pci]
    if any(a.links is None for pair in pairs for a in pair):
        return [Check("links", "all", Outcome.UNKNOWN, None, "XGMI", "KFD", "the KFD tells no links")]
    apart = [f"{a} and {b}" for a, b in pairs if b.node not in (a.links or ())]
    outcome = Outcome.REFUSE if apart else Outcome.PASS
    return [Check("links", "all", outcome, len(apart), "XGMI", "KFD", f"without XGMI: {', '.join(apart) or 'none'}")]


def _host(options: DeviceOptions) -> list[Check]:
    """Settings and load of the host that make timings unsteady; warnings."""
    proc, sysfs, limits = Path(options.proc_root), Path(options.sysfs_root), options.limits
    checks = []
    if limits.numa_balancing is not None:
        found = _text(proc / "sys/kernel/numa_balancing")
        checks.append(_host_check("numa_balancing", found, limits.numa_balancing, found == str(limits.numa_balancing)))
    if limits.governor is not None:
        paths = sorted((sysfs / "devices/system/cpu").glob("cpu*/cpufreq/scaling_governor"))
        name = "/".join(sorted({_text(path) or "unreadable" for path in paths})) or None
        checks.append(_host_check("governor", name, limits.governor, name == limits.governor))
    if limits.load_per_core is not None:
        load = (_text(proc / "loadavg") or "").split()
        share = round(float(load[0]) / (os.cpu_count() or 1), 3) if load else None
        passes = share is not None and share < limits.load_per_core
        checks.append(_host_check("load_per_core", share, limits.load_per_core, passes))
    return checks


def _host_check(gate: str, value: Value | None, limit: Value, passes: bool) -> Check:
    source = "the host's /proc and /sys"
    if value is None:
        return Check(gate, "host", Outcome.UNKNOWN, None, limit, source, f"{gate} cannot be read")
    return Check(
        gate, "host", Outcome.PASS if passes else Outcome.WARN, value, limit, source, f"{value}, wanted: {limit}"
    )


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
