"""A trial of speech: one arm beside every way in which the reference says the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.config import Dtype, TtsGates
from assay.records import JUDGE, Status
from assay.verdicts.drafts import Draft, make_gate
from assay.verdicts.model import Threshold
from assay.verdicts.scoretable import Floats, FloorValues, Mask, ScoreTable, State
from assay.verdicts.trial import MIN_ARMS, Floor, Trial, effective_arms

CONTROL = "control_"  # how the arms of planted faults begin


def cut_floor(table: ScoreTable, values: FloorValues, arms: Sequence[str], dtype: Dtype, options: TtsGates) -> Floor:
    """The floor of speech: its arms. Each gate takes from their scores what it needs."""
    return Floor(tuple(arms), effective_arms(table, arms))


@dataclass(frozen=True)
class SpeechTrial(Trial):
    """A trial of an arm that answers in speech."""

    options: TtsGates

    def references(self, arm: str) -> list[str]:
        """The reference's own arms that `arm` is held against: the judge's and the distinct floor arms but itself."""
        return [name for name in (JUDGE, *self.floor.effective) if name != arm]

    def reference_values(self, arm: str, metric: str) -> Floats:
        """float64 [arms, items] of `references(arm)`."""
        return np.stack([self.table.values(name, metric) for name in self.references(arm)])

    def reference_median(self, arm: str, metric: str) -> Floats:
        """float64 [items]: what the reference does, NaN where it has no value."""
        values = self.reference_values(arm, metric)
        known = ~np.isnan(values).all(axis=0)
        found = np.full(values.shape[1], np.nan)
        found[known] = np.nanmedian(values[:, known], axis=0)
        return found

    def asked(self, arm: str, metric: str) -> bool:
        """Whether an arm has anything, be it the worst case, to say of a metric."""
        return bool((self.table.states(arm, metric) != State.ABSENT).any())

    def worst_if_failed(self, arm: str, metric: str, worst: Floats | float) -> Floats:
        """Values of an arm; `worst` where the item failed and any arm has this metric; NaN where it has none."""
        values = self.table.values(arm, metric)
        lost = (self.failed(arm) | (self.table.states(arm, metric) == State.MISSING_AS_WORST)) & self.table.has(metric)
        return np.where(lost, worst, values)

    def too_few(self) -> str | None:
        """Why the floor says nothing: a model that says all the same each time needs one arm, others a distribution."""
        needed = 1 if self.options.deterministic else MIN_ARMS
        count = len(self.floor.effective)
        if count >= needed:
            return None
        return f"distinct floor arms: {count} of {len(self.floor.arms)}, {needed} needed"

    @property
    def repeats(self) -> bool:
        """Whether one hit, if it comes again, is a fault: not with a model that draws other speech each time."""
        return self.options.deterministic or self.arm.startswith(CONTROL)


def not_asked(trial: SpeechTrial, gate: str, metric: str, statistic: str, unit: str, why: str) -> Draft:
    """A gate that does not concern this pass."""
    return Draft(
        gate=make_gate(
            gate,
            trial,
            metric=metric,
            required=False,
            status=Status.SKIPPED_OPTIONAL,
            statistic=statistic,
            value=None,
            unit=unit,
            detail=why,
        )
    )


def flat(trial: SpeechTrial, gate: str, metric: str, statistic: str, broken: dict[str, Mask], fine: str) -> Draft:
    """A hard gate: no item may break any of some rules (what is broken -> items)."""
    bad = np.logical_or.reduce(list(broken.values()))
    found = [f"{name} ({int(mask.sum())})" for name, mask in broken.items() if mask.any()]
    return Draft(
        hard=bool(bad.any()),
        gate=make_gate(
            gate,
            trial,
            metric=metric,
            severity="hard",
            statistic=statistic,
            value=int(bad.sum()),
            unit="count",
            threshold=Threshold(value=0, source="absolute", detail="no item may"),
            worst=trial.worst(bad.astype(float)),
            detail="; ".join(found) if found else fine,
        ),
    )
