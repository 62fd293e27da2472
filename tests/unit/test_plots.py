"""Strip plots: every score is in exactly one place, marks are where the numbers say, and words say what is drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.report.plots import LANE, LEFT, RIGHT, Series, number, strip


def drawn(row):
    lanes = [lane.count for lane in (row.zeros, row.infinite) if lane]
    return sum(bar.count for bar in row.bars) + sum(lanes)


def plot(values, **marks):
    return strip([Series("x", np.array(values, float), served=True, **marks)], "axis")


def test_positive_scores_lie_on_decades():
    shown = plot([0.01, 0.1, 1.0], value=0.1, limit=1.0)
    (row,) = shown.rows
    middle = (LEFT + RIGHT) / 2  # of 0.01 and 1 in logarithms
    assert (shown.left, shown.right) == (LEFT, RIGHT)
    assert row.value_x == pytest.approx(middle) and row.limit_x == pytest.approx(RIGHT)
    assert [tick.label for tick in shown.ticks] == ["0.01", "0.1", "1"]
    assert [tick.x for tick in shown.ticks] == pytest.approx([LEFT, middle, RIGHT])


def test_zeros_have_a_lane_of_their_own_and_so_have_infinite_scores():
    shown = plot([0, 0, 0.5, np.inf], value=0)
    (row,) = shown.rows
    assert (row.zeros.count, row.infinite.count, [bar.count for bar in row.bars]) == (2, 1, [1])
    assert row.value_x == LEFT + LANE / 2
    assert shown.left > LEFT + LANE and shown.right < RIGHT - LANE


def test_signed_scores_lie_on_a_straight_axis():
    shown = plot([-1, 0, 1], value=0.0)
    (row,) = shown.rows
    assert row.zeros is None and drawn(row) == 3
    assert row.value_x == pytest.approx((LEFT + RIGHT) / 2)
    assert [tick.label for tick in shown.ticks] == ["−1", "−0.5", "0", "0.5", "1"]


def test_the_fullest_bin_is_the_tallest_and_a_single_score_is_seen():
    (row,) = plot([0.02] * 9 + [0.5]).rows
    few, many = sorted(row.bars, key=lambda bar: bar.count)
    assert (few.count, many.count) == (1, 9) and 4 < few.height < many.height == 24


@pytest.mark.parametrize(
    "values",
    [
        *([], [0.0], [np.nan], [np.inf], [1e-300], [-2.0], [1e-6] * 3),
        *([5e-324], [5e-324, 1.0], [1.7e308], [-5e-324], [-5e-324, 5e-324], [-1e-310, 0.0]),
    ],
)
def test_scores_of_one_kind_or_none_can_be_drawn(values):
    (row,) = plot(values).rows
    assert drawn(row) == np.count_nonzero(~np.isnan(values))


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(np.inf) | st.just(np.nan), max_size=60),
    st.none() | st.floats(0, 1e6),
)
def test_no_score_is_lost_and_nothing_is_drawn_outside(values, limit):
    shown = plot(values, limit=limit)
    (row,) = shown.rows
    assert drawn(row) == sum(not np.isnan(value) for value in values)
    places = [*(bar.x for bar in row.bars), *(tick.x for tick in shown.ticks), *([row.limit_x] if row.limit_x else [])]
    assert all(LEFT - 1e-6 <= place <= RIGHT + 1e-6 for place in places)


def test_rows_share_one_axis():
    rows = [Series("floor", np.array([0.001]), served=False), Series("served", np.array([10.0]), served=True)]
    first, second = strip(rows, "axis").rows
    assert first.bars[0].x < LEFT + 10 and second.bars[0].x > RIGHT - 20 and second.top > first.top


def test_words_say_what_is_drawn():
    rows = [
        Series("floor", np.array([0, 0, 0.5]), served=False),
        Series("served", np.array([2.0, np.inf]), served=True, value=2.0, limit=1.0),
    ]
    assert strip(rows, "axis").description == (
        "floor: 3 scores, 2 of them 0, median 0, largest 0.5; "
        "served: 2 scores, 0 of them 0, median 2, largest 2, 1 infinite, value 2, limit 1"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (40, "40"),
        (0.0621, "0.0621"),
        (0.513677, "0.514"),
        (12345.6, "12346"),
        (1e-4, "10⁻⁴"),
        (4.749e-6, "4.75 × 10⁻⁶"),
        (-2.5e-7, "−2.5 × 10⁻⁷"),
        (float("inf"), "∞"),
        (float("nan"), "–"),
    ],
)
def test_numbers_read_as_a_person_writes_them(value, text):
    assert number(value) == text
