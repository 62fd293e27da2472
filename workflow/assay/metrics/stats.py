"""Tests and bounds of the gates. Higher is worse in every score; every p-value is for "served is worse" unless said.

Letters (B, C, R, P, N, M) are those a verdict prints as the name of a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]

EXACT_RANK_ITEMS = 8  # at most this many items: the rank sum's distribution is computed, not approximated
EXACT_SHIFT_ITEMS = 20  # below this many: exact Wilcoxon bounds instead of a bootstrap
DRAWN_ITEMS = 4096  # items whose labels are drawn one by one in a permutation test
_CHUNK = 1 << 22  # labels drawn at a time: bounds memory to some 70 MB


@dataclass(frozen=True)
class Interval:
    """A confidence interval; a side without a bound is 0 or 1 (rates), or infinite (shifts)."""

    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """A test statistic and its p-value."""

    statistic: float
    p: float


@dataclass(frozen=True)
class Shift:
    """A paired shift: its point and one-sided bounds, each at `confidence`."""

    point: float  # mean, Hodges-Lehmann estimate, or difference of pooled rates
    low: float
    high: float
    confidence: float
    method: Literal["bca", "wilcoxon"]


def clopper_pearson(
    k: int, n: int, confidence: float = 0.95, side: Literal["upper", "lower", "two"] = "upper"
) -> Interval:
    """B: exact bounds of a rate, `k` bad of `n` [fraction] (Clopper and Pearson 1934).

    One-sided by default: 0 of 32 bounds the rate by 8.9 %, never by 0.
    """
    alternative = {"upper": "less", "lower": "greater", "two": "two-sided"}[side]
    bounds = stats.binomtest(k, n, alternative=alternative).proportion_ci(confidence, method="exact")
    return Interval(float(bounds.low), float(bounds.high))


def n_for_zero_failures(max_rate: float, confidence: float = 0.95) -> int:
    """Items that must all be good to claim a bad rate below `max_rate`."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - max_rate))


