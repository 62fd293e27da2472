"""What a modality gives the verdict: a suite of gates. Everything else that decides is common.

Each gate's definition and its reasons stand in the docstring of its function. Common to all:

- The unit is the item. Parts of an item depend on one another, so every count, mean and permutation is over items, and
  an aggregate is the plain mean (or root mean square) of the items' values.
- A failed or missing response of a served arm counts as the worst case; it is never dropped.
- Thresholds and aggregates of the floor come from the effective floor arms: arms equal in every score of every metric
  are one arm (in float32 two arms may agree in all margins and still differ in logprobs: two arms).
- A statistical gate fails when the effect exceeds its limit, p < `alpha_soft`, Holm over all p-values of the config
  stays below `alpha`, and the other instance, if it has data, has p < `alpha_confirm` in the same gate. Significant on
  one instance alone is INCONCLUSIVE: the instances differ.
- FAIL needs only enough evidence, PASS needs all of it: what stands in the way of a pass makes INCONCLUSIVE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from assay.config import Dtype, GateOptions
from assay.records import pass_of
from assay.verdicts.drafts import Draft, settle
from assay.verdicts.evidence import COVERAGE, coverage_gate
from assay.verdicts.model import Claim, Gate
from assay.verdicts.planted import Control
from assay.verdicts.scoretable import FloorValues, ScoreTable
from assay.verdicts.trial import Floor, Trial

T_contra = TypeVar("T_contra", bound=Trial, contravariant=True)
T = TypeVar("T", bound=Trial)
GateJudge = Callable[[T_contra], Draft]


@dataclass(frozen=True)
class Check(Generic[T_contra]):
    """One gate of a suite, and when it is asked."""

    judge: GateJudge[T_contra]
    needs: str | None = None  # metric of the items it is about: without any it is not asked; None: it always is
    on_floor: bool = False  # whether each floor arm, as a negative control, must pass it too
    powerless: Callable[[ScoreTable, Any], str | None] | None = None  # why no fault could fail it, or None


@dataclass(frozen=True)
class Suite(Generic[T]):
    """The gates of one modality, and all that is special about judging by them.

    `trial` is the kind of trial that its gates take. `cut_floor` makes its floor of the score table, the values of the
    FLOOR table, the floor arms, the served dtype and the options. `judge_problems` says why the judge's own scores
    cannot be trusted, besides those that are missing or not finite. `claim` is the bound that its gates prove. `counts`
    are the kinds of items that a verdict counts, and the metric that tells each. `unread` finds in a judged table the
    answers that came and could not be read: (arm, item) -> why; `content` what they hold, whatever the bytes around
    it: (arm, item) -> hash.
    """

    options: type[GateOptions]
    trial: type[T]
    cut_floor: Callable[[ScoreTable, FloorValues, Sequence[str], Dtype, Any], Floor]
    gates: Mapping[str, Check[T]]  # in the order a reader meets them, after coverage
    controls: Sequence[Control]
    counts: Mapping[str, str]
    claim: Callable[[Sequence[Gate]], Claim | None]
    judge_problems: Callable[[ScoreTable, Any], list[str]] = lambda table, floor: []
    unread: Callable[[Path], dict[tuple[str, str], str]] = lambda judged: {}
    content: Callable[[Path], dict[tuple[str, str], str]] = lambda judged: {}

    @property
    def checks(self) -> dict[str, Check[T]]:
        """Every gate, coverage first."""
        return {COVERAGE: Check(coverage_gate), **self.gates}

    def applicable(self, table: ScoreTable) -> dict[str, Check[T]]:
        """The gates that the planned items call for."""
        return {
            name: check for name, check in self.checks.items() if check.needs is None or table.has(check.needs).any()
        }

    def evaluate(
        self,
        table: ScoreTable,
        floor: Floor,
        served: Mapping[int, Sequence[str]],
        dtype: Dtype,
        options: GateOptions,
    ) -> list[Gate]:
        """All gates of a run: every one for each pass of each instance, so that no instance is only a witness.

        Args:
            served: instance -> its arms, of instances that came up.
        """
        confirms = {
            arm: confirming_arm(arm, [other for key in sorted(served) if key != instance for other in served[key]])
            for instance, arms in sorted(served.items())
            for arm in arms
        }
        trials = [self.trial(table, arm, floor, options, dtype, other) for arm, other in confirms.items()]
        drafts = [check.judge(trial) for trial in trials for check in self.applicable(table).values()]
        return settle(drafts, options, confirms)


def confirming_arm(arm: str, others: Sequence[str]) -> str | None:
    """Of the passes `others` of other instances, the one that confirms `arm`: that of the same name, else the first."""
    name = pass_of(arm)
    return next((other for other in others if pass_of(other) == name), others[0] if others else None)
