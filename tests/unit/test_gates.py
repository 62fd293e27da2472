"""Each gate: its planted fault turns it red, its clean twin stays green."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import ALL_SERVED, OPTIONS, SERVED, World

from assay.records import Status
from assay.verdicts.drafts import Draft, settle
from assay.verdicts.margins.checks import MARGIN_CHECKS
from assay.verdicts.margins.floor import cut_floor
from assay.verdicts.model import Gate
from assay.verdicts.scoretable import ScoreTable
from assay.verdicts.text.suite import TEXT

FIRST = ALL_SERVED[0]


def gates(world: World, options=OPTIONS, served=SERVED, arm=FIRST) -> dict[str, Gate]:
    """Gates of one pass, the first of instance 0 unless given, by id."""
    table = world.table()
    floor = cut_floor(table, world.margins(), world.floor_arms, world.dtype, options)
    found = TEXT.evaluate(table, floor, served, world.dtype, options)
    return {gate.id: gate for gate in found if gate.arm == arm}


def failing(found: dict[str, Gate]) -> set[str]:
    return {name for name, gate in found.items() if gate.status is Status.FAIL}


def rescore(world: World, margins: np.ndarray, deltas: np.ndarray | None = None) -> World:
    """Serve these token margins, with the dtype's own logprob noise unless given."""
    noise = world.rng.normal(0, 2e-6 if world.dtype == "float32" else 0.03, world.gaps.shape)
    world.serve(margins=margins, deltas=noise if deltas is None else deltas)
    return world


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("floors", [2, 4])
def test_a_healthy_server_passes_every_gate(dtype, floors):
    found = gates(World(dtype=dtype, floors=floors, needles=10))
    assert {gate.status for gate in found.values()} == {Status.PASS}
    assert list(found) == ["G-coverage", "G-struct", *MARGIN_CHECKS, "G-needle"]


def test_a_server_that_is_the_judge_has_the_best_scores():
    world = World()
    world.serve(noise=0.0)
    found = gates(world)
    assert [found[name].value for name in ("G-hard", "G-soft", "G-mean", "G-trend", "G-logprob", "G-KL")] == [0.0] * 6


# --- G-hard ---


def one_bad_token(world: World, margin: float = 3.0, item: int = 5, pos: int = 40) -> np.ndarray:
    margins = world.tokens[FIRST].copy()
    margins[item, pos] = margin
    return margins


def test_one_unexplained_token_fails_the_hard_gate_and_is_listed_with_its_position():
    world = World()
    found = gates(rescore(world, one_bad_token(world)))["G-hard"]
    assert found.status is Status.FAIL
    assert (found.worst_items[0].item_id, found.worst_items[0].value, found.worst_items[0].pos) == (
        "item-000005",
        3.0,
        40,
    )
    assert found.confirm.reproduced_items == ["item-000005"]


def test_a_token_the_judge_gives_no_probability_counts_as_infinite():
    world = World()
    found = gates(rescore(world, one_bad_token(world, np.inf)))["G-hard"]
    assert found.status is Status.FAIL
    assert found.worst_items[0].value is None


def test_a_hit_on_one_instance_only_is_a_caveat():
    world = World()
    world.add(FIRST, margins=one_bad_token(world), deltas=np.zeros(world.gaps.shape))
    found = gates(world)["G-hard"]
    assert found.status is Status.PASS_WITH_CAVEAT
    assert [caveat.code for caveat in found.caveats] == ["not_reproduced"]


def test_a_hit_on_the_other_instance_only_is_a_caveat():
    world = World()
    world.add("served_1_load", margins=one_bad_token(world), deltas=np.zeros(world.gaps.shape))
    assert gates(world)["G-hard"].caveats == []
    assert [caveat.code for caveat in gates(world, arm="served_1_load")["G-hard"].caveats] == ["not_reproduced"]


def garbage(world: World, arm: str) -> World:
    """The second choice at 30 % of the positions of one pass."""
    margins = np.where(world.rng.random(world.gaps.shape) < 0.3, world.gaps, 0.0)
    world.add(arm, margins=margins, deltas=np.zeros(world.gaps.shape))
    return world


