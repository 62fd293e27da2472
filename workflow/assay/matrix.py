"""The fault matrix: for every planted fault and every benign rerun, which gates failed, and what the rules of other
projects would have said of the very same outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay import store
from assay.config import FAULT_SEPARATOR, Fault, lookup
from assay.gate import read_verdict
from assay.metrics.text import check_logprobs_close, rouge_l
from assay.records import JUDGE, ResponseStatus, Status
from assay.run import run_of
from assay.verdicts.model import Verdict

_COLUMNS = ["item_id", "arm", "status", "text", "token_ids", "top_token_ids"]
TOP_N = 5  # of vLLM's rule
ROUGE_L_TOLERANCE = 0.95  # mean over items, below which a ROUGE-L gate is taken to fail


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
    exact: int  # items whose ids (or text) equal the reference's
    logprobs_close: bool | None  # vLLM's rule; None where the server gave no top-k
    rouge_l: float  # mean over items
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
    pairs = list(_pairs(path, verdict))
    close = [item for item in (_close(served, judge) for served, judge in pairs) if item is not None]
    return Row(
        config=verdict.config.name,
        fault=name,
        benign=fault is None or fault.benign,
        n=len(pairs),
        verdict=verdict.verdict,
        failed=tuple(sorted({gate.id for gate in verdict.gates if gate.status is Status.FAIL})),
        expected=tuple(fault.gates) if fault else (),
        exact=sum(_same(served, judge) for served, judge in pairs),
        logprobs_close=all(close) if close else None,
        rouge_l=sum(_rouge(served, judge) for served, judge in pairs) / len(pairs) if pairs else 0.0,
        note=fault.note if fault else None,
    )


def _pairs(path: Path, verdict: Verdict) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(served, reference) responses of every greedy item, from the last pass of instance 0: the one under load."""
    run = run_of(path)
    arm = verdict.instances[0].arms[-1]
    outputs = run.served(arm, "outputs")
    plan = store.read_provenance(outputs)["options"]
    served = {row["item_id"]: row for row in store.read_rows(outputs, "responses", _COLUMNS) if row["arm"] == arm}
    scores = store.read_rows(run.scores, "scores", ["item_id", "arm", "metric"])
    greedy = {row["item_id"] for row in scores if row["arm"] == JUDGE and row["metric"] == "margin_max"}
    for name in plan["sets"]:
        path = run.results / "reference" / plan["reference"]["model"] / name / f"{JUDGE}.parquet"
        for judge in store.read_rows(path, "responses", _COLUMNS):
            if judge["item_id"] in greedy:
                yield served[judge["item_id"]], judge


def _same(served: dict[str, Any], judge: dict[str, Any]) -> bool:
    if served["status"] != ResponseStatus.OK:
        return False
    if served["token_ids"] is not None:
        return bool(served["token_ids"] == judge["token_ids"])
    return bool(served["text"] == judge["text"])


def _close(served: dict[str, Any], judge: dict[str, Any]) -> bool | None:
    if served["status"] != ResponseStatus.OK:
        return False
    if not served["top_token_ids"]:
        return None
    top = [[ids[:TOP_N] for ids in row["top_token_ids"]] for row in (judge, served)]
    return check_logprobs_close(judge["token_ids"], top[0], served["token_ids"], top[1])


def _rouge(served: dict[str, Any], judge: dict[str, Any]) -> float:
    return rouge_l((judge["text"] or "").split(), (served["text"] or "").split())


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
        "verdict, and what other rules say of the same outputs. *Exact* counts items equal to the reference;",
        "*top-5* is vLLM's `check_logprobs_close`;",
        f"*ROUGE-L* is the mean over items, taken to fail below {ROUGE_L_TOLERANCE}.",
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


def _table(rows: Sequence[Row]) -> list[str]:
    head = "| run | n | verdict | gates that failed | expected | exact match | top-5 | ROUGE-L | note |"
    return [head, "|" + "---|" * 9, *(_line(row) for row in rows)]


def _line(row: Row) -> str:
    close = "–" if row.logprobs_close is None else ("pass" if row.logprobs_close else "FAIL")
    rouge = f"{'pass' if row.rouge_l >= ROUGE_L_TOLERANCE else 'FAIL'} ({row.rouge_l:.3f})"
    exact = f"{'pass' if row.exact == row.n else 'FAIL'} ({row.exact}/{row.n})"
    cells = [
        row.config,
        str(row.n),
        row.verdict.value,
        ", ".join(row.failed) or "–",
        ", ".join(row.expected) or "–",
        exact,
        close,
        rouge,
        row.note or "",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
