"""A verdict as one self-contained HTML page: what was decided, why, and the items behind it, worst first."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from assay import store
from assay.gate import read_verdict
from assay.records import Status
from assay.report import asr, text, tts
from assay.report.items import WORST_FIRST, About, Case, Listing, Modality
from assay.report.plots import Series, Strip, number, strip
from assay.report.words import CAVEATS, COMMON_WORDS, LABELS, MEANING, SIGNS, pass_label
from assay.run import Run, run_of
from assay.verdicts.model import Gate, Verdict, most_telling
from assay.verdicts.scoretable import floor_values, planned_items
from assay.verdicts.suites import suite_of
from assay.verdicts.verify import read_scores

MODALITIES: dict[str, Modality] = {"text": text.MODALITY, "asr": asr.MODALITY, "tts": tts.MODALITY}
COMMON_GATES = {
    "G-coverage": About(
        "Every request is answered",
        "Did every planned request get an answer that can be scored?",
    ),
}
TEMPLATES = Path(__file__).parent / "templates"


def write_report(verdict_path: Path, report_path: Path) -> None:
    """Write the page on a verdict, which reads what else it shows from the files of the same run."""
    verdict = read_verdict(verdict_path)
    store.write_text(report_path, render(verdict, run_of(verdict_path)))


def render(verdict: Verdict, run: Run) -> str:
    """The page. Of an unsupported config there is the verdict alone."""
    case = read_case(verdict, run)
    modality = MODALITIES[str(verdict.config.modality)] if case else None
    listing = modality.items(case) if modality and case else Listing([])
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    page = _environment().get_template("page.html")
    return page.render(
        verdict=verdict,
        modality=modality,
        facts=_facts(verdict),
        caveats=_caveats(verdict),
        arms=[arm for instance in verdict.instances for arm in instance.arms],
        gates=_gates(verdict, case, modality) if modality and case else [],
        statuses=sorted({gate.status for gate in verdict.gates}, key=list(Status).index),
        words={**COMMON_WORDS, **modality.words} if modality else {},
        tally=verdict.controls.tally(),
        items=listing.items,
        refused_audio=listing.refused_audio,
        kinds=sorted({item.kind for item in listing.items}),
        standings=sorted({item.worst.standing for item in listing.items}, key=WORST_FIRST.index),
        style=style,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def read_case(verdict: Verdict, run: Run) -> Case | None:
    """The scores that a verdict was decided on; None where nothing was measured."""
    if verdict.options is None or verdict.reference is None:
        return None
    missing = [entry.item_id for entry in verdict.coverage.missing]
    table = read_scores(run.scores, planned_items(store.iter_tables(run.scores, "scores", ["item_id"]), missing))
    values = floor_values(store.iter_tables(run.floor, "floor"))
    dtype: Any = verdict.config.dtype
    suite = suite_of(verdict.config.modality)
    floor = suite.cut_floor(table, values, verdict.reference.floor_arms, dtype, verdict.options)
    arms = [arm for instance in verdict.instances for arm in instance.arms]
    trials = {arm: suite.trial(table, arm, floor, verdict.options, dtype) for arm in arms}
    return Case(verdict, run, run.plan(arms[0]), table, floor, trials)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,  # a prompt may hold anything
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "percent": percent,
        "pass_label": pass_label,
        "visible": visible,
        "drawn": drawn,
        "with_code": with_code,
    }
    environment.globals |= {"LABELS": LABELS, "MEANING": MEANING, "SIGNS": SIGNS}
    return environment


def percent(share: float | None) -> str:
    """A share as per cent; "unknown" where there is none."""
    if share is None:
        return "unknown"
    digits = 0 if share in (0, 1) else 1 if share >= 0.001 else 3
    return f"{100 * share:.{digits}f} %"


def visible(token: str) -> str:
    """A token with its white space drawn."""
    return token.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")


def drawn(token: str) -> str:
    """A token in its text: line breaks drawn, and white space that is the whole of it."""
    return visible(token) if token.isspace() else token.replace("\n", "↵\n")


def with_code(text: str) -> Markup:
    """Text with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _caveats(verdict: Verdict) -> list[tuple[str, str, list[str]]]:
    """Code, what it means, and what was found, each once."""
    found: dict[str, dict[str, None]] = {}
    for caveat in verdict.caveats:
        found.setdefault(caveat.code, {})[caveat.detail] = None
    return [(code, CAVEATS[code], [one for one in details if one != CAVEATS[code]]) for code, details in found.items()]


@dataclass(frozen=True)
class GateView:
    """A gate with what each pass showed."""

    id: str
    about: About
    status: Status  # the worst
    passes: tuple[Gate, ...]
    plot: Strip | None

    @property
    def statement(self) -> Gate:
        """The pass that speaks for the gate: the first of the worst ones."""
        return next(gate for gate in self.passes if gate.status is self.status)


def _gates(verdict: Verdict, case: Case, modality: Modality) -> list[GateView]:
    """Every gate once, the most telling first."""
    views: dict[str, GateView] = {}
    for worst in most_telling(verdict.gates, verdict.samples.planned):
        if worst.id not in views:
            about = {**COMMON_GATES, **modality.gates}[worst.id]
            passes = [gate for gate in verdict.gates if gate.id == worst.id]
            views[worst.id] = GateView(worst.id, about, worst.status, tuple(passes), _plot(passes, about, case))
    return list(views.values())


def _plot(gates: list[Gate], about: About, case: Case) -> Strip | None:
    """The floor's scores of single items, and those of each pass below."""
    shown = [gate for gate in gates if gate.floor is not None]
    if not shown or not about.axis:
        return None
    metric = shown[0].metric
    arms = case.floor.effective
    floor = np.concatenate([np.empty(0), *(case.table.values(arm, metric) for arm in arms)])
    series = [Series(f"the reference's harmless changes ({len(arms)} ways)", floor, served=False)]
    for gate in shown:
        series.append(
            Series(
                label=pass_label(gate.arm),
                values=case.trials[gate.arm].scores(gate.arm, metric),
                served=True,
                value=gate.value if about.draws_value else None,
                limit=gate.threshold.value if gate.threshold and about.draws_limit else None,
            )
        )
    return strip(series, about.axis)


def _facts(verdict: Verdict) -> dict[str, str]:
    """What was judged, as a list of facts."""
    info = verdict.config
    named = {
        "model": info.model,
        "engine": info.arm,
        "precision": info.dtype,
        "items": f"{verdict.samples.planned} ({info.tier})" if info.tier else None,
        "planted fault": info.fault,
    }
    return {name: value for name, value in named.items() if value}