def tolerance_limit_n(quantile: float, confidence: float = 0.95, rank: int = 1) -> int:
    """Smallest n whose `rank`-th largest value is above the `quantile` with `confidence` (Wilks 1941)."""

    def short(n: int) -> bool:
        return bool(stats.binom.cdf(rank - 1, n, 1 - quantile) > 1 - confidence)

    high = rank
    while short(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if short(middle) else (low, middle)
    return high


def conditional_exceedance(k_served: int, n_served: int, k_floor: int, n_floor: int) -> float:
    """C: p-value of `k_served` bad items of `n_served`, given `k_floor` of `n_floor` floor item-arms.

    With the threshold at the r-th largest floor value, k_floor = r - 1 and the p-value is exact for exchangeable
    continuous scores (the served count is then negative binomial): choosing the threshold on the floor costs nothing.
    """
    return float(stats.binom.sf(k_served - 1, k_served + k_floor, n_served / (n_served + n_floor)))


def worst_of_j_plus_1(items: int, worst_count: int, arms: int) -> float:
    """p-value of served being the worst of `arms` + 1 in `worst_count` of `items`."""
    return float(stats.binom.sf(worst_count - 1, items, 1 / (arms + 1)))


def sign_test(worse: int, n: int) -> float:
    """One-sided sign test: `worse` of `n` untied pairs have served worse."""
    return float(stats.binom.sf(worse - 1, n, 0.5))


def mcnemar(lost: int, won: int) -> float:
    """M: exact one-sided McNemar p-value; `lost` pairs only the reference solves, `won` pairs only served solves."""
    return sign_test(lost, lost + won) if lost + won else 1.0


def least_p(items: int, arms: int, permutations: int) -> float:
    """Smallest p-value that a within-item permutation of `arms` + 1 labels can give."""
    return max(float(arms + 1) ** -items, 1 / (permutations + 1))


def holm(p: Sequence[float]) -> Floats:
    """Holm's step-down adjusted p-values, in the order given."""
    values = np.asarray(p, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def floor_quantile(x: npt.ArrayLike, q: float, limit: Literal["upper", "lower"] = "upper") -> float:
    """Order-statistic quantile: never interpolated, rounded away from the bulk for a limit on that side."""
    method: Literal["higher", "lower"] = "higher" if limit == "upper" else "lower"
    return float(np.quantile(np.asarray(x, dtype=np.float64), q, method=method))


def van_elteren(scores: Floats) -> Outcome:
    """R: is served (column 0) ranked worse than the floor arms within items?

    Args:
        scores: float64 [items, 1 + J], higher is worse.

    Returns:
        z of the rank sum with mid-ranks and tie-corrected variance (van Elteren 1960), and the one-sided p-value:
        from the exact distribution for at most `EXACT_RANK_ITEMS` items, else normal. All tied: z = 0, p = 1.
    """
    ranks = stats.rankdata(scores, axis=1)
    excess = float(ranks[:, 0].sum() - ranks.mean(axis=1).sum())
    variance = float(ranks.var(axis=1).sum())
    if variance == 0:
        return Outcome(0.0, 1.0)
    z = excess / math.sqrt(variance)
    p = _rank_sum_tail(ranks) if len(ranks) <= EXACT_RANK_ITEMS else float(stats.norm.sf(z))
    return Outcome(z, p)


def _rank_sum_tail(ranks: Floats) -> float:
    doubled = np.rint(2 * ranks).astype(int)  # mid-ranks are multiples of a half
    distribution = np.ones(1)
    for row in doubled:
        distribution = np.convolve(distribution, np.bincount(row) / len(row))
    return float(min(distribution[doubled[:, 0].sum() :].sum(), 1.0))


def label_permutation(scores: Floats, permutations: int, seed: int) -> Outcome:
    """P: is the mean of served (column 0) above the mean of the floor arms, when labels are exchanged within items?

    Args:
        scores: float64 [items, 1 + J], finite, higher is worse.
        permutations: B. The p-value is (1 + #{permuted >= observed}) / (B + 1).

    Returns:
        mean(served) - mean(floor), and the one-sided p-value. The result does not depend on the order of items.

    The labels of the `DRAWN_ITEMS` items with the widest spread are drawn one by one; all other items enter as one
    normal draw with their exact permutation mean and variance (a sum of thousands of small bounded terms), which bounds
    time and memory at any number of items.
    """
    served, rest = scores[:, 0], scores[:, 1:]
    statistic = float(served.mean() - rest.mean())
    centred = scores - scores.mean(axis=1, keepdims=True)
    variance = (centred**2).mean(axis=1)
    # Rows with the same content are interchangeable: sorting by content makes the draw independent of item order.
    order = np.lexsort((*centred.T, -variance))
    order = order[variance[order] > 0]
    if not len(order):
        return Outcome(statistic, 1.0)
    drawn, pooled = centred[order[:DRAWN_ITEMS]], variance[order[DRAWN_ITEMS:]]
    # Sum over items of the served value, centred: a linear function of the statistic.
    observed = math.fsum(centred[order, 0])
    tolerance = 1e-9 * float(np.abs(drawn).max(axis=1).sum())
    rng = np.random.default_rng(seed)
    offsets = np.arange(len(drawn)) * drawn.shape[1]
    flat, sigma, hits = drawn.ravel(), math.sqrt(float(pooled.sum())), 0
    step = max(1, _CHUNK // len(drawn))
    for start in range(0, permutations, step):
        rows = min(step, permutations - start)
        labels = rng.integers(0, drawn.shape[1], size=(rows, len(drawn)), dtype=np.uint8)
        sums = flat[offsets + labels].sum(axis=1) + sigma * rng.standard_normal(rows)
        hits += int(np.count_nonzero(sums >= observed - tolerance))
    return Outcome(statistic, (1 + hits) / (permutations + 1))


def sign_flip_least_p(items: int) -> float:
    """Smallest one-sided p-value of a sign-flip permutation over `items` pairs."""
    return 0.5**items


def hodges_lehmann(d: npt.ArrayLike) -> float:
    """Median of all Walsh averages (d_i + d_j) / 2, i <= j, in O(n log n) time a step and O(n) memory."""
    values = np.sort(np.asarray(d, dtype=np.float64))
    total = len(values) * (len(values) + 1) // 2
    low, high = (_walsh(values, k) for k in ((total + 1) // 2, total // 2 + 1))
    return (low + high) / 2


def _walsh(ordered: Floats, k: int) -> float:
    """The `k`-th smallest (from 1) Walsh average of sorted values: bisection on its value, to the last bit."""
    low, high = float(ordered[0]), float(ordered[-1])
    if _count_walsh(ordered, low) >= k:
        return low
    while True:
        middle = low + (high - low) / 2
        if not low < middle < high:
            return high
        if _count_walsh(ordered, middle) >= k:
            high = middle
        else:
            low = middle


def _count_walsh(ordered: Floats, x: float) -> int:
    upto = np.searchsorted(ordered, 2 * x - ordered, side="right")  # j such that (d_i + d_j) / 2 <= x
    return int(np.maximum(upto - np.arange(len(ordered)), 0).sum())


def paired_shift(d: npt.ArrayLike, seed: int, confidence: float = 0.95, resamples: int = 9_999) -> Shift:
    """N: how much worse is served, item by item?

    Args:
        d: float64 [items], finite; median over floor arms against served, signed so that + means served is worse.

    Returns:
        From `EXACT_SHIFT_ITEMS` items on the mean, and its one-sided bounds by BCa bootstrap over items; below, the
        Hodges-Lehmann estimate and the exact Wilcoxon signed-rank bounds that belong to it. Too few items for the
        confidence asked give infinite bounds.
    """
    values = np.asarray(d, dtype=np.float64)
    if len(values) < EXACT_SHIFT_ITEMS:
        low, high = _wilcoxon_bounds(values, 1 - confidence)
        return Shift(hodges_lehmann(values), low, high, confidence, "wilcoxon")
    point = float(values.mean())
    if np.allclose(values, point, rtol=1e-9, atol=0):  # the same in every item: so in every resample
        return Shift(point, point, point, confidence, "bca")
    low, high = _bca_bounds((values,), np.mean, seed, confidence, resamples)
    return Shift(point, low, high, confidence, "bca")


def pooled_shift(
    excess: npt.ArrayLike, sizes: npt.ArrayLike, seed: int, confidence: float = 0.95, resamples: int = 9_999
) -> Shift:
    """N for a pooled rate: how much higher is the corpus WER of served than that of the reference?

    Args:
        excess: float64 [items], finite; errors of served minus errors of the reference in one item.
        sizes: float64 [items], >= 0 and not all 0; words of the item. An item of size 0 adds its errors alone.

    Returns:
        Point sum(excess) / sum(sizes); one-sided bounds by BCa bootstrap over items, errors and words of an item drawn
        together (Bisani and Ney 2004). Below `EXACT_SHIFT_ITEMS` items, where no exact bound of a ratio is known, they
        are infinite.

    Raises:
        ValueError: lengths differ, or no item has a size.
    """
    errors, words = np.asarray(excess, np.float64), np.asarray(sizes, np.float64)
    if errors.shape != words.shape or not words.sum() > 0:
        raise ValueError(f"{errors.shape} errors and {words.shape} sizes, {words.sum():g} in all, make no rate")
    point = float(errors.sum() / words.sum())
    if len(errors) < EXACT_SHIFT_ITEMS:
        return Shift(point, -math.inf, math.inf, confidence, "bca")
    if np.allclose(errors, point * words):  # the same rate in every item: so in every resample
        return Shift(point, point, point, confidence, "bca")

    def rate(errors: Floats, words: Floats, axis: int) -> Floats:
        return np.asarray(errors.sum(axis=axis) / words.sum(axis=axis))

    low, high = _bca_bounds((errors, words), rate, seed, confidence, resamples)
    return Shift(point, low, high, confidence, "bca")


def _bca_bounds(
    samples: tuple[Floats, ...], statistic: Callable[..., Any], seed: int, confidence: float, resamples: int
) -> tuple[float, float]:
    """Two one-sided bounds of a statistic by BCa bootstrap; what `samples` hold of one item is drawn together."""
    interval = stats.bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        n_resamples=resamples,
        batch=max(1, _CHUNK // len(samples[0])),
        confidence_level=2 * confidence - 1,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _wilcoxon_bounds(values: Floats, alpha: float) -> tuple[float, float]:
    n = len(values)
    counts = np.ones(1)  # of subsets of 1..n by their sum: the null distribution of the signed-rank statistic
    for rank in range(1, n + 1):
        counts = np.convolve(counts, np.concatenate([[1.0], np.zeros(rank - 1), [1.0]]))
    cumulative = np.cumsum(counts) / 2.0**n
    k = int(np.searchsorted(cumulative, alpha, side="right"))  # largest k with P(T <= k - 1) <= alpha
    if k == 0:
        return -math.inf, math.inf
    ordered = np.sort(values)
    return _walsh(ordered, k), _walsh(ordered, n * (n + 1) // 2 + 1 - k)
