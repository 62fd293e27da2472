"""A trial: one arm against a floor, from cut thresholds to a settled gate. The gates themselves are in `gates`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assay.config import CaveatCode, Dtype, TextGates
from assay.metrics import stats, text
from assay.records import JUDGE, Status
from assay.verdicts.model import Caveat, Confirm, FloorSummary, Gate, WorstItem
from assay.verdicts.scoretable import Floats, Mask, ScoreTable, State

SHOWN_ITEMS = 5
MIN_ARMS = 2  # distinct floor arms below which a floor is no distribution
MIN_FLOOR_EXCEEDANCES = 10  # tau_soft is at least this order statistic of the floor
MAX_LOSSY = 0.1  # share of greedy items that may be left out because text does not encode to the ids it came from
SOFT_TAIL = 2e-4  # share of floor tokens above tau_soft


# --- floor -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """The floor and the thresholds cut from it [nat]."""

    arms: tuple[str, ...]
    effective: tuple[str, ...]
    tau_hard: float
    hard_from: Literal["floor", "absolute"]
    hard_detail: str
    tau_soft: float
    soft_detail: str
    tokens: int
    exceedances: int  # positive token margins

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


def cut_floor(
    table: ScoreTable, margins: Mapping[str, Floats], arms: Sequence[str], dtype: Dtype, options: TextGates
) -> Floor:
    """Cut the thresholds of the margin gates from the floor arms.

    tau_hard is the largest of: kappa x the largest floor margin; kappa x the largest floor |delta logprob| (a served
    token may trail by the sum of two such errors); 2 ulp of the logit dtype in [16, 32), where large logits live; and
    the dtype's resolution. tau_soft is the r-th largest floor token margin, r = max(10, ceil(2e-4 N)) of N floor
    tokens; a floor with fewer than r positive margins has no such token, and tau_soft is tau_hard. It is never below
    the resolution.
    """
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
    return Floor(
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


# --- trial ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One arm judged against a floor. `planned`: a served arm, where an item without a row is a missing response."""

    table: ScoreTable
    arm: str
    floor: Floor
    options: TextGates
    dtype: Dtype
    confirm: str | None = None
    planned: bool = True

    @property
    def resolution(self) -> float:
        """Difference [nat] below which everything is numerics at the served dtype."""
        return self.options.resolution_nat[self.dtype]

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


@dataclass(frozen=True)
class Draft:
    """A gate before multiplicity and confirmation."""

    gate: Gate
    p: float | None = None
    effect: bool = False  # the difference is large enough to matter
    hard: bool = False  # fails whatever the statistics
    blocked: str | None = None  # why it cannot pass
    retest: Callable[[str], float | None] | None = None  # p of the same test on another arm; None: no data


def settle(drafts: Sequence[Draft], options: TextGates, confirms: Mapping[str, str | None] | None = None) -> list[Gate]:
    """Drafts to gates: Holm over all their p-values, then the confirm step on `confirms[arm]`."""
    adjusted = iter(stats.holm([draft.p for draft in drafts if draft.p is not None]).tolist())
    return [_settle(draft, options, None if draft.p is None else next(adjusted), confirms or {}) for draft in drafts]


def _settle(draft: Draft, options: TextGates, p_holm: float | None, confirms: Mapping[str, str | None]) -> Gate:
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
    return Caveat(code=code, detail=detail, gate=gate)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
