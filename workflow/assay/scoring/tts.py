"""Scores of speech: what was heard in each audio against what was asked, against the reference, and against its twin.

Everything is computed from the judge's `transcripts` but the waveform layer, which needs both audios again. All that
belongs to an item, of every arm, is read together and then let go, so that memory does not grow with the set.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from assay import store
from assay.config import TtsGates, parse
from assay.errors import MediaError
from assay.media.audio import Audio, Pcm, decode_named
from assay.media.served import Body, body_of, raw_samples
from assay.metrics import audio as sound
from assay.metrics import speech
from assay.provenance import provenance
from assay.records import JUDGE, served_arm
from assay.samples.lock import load_set
from assay.scoring.rows import Files, Rows, arms_of, score_table
from assay.verdicts.tts.planted import CONTROLS, Take

log = logging.getLogger(__name__)

SILENT_DBFS = -120.0  # stands for minus infinity: below what 16 bits can hold
SEAM_RANK = 0.05  # share of places as loud as a seam from which on it counts as a click

BATCH = 16  # responses read at a time, audio and all
ROWS = 1024  # ... and rows of `transcripts`

Row = dict[str, Any]
Answers = Mapping[str, Row]  # arm -> what was judged of its answer to one item
# Metric -> unit, direction (+1: higher is better). Facts are columns of the transcripts as they are.
FACTS: dict[str, tuple[str, int]] = {
    "rate": ("Hz", 0),
    "channels": ("count", 0),
    "samples": ("count", 0),
    "byte_rate_agrees": ("bool", 1),
    "duration_s": ("s", 0),
    "peak": ("FS", -1),
    "dc": ("FS", 0),
    "clip_fraction": ("fraction", -1),
    "silence_fraction": ("fraction", 0),
    "lead_s": ("s", 0),
    "trail_s": ("s", 0),
    "sound_s": ("s", 0),
    "bandwidth_hz": ("Hz", 0),
    "centroid_hz": ("Hz", 0),
    "flatness": ("fraction", 0),
    "repeat": ("correlation", -1),
    "gaps": ("count", -1),
    "clicks": ("count", -1),
    "has_speech": ("bool", 1),
}
METRICS: dict[str, tuple[str, int]] = {
    "answered": ("bool", 1),
    "decoded": ("bool", 1),
    "headers": ("count", 0),  # aux: wanted
    **FACTS,
    "level_dbfs": ("dBFS", 0),
    "wer_errors": ("count", -1),  # by the pinned normaliser; aux: words, sub, del, ins
    "wer_errors_other": ("count", -1),  # by the other one
    "end_deletions": ("count", -1),  # words missing at the start and at the end; aux: head, tail
    "window_wer": ("fraction", -1),  # of the worst run of words, of longer texts
    "bleed": ("fraction", -1),  # of another item's text, heard though the own one doesn't say it
    "seam_clicks": ("count", -1),  # aux: seams
    "seam_repeat": ("correlation", -1),
    "stream_samples": ("count", 0),  # samples more than in the same answer unstreamed; aux: whole
    "speaker_similarity": ("cosine", 1),  # of the voice to that of the judge's answer
    "load_errors": ("count", -1),  # word errors more than in the same answer alone; aux: words
    "waveform_noise": ("dBFS", -1),  # level of the difference to the reference's samples; aux: lag, more, ...
}
COLUMNS = [  # of the transcripts, that scores are computed from
    *("item_id", "arm", "fault", "format", "headers", *FACTS, "level_dbfs"),
    *("text", "seams", "seam_ranks", "seam_repeats", "speaker_embedding"),
]


@dataclass(frozen=True)
class Score:
    """One number of one item, with what belongs to it. NaN: undefined; infinite: the worst case."""

    value: float
    aux: Mapping[str, float]


Scores = dict[str, Score]  # metric -> score


@dataclass(frozen=True)
class Text:
    """A text, or what was heard of it, as both normalisers leave it."""

    pinned: str
    basic: str


@dataclass(frozen=True)
class Normalisers:
    """The normaliser that scores, and the other one, whose number stands beside."""

    pinned: speech.Normaliser
    basic: speech.Normaliser

    @classmethod
    def of(cls, options: TtsGates) -> Normalisers:
        """Those that the options name."""
        return cls(speech.normaliser(options.normaliser), speech.normaliser(options.other_normaliser))

    def __call__(self, text: str) -> Text:
        """A text through both, once each."""
        return Text(self.pinned.call(text), self.basic.call(text))

    @property
    def identity(self) -> dict[str, dict[str, str]]:
        """What pins them, for provenance."""
        parts = {"pinned": self.pinned, "basic": self.basic}
        return {key: {"name": it.name, "version": it.version, "sha256": it.sha256} for key, it in parts.items()}


# --- the stage ---------------------------------------------------------------------------------------------------


def score(
    items_paths: list[Path],
    served: Files,
    references: Files,
    model_dir: Path,
    options: Mapping[str, Any],
    scores_path: Path,
    floor_path: Path,
) -> None:
    """Score one config and write its `scores` and `floor` tables; every gate of speech floors on scores alone.

    Args:
        items_paths: `items` tables of the sample sets.
        served: responses of each server instance, and their transcripts.
        references: responses of each sample set and reference arm, and their transcripts.
        model_dir: of the recogniser; not needed any more.
        options: scoring options (`assay.config.TtsGates`).
        scores_path, floor_path: Parquet files to write.
    """
    chosen: TtsGates = parse(TtsGates, dict(options), "gate options")
    normalisers = Normalisers.of(chosen)
    planned = {row["item_id"]: (row["set_id"], row["expected"]) for path in items_paths for row in load_set(path)}
    sets = {key: set_id for key, (set_id, _) in planned.items()}
    plan = store.run_options(served.responses)
    inputs = [*items_paths, *served.paths, *references.paths]
    effective = {"run": plan, "scoring": dict(options), "normalisers": normalisers.identity}
    origin = provenance("score", inputs, effective)
    run = Run({key: normalisers(text) for key, (_, text) in planned.items()}, normalisers, chosen, twins_of(plan))
    arms = [arm.label for arm in arms_of(plan, served, references, CONTROLS)]
    keys = sorted(planned)
    heard = store.beside(keys, _transcripts([*served.judged, *references.judged]), {})
    waveforms = waveform_scores(served, references, raw_samples(plan)) if chosen.deterministic else iter(())
    noise = store.beside(keys, waveforms, {})
    with (
        store.table_writer(floor_path, "floor", origin),
        store.table_writer(scores_path, "scores", origin) as writer,
    ):
        items = zip(keys, heard, noise, strict=True)
        while group := list(islice(items, store.ITEMS_PER_ROW_GROUP)):
            scores = {arm: {key: run.scores(arm, key, rows, waves) for key, rows, waves in group} for arm in arms}
            tables = [score_table(plan["config"], arm, sets, rows_of(found)) for arm, found in scores.items()]
            writer.write(pa.concat_tables(tables).unify_dictionaries())
            log.info("scored items up to %s, of %d", group[-1][0], len(keys))


@dataclass(frozen=True)
class Twins:
    """Arms that give the same answers another way: whole instead of streamed, alone instead of under load."""

    whole: str | None = None
    alone: str | None = None


@dataclass(frozen=True)
class Run:
    """What the scores of any arm and item are computed from."""

    texts: Mapping[str, Text]  # item -> what is to be said
    normalisers: Normalisers
    options: TtsGates
    twins: Mapping[str, Twins]  # of served passes; all other arms are held against the judge

    @cached_property
    def _bleeds(self) -> speech.BleedIndex:
        return speech.BleedIndex({key: text.pinned for key, text in self.texts.items()}, self.options.bleed)

    def scores(self, arm: str, item: str, rows: Answers, waveforms: Mapping[str, Score]) -> Scores:
        """Scores of an arm's answer to an item; if it is lost, the worst case in all that it should have.

        Args:
            rows: arm -> what was judged of its answer to this item.
            waveforms: arm -> how far its samples are from the judge's.
        """
        row, text = rows.get(arm), self.texts[item]
        heard = self._heard(row)
        found = item_scores(row, text, heard)
        if heard:
            bleed = self._bleeds.find(item, heard.pinned)
            found["bleed"] = _score(bleed.share if bleed else 0.0)
        twins = self.twins.get(arm, Twins() if arm == JUDGE else Twins(JUDGE, JUDGE))
        if row is None or not is_answered(found):
            return self._lost(arm, item, rows, twins) | found
        beside = self._beside(arm, text, found, rows, twins)
        return found | beside | ({"waveform_noise": waveforms[arm]} if arm in waveforms else {})

    def _heard(self, row: Row | None) -> Text | None:
        """What was heard in an answer; None where nobody listened."""
        return self.normalisers(row["text"]) if row and row["text"] is not None else None

    def _beside(self, arm: str, text: Text, scores: Scores, rows: Answers, twins: Twins) -> Scores:
        """What an answer has more than the same one whole, alone, or by the reference."""
        found = {}
        whole = rows.get(twins.whole) if twins.whole else None
        if whole and whole["samples"] is not None:
            found["stream_samples"] = stream_score(rows[arm], whole)
        alone = self._heard(rows.get(twins.alone)) if twins.alone else None
        if alone and "wer_errors" in scores:
            found["load_errors"] = load_score(scores["wer_errors"], heard_scores(text, alone)["wer_errors"])
        voice, own = _voice(rows), rows[arm]["speaker_embedding"]
        if voice and own is not None and arm != JUDGE:
            found["speaker_similarity"] = speaker_score(voice, own)
        return found

    def _lost(self, arm: str, item: str, rows: Answers, twins: Twins) -> Scores:
        """The worst case in all that the reference has of an item."""
        judge = rows.get(JUDGE)
        wanted = item_scores(judge, self.texts[item], self._heard(judge)) if judge else {}
        names = [*wanted, *(["load_errors"] if twins.alone else [])]
        names += ["waveform_noise"] if self.options.deterministic and arm != JUDGE else []
        names += ["speaker_similarity"] if _voice(rows) and arm != JUDGE else []
        aux = {"words": float(len(self.texts[item].pinned.split()))}
        worst = {name: Score(np.inf, wanted[name].aux if name in wanted else aux) for name in names}
        if twins.whole:
            samples = rows.get(twins.whole, {}).get("samples")
            worst["stream_samples"] = _score(np.inf, whole=np.nan if samples is None else samples)
        return {"wer_errors": Score(np.inf, aux)} | worst


def _voice(rows: Answers) -> Sequence[float] | None:
    """The embedding of the reference's voice; empty or None where there is none."""
    return rows[JUDGE]["speaker_embedding"] if JUDGE in rows else None