@pytest.mark.parametrize(("bad", "clean"), [("served_1_load", "served_0_load"), ("served_0_load", "served_1_load")])
def test_garbage_on_either_instance_alone_is_never_a_pass(bad, clean):
    found = gates(garbage(World(), bad), arm=bad)
    for name in ("G-hard", "G-soft", "G-mean"):
        assert found[name].status is Status.INCONCLUSIVE
        assert f"significant on {bad}, not on {clean}" in found[name].detail


def test_without_a_second_instance_a_hit_stands():
    world = World()
    world.add(FIRST, margins=one_bad_token(world), deltas=np.zeros(world.gaps.shape))
    del world.arms["served_1_load"]
    found = gates(world, served={0: SERVED[0]})["G-hard"]
    assert found.status is Status.FAIL
    assert not found.confirm.performed


def test_corruption_of_other_items_on_each_instance_fails_by_count():
    world = World(n=60)
    for arm, start in ((FIRST, 0), ("served_0_load", 0), ("served_1_load", 30)):
        margins = world.tokens[arm].copy()
        margins[start : start + 12, 3] = 4.0
        world.add(arm, margins=margins, deltas=np.zeros(world.gaps.shape))
    found = gates(world)["G-hard"]
    assert found.status is Status.FAIL
    assert found.confirm.p < OPTIONS.alpha_confirm
    assert found.confirm.reproduced_items == []


def test_the_hard_threshold_is_never_below_two_ulp_of_the_logits():
    assert gates(World(dtype="bfloat16"))["G-hard"].threshold.value >= 0.25


def test_the_hard_threshold_of_a_silent_float32_floor_is_the_resolution():
    threshold = gates(World(dtype="float32"))["G-hard"].threshold
    assert (threshold.value, threshold.source) == (1e-4, "absolute")


def test_the_hard_threshold_grows_with_the_floors_logprob_errors():
    world = World()
    deltas = np.zeros(world.gaps.shape)
    deltas[0, 0] = -0.4
    world.add(world.floor_arms[0], deltas=deltas)
    assert gates(world)["G-hard"].threshold.value == pytest.approx(2 * 0.4)


def test_a_floor_above_the_cap_decides_nothing():
    world = World()
    world.add(world.floor_arms[0], margins=one_bad_token(world, 0.6))
    found = gates(rescore(world, one_bad_token(world, 5.0)))["G-hard"]
    assert found.status is Status.INCONCLUSIVE
    assert "too noisy" in found.detail


# --- distributional gates ---


def test_a_noisier_server_fails_the_distributional_gates():
    world = World()
    world.serve(noise=0.3)
    assert {"G-soft", "G-mean", "G-logprob", "G-KL"} <= failing(gates(world))


def test_a_noise_of_a_hundredth_nat_fails_a_float32_server():
    # RMSNorm eps 1e-3 in all layers moves logprobs by 0.026 on the real model
    world = World(dtype="float32")
    world.serve(noise=0.01)
    assert {"G-logprob", "G-KL"} <= failing(gates(world))


def test_float32_engines_that_differ_in_the_last_bits_are_not_even_a_caveat():
    world = World(dtype="float32", floors=2)
    world.add(world.floor_arms[0], noise=0.0)  # a batch arm that is bit-identical to the judge
    world.serve(noise=2e-5)  # ten times the other arm's noise
    assert {gate.status for gate in gates(world).values()} == {Status.PASS}


def test_a_right_bfloat16_engine_with_half_again_the_floors_noise_does_not_fail():
    for seed in range(10):
        world = World(floors=2, seed=seed)
        world.serve(noise=0.045)
        assert not failing(gates(world))


def test_a_real_shift_inside_the_limit_is_small_but_real():
    world = World(floors=4)
    world.serve(noise=0.05)
    found = gates(world)["G-logprob"]
    assert found.status is Status.PASS_WITH_CAVEAT
    assert [caveat.code for caveat in found.caveats] == ["small_but_real"]


@pytest.mark.parametrize(("part", "where"), [("late", slice(48, None)), ("early", slice(0, 16))])
def test_margins_in_one_part_fail_the_trend_gate_and_name_the_part(part, where):
    world = World()
    margins = world.tokens[FIRST].copy()
    margins[:, where] = np.where(world.rng.random(margins[:, where].shape) < 0.2, 0.2, margins[:, where])
    found = gates(rescore(world, margins))
    assert found["G-trend"].status is Status.FAIL
    assert found["G-trend"].diagnosis[0].hint.startswith(f"{part}_positions")


