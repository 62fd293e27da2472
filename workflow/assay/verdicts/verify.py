"""Recompute a verdict from the stored scores and floor, and from the facts the verdict itself records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from assay import store
from assay.canonical import sha256_lines
from assay.config import Dtype
from assay.errors import StoreError
from assay.records import Status
from assay.verdicts.decide import RunFacts, judge_run
from assay.verdicts.model import Verdict
from assay.verdicts.scoretable import ScoreTable, floor_values, planned_items


@dataclass(frozen=True)
class Difference:
    """A field of the verdict that does not follow from its evidence."""

    path: str
    recorded: Any
    recomputed: Any

    def __str__(self) -> str:
        return f"{self.path}: recorded {self.recorded!r}, recomputed {self.recomputed!r}"


def verify(verdict: Verdict, scores_path: str | Path, floor_path: str | Path) -> list[Difference]:
    """Fields that come out differently when the verdict is computed again; empty when it holds bit for bit.

    `provenance` is not compared: it says where the verdict was made, and nothing in it decides.

    Raises:
        StoreError: scores or floor cannot be read, or the verdict is UNSUPPORTED and has no scores.
    """
    if verdict.verdict is Status.UNSUPPORTED or verdict.options is None or verdict.reference is None:
        raise StoreError(
            f"the verdict on '{verdict.config.name}' is {verdict.verdict}: there are no scores to verify it by"
        )
    items = planned_items(
        store.iter_tables(scores_path, "scores", ["item_id"]), [entry.item_id for entry in verdict.coverage.missing]
    )
    if sha256_lines(items) != verdict.samples.items_sha256:
        return [Difference("samples.items_sha256", verdict.samples.items_sha256, sha256_lines(items))]
    again = judge_run(
        read_scores(scores_path, items),
        floor_values(store.iter_tables(floor_path, "floor")),
        recorded_facts(verdict),
        verdict.tool,
        verdict.provenance,
    )
    return list(_differences(verdict.model_dump(mode="json"), again.model_dump(mode="json"), ""))


def read_scores(path: str | Path, items: list[str]) -> ScoreTable:
    """The score table of a file, aligned to the planned items, one row group at a time."""
    return ScoreTable.from_tables(store.iter_tables(path, "scores"), items)


def recorded_facts(verdict: Verdict) -> RunFacts:
    """The facts a verdict was decided on, from the verdict itself."""
    if verdict.options is None or verdict.reference is None:
        raise StoreError(f"the verdict on '{verdict.config.name}' records no options and no reference")
    unscored = (*verdict.coverage.failed, *verdict.coverage.missing)
    return RunFacts(
        config=verdict.config,
        dtype=cast(Dtype, verdict.config.dtype),
        instances=tuple(verdict.instances),
        floor_arms=tuple(verdict.reference.floor_arms),
        controls=tuple((control.fault, control.gate) for control in verdict.controls.positive),
        options=verdict.options,
        failures={(entry.arm, entry.item_id): entry.reason for entry in unscored},
        retried=verdict.coverage.retried,
        determinism=verdict.determinism,
        problems=tuple(verdict.reference.known),
    )


def _differences(recorded: Any, recomputed: Any, path: str) -> Iterator[Difference]:
    if isinstance(recorded, dict) and isinstance(recomputed, dict):
        for key in sorted(recorded.keys() | recomputed.keys()):
            yield from _differences(recorded.get(key), recomputed.get(key), f"{path}.{key}" if path else key)
    elif isinstance(recorded, list) and isinstance(recomputed, list) and len(recorded) == len(recomputed):
        for index, pair in enumerate(zip(recorded, recomputed, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif recorded != recomputed:
        yield Difference(path, recorded, recomputed)
