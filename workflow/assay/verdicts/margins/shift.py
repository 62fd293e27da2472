"""Shifts of a whole pass against the floor: G-mean, G-logprob, G-KL, and G-trend that localises one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from assay.metrics import stats
from assay.verdicts.drafts import Draft, caveat, first_of, make_gate, make_test, p_text, skip
from assay.verdicts.margins.floor import MarginTrial, too_noisy
from assay.verdicts.model import Caveat, Diagnosis, Threshold
from assay.verdicts.scoretable import Floats

KL_ROUNDING = 1e-6  # nat: what float32 logprobs leave of a KL of zero (measured on float32 engines: 4e-8 to 4e-7)


@dataclass(frozen=True)
class ShiftSpec:
    """A gate on the mean (or RMS) of a per-item score."""

    id: str
    metric: str
    statistic: str
    name: str
    rms: bool = False
    quadratic: bool = False  # the score grows with the square of the logit noise
    logprobs: bool = False
    capped: bool = False


MEAN = ShiftSpec("G-mean", "margin_mean", "mean of the items' clipped mean margins", "mean margin", capped=True)
LOGPROB = ShiftSpec("G-logprob", "logprob_rms", "RMS of the items' logprob errors", "RMS", rms=True, logprobs=True)
KL = ShiftSpec(
    "G-KL", "kl_mean", "mean of the items' mean KL(judge || served)", "mean KL", quadratic=True, logprobs=True
)


def shift_gate(trial: MarginTrial, spec: ShiftSpec) -> Draft:
    """G-mean, G-logprob, G-KL: is the aggregate above its limit, and beyond chance (test P within items)?

    limit = max(ratio x floor, floor + resolution). KL is quadratic in the logit noise (KL ~ Var(delta) / 2), so the
    same allowance of noise amplitude is ratio^2 there, and its resolution max(resolution^2 / 2, `KL_ROUNDING`). The
    mean margin is compared by `ratio` as specified; its resolution keeps two right engines apart from a fault.
    Test R on the same scores, with everything below the resolution tied, is reported: significant without a fail, and
    above floor + resolution, it is the caveat `small_but_real`.
    """
    skipped = _logprobs_skipped(trial, spec) if spec.logprobs else None
    if skipped:
        return skip(trial, spec.id, spec.metric, spec.statistic, "nat", skipped)
    options = trial.options
    resolution = max(trial.resolution**2 / 2, KL_ROUNDING) if spec.quadratic else trial.resolution
    ratio = options.ratio**2 if spec.quadratic else options.ratio
    few = trial.too_few_arms()
    scores = trial.matrix(trial.arm, spec.metric)
    n = len(scores)
    value, base = (_aggregate(part, spec) for part in (scores[:, :1], scores[:, 1:]))
    limit = max(ratio * base, base + resolution)
    noisy = spec.capped and base > options.mean_cap_nat
    tested = not few and not noisy and n > 0
    p = _permute(trial, scores) if tested else None
    rank_p = stats.van_elteren(np.maximum(scores, resolution)).p if tested else None
    fails = p is not None and value > limit and p < options.alpha_soft
    caveats = _partial_logprobs(trial, spec) if spec.logprobs else []
    if rank_p is not None and rank_p < options.alpha_soft and not fails and value > base + resolution:
        why = (
            f"{spec.name} {value:.3g} nat is above the floor's {base:.3g} (test R: p = {rank_p:.2g}), inside the limit"
        )
        caveats.append(caveat("small_but_real", spec.id, why))
    served = trial.scores(trial.arm, spec.metric)
    return Draft(
        p=p,
        effect=value > limit,
        blocked=first_of(
            few,
            too_noisy(noisy),
            None if spec.logprobs else trial.unjudged_why(spec.metric),
            trial.too_few_items(n),
        ),
        retest=lambda arm: _retest(trial, arm, spec.metric),
        gate=make_gate(
            spec.id,
            trial,
            metric=spec.metric,
            statistic=spec.statistic,
            value=value,
            unit="nat",
            threshold=Threshold(
                value=limit,
                source="floor" if ratio * base >= base + resolution else "absolute",
                kappa=ratio,
                detail=f"the larger of {ratio:g} x the floor's {base:.3g} and it + resolution {resolution:.3g} nat",
            ),
            floor=trial.floor.summary(
                trial.floor_values(spec.metric), "scores of items", options.mean_cap_nat if spec.capped else None
            ),
            test=make_test(trial, "P", p=p, n=n, rank_p=rank_p),
            worst=trial.worst(served),
            caveats=caveats,
            detail=f"{spec.name} {value:.3g} nat against {base:.3g} of the floor (limit {limit:.3g})" + p_text(p),
        ),
    )


def _aggregate(scores: Floats, spec: ShiftSpec) -> float:
    if not scores.size:
        return 0.0
    return math.sqrt(float(np.mean(scores**2))) if spec.rms else float(scores.mean())


def _permute(trial: MarginTrial, scores: Floats) -> float:
    return stats.label_permutation(scores, trial.options.permutations, trial.options.seed).p


def _retest(trial: MarginTrial, arm: str, metric: str) -> float | None:
    return _permute(trial, trial.matrix(arm, metric)) if trial.has_data(arm, metric) else None


def _logprobs_skipped(trial: MarginTrial, spec: ShiftSpec) -> Caveat | None:
    table, arm = trial.table, trial.arm
    if not trial.has_data(arm, spec.metric):
        return caveat("logprobs_missing", spec.id, "the server returned no logprobs, or none that belong to token ids")
    served, judge = (
        np.nanmedian(_or_zero(table.aux(arm, "logprob_rms", f"{who}_mass"))) for who in ("served", "judge")
    )
    # Raw top-k probabilities never sum to one; those of a processed (truncated, sharpened) distribution do.
    if served > 1 - 1e-4 and judge < 1 - 1e-3:
        why = f"the server's top logprobs sum to {served:.5f} where the judge's sum to {judge:.5f}: they were processed"
        return caveat("logprobs_processed", spec.id, why)
    return None


def _or_zero(values: Floats) -> Floats:
    return values if np.isfinite(values).any() else np.zeros(1)


def _partial_logprobs(trial: MarginTrial, spec: ShiftSpec) -> list[Caveat]:
    lacking = int(trial.unjudged(spec.metric).sum())
    return [caveat("logprobs_missing", spec.id, f"{lacking} responses carry no logprobs")] if lacking else []


def trend_gate(trial: MarginTrial) -> Draft:
    """G-trend: do margins grow (or shrink) with position more than the floor's?

    Two-sided test P on late - early of each item. It localises a G-mean excess, so a fail also needs the part that the
    trend points to (late for growth, early for shrinkage) above max(ratio x floor, floor + resolution): moving the same
    small margins around is no fault.
    """
    few = trial.too_few_arms()
    options, metric = trial.options, "margin_trend"
    scores = trial.matrix(trial.arm, metric)
    n = len(scores)
    value, base = (float(part.mean()) if n else 0.0 for part in (scores[:, :1], scores[:, 1:]))
    part = "late" if value >= base else "early"
    served = _mean(trial.table.aux(trial.arm, metric, part))
    floor = _mean(np.concatenate([np.empty(0), *(trial.table.aux(arm, metric, part) for arm in trial.floor.effective)]))
    limit = max(options.ratio * floor, floor + trial.resolution)

    def two_sided(scores: Floats) -> float:
        return min(1.0, 2 * min(_permute(trial, scores), _permute(trial, -scores)))

    def retest(arm: str) -> float | None:
        return two_sided(trial.matrix(arm, metric)) if trial.has_data(arm, metric) else None

    p = two_sided(scores) if n and not few else None
    effect = served > limit
    hints = []
    if effect and p is not None and p < options.alpha_soft:
        cause = "grow with position: cache, position or window" if part == "late" else "start high: prompt or prefill"
        gain = served / floor if floor else None
        hints.append(Diagnosis(hint=f"{part}_positions: margins {cause}", gain=gain))
    return Draft(
        p=p,
        effect=effect,
        blocked=first_of(few, trial.unjudged_why(metric, too_short=True), trial.too_few_items(n)),
        retest=retest,
        gate=make_gate(
            "G-trend",
            trial,
            metric=metric,
            statistic="mean of late - early clipped mean margin",
            value=value,
            unit="nat",
            threshold=Threshold(
                value=limit,
                source="floor" if options.ratio * floor >= floor + trial.resolution else "absolute",
                kappa=options.ratio,
                detail=f"for the {part} part: the larger of {options.ratio:g} x the floor's {floor:.3g} and that plus "
                f"the resolution {trial.resolution:.3g} nat",
            ),
            floor=trial.floor.summary(trial.floor_values(metric), "late - early of items"),
            test=make_test(trial, "P", p=p, n=n),
            diagnosis=hints,
            detail=f"{part} part at {served:.3g} nat against {floor:.3g} of the floor (limit {limit:.3g})" + p_text(p),
        ),
    )


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else 0.0
