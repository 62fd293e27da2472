"""Sampled items against the distribution that was asked for: G-surprisal and G-support."""

from __future__ import annotations

import numpy as np
from scipy import stats as distributions

from assay.metrics import text
from assay.verdicts.drafts import Draft, caveat, first_of, make_gate, make_test, p_text, skip
from assay.verdicts.evidence import LEVELS
from assay.verdicts.margins.floor import MarginTrial
from assay.verdicts.model import Caveat, Diagnosis, Threshold

MIN_SAMPLED_ITEMS = 8  # the surprisal test is asymptotic
SUPPORT_NOISE = 1e-3  # tokens outside the declared support that rounding at its boundary explains (measured: 2e-4)


def surprisal_gate(trial: MarginTrial) -> Draft:
    """G-surprisal: are sampled tokens as surprising as the declared distribution says? Two-sided z over items.

    It has no worst case (both directions are faults): a failed item is left to G-coverage.
    """

    if skipped := _sampled_by_text(trial, "G-surprisal"):
        return skip(trial, "G-surprisal", "surprisal", "z of the summed excess surprisal", "sigma", skipped)

    def z_of(arm: str) -> tuple[float, int]:
        values, variance = trial.table.values(arm, "surprisal"), trial.table.aux(arm, "surprisal", "variance")
        known = np.isfinite(values) & np.isfinite(variance)
        return text.surprisal_z(values[known], variance[known]), int(known.sum())

    def p_of(arm: str) -> float | None:
        z, n = z_of(arm)
        return float(2 * distributions.norm.sf(abs(z))) if n >= MIN_SAMPLED_ITEMS else None

    z, n = z_of(trial.arm)
    p = p_of(trial.arm)
    hints = []
    if p is not None and p < trial.options.alpha_soft:
        way = "more surprising: temperature or top-p above what was asked" if z > 0 else "less surprising: sharpened"
        hints.append(Diagnosis(hint=f"sampled tokens are {way}", gain=z))
    few = f"{n} sampled items, {MIN_SAMPLED_ITEMS} needed" if n < MIN_SAMPLED_ITEMS else None
    return Draft(
        p=p,
        effect=True,
        blocked=first_of(trial.unjudged_why("surprisal"), few),
        retest=p_of,
        gate=make_gate(
            "G-surprisal",
            trial,
            metric="surprisal",
            statistic="z of the summed excess surprisal",
            value=z,
            unit="sigma",
            threshold=Threshold(value=None, source="declared", detail="the distribution that was asked for"),
            test=make_test(trial, "surprisal_z", p=p, n=n),
            diagnosis=hints,
            detail=f"z = {z:.2f} over {n} sampled items" + p_text(p),
        ),
    )


def support_gate(trial: MarginTrial) -> Draft:
    """G-support: are sampled tokens inside the declared top-p, top-k, min-p support?

    Binomial test of tokens outside, against the larger of `SUPPORT_NOISE` (rounding at the boundary) and the floor
    arms' own rate where they were scored.
    """
    table = trial.table
    if skipped := _sampled_by_text(trial, "G-support"):
        statistic = "share of sampled tokens outside the declared support"
        return skip(trial, "G-support", "support_outside", statistic, "fraction", skipped)

    def outside(arm: str) -> tuple[int, int]:
        return int(np.nansum(table.values(arm, "support_outside"))), int(
            np.nansum(table.aux(arm, "support_outside", "n"))
        )

    floor = [outside(arm) for arm in trial.floor.effective]
    k_floor, n_floor = sum(k for k, _ in floor), sum(n for _, n in floor)
    rate = max(SUPPORT_NOISE, k_floor / n_floor if n_floor else 0.0)

    def p_of(arm: str) -> float | None:
        k, n = outside(arm)
        return float(distributions.binom.sf(k - 1, n, rate)) if n else None

    k, n = outside(trial.arm)
    p = p_of(trial.arm)
    return Draft(
        p=p,
        effect=n > 0 and k / n > rate,
        blocked=first_of(trial.unjudged_why("support_outside"), None if n else "no sampled tokens"),
        retest=p_of,
        gate=make_gate(
            "G-support",
            trial,
            metric="support_outside",
            statistic="share of sampled tokens outside the declared support",
            value=k / n if n else None,
            unit="fraction",
            threshold=Threshold(
                value=rate, source="floor" if rate > SUPPORT_NOISE else "absolute", detail="rounding at the boundary"
            ),
            test=make_test(trial, "binomial", p=p, n=n),
            worst=trial.worst(table.values(trial.arm, "support_outside")),
            detail=f"{k} of {n} sampled tokens outside the declared support" + p_text(p),
        ),
    )


def _sampled_by_text(trial: MarginTrial, gate: str) -> Caveat | None:
    """Why sampled tokens cannot be judged: text may encode to other, rarer tokens than those that were drawn."""
    by_text = trial.table.has("surprisal") & (trial.table.values(trial.arm, "evidence") >= LEVELS.index("E2"))
    if not by_text.any():
        return None
    return caveat("sampled_not_judged", gate, f"{int(by_text.sum())} sampled responses carry no token ids")
