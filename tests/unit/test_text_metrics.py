"""Text metrics: hand calculations, and agreement of the ragged forms with a loop."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.metrics import text

ragged = st.lists(st.lists(st.floats(0, 5), max_size=140), min_size=1, max_size=8)


def flatten(items):
    return np.array([value for item in items for value in item], float), np.cumsum([0, *map(len, items)])


@settings(max_examples=60, deadline=None)
@given(ragged)
def test_ragged_reductions_equal_a_loop_over_items(items):
    values, offsets = flatten(items)
    nan = float("nan")
    expected = {
        text.ragged_max: [max(item, default=nan) for item in items],
        text.ragged_mean: [np.mean(item) if item else nan for item in items],
        text.ragged_rms: [np.sqrt(np.mean(np.square(item))) if item else nan for item in items],
        text.ragged_sum: [math.fsum(item) for item in items],
        text.ragged_argmax: [int(np.argmax(item)) if item else -1 for item in items],
    }
    for function, wanted in expected.items():
        np.testing.assert_allclose(function(values, offsets), wanted, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(ragged)
def test_trend_compares_quarters_of_long_items_and_halves_of_short_ones(items):
    values, offsets = flatten(items)
    trend = text.margin_trend(values, offsets, 0.5)
    for index, item in enumerate(items):
        width = len(item) // 4 if len(item) >= 64 else len(item) // 2
        if not width:
            assert np.isnan(trend.difference[index])
            continue
        clipped = np.minimum(item, 0.5)
        assert trend.early[index] == pytest.approx(clipped[:width].mean())
        assert trend.late[index] == pytest.approx(clipped[-width:].mean())


def test_a_token_of_no_probability_is_infinite_and_does_not_poison_the_clipped_mean():
    margins = text.greedy_margin([-0.2, -0.2], [-0.2, -np.inf])
    assert margins.tolist() == [0.0, np.inf]
    assert text.clipped_mean(margins, np.array([0, 2]), 0.5).tolist() == [0.25]


def test_an_exact_tie_has_margin_zero():
    assert text.greedy_margin(-0.7, -0.7) == 0.0


def test_topk_kl_counts_what_the_listed_tokens_leave():
    # 0.6 ln(.6/.5) + 0.3 ln(.3/.3) + 0.1 ln(.1/.2)
    kl = text.kl_topk(np.log([0.6, 0.3]), np.log([0.5, 0.3]))
    assert kl == pytest.approx(0.6 * math.log(1.2) + 0.1 * math.log(0.5))


def test_topk_kl_is_not_the_biased_number_without_the_rest_bucket():
    assert text.kl_topk(np.log([0.6, 0.3]), np.log([0.5, 0.3])) != pytest.approx(0.10939293407637275, abs=0.05)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.01, 2))
def test_topk_kl_is_between_zero_and_the_full_kl(seed, noise):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, 50))
    judge, served = text.log_softmax(logits * 3), text.log_softmax(logits * 3 + noise * rng.normal(size=(4, 50)))
    top = np.argsort(-judge, axis=1)[:, :10]
    kl = text.kl_topk(np.take_along_axis(judge, top, 1), np.take_along_axis(served, top, 1))
    full = text.kl_divergence(np.exp(judge), np.exp(served))
    assert (kl >= -1e-12).all()
    assert (kl <= full + 1e-9).all()


def test_float32_logprobs_of_one_distribution_have_no_kl_above_rounding():
    rng = np.random.default_rng(0)
    logprobs = text.log_softmax(rng.normal(size=(100, 1000)) * 4)
    top = -np.sort(-logprobs, axis=1)[:, :20]
    rounded = np.nextafter(top.astype(np.float32), np.float32(0))
    assert np.abs(text.kl_topk(top.astype(np.float32), rounded)).max() < 1e-6


@pytest.mark.parametrize(("dtype", "spacing"), [("bfloat16", 0.125), ("float16", 2**-6), ("float32", 2**-19)])
def test_ulp_of_logits_between_16_and_32(dtype, spacing):
    assert text.ulp(dtype, 16.0) == text.ulp(dtype, 31.9) == spacing


def test_bfloat16_rounding_agrees_with_torch():
    import torch

    x = np.random.default_rng(1).normal(0, 30, 1000).astype(np.float32)
    assert (text.round_bf16(x) == torch.from_numpy(x).bfloat16().float().numpy()).all()


def test_a_missing_token_is_a_divergence():
    assert text.first_divergence([1, 2, 3], [1, 2]) == 2


def test_vllms_rule_looks_only_at_the_first_difference():
    a, b = [1, 2, 9], [1, 3, 8]
    top = [{1}, {2, 3}, {0}]
    assert text.check_logprobs_close(a, top, b, top)
    assert not text.check_logprobs_close(a, [{1}, {2}, {0}], b, top)
    assert text.check_logprobs_close(a, top, a[:2], top[:2])  # a length difference is ignored: its known blind spot


def test_rouge_l_of_words():
    # LCS "the cat" = 2 of 3 + 3 words
    assert text.rouge_l(["the", "cat", "sat"], ["the", "cat", "ran"]) == pytest.approx(2 / 3)
    assert text.rouge_l([], []) == 1.0


def test_two_leading_bos_are_counted():
    assert [text.leading_bos(ids, 1) for ids in ([1, 1, 5], [1, 5, 1], [5])] == [2, 1, 0]


def test_surprisal_z_uses_the_larger_of_model_and_item_spread():
    # sums 3, 1: total 4; model variance 2 + 2 = 4 against spread var(3, 1) x 2 = 4
    assert text.surprisal_z([3.0, 1.0], [2.0, 2.0]) == 2.0
    assert text.surprisal_z([3.0, 1.0], [0.1, 0.1]) == 2.0
    assert text.surprisal_z([3.0, 1.0], [8.0, 8.0]) == 1.0


def test_nobody_calling_a_tool_has_no_f1():
    assert text.tool_call_f1(0, 0, 0) is None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It is 48,213.", True),
        ("48213", True),
        ("48213.5", False),
        ("0.48213", False),
        ("482130", False),
    ],
)
def test_a_needle_is_a_whole_number_with_no_more_digits_on_either_side_of_the_point(answer, right):
    assert text.needle_correct("48213", answer) is right
