"""Tests and bounds: against hand calculations, brute force, and their own promises (uniform p, order, monotony)."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from assay.metrics import stats

scores = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).exponential(size=(12, 4)))


def test_label_permutation_matches_enumeration_of_all_labellings():
    x = np.array([[3.0, 1.0, 0.0], [2.0, 2.5, 1.0], [5.0, 0.0, 4.0], [1.0, 1.0, 0.5]])
    observed = x[:, 0].sum()
    exact = np.mean(
        [sum(row[k] for row, k in zip(x, labels, strict=True)) >= observed for labels in product(range(3), repeat=4)]
    )
    # 99 999 draws: standard error below 0.0016
    assert stats.label_permutation(x, 99_999, seed=1).p == pytest.approx(exact, abs=0.005)


def test_label_permutation_statistic_is_served_mean_minus_floor_mean():
    # served (3 + 1) / 2 = 2; floor (1 + 0 + 0 + 1) / 4 = 0.5
    assert stats.label_permutation(np.array([[3.0, 1.0, 0.0], [1.0, 0.0, 1.0]]), 999, 0).statistic == 1.5


def test_label_permutation_of_equal_scores_gives_no_evidence():
    assert stats.label_permutation(np.zeros((50, 4)), 999, 0) == stats.Outcome(0.0, 1.0)


def test_label_permutation_p_is_uniform_under_the_null():
    rng = np.random.default_rng(5)
    p = [stats.label_permutation(rng.exponential(size=(20, 4)), 999, seed).p for seed in range(400)]
    assert kstest(p, "uniform").pvalue > 0.001


def test_label_permutation_with_pooled_items_agrees_with_drawing_them_all(monkeypatch):
    rng = np.random.default_rng(6)
    x = rng.exponential(size=(3000, 4))
    x[:, 0] += 0.03
    drawn = stats.label_permutation(x, 9_999, 1).p
    monkeypatch.setattr(stats, "DRAWN_ITEMS", 200)
    assert 0.001 < drawn < 0.5
    assert stats.label_permutation(x, 9_999, 1).p == pytest.approx(drawn, abs=0.02)


@settings(max_examples=25, deadline=None)
@given(scores, st.randoms())
def test_label_permutation_ignores_the_order_of_items(x, random):
    shuffled = x[random.sample(range(len(x)), len(x))]
    assert stats.label_permutation(shuffled, 999, 3).p == stats.label_permutation(x, 999, 3).p


@settings(max_examples=25, deadline=None)
@given(scores, st.floats(0, 2))
def test_p_values_fall_when_served_gets_worse(x, shift):
    worse = x.copy()
    worse[:, 0] += shift
    assert stats.label_permutation(worse, 999, 3).p <= stats.label_permutation(x, 999, 3).p + 0.05
    assert stats.van_elteren(worse).p <= stats.van_elteren(x).p


def test_van_elteren_exact_tail_of_three_items_all_worst_of_five():
    # P(served worst in all 3 items of 5 arms) = 0.2^3
    x = np.array([[9.0, 1, 2, 3, 4]] * 3)
    assert stats.van_elteren(x).p == pytest.approx(0.008)


def test_van_elteren_counts_ties_by_mid_ranks():
    # ranks (1.5, 1.5) in both items: the observed sum 3 is certain
    assert stats.van_elteren(np.ones((2, 2))) == stats.Outcome(0.0, 1.0)
    # item 1: served 2 of (1, 2); item 2 tied: P(sum >= 3.5) = 1/2
    assert stats.van_elteren(np.array([[1.0, 0.0], [1.0, 1.0]])).p == 0.5


def test_van_elteren_normal_and_exact_tails_meet():
    rng = np.random.default_rng(7)
    x = rng.normal(size=(9, 5))
    exact = stats._rank_sum_tail(np.argsort(np.argsort(x, axis=1), axis=1) + 1.0)
    assert stats.van_elteren(x).p == pytest.approx(exact, abs=0.05)  # the normal tail has no continuity correction


def test_van_elteren_p_is_uniform_under_the_null():
    rng = np.random.default_rng(8)
    p = [stats.van_elteren(rng.normal(size=(40, 5))).p for _ in range(500)]
    assert kstest(p, "uniform").pvalue > 0.001


def test_conditional_exceedance_never_claims_more_than_its_level():
    rng = np.random.default_rng(9)
    p = np.array(
        [stats.conditional_exceedance(rng.binomial(100, 0.3), 100, rng.binomial(300, 0.3), 300) for _ in range(3000)]
    )
    for level in (0.005, 0.05, 0.2):
        assert np.mean(p <= level) <= level + 3 * np.sqrt(level / 3000)
    assert np.mean(p <= 0.2) > 0.12  # and it is not idle


def test_conditional_exceedance_holds_its_level_with_a_threshold_cut_from_the_same_floor():
    rng = np.random.default_rng(10)
    found = []
    for _ in range(2000):
        floor, served = rng.exponential(size=300), rng.exponential(size=100)
        tau = np.sort(floor)[-10]
        found.append(stats.conditional_exceedance(int((served > tau).sum()), 100, int((floor > tau).sum()), 300))
    assert np.mean(np.array(found) <= 0.05) <= 0.05 + 3 * np.sqrt(0.05 / 2000)


def test_hodges_lehmann_equals_the_median_of_all_walsh_averages():
    rng = np.random.default_rng(11)
    for n in (1, 2, 7, 40):
        d = rng.normal(size=n)
        i, j = np.triu_indices(n)
        assert stats.hodges_lehmann(d) == pytest.approx(np.median((d[i] + d[j]) / 2), rel=1e-12)


def test_exact_shift_bounds_are_order_statistics_of_walsh_averages():
    # n = 5, alpha = 1/32: only T+ = 0 has P <= 1/32, so the bounds are the smallest and largest averages
    shift = stats.paired_shift([1.0, 2.0, 3.0, 4.0, 6.0], seed=0, confidence=1 - 1 / 32)
    assert (shift.low, shift.high, shift.method) == (1.0, 6.0, "wilcoxon")


def test_too_few_pairs_bound_nothing():
    shift = stats.paired_shift([1.0, 2.0, 3.0], seed=0)
    assert (shift.low, shift.high) == (-np.inf, np.inf)


def test_the_shift_lies_between_its_bounds_though_few_items_make_all_of_it():
    d = np.zeros(64)
    d[:10] = -np.linspace(1, 2, 10)
    shift = stats.paired_shift(d, seed=0)
    assert shift.low < shift.point < shift.high < 0
    assert shift.point == pytest.approx(d.mean())


def test_bca_bounds_hold_the_true_shift_as_often_as_promised():
    rng = np.random.default_rng(12)
    held = [stats.paired_shift(rng.normal(0.3, 1, 40), seed, resamples=499) for seed in range(200)]
    assert np.mean([shift.low <= 0.3 for shift in held]) > 0.9
    assert np.mean([shift.high >= 0.3 for shift in held]) > 0.9


def test_clopper_pearson_one_sided_lower_bound():
    # all 10 good: p such that p^10 = 0.05
    assert stats.clopper_pearson(10, 10, side="lower").low == pytest.approx(0.05**0.1)


def test_mcnemar_without_discordant_pairs_gives_no_evidence():
    assert stats.mcnemar(0, 0) == 1.0
    assert stats.mcnemar(8, 0) == pytest.approx(2**-8)


def test_floor_quantile_is_never_interpolated():
    # position 0.95 x 9 = 8.55: the upper limit takes the next value, the lower the one before
    assert stats.floor_quantile(range(1, 11), 0.95) == 10
    assert stats.floor_quantile(range(1, 11), 0.95, "lower") == 9


# --- pooled shift ------------------------------------------------------------------------------------------------


def corpus(n, shift, seed):
    """Errors of served minus those of the reference, and words: 0.2 % benign flips either way, `shift` real ones."""
    rng = np.random.default_rng(seed)
    words = np.maximum(1, rng.lognormal(np.log(18), 0.5, n).astype(int))
    return rng.binomial(words, 0.002 + shift) - rng.binomial(words, 0.002), words


def test_a_pooled_shift_weighs_words_and_not_items():
    # one word wrong in an item of 1, none in 24 items of 10: 1 / 241, where the mean of items is 1 / 25
    excess, words = np.zeros(25), np.full(25, 10)
    excess[0], words[0] = 1, 1
    assert stats.pooled_shift(excess, words, seed=0).point == pytest.approx(1 / 241)


def test_a_pooled_shift_is_positive_when_served_is_worse():
    excess, words = corpus(200, 0.02, 0)
    worse, better = stats.pooled_shift(excess, words, seed=0), stats.pooled_shift(-excess, words, seed=0)
    assert 0 < worse.low < worse.point < worse.high
    assert better.point == -worse.point and better.high < 0


@pytest.mark.parametrize(("shift", "passing", "failing"), [(0.0, 1.0, 0.0), (0.01, 0.0, 0.9)])
def test_half_a_point_of_wer_is_decided_at_300_items(shift, passing, failing):
    # Published simulation at n = 300: no change passes always, one point more fails always
    bounds = [stats.pooled_shift(*corpus(300, shift, seed), seed, resamples=999) for seed in range(20)]
    assert np.mean([bound.high < 0.005 for bound in bounds]) == passing
    assert np.mean([bound.low > 0.005 for bound in bounds]) >= failing


def test_bounds_of_a_pooled_shift_hold_as_often_as_they_say():
    bounds = [stats.pooled_shift(*corpus(100, 0.01, seed), seed, resamples=999) for seed in range(100)]
    # 5 expected on either side; P(more than 11) = 0.4 %
    assert sum(bound.low > 0.01 for bound in bounds) <= 11
    assert sum(bound.high < 0.01 for bound in bounds) <= 11


def test_pairs_are_drawn_together():
    # The same rate in every item: errors and words drawn apart would spread; drawn together they cannot.
    words = np.arange(1, 41) * 10
    assert stats.pooled_shift(words / 10, words, seed=0) == stats.Shift(0.1, 0.1, 0.1, 0.95, "bca")
    excess = words / 10
    excess[0] += 1
    spread = stats.pooled_shift(excess, words, seed=0)
    assert spread.high - spread.low < 0.001


def test_equal_transcripts_leave_no_shift_and_few_items_no_bounds():
    assert stats.pooled_shift(np.zeros(100), np.full(100, 9), seed=0) == stats.Shift(0.0, 0.0, 0.0, 0.95, "bca")
    few = stats.pooled_shift(np.ones(19), np.full(19, 10), seed=0)
    assert (few.point, few.low, few.high) == (0.1, -np.inf, np.inf)


def test_items_without_words_add_their_errors():
    excess, words = np.zeros(100), np.full(100, 10)
    words[:2], excess[:2] = 0, 5
    assert stats.pooled_shift(excess, words, seed=0).point == pytest.approx(10 / 980)


@pytest.mark.parametrize(("excess", "words"), [([1, 2], [3]), ([0, 0], [0, 0]), ([], [])])
def test_no_words_make_no_rate(excess, words):
    with pytest.raises(ValueError, match="make no rate"):
        stats.pooled_shift(excess, words, seed=0)