def is_answered(scores: Scores) -> bool:
    """Whether there was an answer that could be decoded."""
    return scores["answered"].value == 1


def rows_of(scores: Mapping[str, Scores]) -> list[Rows]:
    """Scores as columns, metric by metric."""
    table = {name: Rows(name, *kind) for name, kind in METRICS.items()}
    for item, found in scores.items():
        for name, one in found.items():
            table[name].item_ids.append(item)
            table[name].values.append(one.value)
            table[name].aux.append(dict(one.aux))
    return [rows for rows in table.values() if rows.item_ids]


def twins_of(plan: Mapping[str, Any]) -> dict[str, Twins]:
    """Twins of every served pass: the first whole pass of its instance; the first one, if that had fewer requests."""
    found = {}
    for number, passes in enumerate(plan["instances"]):
        first = passes[0]
        whole = next((it for it in passes if not _streams(it, plan)), None)
        for item in passes:
            streamed = whole is not None and _streams(item, plan)
            loaded = item["concurrency"] > first["concurrency"]
            found[served_arm(number, item["name"])] = Twins(
                served_arm(number, whole["name"]) if whole and streamed else None,
                served_arm(number, first["name"]) if loaded else None,
            )
    return found


def _streams(item: Mapping[str, Any], plan: Mapping[str, Any]) -> bool:
    return bool(item.get("stream", plan["client"].get("stream")))