def test_the_same_margins_spread_evenly_are_no_trend():
    world = World()
    margins = np.where(world.rng.random(world.gaps.shape) < 0.05, 0.2, 0.0)
    found = gates(rescore(world, margins))
    assert found["G-mean"].status is Status.FAIL
    assert found["G-trend"].status is Status.PASS


def test_a_statistical_fail_needs_the_other_instance_to_agree():
    world = World()
    world.add(FIRST, noise=0.3)
    found = gates(world)["G-logprob"]
    assert found.status is Status.INCONCLUSIVE
    assert found.confirm.performed
    assert "the instances differ" in found.detail


def test_a_confirming_instance_that_answered_nothing_confirms_nothing():
    world = World()
    world.serve(noise=0.3)
    for index in range(32):
        world.arms["served_1_load"].fail(index)
    found = gates(world)
    assert {"G-hard", "G-logprob"} <= failing(found)
    assert not found["G-hard"].confirm.performed
    assert not found["G-logprob"].confirm.performed


def test_identical_floor_arms_are_one_arm_and_one_arm_is_no_floor():
    world = World(floors=2)
    world.copy(world.floor_arms[0], world.floor_arms[1])
    found = gates(world)
    assert found["G-mean"].floor.arms_effective == 1
    assert {found[name].status for name in MARGIN_CHECKS} == {Status.INCONCLUSIVE}


def test_arms_with_equal_margins_and_different_logprobs_are_two_arms():
    world = World(dtype="float32", floors=2)
    assert (world.tokens[world.floor_arms[0]] == world.tokens[world.floor_arms[1]]).all()
    assert gates(world)["G-logprob"].floor.arms_effective == 2


def test_three_items_can_never_fail_a_permutation_test_and_never_pass_it():
    assert gates(World(n=3))["G-mean"].status is Status.INCONCLUSIVE


def test_soft_threshold_is_the_tenth_largest_floor_margin():
    world = World(n=100)
    pooled = np.sort(np.concatenate([world.tokens[arm].ravel() for arm in world.floor_arms]))
    assert gates(world)["G-soft"].threshold.value == max(pooled[-10], OPTIONS.resolution_nat["bfloat16"])


def test_the_soft_threshold_is_never_below_the_resolution():
    world = World(dtype="float32")
    world.add(world.floor_arms[0], margins=np.where(world.rng.random(world.gaps.shape) < 0.1, 1e-6, 0.0))
    assert gates(world)["G-soft"].threshold.value == 1e-4


def test_a_significant_trend_of_margins_below_the_resolution_is_no_fault():
    world = World(dtype="float32")
    margins = np.zeros(world.gaps.shape)
    margins[:, 48:] = 5e-5
    found = gates(rescore(world, margins))["G-trend"]
    assert found.test.p < OPTIONS.alpha_soft
    assert found.status is Status.PASS


@pytest.mark.parametrize(("p", "status"), [(0.004, Status.FAIL), (0.007, Status.PASS)])
def test_a_single_test_fails_below_the_level_of_its_gate_only(p, status):
    gate = gates(World())["G-mean"].model_copy(update={"caveats": []})
    (settled,) = settle([Draft(gate=gate, p=p, effect=True)], OPTIONS)
    assert settled.status is status


def test_twenty_tests_at_once_need_a_smaller_p():
    gate = gates(World())["G-mean"]
    drafts = [Draft(gate=gate, p=0.004, effect=True), *[Draft(gate=gate, p=0.5)] * 19]
    assert settle(drafts, OPTIONS)[0].status is Status.PASS  # Holm: 20 x 0.004


# --- evidence ---


def test_missing_logprobs_skip_their_gates_with_a_caveat():
    world = World()
    for arm in ALL_SERVED:
        world.arms[arm].undefine("logprob_rms")
        world.arms[arm].undefine("kl_mean")
    found = gates(world)
    assert {found[name].status for name in ("G-logprob", "G-KL")} == {Status.SKIPPED_OPTIONAL}
    assert found["G-KL"].caveats[0].code == "logprobs_missing"


def test_processed_logprobs_are_not_judged():
    world = World()
    world.serve(noise=0.5)
    for arm in ALL_SERVED:
        world.arms[arm].aux["logprob_rms"]["served_mass"] = np.ones(32)
    found = gates(world)["G-logprob"]
    assert (found.status, found.caveats[0].code) == (Status.SKIPPED_OPTIONAL, "logprobs_processed")


