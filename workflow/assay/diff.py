"""What changed between two verdicts: gate by gate, then item by item."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from assay import store
from assay.gate import read_verdict
from assay.records import SERVED
from assay.run import run_of
from assay.verdicts.model import Gate, Verdict

ITEM_METRICS = ("answered", "exact", "margin_max", "logprob_rms", "kl_mean", "needle", "surprisal", "prompt_equal")
Score = tuple[float | None, str]  # value and flag


@dataclass(frozen=True)
class Change:
    """One thing that differs; `before` or `after` is None where it is absent."""

    what: str
    before: str | None
    after: str | None


def diff(a: str | Path, b: str | Path) -> tuple[list[Change], list[Change]]:
    """Changes from verdict `a` to verdict `b`: of the verdict and its gates, and of item scores (largest first)."""
    left, right = read_verdict(a), read_verdict(b)
    return [*_verdict_changes(left, right), *_gate_changes(left, right)], _item_changes(Path(a), Path(b))


def _verdict_changes(left: Verdict, right: Verdict) -> Iterator[Change]:
    pairs = {
        "verdict": (left.verdict.value, right.verdict.value),
        "reason": (left.reason, right.reason),
        "caveats": (_codes(left), _codes(right)),
        "options": (left.options_sha256, right.options_sha256),
        "items": (left.samples.items_sha256, right.samples.items_sha256),
    }
    yield from (Change(name, before, after) for name, (before, after) in pairs.items() if before != after)


def _codes(verdict: Verdict) -> str:
    return ", ".join(sorted({item.code for item in verdict.caveats})) or "none"


def _gate_changes(left: Verdict, right: Verdict) -> Iterator[Change]:
    before, after = ({(gate.id, gate.arm): _gate(gate) for gate in item.gates} for item in (left, right))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield Change(f"{key[0]} ({key[1].removeprefix('served_')})", before.get(key), after.get(key))


def _gate(gate: Gate) -> str:
    limit = gate.threshold.value if gate.threshold else None
    return f"{gate.status} value {_show(gate.value)} limit {_show(limit)}"


def _show(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def _item_changes(a: Path, b: Path) -> list[Change]:
    left, right = _scores(a), _scores(b)
    changes = []
    for key in left.keys() | right.keys():
        before, after = left.get(key), right.get(key)
        if before != after:
            changes.append((_distance(before, after), key, before, after))
    changes.sort(key=lambda change: (-change[0], change[1]))
    return [
        Change(f"{item} {arm.removeprefix('served_')} {metric}", _score(before), _score(after))
        for _, (item, arm, metric), before, after in changes
    ]


def _distance(before: Score | None, after: Score | None) -> float:
    """How far two scores are apart; a score or value that is absent is infinitely far from any other."""
    if before is None or after is None or before[0] is None or after[0] is None:
        return math.inf
    return abs(before[0] - after[0])


def _scores(path: Path) -> dict[tuple[str, str, str], Score]:
    """(item, served arm, metric) -> score."""
    run = run_of(path)
    if not run.scores.exists():
        return {}
    columns = ["item_id", "arm", "metric", "value", "flag"]
    return {
        (row["item_id"], row["arm"], row["metric"]): (row["value"], row["flag"])
        for row in store.read_rows(run.scores, "scores", columns)
        if row["arm"].startswith(SERVED) and row["metric"] in ITEM_METRICS
    }


def _score(score: Score | None) -> str | None:
    if score is None:
        return None
    value, flag = score
    return flag if value is None else f"{value:.6g}"
