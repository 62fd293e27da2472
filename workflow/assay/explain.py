"""A verdict for a person: what was decided and why, the worst items first, with the text around each divergence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from assay import store
from assay.errors import AssayError
from assay.explain_asr import transcript_panel, worst_transcripts
from assay.explain_tts import panel as speech_panel
from assay.explain_tts import worst_spoken
from assay.gate import read_verdict
from assay.records import SERVED, Status
from assay.run import Run, prompt_text, response_rows, run_of, token_rows
from assay.verdicts.model import Gate, Instance, Threshold, Verdict, most_telling

STYLES = {
    Status.PASS: "green",
    Status.PASS_WITH_CAVEAT: "green",
    Status.FAIL: "bold red",
    Status.ERROR: "bold magenta",
    Status.INCONCLUSIVE: "yellow",
    Status.UNSUPPORTED: "yellow",
    Status.SKIPPED_OPTIONAL: "dim",
}
CONTEXT = 12  # tokens shown before a divergence


@dataclass(frozen=True)
class Divergence:
    """One token that was served against the judge's advice, with the text before it."""

    item_id: str
    arm: str
    prompt: str
    pos: int
    before: str
    served: str
    preferred: str
    margin: float  # nat
    rank: int
    answer: str


def explain(path: str | Path, console: Console, brief: bool = False, items: int = 5) -> None:
    """Print a verdict.

    Args:
        path: the verdict file, beside the other results of its run.
        console: where to print.
        brief: only the verdict, its reason and caveats.
        items: how many of the worst items to show.
    """
    verdict = read_verdict(path)
    console.print(_headline(verdict, path))
    if brief:
        return
    if verdict.gates:
        console.print(_gate_table(most_telling(verdict.gates, verdict.samples.planned)))
        console.print(_controls(verdict))
    for line in _instances(verdict):
        console.print(line)
    try:
        shown = list(_worst(verdict, run_of(path), items))
    except AssayError as error:
        console.print(Text(f"The worst items cannot be shown: {error}", style="yellow"))
        return
    if shown:
        console.print(Text("\nWorst items", style="bold"))
    for panel in shown:
        console.print(panel)


def _headline(verdict: Verdict, path: str | Path) -> Panel:
    status = Text(verdict.verdict.value.replace("_", " "), style=STYLES[verdict.verdict])
    lines: list[Any] = [Text.assemble(status, "  ", verdict.reason)]
    if verdict.claim:
        claim = verdict.claim
        lines.append(
            Text(f"{claim.bad} of {claim.n} items bad: at most {claim.rate_upper95:.2%} of items (95% confidence)")
        )
    caveats = dict.fromkeys((item.code, item.detail) for item in verdict.caveats)  # several gates may share one
    lines += [Text(f"caveat {code}: {detail}", style="yellow") for code, detail in caveats]
    lines.append(Text(f"verdict file: {path}", style="dim"))
    if (report := run_of(path).current_report()) is not None:
        lines.append(Text(f"report: {report}", style="dim"))
    info = verdict.config
    facts = [part for part in (info.model, info.arm, info.dtype, info.tier) if part]
    return Panel(Group(*lines), title=Text(" · ".join([info.name, *facts])), title_align="left")


def _gate_table(gates: list[Gate]) -> Table:
    table = Table(title="Gates", title_justify="left", header_style="bold")
    for name in ("gate", "pass", "status", "value", "limit", "what it says"):
        table.add_column(name, overflow="fold")
    for gate in gates:
        table.add_row(
            gate.id,
            Text(gate.arm.removeprefix(SERVED)),
            Text(gate.status.value, style=STYLES[gate.status]),
            _number(gate.value, gate.unit),
            _limit(gate.threshold),
            Text("\n".join([gate.detail, *(hint.hint for hint in gate.diagnosis)])),
        )
    return table


def _number(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.3g} {unit}".strip()


def _limit(threshold: Threshold | None) -> str:
    """In the statistic's unit, which stands beside it; or in its own, where it is the limit of each item."""
    if threshold is None:
        return "–"
    return _number(threshold.value, f"{threshold.unit} an item" if threshold.unit else "")


def _controls(verdict: Verdict) -> Text:
    tally = verdict.controls.tally()
    return Text(
        f"Controls: {tally.caught} of {tally.planted} planted faults caught, "
        f"{tally.alarms} of {tally.harmless} false alarms on left-out floor arms"
    )


