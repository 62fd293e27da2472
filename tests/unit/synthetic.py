"""Synthetic score tables: a small noisy language model whose faults are known.

At each position the judge's first two choices are `gap` apart (density 0.5 at 0, as on the real model); an arm adds
normal noise to their difference, takes the second where the noise exceeds the gap, and then has the margin `gap`. Its
logprob error is the same noise, its KL half the square of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from assay.config import TextGates
from assay.records import FLOOR, SCORES
from assay.verdicts.decide import RunFacts
from assay.verdicts.model import Cleanup, ConfigInfo, DeviceReport, Devices, Instance, Startup, Tool
from assay.verdicts.scoretable import FloorValues, ScoreTable, floor_values

NOISE = {"float32": 2e-6, "bfloat16": 0.03}
SERVED = {0: ["served_0_alone", "served_0_load"], 1: ["served_1_load"]}
ALL_SERVED = [arm for arms in SERVED.values() for arm in arms]
OPTIONS = TextGates(permutations=4999)
TOOL = Tool(version="0")


@dataclass
class Columns:
    """Scores of one arm: metric -> values [items] and helper numbers; `flags` where a value is not plain."""

    values: dict[str, np.ndarray] = field(default_factory=dict)
    aux: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    flags: dict[str, np.ndarray] = field(default_factory=dict)

    def put(self, metric: str, values: Any, **aux: Any) -> None:
        self.values[metric] = np.asarray(values, float)
        self.aux[metric] = {
            key: np.broadcast_to(np.asarray(part, float), self.values[metric].shape) for key, part in aux.items()
        }
        self.flags[metric] = np.full(len(self.values[metric]), "ok", dtype=object)

    def fail(self, index: int) -> None:
        """The response of one item cannot be scored."""
        for metric, values in self.values.items():
            values[index], self.flags[metric][index] = np.nan, "missing_as_worst"
        if "answered" in self.values:
            self.values["answered"][index], self.flags["answered"][index] = 0.0, "ok"

    def undefine(self, metric: str, where: Any = slice(None), flag: str = "undefined") -> None:
        """No value for this metric."""
        self.values[metric][where], self.flags[metric][where] = np.nan, flag


class World:
    """Score columns of every arm of one run; change them, then ask for `table()`."""

    def __init__(
        self, n: int = 32, dtype: str = "bfloat16", floors: int = 3, tokens: int = 64, seed: int = 0, needles: int = 0
    ):
        self.dtype, self.rng, self.needles = dtype, np.random.default_rng(seed), needles
        self.items = [f"item-{number:06d}" for number in range(n)]
        self.gaps = self.rng.exponential(2.0, (n, tokens))
        self.arms: dict[str, Columns] = {}
        self.tokens: dict[str, np.ndarray] = {}
        self.floor_arms = [f"{dtype}-{change}" for change in ("batch", "attention", "chunked", "matmul")[:floors]]
        self.add("judge", 0.0)
        for arm in (*self.floor_arms, *ALL_SERVED):
            self.add(arm)
        # A deterministic engine: both instances and both passes give the same output.
        for arm in ALL_SERVED[1:]:
            self.copy(ALL_SERVED[0], arm)
        self.controls: dict[str, str] = {}

    def add(
        self, arm: str, noise: float | None = None, margins: np.ndarray | None = None, deltas: np.ndarray | None = None
    ) -> Columns:
        """Score an arm with this noise (the dtype's own when None), or with these token margins and logprob errors."""
        scale = NOISE[self.dtype] if noise is None else noise
        drawn = self.rng.normal(0.0, 1.0, self.gaps.shape) * scale
        deltas = drawn if deltas is None else deltas
        margins = np.where(drawn > self.gaps, self.gaps, 0.0) if margins is None else margins
        part, n, tokens = Columns(), *self.gaps.shape
        quarter = tokens // 4
        clipped = np.minimum(margins, 0.5)
        early, late = clipped[:, :quarter].mean(axis=1), clipped[:, -quarter:].mean(axis=1)
        differs = margins > 0
        part.put("answered", np.ones(n))
        part.put("evidence", np.zeros(n))
        part.put("margin_max", margins.max(axis=1), pos=margins.argmax(axis=1))
        part.put("margin_mean", clipped.mean(axis=1), n=tokens)
        part.put("margin_trend", late - early, late=late, early=early, n=tokens)
        part.put(
            "logprob_rms",
            np.sqrt((deltas**2).mean(axis=1)),
            n=tokens,
            mean=deltas.mean(axis=1),
            max_abs=np.abs(deltas).max(axis=1),
            served_mass=0.97,
            judge_mass=0.97,
        )
        part.put("kl_mean", (deltas**2).mean(axis=1) / 2, n=tokens, max=(deltas**2).max(axis=1) / 2, same_top=1.0)
        part.put("exact", ~differs.any(axis=1))
        part.put("first_divergence", np.where(differs.any(axis=1), differs.argmax(axis=1), np.nan))
        part.undefine("first_divergence", ~differs.any(axis=1))
        part.put("output_tokens", np.full(n, float(tokens)), ref=tokens, tolerance=1)
        part.put("prompt_equal", np.ones(n), by_ids=1.0, served=37, ref=37)
        part.put("bos_ok", np.ones(n))
        part.put("ids_ok", np.ones(n))
        part.put("tokens_after_eos", np.zeros(n))
        part.put("finish_ok", np.ones(n))
        if self.needles:
            found = np.where(np.arange(n) < self.needles, 1.0, np.nan)
            part.put("needle", found, prompt_tokens=2000)
        self.arms[arm], self.tokens[arm] = part, margins
        return part

    def copy(self, source: str, target: str) -> Columns:
        """Make `target` score exactly like `source`."""
        old = self.arms[source]
        self.arms[target] = Columns(
            {key: part.copy() for key, part in old.values.items()},
            {key: {name: part.copy() for name, part in parts.items()} for key, parts in old.aux.items()},
            {key: part.copy() for key, part in old.flags.items()},
        )
        self.tokens[target] = self.tokens[source]
        return self.arms[target]

    def serve(self, **score: Any) -> None:
        """Score instance 0's first pass anew, and all other passes like it."""
        self.add(ALL_SERVED[0], **score)
        for arm in ALL_SERVED[1:]:
            self.copy(ALL_SERVED[0], arm)

    def control(self, fault: str, gate: str, **score: Any) -> Columns:
        """Plant a positive control."""
        self.controls[fault] = gate
        return self.add(f"control_{fault}", **score)

    def scores(self) -> pa.Table:
        """The SCORES table, in no particular order."""
        return pa.concat_tables(
            [_rows(self.items, arm, metric, part) for arm, part in self.arms.items() for metric in part.values]
        )

    def floor(self) -> pa.Table:
        """The FLOOR table."""
        parts = []
        for arm in self.floor_arms:
            owner, _ = np.nonzero(self.tokens[arm] > 0)
            n = len(owner)
            parts.append(
                pa.table(
                    {
                        "gate": ["G-soft"] * n,
                        "metric": ["margin"] * n,
                        "item_id": [self.items[index] for index in owner],
                        "arm": [arm] * n,
                        "value": self.tokens[arm][self.tokens[arm] > 0],
                    }
                ).cast(FLOOR)
            )
        return pa.concat_tables(parts) if parts else FLOOR.empty_table()

    def table(self) -> ScoreTable:
        return ScoreTable.from_tables([self.scores()], self.items)

    def margins(self) -> FloorValues:
        return floor_values([self.floor()])

    def facts(self, **changes: Any) -> RunFacts:
        known = {
            "config": ConfigInfo(name="synthetic", dtype=self.dtype, tier="smoke", modality="text"),
            "dtype": self.dtype,
            "instances": tuple(instance(number, arms) for number, arms in SERVED.items()),
            "floor_arms": tuple(self.floor_arms),
            "controls": tuple(self.controls.items()),
            "options": OPTIONS,
        }
        return RunFacts(**(known | changes))


def instance(number: int, arms: list[str], **changes: Any) -> Instance:
    known = {
        "instance": number,
        "arms": arms,
        "startup": Startup(ready=True, seconds=1.0),
        "cleanup": Cleanup(stopped_by="SIGINT", clean=True, port_free=True),
    }
    return Instance(**(known | changes))


def devices(
    before: list[dict[str, Any]] | None = None,
    after: list[dict[str, Any]] | None = None,
    error: str | None = None,
    health: list[dict[str, Any]] | None = None,
    **during: Any,
) -> Devices:
    """Two idle devices that nothing happened to, but for these checks and what was seen while they were used."""

    def report(checks: list[dict[str, Any]] | None, error: str | None = None) -> DeviceReport:
        passed = {"gate": "memory_in_use", "device": "HIP 0", "outcome": "pass", "detail": "0.3 GB in use"}
        found = {"outcome": "pass", "checks": [passed]}
        if checks:
            worst = "refuse" if any(one["outcome"] == "refuse" for one in checks) else "warn"
            found = {"outcome": worst, "checks": [passed, *checks]}
        return DeviceReport.model_validate(found | ({"outcome": "refuse", "error": error} if error else {}))

    leased = [
        {"index": 0, "pci": "0000:05:00.0", "uuid": "GPU-1", "name": "AMD Instinct MI300X", "tool_index": 0},
        {"index": 1, "pci": "0000:26:00.0", "uuid": "GPU-2", "name": None, "tool_index": None},
    ]
    seen = {"looks": 9, "failed": [], "strangers": [], "astray": [], "unused": [], "blind": []} | during
    seen["health"] = report(health)
    return Devices.model_validate(
        {"leased": leased, "before": report(before), "during": seen, "after": report(after, error)}
    )


def check(gate: str, outcome: str, detail: str, device: str = "HIP 1") -> dict[str, Any]:
    """What a health gate said, as an instance's evidence has it."""
    return {"gate": gate, "device": device, "outcome": outcome, "detail": detail}


def _rows(items: list[str], arm: str, metric: str, part: Columns) -> pa.Table:
    values, aux, n = part.values[metric], part.aux[metric], len(items)
    keep = ~((metric == "needle") & np.isnan(values) & (part.flags[metric] == "ok"))
    names = sorted(aux)
    helpers = pa.MapArray.from_arrays(
        pa.array(np.arange(n + 1, dtype=np.int32) * len(names)),
        pa.array(names * n, pa.string()),
        pa.array(np.stack([aux[name] for name in names], axis=1).ravel() if names else np.empty(0), pa.float64()),
    )
    table = pa.table(
        {
            "config": pa.repeat("synthetic", n),
            "item_id": items,
            "set_id": pa.repeat("set", n),
            "arm": pa.repeat(arm, n),
            "metric": pa.repeat(metric, n),
            "value": pa.array(values, mask=np.isnan(values)),
            "flag": pa.array(part.flags[metric]),
            "unit": pa.repeat("nat", n),
            "direction": pa.array(np.full(n, -1, np.int8)),
            "aux": helpers,
        }
    )
    return table.filter(pa.array(keep)).cast(SCORES)
