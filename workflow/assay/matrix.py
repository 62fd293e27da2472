"""The fault matrix: for every planted fault and every benign rerun, which gates failed, and what the rules of other
projects would have said of the very same outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay import store
from assay.baselines import LENGTHS, RATE, ROUGE_L_TOLERANCE, Said, speech_rules, text_rules, transcription_rules
from assay.config import FAULT_SEPARATOR, Fault, lookup
from assay.gate import read_verdict
from assay.records import JUDGE, Status
from assay.run import Run, run_of
from assay.samples.lock import load_set
from assay.verdicts.model import Verdict

Answer = dict[str, Any]

_COLUMNS = ["item_id", "arm", "status", "text", "token_ids", "top_token_ids"]
_HEARD = ["item_id", "arm", "text", "duration_s"]


@dataclass(frozen=True)
class Row:
    """One run of the matrix."""

    config: str
    fault: str | None
    benign: bool
    n: int
    verdict: Status
    failed: tuple[str, ...]
    expected: tuple[str, ...]
    others: tuple[Said, ...]  # what other rules say
    note: str | None

    @property
    def caught(self) -> bool:
        """Whether the verdict is FAIL."""
        return self.verdict is Status.FAIL


def matrix(paths: Iterable[Path], faults: dict[str, Fault]) -> list[Row]:
    """One row for every verdict file."""
    return [_row(path, faults) for path in paths]


def _row(path: Path, faults: dict[str, Fault]) -> Row:
    verdict = read_verdict(path)
    name = verdict.config.name.partition(FAULT_SEPARATOR)[2] or None
    fault = lookup(faults, name, "fault") if name else None
    n, others = _others(run_of(path), verdict)
    return Row(
        config=verdict.config.name,
        fault=name,
        benign=fault is None or fault.benign,
        n=n,
        verdict=verdict.verdict,
        failed=tuple(sorted({gate.id for gate in verdict.gates if gate.status is Status.FAIL})),
        expected=tuple(fault.gates) if fault else (),
        others=tuple(others),
        note=fault.note if fault else None,
    )


def _others(run: Run, verdict: Verdict) -> tuple[int, list[Said]]:
    """Items and what other rules say of the last pass of instance 0: the one under load."""
    arm = verdict.instances[0].arms[-1]
    plan = run.plan(arm)
    if verdict.config.modality == "text":
        served, reference = _both(run, arm, plan, "responses", _COLUMNS)
        return len(reference), text_rules(_greedy_pairs(run, served, reference))
    sets = (run.results.parent / "samplesets" / f"{name}.parquet" for name in plan["sets"])
    texts = {row["item_id"]: row["expected"] for path in sets for row in load_set(path)}
    if verdict.config.modality == "tts":
        served, reference = _both(run, arm, plan, "transcripts", _HEARD)
        return len(texts), speech_rules(texts, served, reference)
    served, reference = _both(run, arm, plan, "responses", _COLUMNS)
    return len(texts), transcription_rules(texts, served, reference)


def _both(
    run: Run, arm: str, plan: dict[str, Any], table: str, columns: list[str]
) -> tuple[list[Answer], list[Answer]]:
    """Rows of a served arm and of the judge."""
    responses = table == "responses"
    served = [run.outputs(arm)] if responses else [run.judged]
    reference = run.reference(plan) if responses else run.judged_reference(plan)
    return _of_arm(served, arm, table, columns), _of_arm(reference, JUDGE, table, columns)


def _of_arm(paths: Iterable[Path], arm: str, table: str, columns: list[str]) -> list[Answer]:
    return [row for path in paths for row in store.read_rows(path, table, columns) if row["arm"] == arm]


def _greedy_pairs(run: Run, served: list[Answer], reference: list[Answer]) -> list[tuple[Answer, Answer]]:
    """(served, reference) responses of every greedy item: a sampled one need not equal the reference's."""
    answers = {row["item_id"]: row for row in served}
    scores = store.read_rows(run.scores, "scores", ["item_id", "arm", "metric"])
    greedy = {row["item_id"] for row in scores if row["arm"] == JUDGE and row["metric"] == "margin_max"}
    return [(answers[row["item_id"]], row) for row in reference if row["item_id"] in greedy]


# --- as a page ---------------------------------------------------------------------------------------------------


def render(rows: Sequence[Row], title: str) -> str:
    """The matrix as Markdown: faults first, those not caught on top; then benign reruns with the false alarms."""
    faults = sorted((row for row in rows if not row.benign), key=lambda row: (row.caught, row.config))
    benign = sorted((row for row in rows if row.benign), key=lambda row: (not row.caught, row.config))
    caught = sum(row.caught for row in faults)
    false_fails = sum(row.caught for row in benign)
    lines = [
        f"# {title}",
        "",
        "Written by `make fault-matrix`; do not edit. Every row is a run of the real model on the real server: the",
        "verdict, and what other rules (`assay.baselines`) say of the same outputs.",
        *_legend(rows),
        "",
        f"**{caught} of {len(faults)} planted faults caught; {false_fails} false FAIL in {len(benign)} benign runs.**",
        "",
        "## Planted faults",
        "",
        *_table(faults),
        "",
        "## Benign runs",
        "",
        *_table(benign),
        "",
    ]
    return "\n".join(lines)


_LEGEND = {
    "exact match": "*Exact match* counts items equal to the reference.",
    "top-5": "*Top-5* is vLLM's `check_logprobs_close`.",
    "ROUGE-L": f"*ROUGE-L* is the mean over items, taken to fail below {ROUGE_L_TOLERANCE}.",
    "mean WER": f"*Mean WER* is the mean of the items' rates, taken to fail {RATE:.0%} above the reference's.",
    "length": f"*Length* is the mean over the reference's, taken to fail outside {LENGTHS[0]} to {LENGTHS[1]}.",
    "seed-tts-eval": f"*seed-tts-eval* is its rule, taken to fail {RATE:.0%} above the reference's.",
}


def _legend(rows: Sequence[Row]) -> list[str]:
    return [_LEGEND[said.rule] for said in rows[0].others] if rows else []


def _table(rows: Sequence[Row]) -> list[str]:
    rules = [said.rule for said in rows[0].others] if rows else []
    head = ["run", "n", "verdict", "gates that failed", "expected", *rules, "note"]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(_line(row) for row in rows)]


def _line(row: Row) -> str:
    cells = [
        row.config,
        str(row.n),
        row.verdict.value,
        ", ".join(row.failed) or "–",
        ", ".join(row.expected) or "–",
        *map(str, row.others),
        row.note or "",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
