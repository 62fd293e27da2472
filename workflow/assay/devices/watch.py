"""What is seen of devices while a server runs on them: samples, and processes of others. It only looks."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from assay.config import HealthLimits
from assay.devices.health import Check, Outcome, Phase, state, worse
from assay.devices.model import Node, Reading
from assay.errors import DeviceError, StoreError

WATCHED = (Reading.MEMORY_USED, Reading.ACTIVITY, Reading.POWER, Reading.CLOCK, Reading.TEMPERATURE)


@dataclass(frozen=True)
class Stranger:
    """A process of somebody else that came onto our devices."""

    pid: int
    name: str | None
    device: str
    first_utc: str
    memory: int | None  # the most that was seen [bytes]


@dataclass
class Watch:
    """What was seen while a server ran, and what the gates say of it."""

    limits: HealthLimits = field(default_factory=HealthLimits)
    looks: int = 0
    failed: list[str] = field(default_factory=list)  # looks that gave no answer, and why
    strangers: dict[int, Stranger] = field(default_factory=dict)  # by process id
    used: set[str] = field(default_factory=set)  # devices, ours or not, that our server's processes were on
    blind: set[str] = field(default_factory=set)  # devices whose processes no source lists: a stranger goes unseen
    clocks: dict[str, list[float]] = field(default_factory=dict)  # device -> MHz
    worst: dict[tuple[str, str], Check] = field(default_factory=dict)  # of all looks, by gate and device

    @property
    def checks(self) -> tuple[Check, ...]:
        """What every gate said, at its worst."""
        return (*self.worst.values(), *self._clock_spread())

    def _clock_spread(self) -> list[Check]:
        """Whether our devices ran at one clock; nothing where that is not asked, or there is but one."""
        limit = self.limits.clock_spread_pct
        medians = {device: statistics.median(clocks) for device, clocks in self.clocks.items() if clocks}
        if limit is None or len(medians) < 2 or not (low := min(medians.values())):
            return []
        spread = round(100 * (max(medians.values()) / low - 1), 2)
        outcome = Outcome.PASS if spread <= limit else Outcome.WARN
        detail = ", ".join(f"{device} {clock:g} MHz" for device, clock in medians.items())
        return [Check("clock_spread", "all", outcome, spread, limit, "samples", detail)]

    def take(self, node: Node, indices: Sequence[int], own: Collection[int], utc: str) -> list[dict[str, Any]]:
        """Take one look into account; its samples."""
        self.looks += 1
        self.used |= {
            str(device) for device in node.devices if any(one.certain and one.pid in own for one in device.holders)
        }
        samples = []
        for device in node.pick(indices):
            others = [
                holder
                for sibling in node.siblings(device)
                for holder in sibling.holders
                if holder.certain and holder.pid not in own
            ]
            if device.holders_source is None:
                self.blind.add(str(device))
            for holder in others:
                new = Stranger(holder.pid, holder.name, str(device), utc, holder.memory)
                seen = self.strangers.get(holder.pid, new)
                memory = max((used for used in (seen.memory, new.memory) if used is not None), default=None)
                self.strangers[holder.pid] = replace(seen, memory=memory)
            for found in state(device, self.limits, Phase.DURING):
                key = (found.gate, found.device)
                self.worst[key] = worse(self.worst.get(key, found), found)
            clock = device[Reading.CLOCK].value
            if clock is not None:
                self.clocks.setdefault(str(device), []).append(float(clock))
            values = {reading.value: device[reading].value for reading in WATCHED}
            samples.append({"utc": utc, "device": str(device), **values, "strangers": [asdict(one) for one in others]})
        return samples


@contextmanager
def watch(
    look: Callable[[], Node],
    indices: Sequence[int],
    own: Callable[[], Collection[int]],
    path: Path,
    every_s: float,
    limits: HealthLimits,
) -> Iterator[Watch]:
    """Look at devices every `every_s` seconds until the block ends; each sample is one JSON line of `path`.

    A look that fails is noted and the next one is made: a run does not end because a sensor does not answer.

    Args:
        look: gives the node; quick, so mostly of sysfs or NVML alone.
        indices: runtime numbers of our devices.
        own: process ids of our server, asked at each look: it starts processes as it goes.
        path: file for the samples; begun anew.
        limits: of the gates.

    Raises:
        StoreError: the file cannot be written.
    """
    seen, stop = Watch(limits), threading.Event()

    def work(output: IO[str]) -> None:
        while not stop.wait(every_s if seen.looks or seen.failed else 0):
            utc = datetime.now(UTC).isoformat(timespec="milliseconds")
            try:
                before = set(own())  # and after: one that starts or ends in the meantime is ours as well
                node = look()
                samples = seen.take(node, indices, before | set(own()), utc)
            except DeviceError as error:
                seen.failed.append(str(error))
                samples = [{"utc": utc, "error": str(error)}]
            with _writing(path):
                output.writelines(json.dumps(sample) + "\n" for sample in samples)
                output.flush()

    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        output = path.open("w", encoding="utf-8")
    with output, ThreadPoolExecutor(1, "watch") as threads:
        working = threads.submit(work, output)
        try:
            yield seen
        finally:
            stop.set()
            working.result()  # a watch that broke off is no watch


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
