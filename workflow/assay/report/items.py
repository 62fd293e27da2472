"""What every modality's items have in common on a page: how they stand, and where they come in the list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from assay.run import Run
from assay.verdicts.model import Verdict
from assay.verdicts.scoretable import ScoreTable


class Standing(StrEnum):
    """How an answer compares with the reference, worst first."""

    UNANSWERED = "no answer"
    WRONG = "over a limit"
    CLOSE = "differs within the limits"
    UNJUDGED = "not judged alone"
    SAME = "as the reference"


WORST_FIRST = list(Standing)


@dataclass(frozen=True)
class Pass:
    """One answer to an item: what a pass of a server made of it."""

    arm: str
    standing: Standing
    score: float | None  # larger is worse; None: there is none
    notes: tuple[str, ...] = ()  # what is wrong, in words

    @property
    def order(self) -> tuple[int, float]:
        """Worst first."""
        return WORST_FIRST.index(self.standing), -(self.score or 0.0)


@dataclass(frozen=True)
class Item:
    """One item of the list. `view` is what the modality's template shows of it."""

    item_id: str
    kind: str
    tags: tuple[str, ...]
    passes: tuple[Pass, ...]  # in the order of the plan
    summary: str
    view: Any

    @property
    def worst(self) -> Pass:
        """The pass that the item is listed by."""
        return worst_of(self.passes)


def worst_of(passes: Sequence[Pass]) -> Pass:
    """The worst of an item's passes, the first of equal ones."""
    return min(passes, key=lambda one: one.order)


def worst_first(passes: Mapping[str, Sequence[Pass]]) -> list[str]:
    """Items by their worst pass; equal ones by id."""
    return sorted(passes, key=lambda item: (*worst_of(passes[item]).order, item))


@dataclass(frozen=True)
class About:
    """A gate in plain words, and how its scores are drawn."""

    title: str
    asks: str  # the question it puts to the server
    axis: str = ""  # what one score of its metric is, with the unit; without it nothing is drawn
    draws_value: bool = False  # whether the gate's value is a score of this kind: a mean of them
    draws_limit: bool = False  # whether the limit is one: for the value, or else for each item


@dataclass(frozen=True)
class Case:
    """A verdict with the scores it was decided on. `plan`: as the run recorded it."""

    verdict: Verdict
    run: Run
    plan: Mapping[str, Any]
    table: ScoreTable
    floor: Any  # of the suite's kind
    trials: Mapping[str, Any]  # every pass of every instance -> the trial that its gates judged, of the suite's kind

    def why_unscored(self) -> dict[tuple[str, str], str]:
        """(arm, item) -> why there is no answer that could be scored."""
        coverage = self.verdict.coverage
        return {(entry.arm, entry.item_id): entry.reason for entry in (*coverage.failed, *coverage.missing)}

    @property
    def outputs(self) -> list[Path]:
        """The responses of every pass."""
        return [self.run.outputs(arm) for arm in self.trials]


@dataclass(frozen=True)
class Listing:
    """All items, the worst first."""

    items: list[Item]
    refused_audio: int = 0  # audio that the page had no room for


@dataclass(frozen=True)
class Modality:
    """What a page needs to know of a modality."""

    gates: Mapping[str, About]
    words: Mapping[str, str]  # what the page's terms mean
    score: str  # what an item's score is, with the unit
    template: str  # shows an item's `view`
    items: Callable[[Case], Listing]
