"""The floor of token margins and a trial against it: what every modality with teacher-forced tokens shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assay.config import Dtype, MarginGates
from assay.metrics import text
from assay.records import JUDGE
from assay.verdicts.evidence import LEVELS
from assay.verdicts.scoretable import Floats, FloorValues, Mask, ScoreTable, State
from assay.verdicts.trial import Floor, Trial, effective_arms

SOFT = "G-soft"  # gate that the token margins in a FLOOR table are for
MIN_FLOOR_EXCEEDANCES = 10  # tau_soft is at least this order statistic of the floor
MAX_LOSSY = 0.1  # share of greedy items that may be left out because text does not encode to the ids it came from
SOFT_TAIL = 2e-4  # share of floor tokens above tau_soft
CAP_RULE = "a floor above the cap makes the gate inconclusive, never wider"


@dataclass(frozen=True)
class MarginFloor(Floor):
    """The floor and the thresholds cut from it [nat]."""

    tau_hard: float
    hard_from: Literal["floor", "absolute"]
    hard_detail: str
    tau_soft: float
    soft_detail: str
    tokens: int
    exceedances: int  # positive token margins


def cut_floor(
    table: ScoreTable, values: FloorValues, arms: Sequence[str], dtype: Dtype, options: MarginGates
) -> MarginFloor:
    """Cut the thresholds of the margin gates from the floor arms; `values` of G-soft are their positive token margins.

    tau_hard is the largest of: kappa x the largest floor margin; kappa x the largest floor |delta logprob| (a served
    token may trail by the sum of two such errors); 2 ulp of the logit dtype in [16, 32), where large logits live; and
    the dtype's resolution. tau_soft is the r-th largest floor token margin, r = max(10, ceil(2e-4 N)) of N floor
    tokens; a floor with fewer than r positive margins has no such token, and tau_soft is tau_hard. It is never below
    the resolution.
    """
    margins = values.get(SOFT, {})
    effective = effective_arms(table, arms)
    resolution = options.resolution_nat[dtype]
    largest = _largest([table.values(arm, "margin_max") for arm in effective])
    delta = _largest([table.aux(arm, "logprob_rms", "max_abs") for arm in effective])
    candidates: list[tuple[float, Literal["floor", "absolute"], str]] = [
        (options.kappa * largest, "floor", f"{options.kappa:g} x the largest floor margin ({largest:.3g} nat)"),
        (options.kappa * delta, "floor", f"{options.kappa:g} x the largest floor |delta logprob| ({delta:.3g} nat)"),
        (2 * text.ulp(dtype, 16.0), "absolute", f"2 ulp of {dtype} logits in [16, 32)"),
        (resolution, "absolute", f"resolution of {dtype}"),
    ]
    tau_hard, source, detail = max(candidates, key=lambda candidate: candidate[0])
    tokens = int(sum(np.nansum(table.aux(arm, "margin_mean", "n")) for arm in effective))
    pooled = np.sort(np.concatenate([np.empty(0), *(margins[arm] for arm in effective if arm in margins)]))[::-1]
    rank = max(MIN_FLOOR_EXCEEDANCES, math.ceil(SOFT_TAIL * tokens))
    if len(pooled) < rank:
        tau_soft, soft = tau_hard, f"tau_hard: only {len(pooled)} of {tokens} floor tokens have a positive margin"
    else:
        tau_soft, soft = float(pooled[rank - 1]), f"the {rank}-th largest of {tokens} floor token margins"
    return MarginFloor(
        arms=tuple(arms),
        effective=effective,
        tau_hard=tau_hard,
        hard_from=source,
        hard_detail=detail,
        tau_soft=max(tau_soft, resolution),
        soft_detail=soft,
        tokens=tokens,
        exceedances=len(pooled),
    )


def _largest(columns: Sequence[Floats]) -> float:
    known = [float(np.nanmax(column)) for column in columns if np.isfinite(column).any()]
    return max(known, default=0.0)


@dataclass(frozen=True)
class MarginTrial(Trial):
    """A trial of an arm whose tokens were judged."""

    floor: MarginFloor
    options: MarginGates

    @property
    def resolution(self) -> float:
        """Difference [nat] below which everything is numerics at the served dtype."""
        return self.options.resolution_nat[self.dtype]

    def lossy(self) -> Mask:
        """Items left without margins in every arm, because the reference's own text does not encode to its ids."""
        return self.table.values(JUDGE, "lossy_text") == 1

    def unjudged(self, metric: str) -> Mask:
        """Answered items that should have this metric and whose evidence does not allow it; few `lossy` ones aside."""
        lossy = self.lossy()
        few = lossy.sum() <= MAX_LOSSY * self.table.has("margin_max").sum()
        lacking = self.table.has(metric) & ~self.failed(self.arm) & np.isnan(self.table.values(self.arm, metric))
        if not self.planned:
            lacking &= self.table.states(self.arm, metric) != State.ABSENT
        return lacking & ~lossy if few else lacking

    def unjudged_why(self, metric: str, too_short: bool = False) -> str | None:
        """Why some answers cannot pass by this metric, or None; `too_short`: an answer of one token has none."""
        # A trend needs two tokens: an item that has a margin and no trend is short, not without evidence.
        wanted = "margin_max" if too_short else metric
        lacking = self.unjudged(wanted)
        parsed = lacking & (self.table.values(self.arm, "evidence") >= LEVELS.index("E3"))
        if parsed.any():
            who = f"{int(parsed.sum())} responses, first {self._first(parsed)},"
            return f"{who} have no token ids, and text that cannot stand for them (E3)"
        if (lacking & self.lossy()).any():
            lossy = int(self.lossy().sum())
            return f"{lossy} items of the reference itself do not survive encoding: too many to leave out"
        if lacking.any():
            return f"{int(lacking.sum())} responses, first {self._first(lacking)}, have no {wanted}"
        return None

    def _first(self, items: Mask) -> str:
        return self.table.items[int(np.argmax(items))]


def judge_problems(table: ScoreTable, floor: MarginFloor) -> list[str]:
    """That the judge, forced through its own greedy run, prefers another token."""
    own = table.values(JUDGE, "margin_max")
    if (own > floor.tau_hard).any():
        index = int(np.nanargmax(own))
        return [f"the judge does not agree with its own greedy run: {own[index]:.3g} nat at {table.items[index]}"]
    return []


def too_noisy(noisy: bool) -> str | None:
    """Why a floor above its cap decides nothing, or None."""
    return f"floor too noisy: {CAP_RULE}" if noisy else None
