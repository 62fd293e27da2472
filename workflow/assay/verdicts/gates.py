"""Scores and floors to gates. Definitions and their reasons stand in the docstring of each gate function.

Common to all:

- The unit is the item. Tokens inside an item depend on one another, so every count, mean and permutation is over items,
  and an aggregate is the plain mean (or root mean square) of the items' values.
- A failed or missing response of a served arm counts as the worst case; it is never dropped.
- `tau_hard`, `tau_soft` and the floor's aggregates come from the effective floor arms: arms equal in every score of
  every metric are one arm (in float32 two arms may agree in all margins and still differ in logprobs: two arms).
- A statistical gate fails when the effect exceeds its limit, p < `alpha_soft`, Holm over all p-values of the config
  stays below `alpha`, and the other instance, if it has data, has p < `alpha_confirm` in the same gate. Significant on
  one instance alone is INCONCLUSIVE: the instances differ.
- FAIL needs only enough evidence, PASS needs all of it: what stands in the way of a pass makes INCONCLUSIVE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats as distributions

from assay.config import Dtype, TextGates
from assay.metrics import stats, text
from assay.records import Status
from assay.verdicts.evidence import JUDGE, LEVELS, nonfinite
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
from assay.verdicts.scoretable import Floats, Mask, ScoreTable
from assay.verdicts.trial import SHOWN_ITEMS, Draft, Floor, Trial, caveat, settle

MIN_SAMPLED_ITEMS = 8  # the surprisal test is asymptotic
SUPPORT_NOISE = 1e-3  # tokens outside the declared support that rounding at its boundary explains (measured: 2e-4)
PROMPT = "the prompt differs"  # the one breach that an answer without content can show as well
KL_ROUNDING = 1e-6  # nat: what float32 logprobs leave of a KL of zero (measured on float32 engines: 4e-8 to 4e-7)
CAP_RULE = "a floor above the cap makes the gate inconclusive, never wider"


# --- hard gates --------------------------------------------------------------------------------------------------


def coverage_gate(trial: Trial) -> Draft:
    """G-coverage: every planned request of the pass has a scored response. The denominator is what was planned."""
    failed = trial.failed(trial.arm)
    n, bad = len(failed), int(failed.sum())
    return Draft(
        hard=bad > 0,
        gate=_gate(
            "G-coverage",
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


def structure_gate(trial: Trial) -> Draft:
    """G-struct: what must hold for every answered item (for its prompt: for every counted one), without statistics.

    The prompt has the judge's tokens (ids, else their count); one BOS where the tokenizer adds one; no id outside the
    vocabulary; nothing after EOS; a finish reason that fits the length; text and usage that fit the tokens; finite
    scores; lengths like the reference's. Text alone is held to the tokens it encodes to, with the tolerance that a cut
    character and encoding again call for. Two length rules: (1) an item whose every token is the judge's choice, and
    whose length differs by more than the tolerance (one token, by ids) and the allowed ratio was cut short or ran on;
    (2) the ratio of total lengths is inside the allowed range, unless every item outside it is explained by a near-tie
    divergence (a margin above 0 and up to tau_hard).
    """
    table, arm = trial.table, trial.arm
    answered = ~trial.failed(arm)
    broken = {
        PROMPT: table.values(arm, "prompt_equal") == 0,
        "not exactly one BOS": table.values(arm, "bos_ok") == 0,
        "token ids outside the vocabulary": table.values(arm, "ids_ok") == 0,
        "tokens after the end of sequence": table.values(arm, "tokens_after_eos") > 0,
        "finish reason does not fit the length": table.values(arm, "finish_ok") == 0,
        "the text is not that of the tokens": table.values(arm, "text_ok") == 0,
        "the usage count is not that of the tokens": table.values(arm, "usage_ok") == 0,
        "non-finite score": nonfinite(table, arm),
        "length differs without a near tie": _length_outliers(trial),
    }
    broken = {name: mask & (answered | (name == PROMPT)) for name, mask in broken.items()}
    bad = np.logical_or.reduce(list(broken.values()))
    found = [f"{name} ({int(mask.sum())})" for name, mask in broken.items() if mask.any()]
    unchecked = int((answered & np.isnan(table.values(arm, "prompt_equal"))).sum())
    caveats = []
    if unchecked:
        why = f"{unchecked} of {int(answered.sum())} responses report neither prompt ids nor a prompt token count"
        caveats.append(caveat("prompt_unchecked", "G-struct", why))
    return Draft(
        hard=bool(bad.any()),
        gate=_gate(
            "G-struct",
            trial,
            metric="structure",
            severity="hard",
            statistic="items that break the contract",
            value=int(bad.sum()),
            unit="count",
            threshold=Threshold(value=0, source="absolute", detail="no item may break the contract"),
            worst=[WorstItem(item_id=table.items[i], value=1) for i in np.flatnonzero(bad)[:SHOWN_ITEMS]],
            diagnosis=_prompt_hints(trial, broken[PROMPT]),
            caveats=caveats,
            detail="; ".join(found) if found else f"{int(answered.sum())} items keep prompt, end and length",
        ),
    )


def _length_outliers(trial: Trial) -> Mask:
    table, arm = trial.table, trial.arm
    low, high = trial.options.length_ratio
    served, reference = table.values(arm, "output_tokens"), table.aux(arm, "output_tokens", "ref")
    margins = table.values(arm, "margin_max")
    known = np.isfinite(served) & np.isfinite(reference) & (reference > 0) & np.isfinite(margins)
    tolerance = table.aux(arm, "output_tokens", "tolerance")
    outlier = known & ((served < low * reference - tolerance) | (served > high * reference + tolerance))
    cut = outlier & (margins == 0)
    unexplained = outlier & ~((margins > 0) & (margins <= trial.floor.tau_hard))
    if known.any() and not low <= text.length_ratio(served[known], reference[known]) <= high:
        return unexplained
    return cut


def _prompt_hints(trial: Trial, differs: Mask) -> list[Diagnosis]:
    if not differs.any():
        return []
    index = int(np.flatnonzero(differs)[0])
    item = trial.table.items[index]
    served, reference = (trial.table.aux(trial.arm, "prompt_equal", key)[index] for key in ("served", "ref"))
    if np.isfinite(served) and np.isfinite(reference) and served != reference:
        hint = (
            f"chat template or BOS differs: server counted {int(served)} prompt tokens where the reference has "
            f"{int(reference)} ({item})"
        )
        return [Diagnosis(hint=hint, gain=float(served - reference))]
    return [Diagnosis(hint=f"prompt ids differ at equal count: template text or special tokens ({item})")]


def hard_gate(trial: Trial) -> Draft:
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
        blocked=_first(_noisy(noisy), _unjudged(trial, "margin_max"), trial.too_few_arms(), None if n else "no items"),
        retest=exceedance,
        gate=_gate(
            "G-hard",
            trial,
            metric="margin_max",
            severity="hard",
            statistic="items with a margin above tau_hard",
            value=u,
            unit="count",
            threshold=Threshold(
                value=floor.tau_hard, source=floor.hard_from, kappa=trial.options.kappa, detail=floor.hard_detail
            ),
            floor=floor.summary(floor_margins, "largest margin of each item and arm", trial.options.tau_hard_cap_nat),
            test=_test(
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


def _exceedance(trial: Trial, arm: str, floor: Floats, tau: float) -> float | None:
    served = trial.scores(arm, "margin_max")
    n_served, n_floor = int((~np.isnan(served)).sum()), int((~np.isnan(floor)).sum())
    if not n_floor or not trial.has_data(arm, "margin_max"):
        return None
    return stats.conditional_exceedance(int((served > tau).sum()), n_served, int((floor > tau).sum()), n_floor)


def _evidence_caveats(trial: Trial) -> list[Caveat]:
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


def _position_hints(trial: Trial, hits: Mask) -> list[Diagnosis]:
    positions = trial.table.aux(trial.arm, "margin_max", "pos")[hits]
    positions = positions[np.isfinite(positions)]
    if len(positions) and np.median(positions) <= 1:
        return [Diagnosis(hint="the worst margins stand at the first tokens: prompt, template or BOS")]
    return []


# --- distributional gates ----------------------------------------------------------------------------------------


def soft_gate(trial: Trial) -> Draft:
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
        blocked=_first(few, _unjudged(trial, "margin_max"), trial.too_few_items(n)),
        retest=exceedance,
        gate=_gate(
            "G-soft",
            trial,
            metric="margin_max",
            statistic="items with a margin above tau_soft",
            value=k,
            unit="count",
            threshold=Threshold(value=floor.tau_soft, source="floor", detail=floor.soft_detail),
            floor=floor.summary(floor_margins, f"{floor.exceedances} positive margins of {floor.tokens} tokens"),
            test=_test(trial, "C", p=p, n=n),
            detail=f"{k} of {n} items against {k_floor} of {n_floor} floor item-arms above {floor.tau_soft:.3g} nat"
            + _p_text(p),
        ),
    )


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


def shift_gate(trial: Trial, spec: ShiftSpec) -> Draft:
    """G-mean, G-logprob, G-KL: is the aggregate above its limit, and beyond chance (test P within items)?

    limit = max(ratio x floor, floor + resolution). KL is quadratic in the logit noise (KL ~ Var(delta) / 2), so the
    same allowance of noise amplitude is ratio^2 there, and its resolution max(resolution^2 / 2, `KL_ROUNDING`). The
    mean margin is compared by `ratio` as specified; its resolution keeps two right engines apart from a fault.
    Test R on the same scores, with everything below the resolution tied, is reported: significant without a fail, and
    above floor + resolution, it is the caveat `small_but_real`.
    """
    skipped = _logprobs_skipped(trial, spec) if spec.logprobs else None
    if skipped:
        return _skip(trial, spec.id, spec.metric, spec.statistic, "nat", skipped)
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
        blocked=_first(
            few,
            _noisy(noisy),
            None if spec.logprobs else _unjudged(trial, spec.metric),
            trial.too_few_items(n),
        ),
        retest=lambda arm: _retest(trial, arm, spec.metric),
        gate=_gate(
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
            test=_test(trial, "P", p=p, n=n, rank_p=rank_p),
            worst=trial.worst(served),
            caveats=caveats,
            detail=f"{spec.name} {value:.3g} nat against {base:.3g} of the floor (limit {limit:.3g})" + _p_text(p),
        ),
    )


def _aggregate(scores: Floats, spec: ShiftSpec) -> float:
    if not scores.size:
        return 0.0
    return math.sqrt(float(np.mean(scores**2))) if spec.rms else float(scores.mean())


def _permute(trial: Trial, scores: Floats) -> float:
    return stats.label_permutation(scores, trial.options.permutations, trial.options.seed).p


def _retest(trial: Trial, arm: str, metric: str) -> float | None:
    return _permute(trial, trial.matrix(arm, metric)) if trial.has_data(arm, metric) else None


def _logprobs_skipped(trial: Trial, spec: ShiftSpec) -> Caveat | None:
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


def _sampled_by_text(trial: Trial, gate: str) -> Caveat | None:
    """Why sampled tokens cannot be judged: text may encode to other, rarer tokens than those that were drawn."""
    by_text = trial.table.has("surprisal") & (trial.table.values(trial.arm, "evidence") >= LEVELS.index("E2"))
    if not by_text.any():
        return None
    return caveat("sampled_not_judged", gate, f"{int(by_text.sum())} sampled responses carry no token ids")


def _or_zero(values: Floats) -> Floats:
    return values if np.isfinite(values).any() else np.zeros(1)


def _partial_logprobs(trial: Trial, spec: ShiftSpec) -> list[Caveat]:
    lacking = int(trial.unjudged(spec.metric).sum())
    return [caveat("logprobs_missing", spec.id, f"{lacking} responses carry no logprobs")] if lacking else []


def trend_gate(trial: Trial) -> Draft:
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
        blocked=_first(few, _unjudged(trial, metric, too_short=True), trial.too_few_items(n)),
        retest=retest,
        gate=_gate(
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
            test=_test(trial, "P", p=p, n=n),
            diagnosis=hints,
            detail=f"{part} part at {served:.3g} nat against {floor:.3g} of the floor (limit {limit:.3g})" + _p_text(p),
        ),
    )


def needle_gate(trial: Trial) -> Draft:
    """G-needle: needles that the judge finds and the server does not.

    Test M over all needles (lost against won), so that a judge that is lucky on some is no evidence against the server;
    the rate of lost ones and its bound are over needles the judge solves. Losses that chance explains are a caveat.
    Margins of needle items count in G-hard, which is the sharper instrument.
    """
    judge = trial.table.values(JUDGE, "needle")
    solved = judge == 1

    def count(arm: str) -> tuple[int, int]:
        found = trial.scores(arm, "needle", worst=0.0)
        return int((solved & (found == 0)).sum()), int(((judge == 0) & (found == 1)).sum())

    def retest(arm: str) -> float | None:
        return stats.mcnemar(*count(arm)) if trial.has_data(arm, "needle") else None

    n, planned = int(solved.sum()), int((~np.isnan(judge)).sum())
    lost, won = count(trial.arm)
    bound = stats.clopper_pearson(lost, n).high if n else None
    caveats = []
    if not n:
        caveats.append(caveat("no_solved_needles", "G-needle", f"the judge solves none of {planned} needles"))
    elif lost:
        caveats.append(caveat("needles_lost", "G-needle", f"{lost} of {n} needles lost"))
    p = stats.mcnemar(lost, won) if n else None
    return Draft(
        p=p,
        effect=lost > 0,
        blocked=_unjudged(trial, "needle"),
        retest=retest,
        gate=_gate(
            "G-needle",
            trial,
            metric="needle",
            statistic="needles lost of those the judge solves",
            value=lost,
            unit="count",
            threshold=Threshold(value=None, source="absolute", detail="McNemar against the judge"),
            test=_test(trial, "M", p=p, n=n, ci_low=0.0 if n else None, ci_high=bound, ci_level=0.95 if n else None),
            worst=trial.worst(np.where(solved & (trial.scores(trial.arm, "needle", worst=0.0) == 0), 1.0, 0.0)),
            caveats=caveats,
            detail=f"{lost} of {n} solved needles lost, {won} won (rate of lost at most {bound:.3g})"
            if bound is not None
            else f"the judge solves none of {planned} needles: nothing to lose",
        ),
    )


def surprisal_gate(trial: Trial) -> Draft:
    """G-surprisal: are sampled tokens as surprising as the declared distribution says? Two-sided z over items.

    It has no worst case (both directions are faults): a failed item is left to G-coverage.
    """

    if skipped := _sampled_by_text(trial, "G-surprisal"):
        return _skip(trial, "G-surprisal", "surprisal", "z of the summed excess surprisal", "sigma", skipped)

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
        blocked=_first(_unjudged(trial, "surprisal"), few),
        retest=p_of,
        gate=_gate(
            "G-surprisal",
            trial,
            metric="surprisal",
            statistic="z of the summed excess surprisal",
            value=z,
            unit="sigma",
            threshold=Threshold(value=None, source="declared", detail="the distribution that was asked for"),
            test=_test(trial, "surprisal_z", p=p, n=n),
            diagnosis=hints,
            detail=f"z = {z:.2f} over {n} sampled items" + _p_text(p),
        ),
    )


def support_gate(trial: Trial) -> Draft:
    """G-support: are sampled tokens inside the declared top-p, top-k, min-p support?

    Binomial test of tokens outside, against the larger of `SUPPORT_NOISE` (rounding at the boundary) and the floor
    arms' own rate where they were scored.
    """
    table = trial.table
    if skipped := _sampled_by_text(trial, "G-support"):
        statistic = "share of sampled tokens outside the declared support"
        return _skip(trial, "G-support", "support_outside", statistic, "fraction", skipped)

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
        blocked=_first(_unjudged(trial, "support_outside"), None if n else "no sampled tokens"),
        retest=p_of,
        gate=_gate(
            "G-support",
            trial,
            metric="support_outside",
            statistic="share of sampled tokens outside the declared support",
            value=k / n if n else None,
            unit="fraction",
            threshold=Threshold(
                value=rate, source="floor" if rate > SUPPORT_NOISE else "absolute", detail="rounding at the boundary"
            ),
            test=_test(trial, "binomial", p=p, n=n),
            worst=trial.worst(table.values(trial.arm, "support_outside")),
            detail=f"{k} of {n} sampled tokens outside the declared support" + _p_text(p),
        ),
    )


# --- all gates ---------------------------------------------------------------------------------------------------

GateJudge = Callable[[Trial], Draft]

ALWAYS: dict[str, GateJudge] = {"G-coverage": coverage_gate, "G-struct": structure_gate}
GREEDY: dict[str, GateJudge] = {
    "G-hard": hard_gate,
    "G-soft": soft_gate,
    "G-mean": lambda trial: shift_gate(trial, MEAN),
    "G-trend": trend_gate,
    "G-logprob": lambda trial: shift_gate(trial, LOGPROB),
    "G-KL": lambda trial: shift_gate(trial, KL),
}
NEEDLE: dict[str, GateJudge] = {"G-needle": needle_gate}
SAMPLED: dict[str, GateJudge] = {"G-surprisal": surprisal_gate, "G-support": support_gate}
GATES: dict[str, GateJudge] = {**ALWAYS, **GREEDY, **NEEDLE, **SAMPLED}


def applicable(table: ScoreTable) -> dict[str, GateJudge]:
    """The gates that the planned items call for, in the order a reader meets them."""
    parts = [("margin_max", GREEDY), ("needle", NEEDLE), ("surprisal", SAMPLED)]
    return ALWAYS | {name: judge for metric, gates in parts if table.has(metric).any() for name, judge in gates.items()}


def evaluate_gates(
    table: ScoreTable, floor: Floor, served: Mapping[int, Sequence[str]], dtype: Dtype, options: TextGates
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
    trials = [Trial(table, arm, floor, options, dtype, other) for arm, other in confirms.items()]
    drafts = [judge(trial) for trial in trials for judge in applicable(table).values()]
    return settle(drafts, options, confirms)


def confirming_arm(arm: str, others: Sequence[str]) -> str | None:
    """Of the passes `others` of other instances, the one that confirms `arm`: that of the same name, else the first."""
    name = arm.split("_", 2)[-1]
    return next((other for other in others if other.split("_", 2)[-1] == name), others[0] if others else None)


def noninferiority(low: float, high: float, margin: float) -> Status:
    """N: bounds of how much worse served is, against the allowed margin. Inside it but surely worse is a caveat."""
    if low > margin:
        return Status.FAIL
    if high >= margin:
        return Status.INCONCLUSIVE
    return Status.PASS_WITH_CAVEAT if low > 0 else Status.PASS


# --- small parts -------------------------------------------------------------------------------------------------


def _gate(
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


def _test(
    trial: Trial,
    name: Literal["B", "C", "P", "M", "binomial", "surprisal_z"],
    *,
    p: float | None,
    n: int,
    rank_p: float | None = None,
    ci_low: float | None = None,
    ci_high: float | None = None,
    ci_level: float | None = None,
) -> GateTest:
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


def _skip(trial: Trial, gate: str, metric: str, statistic: str, unit: str, why: Caveat) -> Draft:
    return Draft(
        gate=_gate(
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


def _noisy(noisy: bool) -> str | None:
    return f"floor too noisy: {CAP_RULE}" if noisy else None


def _unjudged(trial: Trial, metric: str, too_short: bool = False) -> str | None:
    # A trend needs two tokens: an item that has a margin and no trend is short, not without evidence.
    wanted = "margin_max" if too_short else metric
    lacking = trial.unjudged(wanted)
    parsed = lacking & (trial.table.values(trial.arm, "evidence") >= LEVELS.index("E3"))
    if parsed.any():
        return f"{int(parsed.sum())} responses returned only lossy text (E3): their tokens cannot be judged"
    if (lacking & trial.lossy()).any():
        return (
            f"{int(trial.lossy().sum())} items of the reference itself do not survive encoding: too many to leave out"
        )
    return f"{int(lacking.sum())} responses have no {wanted}" if lacking.any() else None


def _first(*reasons: str | None) -> str | None:
    return next((reason for reason in reasons if reason), None)


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else 0.0


def _p_text(p: float | None) -> str:
    return "" if p is None else f", p = {p:.3g}"