def test_retokenised_text_is_a_caveat():
    world = World()
    for arm in ALL_SERVED:
        world.arms[arm].values["evidence"][:] = 2
    assert gates(world)["G-hard"].caveats[0].code == "retokenised"


@pytest.mark.parametrize(("count", "status"), [(3, Status.PASS_WITH_CAVEAT), (4, Status.INCONCLUSIVE)])
def test_a_few_items_whose_own_reference_text_is_lossy_are_left_out_and_counted(count, status):
    world = World()
    lossy = np.where(np.arange(32) < count, 1.0, np.nan)
    for part in world.arms.values():
        part.put("lossy_text", lossy)
        part.undefine("lossy_text", np.isnan(lossy))
        for metric in ("margin_max", "margin_mean", "margin_trend", "exact"):
            part.undefine(metric, slice(0, count))
    found = gates(world)
    assert found["G-hard"].status is status
    assert f"{count} of 32 items" in found["G-hard"].caveats[-1].detail
    assert found["G-hard"].caveats[-1].code == "lossy_items"
    assert (found["G-mean"].status is Status.INCONCLUSIVE) == (status is Status.INCONCLUSIVE)
    assert ("do not survive encoding" in found["G-hard"].detail) == (status is Status.INCONCLUSIVE)


def test_lossy_text_of_one_item_stands_in_the_way_of_a_pass_but_not_of_a_fail():
    world = World()
    for arm in ALL_SERVED:
        for metric in ("margin_max", "margin_mean", "margin_trend"):
            world.arms[arm].undefine(metric, 7)
    assert gates(world)["G-hard"].status is Status.INCONCLUSIVE
    rescore(world, one_bad_token(world))
    for arm in ALL_SERVED:
        world.arms[arm].undefine("margin_max", 7)
    assert gates(world)["G-hard"].status is Status.FAIL


# --- coverage and structure ---


def test_a_failed_item_is_the_worst_case_everywhere():
    world = World()
    for arm in ALL_SERVED:
        world.arms[arm].fail(3)
    found = gates(world)
    assert found["G-coverage"].status is Status.FAIL
    assert found["G-coverage"].worst_items[0].item_id == "item-000003"
    assert (found["G-hard"].value, found["G-hard"].test.n) == (1, 32)


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("prompt_equal", 0, "prompt differs"),
        ("bos_ok", 0, "BOS"),
        ("ids_ok", 0, "outside the vocabulary"),
        ("tokens_after_eos", 2, "after the end"),
        ("finish_ok", 0, "finish reason"),
    ],
)
def test_one_structural_violation_fails(metric, value, words):
    world = World()
    world.arms[FIRST].values[metric][9] = value
    found = gates(world)["G-struct"]
    assert found.status is Status.FAIL
    assert words in found.detail
    assert found.worst_items[0].item_id == "item-000009"


def test_a_non_finite_served_score_fails():
    world = World()
    world.arms[FIRST].undefine("logprob_rms", 2, "nonfinite")
    assert "non-finite" in gates(world)["G-struct"].detail


def test_a_prompt_of_another_length_points_at_template_or_bos():
    world = World()
    world.arms[FIRST].put("prompt_equal", np.zeros(32), by_ids=0, served=13, ref=37)
    hint = gates(world)["G-struct"].diagnosis[0].hint
    assert "chat template or BOS differs: server counted 13 prompt tokens where the reference has 37" in hint


def test_an_unreported_prompt_is_a_caveat():
    world = World()
    world.arms[FIRST].undefine("prompt_equal")
    assert [caveat.code for caveat in gates(world)["G-struct"].caveats] == ["prompt_unchecked"]


def test_an_answer_cut_short_without_any_divergence_fails():
    world = World(dtype="float32")
    world.arms[FIRST].values["output_tokens"][4] = 50
    assert "length differs" in gates(world)["G-struct"].detail


@pytest.mark.parametrize(("length", "status"), [(50, Status.FAIL), (55, Status.PASS)])
def test_a_text_cut_short_fails_beyond_the_tolerance_of_text(length, status):
    world = World(dtype="float32")
    for arm in ALL_SERVED:
        world.arms[arm].put("evidence", np.full(32, 2.0))
        lengths = np.where(np.arange(32) == 4, length, 64)
        world.arms[arm].put("output_tokens", lengths, ref=64, tolerance=3)  # 0.9 * 64 - 3 = 54.6
    assert gates(world)["G-struct"].status is status


