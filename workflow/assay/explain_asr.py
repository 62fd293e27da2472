"""Transcripts for a person: what was said, what the reference heard and what was served, word by word."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from assay import store
from assay.metrics.speech import Alignment, Edit, align_words, normaliser
from assay.records import JUDGE, SERVED, Flag
from assay.samples.lock import load_set


@dataclass(frozen=True)
class Heard:
    """One served transcript beside the reference's and what is said; texts are normalised, alignments of words."""

    item_id: str
    arm: str
    said: str
    reference: Alignment  # against what is said
    served: Alignment  # against what is said
    between: Alignment  # served against the reference
    margin: float | None  # nat, the largest; infinite: tokens that could not be judged count as the worst
    raw: str | None  # as served; None: no answer

    @property
    def excess(self) -> int:
        """Word errors beyond the reference's."""
        return self.served.edits.errors - self.reference.edits.errors


def worst_transcripts(
    root: Path, scores: Path, outputs: Mapping[str, Path], plan: Mapping[str, Any], options: Any, count: int
) -> Iterator[Heard]:
    """The transcripts with most word errors beyond the reference's, then those most unlike it; each item once.

    Args:
        root: where `samplesets` and `results` lie.
        scores: the `scores` table.
        outputs: served arm -> its `responses` table.
        plan: the serve plan of the run.
        options: gate options (`assay.config.AsrGates`).
        count: how many.
    """
    expected = {
        row["item_id"]: row["expected"]
        for name in plan["sets"]
        for row in load_set(root / "samplesets" / f"{name}.parquet")
    }
    reference = {
        row["item_id"]: row["text"]
        for name in plan["sets"]
        for row in store.read_rows(
            root / "results/reference" / plan["reference"]["model"] / name / f"{JUDGE}.parquet",
            "responses",
            ["item_id", "text"],
        )
    }
    margins = _margins(scores)
    words = normaliser(options.normaliser).call
    found: dict[str, Heard] = {}
    for arm, path in outputs.items():
        for row in store.read_rows(path, "responses", ["item_id", "arm", "text"]):
            if row["arm"] == arm:
                heard = _heard(row, expected[row["item_id"]], reference[row["item_id"]], margins, words)
                found[row["item_id"]] = max(found.get(row["item_id"], heard), heard, key=_badness)
    worst = sorted(found.values(), key=lambda heard: (*(-part for part in _badness(heard)), heard.item_id))
    yield from [heard for heard in worst if _badness(heard) > (0, 0, 0)][:count]


def _badness(heard: Heard) -> tuple[float, ...]:
    return heard.excess, heard.between.edits.errors, heard.margin or 0.0


def _heard(
    row: Mapping[str, Any], said: str, reference: str, margins: Mapping[tuple[str, str], float | None], words: Any
) -> Heard:
    served = words(row["text"] or "")
    return Heard(
        item_id=row["item_id"],
        arm=row["arm"],
        said=words(said),
        reference=align_words(words(said), words(reference)),
        served=align_words(words(said), served),
        between=align_words(words(reference), served),
        margin=margins.get((row["item_id"], row["arm"])),
        raw=row["text"],
    )


def _margins(scores: Path) -> dict[tuple[str, str], float | None]:
    rows = store.read_rows(scores, "scores", ["item_id", "arm", "metric", "value", "flag"])
    return {
        (row["item_id"], row["arm"]): math.inf if row["flag"] == Flag.MISSING_AS_WORST else row["value"]
        for row in rows
        if row["metric"] == "margin_max" and row["arm"].startswith(SERVED)
    }


def transcript_panel(heard: Heard) -> Panel:
    """One transcript: what is said, then the reference's and the served words against it, errors in colour."""
    if heard.margin is None:
        margin = "no margin"
    elif math.isinf(heard.margin):
        margin = "no token could be judged: the worst margin"
    else:
        margin = f"largest margin {heard.margin:.3g} nat"
    between = heard.between.edits
    lines = [
        Text.assemble("said       ", heard.said or ("nothing", "dim")),
        Text.assemble("reference  ", aligned(heard.reference.places), f"  {_rate(heard.reference)}"),
        Text.assemble("served     ", aligned(heard.served.places), f"  {_rate(heard.served)}"),
        Text(f"{between.errors} edits between served and reference ({between.words} words); {margin}", style="dim"),
        Text("no answer" if heard.raw is None else f"as served: {heard.raw.strip()}", style="dim"),
    ]
    return Panel(Group(*lines), title=Text(f"{heard.item_id} ({heard.arm.removeprefix(SERVED)})"), title_align="left")


def aligned(places: Sequence[Any]) -> Text:
    """Words as heard: right ones plain, ⟨wrong→right⟩, -missing-, +invented+."""
    parts = []
    for place in places:
        if place.edit is Edit.EQUAL:
            parts.append(Text(place.hypothesis))
        elif place.edit is Edit.SUBSTITUTE:
            parts.append(Text.assemble(("⟨", "red"), (place.hypothesis, "red"), "→", (f"{place.reference}⟩", "green")))
        elif place.edit is Edit.DELETE:
            parts.append(Text(f"-{place.reference}-", style="yellow"))
        else:
            parts.append(Text(f"+{place.hypothesis}+", style="red"))
    return Text(" ").join(parts) if parts else Text("nothing", style="dim")


def _rate(alignment: Alignment) -> str:
    edits = alignment.edits
    if edits.rate is None:
        return f"[{edits.insertions} words invented]"
    return f"[WER {100 * edits.rate:.3g} %: {edits.substitutions} sub, {edits.deletions} del, {edits.insertions} ins]"
