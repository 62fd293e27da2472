"""Transcripts on a page: the audio that was sent, and what the server and the reference heard in it, word by word."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assay.media.audio import Container, decode
from assay.metrics.speech import Aligned, align_words, normaliser
from assay.records import JUDGE
from assay.report.items import About, Case, Item, Listing, Modality, Pass, Standing, worst_first, worst_of
from assay.report.margins import MARGIN_GATES, MARGIN_WORDS, standing_of
from assay.report.sound import Player, Room, player
from assay.report.tokens import Answer, Comparison, compare
from assay.run import Row, response_rows, token_rows
from assay.verdicts.asr.structure import breaches
from assay.verdicts.asr.words import unlike


@dataclass(frozen=True)
class Transcript:
    """What somebody heard, as it was given, and its words beside those that are said."""

    text: str
    places: tuple[Aligned, ...]
    errors: int
    words: int  # said


@dataclass(frozen=True)
class AsrView:
    """What is shown of one item."""

    audio: Player
    said: str  # empty: nobody speaks
    served: Transcript | None
    reference: Transcript | None
    segments: tuple[Row, ...]  # start, end [s] and text, as the server says
    answers: Comparison


def asr_items(case: Case) -> Listing:
    """Every planned item with its audio and the transcripts of its worst pass."""
    planned = {row["item_id"]: row for row in case.run.items(case.plan)}
    passes = _passes(case)
    shown = {key: worst_of(found).arm for key, found in passes.items()}
    judge = dict.fromkeys(planned, JUDGE)
    responses = response_rows(case.outputs, shown)
    answers = response_rows(case.run.reference(case.plan), judge)
    tokens = token_rows([case.run.judged], shown)
    ideal = token_rows(case.run.judged_reference(case.plan), judge)
    tokenizer = case.run.tokenizer(case.plan)
    options: Any = case.verdict.options
    words, room = normaliser(options.normaliser).call, Room()

    def heard(row: Row, response: Row | None) -> Transcript | None:
        if response is None or response["text"] is None:
            return None
        alignment = align_words(words(row["expected"]), words(response["text"]))
        return Transcript(response["text"], alignment.places, alignment.edits.errors, alignment.edits.words)

    def view(key: str, row: Row) -> AsrView:
        response, answer = responses.get(key), answers.get(key)
        return AsrView(
            audio=player(_sent(row), room),
            said=row["expected"],
            served=heard(row, response),
            reference=heard(row, answer),
            segments=tuple((response or {}).get("segments") or ()),
            answers=compare(
                Answer(response, tokens.get(key, [])),
                Answer(answer, ideal.get(key, [])),
                tokenizer,
                case.floor.tau_hard,
            ),
        )

    items = [
        Item(
            item_id=key,
            kind=_kind(row),
            tags=tuple(row["tags"]),
            passes=tuple(passes[key]),
            summary=row["expected"] or "nobody speaks",
            view=view(key, row),
        )
        for key, row in ((key, planned[key]) for key in worst_first(passes))
    ]
    return Listing(items, room.refused)


def _kind(row: Row) -> str:
    """The part of the set that an item belongs to: its first tag."""
    return str(row["tags"][0]) if row["tags"] else str(row["kind"])


def _sent(row: Row) -> Any:
    audio = row["audio"]
    return decode(audio["bytes"], Container(Path(audio["path"]).suffix.removeprefix(".")))


def _passes(case: Case) -> dict[str, list[Pass]]:
    """Item -> its passes, in the order of the plan. The score is edits a word against the reference's transcript."""
    found: dict[str, list[Pass]] = {key: [] for key in case.table.items}
    reasons = case.why_unscored()
    for arm, trial in case.trials.items():
        failed, broken = trial.failed(arm), breaches(trial) | {"unlike the reference's transcript": unlike(trial, arm)}
        margins, exact = case.table.values(arm, "margin_max", np.inf), case.table.values(arm, "exact")
        rates, invented = case.table.values(arm, "edit_rate"), case.table.aux(arm, "silence_words", "words")
        ours = case.table.aux(JUDGE, "silence_words", "words")
        for k, key in enumerate(case.table.items):
            notes = [what for what, mask in broken.items() if mask[k]]
            if failed[k]:
                found[key].append(
                    Pass(arm, Standing.UNANSWERED, None, (reasons.get((arm, key), "not recorded"), *notes))
                )
                continue
            silent = np.isfinite(invented[k])
            standing = (
                standing_of(0.0, invented[k] <= ours[k], case.floor.tau_hard, bool(notes))
                if silent
                else standing_of(float(margins[k]), exact[k] == 1, case.floor.tau_hard, bool(notes))
            )
            notes += [f"{invented[k]:.0f} words where nobody speaks"] if silent and invented[k] > ours[k] else []
            score = invented[k] if silent else rates[k]
            found[key].append(Pass(arm, standing, float(score) if np.isfinite(score) else None, tuple(notes)))
    return found


# --- in plain words ----------------------------------------------------------------------------------------------

GATES = {
    "G-struct": About(
        "Transcripts are whole and consistent",
        "Is every transcript complete, in the right language, free of decoder tokens and loops, with times in order?",
    ),
    **MARGIN_GATES,
    "G-transcript": About(
        "Transcripts are the reference's",
        "Does any transcript differ from the reference's by more than a few words, with no near tie to explain it?",
        "edits a word against the reference's transcript, per item",
        draws_limit=True,
    ),
    "G-wer": About(
        "No more words are wrong",
        "Over all items, is the share of words that are wrong higher than the reference's by more than matters?",
        "wrong words of an item",
    ),
    "G-silence": About(
        "Nothing is heard in silence",
        "Does the server invent words where nobody speaks, more than the reference does?",
        "words a minute where nobody speaks, per clip",
        draws_value=True,
        draws_limit=True,
    ),
}

WORDS = {
    **MARGIN_WORDS,
    "word error rate": "words missed, replaced and invented, over the words that are said. Both are first brought to "
    "one spelling (numbers, contractions, case).",
    "edits a word": "the same against the reference's own transcript instead of what is said.",
}

MODALITY = Modality(GATES, WORDS, "edits a word (where nobody speaks: words)", "asr.html", asr_items)