def _instances(verdict: Verdict) -> Iterator[Text]:
    for item in verdict.instances:
        if item.startup.failure:
            failure = item.startup.failure
            yield Text(f"Server {item.instance}: {failure.message}\n{failure.log_tail or ''}".rstrip(), style="red")
        elif item.died:
            yield Text(f"Server {item.instance}: {item.died.message}", style="red")
        else:
            seconds = "unknown" if item.startup.seconds is None else f"{item.startup.seconds:.0f} s"
            yield Text(
                f"Server {item.instance}: ready after {seconds}, stopped by {item.cleanup.stopped_by or 'itself'}"
            )
        yield from _runs_on(item)
    if verdict.determinism and verdict.determinism.n:
        known = verdict.determinism
        yield Text(
            f"Determinism over {known.n} items: alone = under load {_share(known.under_load_identical)}, "
            f"instance 0 = instance 1 {_share(known.cross_instance_identical)}"
        )


def _runs_on(item: Instance) -> Iterator[Text]:
    """The devices of an instance, and what its log says that it picked."""
    if item.devices:
        leased = (" ".join(str(one[key]) for key in ("name", "pci") if one[key]) for one in item.devices.leased)
        yield Text(f"  on {', '.join(leased)}")
    for question, statement in item.facts.statements.items():
        yield Text(f"  {question}: {statement}", style="dim")
    if item.facts.unmatched:
        yield Text(f"  and {item.facts.unmatched} log messages that no rule reads (results/facts/)", style="dim")


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def _worst(verdict: Verdict, run: Run, count: int) -> Iterator[Panel]:
    """The worst items of a run, as its modality shows them."""
    if not verdict.gates:
        return
    outputs = {arm: run.outputs(arm) for entry in verdict.instances for arm in entry.arms}
    plan = run.plan(next(iter(outputs)))
    if verdict.config.modality == "asr":
        transcripts = worst_transcripts(run.results.parent, run.scores, outputs, plan, verdict.options, count)
        yield from map(transcript_panel, transcripts)
    elif verdict.config.modality == "tts":
        yield from map(speech_panel, worst_spoken(verdict, plan, run, count))
    else:
        yield from map(_divergence, worst_divergences(verdict, run, count))


# --- worst items -------------------------------------------------------------------------------------------------


def worst_divergences(verdict: Verdict, run: Run, count: int) -> Iterator[Divergence]:
    """The items with the largest margins of the served passes, worst first, one pass each."""
    scores = store.read_table(run.scores, "scores", ["item_id", "arm", "metric", "value", "aux"])
    margins = scores.filter(pc.and_(pc.equal(scores["metric"], "margin_max"), pc.greater(scores["value"], 0)))
    rows = [row for row in margins.to_pylist() if row["arm"].startswith(SERVED)]
    rows.sort(key=lambda row: (-row["value"], row["item_id"], row["arm"]))
    plan = run.plan(rows[0]["arm"]) if rows else {}
    seen: set[str] = set()
    for row in rows:
        if row["item_id"] in seen or len(seen) == count:
            continue
        seen.add(row["item_id"])
        yield _read_divergence(run, plan, row["item_id"], row["arm"], int(dict(row["aux"])["pos"]))


def _read_divergence(run: Run, plan: dict[str, Any], item_id: str, arm: str, pos: int) -> Divergence:
    tokens = token_rows([run.judged], {item_id: arm})[item_id]
    response = response_rows([run.outputs(arm)], {item_id: arm})[item_id]
    tokenizer = run.tokenizer(plan)
    ids = [row["token_id"] for row in tokens]
    at = tokens[pos]

    def decode(chosen: list[int]) -> str:
        return tokenizer.decode(chosen, skip_special_tokens=False)

    return Divergence(
        item_id=item_id,
        arm=arm,
        prompt=next(prompt_text(row["request"]) for row in run.items(plan) if row["item_id"] == item_id),
        pos=pos,
        before=decode(ids[max(0, pos - CONTEXT) : pos]),
        served=decode([at["token_id"]]),
        preferred=decode([at["judge_top_ids"][0]]),
        margin=at["lp_judge_max"] - at["lp_judge"],
        rank=at["judge_rank"],
        answer=response["text"] or "",
    )


def _divergence(item: Divergence) -> Panel:
    lines = [
        Text(f"prompt: {_short(item.prompt)}"),
        Text.assemble(
            f"token {item.pos}: …{item.before}",
            (f"⟨{item.served}⟩", "red"),
            "  where the reference prefers ",
            (f"⟨{item.preferred}⟩", "green"),
        ),
        Text(f"margin {item.margin:.3g} nat, rank {item.rank}"),
        Text(f"answer: {_short(item.answer)}", style="dim"),
    ]
    return Panel(Group(*lines), title=Text(f"{item.item_id} ({item.arm.removeprefix('served_')})"), title_align="left")


def _short(text: str, limit: int = 240) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"
