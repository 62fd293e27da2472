"""The devices of one server: leased and judged before it starts, watched while it runs, compared after it stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from assay.config import DeviceOptions, parse
from assay.devices.discovery import discover
from assay.devices.health import RULES, Check, Outcome, Phase, Report, compare, settle, unfit
from assay.devices.kernel_log import faults, kernel_log
from assay.devices.lease import lease
from assay.devices.masks import candidates
from assay.devices.model import Device, Node, Reading, Vendor
from assay.devices.watch import Watch, watch
from assay.errors import DeviceError
from assay.store import atomic_path

RETURN_S = 60  # a driver takes back the memory of a process that ended with some delay
LOOK_S = 1.0
TOOLS_S = 60  # AMD's tools take seconds, and know what sysfs does not: one look so often is theirs
TOLD_WHILE_RUNNING = tuple(dict.fromkeys(rule.reading for rule in RULES if Phase.DURING in rule.phases))


class Tree(Protocol):
    """What has devices: `assay.engines.server.Server`."""

    def processes(self) -> set[psutil.Process]:
        """All of it that lives."""


@dataclass
class Held:
    """Devices that are ours; without any for a server that needs none.

    `evidence` is what was seen, JSON-able, and complete
    when the devices were let go; None for a server without devices.
    """

    devices: tuple[Device, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # the mask under which a process sees them and no other
    evidence: dict[str, Any] | None = None
    _server: Tree | None = None
    _pids: set[int] = field(default_factory=set)

    def belong_to(self, server: Tree) -> None:
        """Say whose the devices are, before it starts."""
        self._server = server

    def pids(self) -> set[int]:
        """Every process of the server that was ever seen: a driver lists some of them after their end."""
        if self._server is not None:
            self._pids |= {process.pid for process in self._server.processes()}
        return self._pids


@contextmanager
def hold(plan: Mapping[str, Any], base: Mapping[str, str], samples: Path) -> Iterator[Held]:
    """Hold the devices that a serve plan asks for.

    Args:
        plan: a serve plan, or as much of one: `gpus` is how many, `device` of which kind, `device_options` how,
            `config` what for.
        base: the environment we run in: its masks and SLURM's allocation say which devices are to be had.
        samples: file for what is seen while the server runs, JSON lines; empty for a server without devices.

    Raises:
        DeviceError: which device is which cannot be told, too few became free in time, or they are not fit.
        StoreError: the samples cannot be written.
    """
    if not plan["gpus"]:
        with atomic_path(samples) as empty:
            empty.touch()
        yield Held()
        return
    vendor, options = Vendor(plan["device"]), parse(DeviceOptions, plan["device_options"], "the serve plan's devices")
    look = partial(discover, vendor, options)
    pool = candidates(look().devices, base)
    fit = unfit(partial(look, (Reading.MEMORY_USED,)), options.limits)
    with (
        lease(pool, plan["gpus"], options.lock_dir, options.lease_s, plan["config"], fit, options.settle_s) as leased,
        kernel_log(options.kernel_log) as logged,
    ):

        def told_by_kernel() -> list[Check]:
            return faults(logged(), leased.devices, options.kernel_log)

        indices = [device.index for device in leased.devices]
        before, report = settle(look, indices, options)
        report = replace(report, checks=(*report.checks, *told_by_kernel()))
        report.require()
        held = Held(leased.devices, leased.env)
        held.evidence = {"leased": [_named(device) for device in leased.devices], "before": _report(report)}
        with (
            _compared(held.evidence, partial(_after, look, before, leased.devices, options)),
            ExitStack() as watching,
        ):
            running = watch(_while_running(look), indices, held.pids, samples, options.poll_s, options.limits)
            seen = watching.enter_context(running)
            try:
                yield held
            finally:
                watching.close()  # what its last look sees counts too
                checks = (*seen.checks, *told_by_kernel())
                held.evidence["during"] = _seen(seen, leased.devices, checks, options)


def _while_running(look: Callable[[Collection[Reading]], Node]) -> Callable[[], Node]:
    """Looks that are quick, but for one now and then."""
    asked = -math.inf

    def one() -> Node:
        nonlocal asked
        if time.monotonic() < asked + TOOLS_S:
            return look(())
        asked = time.monotonic()
        return look(TOLD_WHILE_RUNNING)

    return one


@contextmanager
def _compared(evidence: dict[str, Any], look: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Look once more when the block ended, also when its server failed; an interrupt does not wait for that."""
    try:
        yield
    except Exception:
        evidence["after"] = look()
        raise
    evidence["after"] = look()


def _after(
    look: Callable[[], Node], before: Node, devices: tuple[Device, ...], options: DeviceOptions
) -> dict[str, Any]:
    """What the run left behind, once its memory came back or will not."""
    deadline = time.monotonic() + RETURN_S
    while True:
        try:
            report = compare(before, look(), devices, options)
        except DeviceError as error:  # a device that is gone is for the verdict to tell, not for us to hide a run
            return {"outcome": Outcome.REFUSE.value, "checks": [], "elsewhere": [], "error": str(error)}
        if report.outcome != Outcome.REFUSE or time.monotonic() > deadline:
            return _report(report)
        time.sleep(LOOK_S)


def _named(device: Device) -> dict[str, Any]:
    return {
        "index": device.index,
        "pci": device.address,
        "uuid": device.uuid,
        "name": device[Reading.NAME].value,
        "tool_index": device.tool_index.value,
    }


def _report(report: Report) -> dict[str, Any]:
    return {
        "outcome": report.outcome.value,
        "checks": [asdict(check) for check in report.checks],
        "elsewhere": [f"{holder} on {device}" for device, holder in report.elsewhere],
        "error": None,
    }


def _seen(seen: Watch, leased: Sequence[Device], checks: tuple[Check, ...], options: DeviceOptions) -> dict[str, Any]:
    ours = set(map(str, leased))
    return {
        "looks": seen.looks,
        "failed": list(dict.fromkeys(seen.failed)),  # a sensor that is gone says the same every second
        "strangers": [asdict(stranger) for stranger in seen.strangers.values()],
        "astray": sorted(seen.used - ours),
        "unused": sorted(ours - seen.used - seen.blind),
        "blind": sorted(seen.blind),
        "health": _report(Report(checks, options.on_unknown)),
    }