def _transcripts(paths: Iterable[Path]) -> Iterator[tuple[str, Answers]]:
    """Each item with what was judged of every arm's answer."""
    for item, rows in store.rows_by_item(paths, "transcripts", COLUMNS, ROWS):
        yield item, {row["arm"]: row for row in rows}


# --- both audios again -------------------------------------------------------------------------------------------


def waveform_scores(served: Files, references: Files, pcm: Pcm | None) -> Iterator[tuple[str, Mapping[str, Score]]]:
    """Each item with how far the samples of every arm are from the judge's; reads the answers of one item at a time.

    Planted faults are planted anew, where their gate is the one of waveforms. What cannot be decoded is left out.
    """
    columns = ["item_id", "arm", "status", "error", "audio", "chunk_bytes"]
    paths = [*served.responses, *references.responses]
    for item, rows in store.rows_by_item(paths, "responses", columns, BATCH):
        bodies = {row["arm"]: body for row in rows if (body := body_of(row))}
        judge = _decoded(bodies.pop(JUDGE, None), pcm)
        if judge is None:
            continue
        take = Take(item, judge.samples, judge.rate, ())
        planted = {f"control_{it.name}": it.plant(take, None) for it in CONTROLS if "G-waveform" in it.gates}
        decoded = {arm: audio for arm, body in (bodies | planted).items() if (audio := _decoded(body, pcm))}
        yield item, {arm: waveform_score(judge.samples, audio.samples, judge.rate) for arm, audio in decoded.items()}


