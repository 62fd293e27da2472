"""Drafts: gates before multiplicity and confirmation, the parts they are made of, and how they are settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.config import CaveatCode, GateOptions
from assay.metrics import stats
from assay.records import Status
from assay.verdicts.model import (
    Caveat,
    Confirm,
    Diagnosis,
    FloorSummary,
    Gate,
    GateTest,
    Threshold,
    WorstItem,
)
from assay.verdicts.trial import Trial


@dataclass(frozen=True)
class Draft:
    """A gate before multiplicity and confirmation."""

    gate: Gate
    p: float | None = None
    effect: bool = False  # the difference is large enough to matter
    hard: bool = False  # fails whatever the statistics
    blocked: str | None = None  # why it cannot pass
    retest: Callable[[str], float | None] | None = None  # p of the same test on another arm; None: no data


def settle(
    drafts: Sequence[Draft], options: GateOptions, confirms: Mapping[str, str | None] | None = None
) -> list[Gate]:
    """Drafts to gates: Holm over all their p-values, then the confirm step on `confirms[arm]`."""
    adjusted = iter(stats.holm([draft.p for draft in drafts if draft.p is not None]).tolist())
    return [_settle(draft, options, None if draft.p is None else next(adjusted), confirms or {}) for draft in drafts]


def _settle(draft: Draft, options: GateOptions, p_holm: float | None, confirms: Mapping[str, str | None]) -> Gate:
    gate = draft.gate
    test = gate.test.model_copy(update={"p_holm": p_holm}) if gate.test and p_holm is not None else gate.test
    status, confirm, detail, blocked = gate.status, gate.confirm, gate.detail, draft.blocked
    significant = (
        draft.effect
        and draft.p is not None
        and p_holm is not None
        and draft.p < options.alpha_soft
        and p_holm < options.alpha
    )
    if draft.hard:
        status = Status.FAIL
    elif significant:
        arm = confirms.get(gate.arm)
        p = draft.retest(arm) if arm and draft.retest else None
        reproduced = confirm.reproduced_items if confirm else []
        confirm = Confirm(performed=p is not None, arm=arm, p=p, reproduced_items=reproduced)
        if p is None or p < options.alpha_confirm:
            status = Status.FAIL
        else:
            blocked = f"significant on {gate.arm}, not on {arm} (p = {p:.3g}): the instances differ"
    if status is not Status.FAIL and blocked:
        status, detail = Status.INCONCLUSIVE, f"{detail}; {blocked}" if detail else blocked
    elif status is Status.PASS and gate.caveats:
        status = Status.PASS_WITH_CAVEAT
    return gate.model_copy(update={"status": status, "test": test, "confirm": confirm, "detail": detail})


def caveat(code: CaveatCode, gate: str, detail: str) -> Caveat:
    """A caveat that comes from a gate."""
    return Caveat(code=code, detail=detail, gate=gate)


def noninferiority(low: float, high: float, margin: float) -> Status:
    """N: bounds of how much worse served is, against the allowed margin. Inside it but surely worse is a caveat."""
    if low > margin:
        return Status.FAIL
    if high >= margin:
        return Status.INCONCLUSIVE
    return Status.PASS_WITH_CAVEAT if low > 0 else Status.PASS


# --- parts of a draft ----------------------------------------------------------------------------------------------


def make_gate(
    name: str,
    trial: Trial,
    *,
    metric: str,
    statistic: str,
    value: float | None,
    unit: str,
    detail: str,
    severity: Literal["hard", "gate", "info"] = "gate",
    required: bool = True,
    status: Status = Status.PASS,
    threshold: Threshold | None = None,
    floor: FloorSummary | None = None,
    test: GateTest | None = None,
    confirm: Confirm | None = None,
    worst: Sequence[WorstItem] = (),
    diagnosis: Sequence[Diagnosis] = (),
    caveats: Sequence[Caveat] = (),
) -> Gate:
    """The gate called `name` of a trial's arm; a pass unless something else is said."""
    return Gate(
        id=name,
        arm=trial.arm,
        metric=metric,
        severity=severity,
        required=required,
        status=status,
        statistic=statistic,
        value=value,
        unit=unit,
        threshold=threshold,
        floor=floor,
        test=test,
        confirm=confirm,
        worst_items=list(worst),
        diagnosis=list(diagnosis),
        caveats=list(caveats),
        detail=detail,
    )


def make_test(
    trial: Trial,
    name: Literal["B", "C", "N", "P", "M", "binomial", "surprisal_z"],
    *,
    p: float | None,
    n: int,
    rank_p: float | None = None,
    ci_low: float | None = None,
    ci_high: float | None = None,
    ci_level: float | None = None,
) -> GateTest:
    """A gate's test at the level of one test; seed and permutations where it permutes."""
    permutes = name == "P"
    return GateTest(
        name=name,
        alpha=trial.options.alpha_soft,
        p=p,
        rank_p=rank_p,
        ci_low=ci_low,
        ci_high=ci_high,
        ci_level=ci_level,
        n=n,
        seed=trial.options.seed if permutes else None,
        permutations=trial.options.permutations if permutes else None,
    )


def skip(trial: Trial, gate: str, metric: str, statistic: str, unit: str, why: Caveat) -> Draft:
    """A gate that has nothing to go by in this run, and need not."""
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
            caveats=[why],
            detail=why.detail,
        )
    )


def first_of(*reasons: str | None) -> str | None:
    """The first reason there is, or None."""
    return next((reason for reason in reasons if reason), None)


def p_text(p: float | None) -> str:
    """A p-value as the end of a sentence; empty where there is none."""
    return "" if p is None else f", p = {p:.3g}"
