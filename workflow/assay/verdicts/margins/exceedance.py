"""Items whose largest token margin exceeds a threshold: G-hard and G-soft, and the claim that follows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from assay.metrics import stats
from assay.verdicts.drafts import Draft, caveat, first_of, make_gate, make_test, p_text
from assay.verdicts.evidence import LEVELS
from assay.verdicts.margins.floor import SOFT, MarginTrial, too_noisy
from assay.verdicts.model import Caveat, Claim, Confirm, Diagnosis, Gate, Threshold
from assay.verdicts.scoretable import Floats, Mask


def hard_gate(trial: MarginTrial) -> Draft:
    """G-hard: items with any token whose margin exceeds tau_hard: divergences that no near tie explains.

    None: a pass, with the one-sided bound on their rate (test B). Any: a fail if the same item exceeds on the other
    instance, or if the other instance has no data; else test C decides (floor arms at the same tau), which sees
    corruption that strikes other items each time. Hits that do not reproduce are the caveat `not_reproduced`. With one
    distinct floor arm hits can fail, but their absence cannot pass.
    """
    floor, margins = trial.floor, trial.scores(trial.arm, "margin_max")
    hits = margins > floor.tau_hard
    n, u = int((~np.isnan(margins)).sum()), int(hits.sum())
    floor_margins = trial.floor_values("margin_max")

    def exceedance(arm: str) -> float | None:
        return _exceedance(trial, arm, floor_margins, floor.tau_hard)

    confirmable = trial.confirm is not None and trial.has_data(trial.confirm, "margin_max")
    other_hits = trial.scores(trial.confirm, "margin_max") > floor.tau_hard if trial.confirm and confirmable else None
    reproduced = hits & other_hits if other_hits is not None else np.zeros_like(hits)
    caveats = _evidence_caveats(trial)
    alone = int(hits.sum() - reproduced.sum()) if other_hits is not None else 0
    if alone:
        why = f"{alone} items exceed tau_hard on {trial.arm} and not on {trial.confirm}"
        caveats.append(caveat("not_reproduced", "G-hard", why))
    noisy = floor.tau_hard > trial.options.tau_hard_cap_nat
    exact = int((trial.table.values(trial.arm, "exact") == 1).sum())
    p = exceedance(trial.arm)
    return Draft(
        p=None if noisy else p,
        effect=u > 0,
        hard=not noisy and bool(reproduced.any() or (u > 0 and other_hits is None)),
        blocked=first_of(
            too_noisy(noisy), trial.unjudged_why("margin_max"), trial.too_few_arms(), None if n else "no items"
        ),
        retest=exceedance,
        gate=make_gate(
            "G-hard",
            trial,
            metric="margin_max",
            severity="hard",
            statistic="items with a margin above tau_hard",
            value=u,
            unit="count",
            threshold=Threshold(
                value=floor.tau_hard,
                source=floor.hard_from,
                kappa=trial.options.kappa,
                unit="nat",
                detail=floor.hard_detail,
            ),
            floor=floor.summary(floor_margins, "largest margin of each item and arm", trial.options.tau_hard_cap_nat),
            test=make_test(
                trial,
                "C" if u else "B",
                p=p,
                n=n,
                ci_low=0.0,
                ci_high=stats.clopper_pearson(u, n).high if n else None,
                ci_level=0.95,
            ),
            confirm=Confirm(
                performed=other_hits is not None,
                arm=trial.confirm,
                reproduced_items=[trial.table.items[i] for i in np.flatnonzero(reproduced)],
            )
            if u
            else None,
            worst=trial.worst(margins, trial.table.aux(trial.arm, "margin_max", "pos")),
            diagnosis=_position_hints(trial, hits),
            caveats=caveats,
            detail=f"{n} items: {exact} exact, {u} with a margin above tau_hard = {floor.tau_hard:.3g} nat, "
            f"{n - exact - u} near ties",
        ),
    )


def _evidence_caveats(trial: MarginTrial) -> list[Caveat]:
    levels = trial.table.values(trial.arm, "evidence")
    retokenised = int((levels == LEVELS.index("E2")).sum())
    found = []
    if retokenised:
        why = f"{retokenised} responses carry no token ids; their text was encoded again, and so was the floor's"
        found.append(caveat("retokenised", "G-hard", why))
    lossy, greedy = int(trial.lossy().sum()), int(trial.table.has("margin_max").sum())
    if lossy:
        why = f"{lossy} of {greedy} items have no margin: a reference answer's text encodes to other ids than it had"
        found.append(caveat("lossy_items", "G-hard", why))
    return found


def _position_hints(trial: MarginTrial, hits: Mask) -> list[Diagnosis]:
    positions = trial.table.aux(trial.arm, "margin_max", "pos")[hits]
    positions = positions[np.isfinite(positions)]
    if len(positions) and np.median(positions) <= 1:
        return [Diagnosis(hint="the worst margins stand at the first tokens: prompt, template or BOS")]
    return []


def soft_gate(trial: MarginTrial) -> Draft:
    """G-soft: more items with a margin above tau_soft than the floor has (test C, floor item-arms)."""
    floor, margins = trial.floor, trial.scores(trial.arm, "margin_max")
    floor_margins = trial.floor_values("margin_max")
    k, n = int((margins > floor.tau_soft).sum()), int((~np.isnan(margins)).sum())
    k_floor, n_floor = int((floor_margins > floor.tau_soft).sum()), int((~np.isnan(floor_margins)).sum())
    few = trial.too_few_arms()

    def exceedance(arm: str) -> float | None:
        return _exceedance(trial, arm, floor_margins, floor.tau_soft)

    p = None if few else exceedance(trial.arm)
    return Draft(
        p=p,
        effect=k > 0,
        blocked=first_of(few, trial.unjudged_why("margin_max"), trial.too_few_items(n)),
        retest=exceedance,
        gate=make_gate(
            SOFT,
            trial,
            metric="margin_max",
            statistic="items with a margin above tau_soft",
            value=k,
            unit="count",
            threshold=Threshold(value=floor.tau_soft, source="floor", unit="nat", detail=floor.soft_detail),
            floor=floor.summary(floor_margins, f"{floor.exceedances} positive margins of {floor.tokens} tokens"),
            test=make_test(trial, "C", p=p, n=n),
            detail=f"{k} of {n} items against {k_floor} of {n_floor} floor item-arms above {floor.tau_soft:.3g} nat"
            + p_text(p),
        ),
    )


def item_claim(gates: Iterable[Gate]) -> Claim | None:
    """The bound on the rate of unexplained items, from the pass with most of them; None without greedy items."""
    hard = [gate for gate in gates if gate.id == "G-hard" and gate.test and gate.test.n and gate.value is not None]
    if not hard:
        return None
    bad, n = max((round(gate.value or 0), gate.test.n) for gate in hard if gate.test)
    return Claim(bad=bad, n=n, rate_upper95=stats.clopper_pearson(bad, n).high)


def _exceedance(trial: MarginTrial, arm: str, floor: Floats, tau: float) -> float | None:
    served = trial.scores(arm, "margin_max")
    n_served, n_floor = int((~np.isnan(served)).sum()), int((~np.isnan(floor)).sum())
    if not n_floor or not trial.has_data(arm, "margin_max"):
        return None
    return stats.conditional_exceedance(int((served > tau).sum()), n_served, int((floor > tau).sum()), n_floor)
