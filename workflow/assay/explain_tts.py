"""The worst items of a verdict on speech: what was asked, what was heard, and the numbers beside the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from assay.records import JUDGE, SERVED, Status
from assay.run import Run, transcript_rows
from assay.verdicts.model import Verdict, most_telling

Row = Mapping[str, Any]
SHOWN = {"duration_s": "s", "level_dbfs": "dBFS", "clicks": "clicks", "gaps": "gaps", "seams": "seams"}


@dataclass(frozen=True)
class Spoken:
    """One answer that a gate lists among its worst, with the gates that do."""

    item_id: str
    arm: str
    gates: tuple[str, ...]
    asked: str
    served: Row | None  # of the transcripts
    reference: Row | None


def worst_spoken(verdict: Verdict, plan: Mapping[str, Any], run: Run, count: int) -> Iterator[Spoken]:
    """The answers that gates which do not pass name, those of the most telling ones first, one pass of each item.

    Args:
        plan: the serve plan of the run.
        run: its files.
        count: how many.
    """
    named: dict[str, tuple[str, list[str]]] = {}
    unlike = [gate for gate in verdict.gates if gate.status is not Status.PASS]
    for gate in most_telling(unlike, verdict.samples.planned):
        for worst in gate.worst_items:
            arm, gates = named.setdefault(worst.item_id, (gate.arm, []))
            if gate.arm == arm:
                gates.append(gate.id)
    shown = dict(list(named.items())[:count])
    texts = {row["item_id"]: row["expected"] for row in run.items(plan)}
    served = transcript_rows([run.judged], {item: arm for item, (arm, _) in shown.items()})
    reference = transcript_rows(run.judged_reference(plan), dict.fromkeys(shown, JUDGE))
    for item, (arm, gates) in shown.items():
        yield Spoken(
            item_id=item,
            arm=arm,
            gates=tuple(gates),
            asked=texts[item],
            served=served.get(item),
            reference=reference.get(item),
        )


def panel(spoken: Spoken) -> Panel:
    """One answer for a person."""
    lines = [
        Text.assemble(("asked:     ", "dim"), spoken.asked),
        Text.assemble(("served:    ", "dim"), _heard(spoken.served)),
        Text.assemble(("reference: ", "dim"), _heard(spoken.reference)),
        Text(_numbers(spoken.served, spoken.reference), style="dim"),
    ]
    title = f"{spoken.item_id} ({spoken.arm.removeprefix(SERVED)}): {', '.join(spoken.gates)}"
    return Panel(Group(*lines), title=Text(title), title_align="left")


def _heard(row: Row | None) -> Text:
    if row is None:
        return Text("no record", style="red")
    if row["text"] is None:
        return Text(row["error"] or "not listened to", style="red")
    return Text(row["text"] or "nothing that is speech")


def _numbers(served: Row | None, reference: Row | None) -> str:
    """Numbers of both, where either has them."""
    said = []
    for name, unit in SHOWN.items():
        values = [row[name] if row else None for row in (served, reference)]
        if any(value is not None for value in values) and values[0] != values[1]:
            own, other = (_number(value) for value in values)
            said.append(f"{own} {unit} (reference {other})")
    return ", ".join(said) or "the same numbers as the reference's"


def _number(value: Any) -> str:
    if value is None:
        return "no"
    return str(len(value)) if isinstance(value, list) else f"{value:.3g}"
