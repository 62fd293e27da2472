"""What was measured at all: coverage, evidence levels, and whether the reference can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from assay.records import JUDGE
from assay.verdicts.drafts import Draft, make_gate
from assay.verdicts.model import Coverage, EvidenceSummary, Threshold, Unscored, WorstItem
from assay.verdicts.scoretable import Mask, ScoreTable, State
from assay.verdicts.trial import SHOWN_ITEMS, Trial

COVERAGE = "G-coverage"
LEVELS = ("E0", "E1", "E2", "E3", "none")


def cover(
    table: ScoreTable, arms: Sequence[str], failures: Mapping[tuple[str, str], str], retried: int = 0
) -> Coverage:
    """What became of every planned request of `arms`."""
    failed: list[Unscored] = []
    missing: list[Unscored] = []
    for arm in arms:
        answered, states = table.values(arm, "answered", worst=0.0), table.states(arm, "answered")
        for index in np.flatnonzero(answered != 1):
            item = table.items[index]
            absent = states[index] == State.ABSENT
            reason = failures.get((arm, item), "no record" if absent else "no scorable response")
            (missing if absent else failed).append(Unscored(item_id=item, arm=arm, reason=reason))
    planned = len(table.items) * len(arms)
    scored = planned - len(failed) - len(missing)
    return Coverage(planned=planned, scored=scored, retried=retried, failed=failed, missing=missing)


def coverage_gate(trial: Trial) -> Draft:
    """G-coverage: every planned request of the pass has a scored response. The denominator is what was planned."""
    failed = trial.failed(trial.arm)
    n, bad = len(failed), int(failed.sum())
    return Draft(
        hard=bad > 0,
        gate=make_gate(
            COVERAGE,
            trial,
            metric="answered",
            severity="hard",
            statistic="requests without a scored response",
            value=bad,
            unit="count",
            threshold=Threshold(value=0, source="absolute", detail="every planned request must be answered"),
            worst=[WorstItem(item_id=trial.table.items[i], value=1) for i in np.flatnonzero(failed)[:SHOWN_ITEMS]],
            detail=f"{n - bad} of {n} planned requests answered",
        ),
    )


def summarise_evidence(table: ScoreTable, arms: Sequence[str]) -> EvidenceSummary:
    """Evidence levels and prompt checks over the served responses."""
    levels = np.concatenate([np.empty(0), *(table.values(arm, "evidence", worst=4.0) for arm in arms)])
    prompt = np.concatenate([np.empty(0), *(table.values(arm, "prompt_equal") for arm in arms)])
    by_ids = np.concatenate([np.empty(0), *(table.aux(arm, "prompt_equal", "by_ids") for arm in arms)])
    known = np.isfinite(prompt)
    return EvidenceSummary(
        level_counts={name: int((levels == code).sum()) for code, name in enumerate(LEVELS)},
        prompt_by_ids=int((known & (by_ids == 1)).sum()),
        prompt_by_count=int((known & (by_ids != 1)).sum()),
        prompt_unchecked=int((~known).sum()),
    )


def reference_problems(table: ScoreTable, floor_arms: Sequence[str], served: Sequence[str]) -> list[str]:
    """Why the reference cannot be trusted: scores that are missing or not finite.

    A server's own NaN is no answer at all, so a score of a `served` arm that is not finite is the judge's as well.
    """
    problems = []
    for arm in served:
        bad = nonfinite(table, arm)
        if bad.any():
            item = table.items[int(np.flatnonzero(bad)[0])]
            problems.append(f"the judge gives no finite number for {int(bad.sum())} answers of '{arm}', first {item}")
    for arm in (JUDGE, *floor_arms):
        bad = nonfinite(table, arm)
        for metric in table.metrics(arm):
            bad |= table.states(arm, metric) == State.MISSING_AS_WORST
        if bad.any():
            item = table.items[int(np.flatnonzero(bad)[0])]
            problems.append(f"reference arm '{arm}' has no finite score for {int(bad.sum())} items, first {item}")
    return problems


def nonfinite(table: ScoreTable, arm: str) -> Mask:
    """Items for which any metric of an arm is not finite."""
    found = np.zeros(len(table.items), bool)
    for metric in table.metrics(arm):
        found |= table.states(arm, metric) == State.NONFINITE
    return found
