"""Scores of transcripts: token margins, word errors against what is said, and structure."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from assay import store
from assay.media.audio import Container, decode
from assay.metrics import speech
from assay.provenance import provenance
from assay.records import JUDGE, SERVED, Evidence, ResponseStatus
from assay.samples.lock import load_set
from assay.scoring.margins import floor_table, margin_rows, read_blocks, read_ids, unjudged_margins
from assay.scoring.rows import Arm, Files, Rows, arms_of, read_responses, score_table
from assay.verdicts.asr.planted import CONTROLS
from assay.verdicts.evidence import LEVELS
from assay.verdicts.margins.planted import TokenControl

log = logging.getLogger(__name__)

COLUMNS = ["item_id", "arm", "status", "evidence", "text", "token_ids", "language", "segments"]
LATE_S = 1.0  # a segment may end so much after the clip: the model hears the silence behind it
LANGUAGES = {"english": "en"}  # names that servers give beside codes


@dataclass(frozen=True)
class Item:
    """What the scores need to know of a planned item."""

    item_id: str
    set_id: str
    expected: str  # empty: nobody speaks
    language: str | None
    seconds: float


@dataclass(frozen=True)
class Context:
    """What every arm is scored against and by."""

    items: Mapping[str, Item]
    judge_texts: Mapping[str, str]  # the judge's own transcripts
    judge_ids: Mapping[str, np.ndarray]
    normalisers: tuple[speech.Normaliser, speech.Normaliser]  # the gates' own, and the other
    text_of: Callable[[Sequence[int]], str]
    lossy: bool  # whether the server gives text alone: then every arm is judged by its text
    clip_nat: float

    @property
    def spoken(self) -> list[str]:
        """Items in which somebody speaks."""
        return [key for key, item in self.items.items() if item.expected]


def score(
    items_paths: list[Path],
    served: Files,
    references: Files,
    model_dir: Path,
    options: Mapping[str, Any],
    scores_path: Path,
    floor_path: Path,
) -> None:
    """Score one config and write its `scores` and `floor` tables.

    Args:
        items_paths: `items` tables of the sample sets.
        served: responses of each server instance, and their tokens.
        references: responses of each sample set and reference arm, and their tokens.
        model_dir: the reference's files; its tokenizer.json says what text some ids are.
        options: scoring options (`assay.config.AsrGates`).
        scores_path, floor_path: Parquet files to write.
    """
    plan = store.run_options(served.responses)
    context = _context(items_paths, served, references, model_dir, options)
    inputs = [*items_paths, *served.paths, *references.paths]
    normalisers = [
        {"name": found.name, "version": found.version, "sha256": found.sha256} for found in context.normalisers
    ]
    origin = provenance("score", inputs, {"run": plan, "scoring": dict(options), "normalisers": normalisers})
    floor_arms = set(plan["reference"]["arms"]) - {JUDGE}
    sets = {key: item.set_id for key, item in context.items.items()}
    with (
        store.table_writer(scores_path, "scores", origin) as scores,
        store.table_writer(floor_path, "floor", origin) as floor,
    ):
        arms = list(arms_of(plan, served, references, CONTROLS))
        judged: dict[str, set[str]] = {arm.label: set() for arm in arms}
        for arm, block in read_blocks(arms, context.lossy):
            block = block.take(np.array([bool(context.items[key].expected) for key in block.item_ids], dtype=bool))
            judged[arm.label] |= set(block.item_ids)
            rows = margin_rows(block, context.judge_ids, context.clip_nat)
            scores.write(score_table(plan["config"], arm.label, sets, rows))
            if arm.name in floor_arms:
                floor.write(floor_table(block, arm.label))
        for arm in arms:
            log.info("scoring %s", arm.label)
            rows = _answer_rows(arm, context, judged[arm.label])
            scores.write(score_table(plan["config"], arm.label, sets, rows))


def _context(
    items_paths: list[Path], served: Files, references: Files, model_dir: Path, options: Mapping[str, Any]
) -> Context:
    lossy = _only_text(served)
    judges = references.of(JUDGE)
    judge_ids = defaultdict(
        lambda: np.empty(0, np.int32),  # where the judge says nothing
        read_ids(references.judged, JUDGE, lossy),
    )
    end = store.read_provenance(judges[0])["options"]["end_id"]
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return Context(
        items={item.item_id: item for path in items_paths for item in map(_item, load_set(path))},
        judge_texts={
            row["item_id"]: row["text"]
            for path in judges
            for row in store.read_rows(path, "responses", ["item_id", "text"])
        },
        judge_ids=judge_ids,
        normalisers=(speech.normaliser(options["normaliser"]), speech.normaliser(options["other_normaliser"])),
        text_of=lambda ids: str(tokenizer.decode([token for token in ids if token < end])),
        lossy=lossy,
        clip_nat=options["clip_nat"],
    )


def _only_text(served: Files) -> bool:
    """Whether a server tells what it hears, and the tokens of no transcript.

    One that tells those of some is judged by tokens, and what it says without them stays unjudged: by its text every
    limit would be cut from the coarser floor of texts.
    """
    columns = ["evidence", "text", "token_ids"]
    rows = [row for path in served.responses for row in store.read_rows(path, "responses", columns)]
    alone = any(row["evidence"] == Evidence.E2 and row["text"].strip() for row in rows)
    return alone and not any(row["token_ids"] for row in rows)


def _item(row: Mapping[str, Any]) -> Item:
    audio = row["audio"]
    clip = decode(audio["bytes"], Container(Path(audio["path"]).suffix.removeprefix(".")))
    language = json.loads(row["request"]).get("language")
    return Item(row["item_id"], row["set_id"], row["expected"].strip(), language, clip.duration_s)


def _answer_rows(arm: Arm[TokenControl], context: Context, judged: set[str]) -> list[Rows]:
    """Scores of an arm that come from its transcripts, and from which spoken items have judged tokens."""
    responses = read_responses(arm, COLUMNS)
    return [*_response_rows(responses, context, judged), *_unjudged_rows(responses, arm.label, context, judged)]


def _unjudged_rows(responses: Mapping[str, dict[str, Any]], arm: str, context: Context, judged: set[str]) -> list[Rows]:
    """Margins of spoken items without judged tokens.

    Nothing said is no divergence where the judge says nothing either, and the worst of a server's where it does, as are
    tokens that are no transcript of this audio. Text alone that was not judged proves no fault: undefined.
    """
    equal: list[str] = []
    worst: list[str] = []
    undefined: list[str] = []
    for key in context.spoken:
        row = responses.get(key)
        if key in judged:
            continue
        if row is None or row["status"] != ResponseStatus.OK:
            worst.append(key)
        elif row["text"].strip():
            (worst if row["token_ids"] else undefined).append(key)
        elif not context.judge_texts[key]:
            equal.append(key)
        else:
            (worst if arm.startswith(SERVED) else undefined).append(key)
    return [
        *unjudged_margins(worst, False, np.inf),
        *unjudged_margins(undefined, False, np.nan),
        *(
            replace(rows, values=[1.0] * len(equal)) if rows.metric == "exact" else rows
            for rows in unjudged_margins(equal, False, 0.0)
        ),
    ]


def _response_rows(responses: Mapping[str, dict[str, Any]], context: Context, judged: set[str]) -> list[Rows]:
    """Scores that come from the transcripts themselves: coverage, evidence, words, structure."""
    found: dict[str, Rows] = {}

    def add(metric: str, key: str, value: float | None, unit: str = "bool", direction: int = 1, **aux: float) -> None:
        rows = found.setdefault(metric, Rows(metric, unit, direction))
        rows.item_ids.append(key)
        rows.values.append(np.nan if value is None else float(value))
        rows.aux.append(aux)

    for key, item in context.items.items():
        response = responses.get(key)
        answered = response is not None and response["status"] == ResponseStatus.OK
        add("answered", key, answered)
        if response is None or not answered:
            _add_words(add, item, None, context)
            continue
        add("evidence", key, LEVELS.index(_evidence(response, item, key in judged)), "level", -1)
        _add_words(add, item, response["text"], context)
        _add_structure(add, item, response, context, key in judged)
    return list(found.values())


def _evidence(response: Mapping[str, Any], item: Item, judged: bool) -> Evidence:
    """How much a transcript proves. An empty one has no tokens to know; text that was not judged is as parsed."""
    if not response["text"].strip():
        return Evidence.E1
    level = Evidence(response["evidence"])
    return Evidence.E3 if level is Evidence.E2 and item.expected and not judged else level


def _add_words(add: Callable[..., None], item: Item, text: str | None, context: Context) -> None:
    """Errors against what is said, by both normalisers, and edits against the judge's transcript; no text: the worst.

    Where nobody speaks every word is invented: words a minute.
    """
    for metric, normaliser in zip(("wer_errors", "wer_errors_other"), context.normalisers, strict=True):
        if not item.expected:
            continue
        edits = speech.align_words(normaliser.call(item.expected), normaliser.call(text or "")).edits
        value = np.inf if text is None else edits.errors
        aux = {"words": edits.words, "sub": edits.substitutions, "del": edits.deletions, "ins": edits.insertions}
        add(metric, item.item_id, value, "count", -1, **aux)
    words = context.normalisers[0].call
    if item.expected:
        edits = speech.align_words(words(context.judge_texts[item.item_id]), words(text or "")).edits
        value = np.inf if text is None else edits.errors / max(1, edits.words)
        add("edit_rate", item.item_id, value, "fraction", -1, edits=edits.errors, words=edits.words)
    else:
        edits = speech.align_words("", words(text or "")).edits
        value = np.inf if text is None else speech.insertions_per_minute(edits, item.seconds)
        add("silence_words", item.item_id, value, "words/min", -1, words=edits.insertions, seconds=item.seconds)


def _add_structure(
    add: Callable[..., None], item: Item, response: Mapping[str, Any], context: Context, judged: bool
) -> None:
    """Whether a transcript's parts fit one another and the audio."""
    key, text = item.item_id, response["text"]
    words = context.normalisers[0].call
    said, expected = words(text), words(item.expected)
    add("leaked_tokens", key, len(speech.special_tokens(text)), "count", -1)
    if item.expected:
        add("empty", key, not said, "bool", -1)
        add("repeats", key, speech.repeat_fraction(said), "fraction", -1)
        add("tail_missing", key, speech.tail_deletions(expected, said), "words", -1)
        add("head_missing", key, speech.head_deletions(expected, said), "words", -1)
    if item.language and response["language"]:
        named = response["language"].lower().partition("-")[0]  # of a tag such as en-US the language
        add("language_ok", key, LANGUAGES.get(named, named) == item.language)
    if response["token_ids"]:
        add("text_ok", key, text.split() == context.text_of(response["token_ids"]).split())
        if item.expected:
            add("ids_ok", key, judged)
    if response["segments"] is not None:
        segments = [speech.Segment(entry["start"], entry["end"]) for entry in response["segments"]]
        told = "".join(entry["text"] for entry in response["segments"])
        add("segments_ok", key, "".join(told.split()) == "".join(text.split()))  # servers space them as they like
        timing = speech.segment_timing(segments, item.seconds + LATE_S)
        faults = timing.inverted + timing.backward + timing.outside
        add("timing_faults", key, faults, "count", -1, covered=timing.covered)