def _decoded(body: Body | None, pcm: Pcm | None) -> Audio | None:
    try:
        return decode_named(body.content, body.name, pcm) if body else None
    except MediaError:
        return None


# --- one audio ---------------------------------------------------------------------------------------------------


def item_scores(transcript: Row | None, asked: Text, heard: Text | None) -> Scores:
    """Scores of one answer by itself; what was not decoded, or not listened to, has none of the respective ones."""
    if transcript is None:
        return {"answered": _score(0)}
    if transcript["samples"] is None:
        unread = {"decoded": _score(0), "headers": _headers(transcript)} if transcript["fault"] else {}
        return {"answered": _score(0)} | unread
    found = {"answered": _score(1), "decoded": _score(1), "headers": _headers(transcript)}
    found |= {name: _score(transcript[name]) for name in FACTS}
    level = transcript["level_dbfs"]
    found["level_dbfs"] = _score(SILENT_DBFS if level is None else level)
    if heard:
        found |= heard_scores(asked, heard)
    if transcript["seams"]:
        ranks = np.array(transcript["seam_ranks"])
        found["seam_clicks"] = _score((ranks <= SEAM_RANK).sum(), seams=len(ranks))
        found["seam_repeat"] = _score(max(transcript["seam_repeats"]))
    return found


def _headers(transcript: Row) -> Score:
    return _score(transcript["headers"], wanted=float(transcript["format"] != "pcm"))


def heard_scores(asked: Text, heard: Text) -> Scores:
    """Word errors by both normalisers, words missing at the ends, and the worst stretch."""
    alignment = speech.align_words(asked.pinned, heard.pinned)
    head, tail = (count(asked.pinned, heard.pinned) for count in (speech.head_deletions, speech.tail_deletions))
    edits = alignment.edits
    found = {
        "wer_errors": _errors(edits),
        "wer_errors_other": _errors(speech.align_words(asked.basic, heard.basic).edits),
        "end_deletions": _score(min(head + tail, edits.words), head=head, tail=tail),
    }
    if edits.words > speech.WINDOW_WORDS:
        found["window_wer"] = _score(speech.windowed_rate(alignment).max())
    return found


def _errors(edits: speech.Edits) -> Score:
    counts = {"sub": edits.substitutions, "del": edits.deletions, "ins": edits.insertions}
    return _score(edits.errors, words=edits.words, **counts)


def _score(value: float | None, **aux: float) -> Score:
    return Score(np.nan if value is None else float(value), aux)


# --- one audio and another ---------------------------------------------------------------------------------------


def stream_score(streamed: Row, whole: Row) -> Score:
    """Samples that the streamed answer has more than the same one unstreamed."""
    return _score(streamed["samples"] - whole["samples"], whole=whole["samples"])


def load_score(loaded: Score, alone: Score) -> Score:
    """Word errors that an answer under load has more than the same one alone."""
    return _score(loaded.value - alone.value, words=loaded.aux["words"])


def speaker_score(reference: Sequence[float], served: Sequence[float]) -> Score:
    """How like the reference's voice that of an answer is; the worst case where nobody speaks."""
    return _score(sound.speaker_similarity(reference, served) if served else np.inf)


def waveform_score(reference: sound.Samples, served: sound.Samples, rate: int) -> Score:
    """Level of what is left when the reference's samples are taken from the served ones, after the lag."""
    if len(reference) != len(served):
        return _score(np.inf)
    if np.array_equal(reference, served):
        return EQUAL
    found = sound.difference(reference, served, rate)
    more = served.shape[-1] - reference.shape[-1]
    aux = {"lag": found.lag_samples, "more": more, "snr_db": found.snr_db, "lsd_db": found.lsd_db}
    if found.si_sdr_db is not None:
        aux["si_sdr_db"] = found.si_sdr_db
    return _score(max(SILENT_DBFS, -found.psnr_db), **aux)


EQUAL = Score(SILENT_DBFS, {"lag": 0.0, "more": 0.0})
