"""Where scores lie beside the floor and the limit: the geometry of small strip plots. `strip.svg` draws it.

A strip is a histogram of the scores of single items on an axis that all rows of a plot share. Scores that span more
than one decade are on a logarithmic axis, where zero has a lane of its own on the left; so has, on the right, an item
that counts as infinitely bad.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WIDTH = 400.0
LEFT, RIGHT = 10.0, 390.0
LANE = 34.0  # of zeros, or of infinities
GAP = 10.0  # between a lane and the axis
BINS = 40
ROW = 56.0
BASELINE = 46.0  # of a row, from its top
TALLEST, LOWEST = 24.0, 4.0  # a bar: of the fullest bin, and the least that can be seen
FOOT = 34.0  # ticks and the name of the axis
SMALLEST_SPREAD = 1e-300  # of a straight axis, less is rounding
TICKS = 5


@dataclass(frozen=True)
class Series:
    """Scores to draw in one row. NaN is left out; infinity is the worst case."""

    label: str
    values: Floats
    served: bool
    value: float | None = None  # the gate's statistic, where it is on this axis
    limit: float | None = None


@dataclass(frozen=True)
class Bar:
    """A bin: how many scores, and the rectangle that shows it."""

    x: float
    y: float
    width: float
    height: float
    count: int


@dataclass(frozen=True)
class Lane:
    """Scores that have no place on the axis."""

    x: float
    y: float
    count: int


@dataclass(frozen=True)
class StripRow:
    """One row, in the units of the drawing."""

    label: str
    served: bool
    top: float
    baseline: float
    bars: tuple[Bar, ...]
    zeros: Lane | None
    infinite: Lane | None
    value_x: float | None
    limit_x: float | None


@dataclass(frozen=True)
class Tick:
    """A mark of the axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Strip:
    """A whole plot."""

    width: float
    height: float
    left: float  # where the axis starts and ends
    right: float
    rows: tuple[StripRow, ...]
    ticks: tuple[Tick, ...]
    axis: str
    description: str  # what the drawing shows, in words


@dataclass(frozen=True)
class Axis:
    """Where a score is drawn."""

    low: float  # on a logarithmic axis the exponents of ten: 10 ** low may be too small for a float
    high: float
    log: bool
    left: float
    right: float

    def place(self, value: float) -> float:
        """Horizontal position; zero of a logarithmic axis is in its lane."""
        if self.log and value <= 0:
            return LEFT + LANE / 2
        return self._at(math.log10(value) if self.log else value)

    def _at(self, value: float) -> float:
        return self.left + (value - self.low) / (self.high - self.low) * (self.right - self.left)

    def ticks(self) -> tuple[Tick, ...]:
        """About `TICKS` round numbers."""
        if self.log:
            first, last = round(self.low), round(self.high)
            powers = range(first, last + 1, max(1, math.ceil((last - first) / TICKS)))
            return tuple(Tick(self._at(power), _power_of_ten(power)) for power in powers)
        step = _round_step((self.high - self.low) / TICKS)
        marks = np.arange(math.ceil(self.low / step), math.floor(self.high / step) + 1) * step
        return tuple(Tick(self.place(mark), number(mark)) for mark in marks.tolist())


def strip(series: Sequence[Series], axis: str) -> Strip:
    """Lay out one plot.

    Args:
        series: its rows, from the top.
        axis: name of the axis, with the unit.
    """
    scores = [row.values[~np.isnan(row.values)] for row in series]
    marks = [mark for row in series for mark in (row.value, row.limit) if mark is not None]
    scale = _axis(np.concatenate([*scores, np.array(marks, dtype=np.float64)]), any(np.isinf(v).any() for v in scores))
    return Strip(
        width=WIDTH,
        height=ROW * len(series) + FOOT,
        left=scale.left,
        right=scale.right,
        rows=tuple(
            _row(row, values, scale, ROW * k) for k, (row, values) in enumerate(zip(series, scores, strict=True))
        ),
        ticks=scale.ticks(),
        axis=axis,
        description="; ".join(_words(row, values) for row, values in zip(series, scores, strict=True)),
    )


def _axis(values: Floats, infinite: bool) -> Axis:
    finite = values[np.isfinite(values)]
    positive = finite[finite > 0]
    right = RIGHT - LANE - GAP if infinite else RIGHT
    if len(finite) and finite.min() < 0:
        low, high = float(finite.min()), float(finite.max())
        spread = high - low
        room = 0.04 * (spread if spread > SMALLEST_SPREAD else 1.0)
        return Axis(low - room, high + room, False, LEFT, right)
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    zeros = len(positive) < len(finite)
    left = LEFT + LANE + GAP if zeros else LEFT
    return Axis(first, max(last, first + 1), True, left, right)


def _row(series: Series, values: Floats, axis: Axis, top: float) -> StripRow:
    on_axis = np.isfinite(values) & ((values > 0) | (not axis.log))
    places = np.array([axis.place(value) for value in values[on_axis].tolist()])
    counts, edges = np.histogram(places, bins=BINS, range=(axis.left, axis.right))
    zeros, infinite = int((values == 0).sum()) if axis.log else 0, int(np.isinf(values).sum())
    tallest = max(1, counts.max())
    baseline = top + BASELINE
    bars = []
    for count, start, end in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if count:
            height = LOWEST + (TALLEST - LOWEST) * count / tallest
            bars.append(Bar(start + 0.5, baseline - height, end - start - 1, height, count))
    return StripRow(
        label=series.label,
        served=series.served,
        top=top,
        baseline=baseline,
        bars=tuple(bars),
        zeros=Lane(LEFT, baseline, zeros) if zeros else None,
        infinite=Lane(RIGHT - LANE, baseline, infinite) if infinite else None,
        value_x=None if series.value is None else axis.place(series.value),
        limit_x=None if series.limit is None else axis.place(series.limit),
    )


def _words(series: Series, values: Floats) -> str:
    """What a row shows, for a reader who does not see it."""
    finite = values[np.isfinite(values)]
    parts = [f"{len(values)} scores"]
    if len(finite):
        parts += [f"{int((finite == 0).sum())} of them 0, median {number(float(np.median(finite)))}"]
        parts += [f"largest {number(float(finite.max()))}"]
    if len(finite) < len(values):
        parts.append(f"{len(values) - len(finite)} infinite")
    parts += [
        f"{name} {number(mark)}"
        for name, mark in (("value", series.value), ("limit", series.limit))
        if mark is not None
    ]
    return f"{series.label}: {', '.join(parts)}"


def _round_step(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power_of_ten(power: int) -> str:
    """The label of a decade, also of one too small or too large for a float."""
    return number(10.0**power) if abs(power) < 5 else f"10{str(power).translate(_SUPERSCRIPT)}"


def number(value: float | None, digits: int = 3) -> str:
    """A number for a person: `digits` significant ones, powers of ten written out, "–" where there is none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
        return text.replace("-", "−")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = f"10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    mantissa = mantissa.rstrip("0").rstrip(".")
    return (power if mantissa == "1" else f"{mantissa} × {power}").replace("-", "−")