def test_a_length_that_a_near_tie_explains_passes():
    world = World()
    margins = world.tokens[FIRST].copy()
    margins[4, 10] = 0.05
    rescore(world, margins)
    for arm in ALL_SERVED:
        world.arms[arm].values["output_tokens"][4] = 50
    assert gates(world)["G-struct"].status is Status.PASS


# --- needles ---


def lose(world: World, count: int) -> World:
    for arm in ALL_SERVED:
        world.arms[arm].values["needle"][:count] = 0
    return world


def test_losing_most_needles_fails_and_losing_one_is_a_caveat():
    assert gates(lose(World(needles=20), 15))["G-needle"].status is Status.FAIL
    assert gates(lose(World(needles=8), 8))["G-needle"].status is Status.FAIL  # though Holm alone would let it pass
    found = gates(lose(World(needles=20), 1))["G-needle"]
    assert (found.status, found.caveats[0].code) == (Status.PASS_WITH_CAVEAT, "needles_lost")


def test_needles_the_judge_does_not_solve_prove_nothing():
    world = World(needles=6)
    world.arms["judge"].values["needle"][:6] = 0
    found = gates(lose(world, 6))["G-needle"]
    assert (found.status, found.caveats[0].code) == (Status.PASS_WITH_CAVEAT, "no_solved_needles")


def test_the_bound_of_no_lost_needle_is_printed():
    # 1 - 0.05^(1/4) = 0.527
    assert gates(World(needles=4))["G-needle"].test.ci_high == pytest.approx(0.527, abs=1e-3)


# --- sampled ---


def sampled(z_per_item: float = 0.0, outside: int = 0) -> World:
    world = World()
    for arm in ALL_SERVED:
        rng = np.random.default_rng(1)
        world.arms[arm].put("surprisal", rng.normal(z_per_item, 1, 32) * 8, variance=64.0, n=64)
        world.arms[arm].put("support_outside", np.full(32, outside), n=64)
    return world


def test_tokens_as_surprising_as_declared_pass():
    found = gates(sampled())
    assert {found[name].status for name in ("G-surprisal", "G-support")} == {Status.PASS}


@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_another_temperature_fails_surprisal_either_way(shift):
    assert failing(gates(sampled(shift))) == {"G-surprisal"}


def test_sampled_answers_known_by_text_alone_are_not_judged_as_sampled():
    world = sampled(1.0)
    assert {"G-surprisal"} <= failing(gates(world))
    for arm in ALL_SERVED:
        world.arms[arm].put("evidence", np.full(len(world.items), 2.0))
    found = gates(world)
    for name in ("G-surprisal", "G-support"):
        assert found[name].status is Status.SKIPPED_OPTIONAL
        assert [caveat.code for caveat in found[name].caveats] == ["sampled_not_judged"]


def test_ignored_top_p_fails_support():
    assert failing(gates(sampled(outside=5))) == {"G-support"}


# --- properties ---


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1000), st.randoms())
def test_gates_do_not_depend_on_the_order_of_rows(seed, random):
    world = World(n=12, tokens=16, seed=seed)
    table = world.scores()
    shuffled = table.take(random.sample(range(table.num_rows), table.num_rows))
    results = []
    for rows in (table, shuffled):
        scores = ScoreTable.from_tables([rows.slice(0, 500), rows.slice(500)], world.items)
        floor = cut_floor(scores, world.margins(), world.floor_arms, world.dtype, OPTIONS)
        results.append(TEXT.evaluate(scores, floor, SERVED, world.dtype, OPTIONS))
    assert results[0] == results[1]


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 1000), st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_values_grow_with_injected_noise(seed, levels):
    world = World(n=12, tokens=16, seed=seed)
    unit = np.random.default_rng(seed).normal(size=world.gaps.shape)
    values = []
    for noise in sorted(levels):
        world.serve(margins=np.where(noise * unit > world.gaps, world.gaps, 0.0), deltas=noise * unit)
        found = gates(world)
        values.append([found[name].value for name in ("G-hard", "G-soft", "G-mean", "G-logprob", "G-KL")])
    assert all(left <= right + 1e-12 for pair in pairwise(values) for left, right in zip(*pair, strict=True))
