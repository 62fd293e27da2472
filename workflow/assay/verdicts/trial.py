"""A trial: one arm against a floor, with the scores that gates ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.config import Dtype, GateOptions
from assay.metrics import stats
from assay.verdicts.model import FloorSummary, WorstItem
from assay.verdicts.scoretable import Floats, Mask, ScoreTable, State

SHOWN_ITEMS = 5
MIN_ARMS = 2  # distinct floor arms below which a floor is no distribution


@dataclass(frozen=True)
class Floor:
    """Floor arms, and which of them differ. A modality that cuts thresholds from them adds those."""

    arms: tuple[str, ...]
    effective: tuple[str, ...]

    def summary(self, values: Floats, method: str, cap: float | None = None) -> FloorSummary:
        """The floor as a gate reports it; `values` are the floor's own scores [items, arms]."""
        known = values[np.isfinite(values)]
        q50, q99, top = (stats.floor_quantile(known, q) if len(known) else None for q in (0.5, 0.99, 1.0))
        return FloorSummary(
            arms=list(self.arms),
            arms_effective=len(self.effective),
            n_items=int(np.isfinite(values).any(axis=1).sum()) if values.size else 0,
            n_values=len(known),
            q50=q50,
            q99=q99,
            max=top,
            cap=cap,
            method=method,
        )


def effective_arms(table: ScoreTable, arms: Sequence[str]) -> tuple[str, ...]:
    """Floor arms that have scores and differ from one another in any of them; of equal arms the first stays."""
    found: dict[str, str] = {}
    for arm in arms:
        if table.metrics(arm):
            found.setdefault(table.digest(arm), arm)
    return tuple(found.values())


@dataclass(frozen=True)
class Trial:
    """One arm judged against a floor. `planned`: a served arm, where an item without a row is a missing response."""

    table: ScoreTable
    arm: str
    floor: Floor
    options: GateOptions
    dtype: Dtype
    confirm: str | None = None
    planned: bool = True

    def failed(self, arm: str) -> Mask:
        """Items whose response cannot be scored."""
        answered = self.table.values(arm, "answered", worst=0.0)
        return answered != 1 if self.planned else answered == 0

    def scores(self, arm: str, metric: str, worst: float = np.inf) -> Floats:
        """Values of a served arm over items that have this metric; failed ones are `worst`; NaN elsewhere."""
        values = self.table.values(arm, metric, worst)
        values[self.failed(arm) & self.table.has(metric)] = worst
        return values

    def has_data(self, arm: str, metric: str) -> bool:
        """Whether any response of an arm has a value of this metric."""
        return bool((self.table.states(arm, metric) == State.OK).any())

    def matrix(self, arm: str, metric: str) -> Floats:
        """float64 [items, 1 + J]: `arm`, then the effective floor arms; only items all of them have.

        An infinite worst case becomes the largest finite score of any arm, so that means and ranks stay defined.
        """
        columns = [
            self.scores(arm, metric),
            *(self.table.values(name, metric, worst=np.inf) for name in self.floor.effective),
        ]
        scores = np.stack(columns, axis=1)
        scores = scores[~np.isnan(scores).any(axis=1)]
        finite = scores[np.isfinite(scores)]
        scores[np.isinf(scores)] = finite.max() if len(finite) else 0.0
        return scores

    def floor_values(self, metric: str) -> Floats:
        """float64 [items, J] of the effective floor arms."""
        columns = [self.table.values(arm, metric) for arm in self.floor.effective]
        return np.stack(columns, axis=1) if columns else np.empty((0, 0))

    def too_few_arms(self) -> str | None:
        """Why no stochastic gate can decide, or None."""
        count = len(self.floor.effective)
        if count >= MIN_ARMS:
            return None
        return f"distinct floor arms: {count} of {len(self.floor.arms)}, {MIN_ARMS} needed"

    def too_few_items(self, items: int) -> str | None:
        """Why a permutation test over so few items can never fail, or None."""
        if stats.least_p(items, len(self.floor.effective), self.options.permutations) < self.options.alpha_soft:
            return None
        return f"{items} items are too few for p < {self.options.alpha_soft:g}"

    def worst(self, values: Floats, pos: Floats | None = None) -> list[WorstItem]:
        """The items with the largest positive values, worst first; equal values by item id."""
        ranked = np.argsort(-np.where(np.isnan(values), -np.inf, values), kind="stable")[:SHOWN_ITEMS]
        return [
            WorstItem(
                item_id=self.table.items[index],
                value=_finite(values[index]),
                pos=None if pos is None or not np.isfinite(pos[index]) else int(pos[index]),
            )
            for index in ranked
            if values[index] > 0
        ]


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
