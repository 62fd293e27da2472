"""Scores of speech: what was heard in each audio against what was asked, against the reference, and against its twin.

Everything is computed from the judge's `transcripts` but the waveform layer, which needs both audios again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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

Row = dict[str, Any]
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
    planned = {row["item_id"]: row for path in items_paths for row in load_set(path)}
    plan = store.run_options(served.responses)
    inputs = [*items_paths, *served.paths, *references.paths]
    effective = {"run": plan, "scoring": dict(options), "normalisers": normalisers.identity}
    origin = provenance("score", inputs, effective)
    run = Run(
        texts={key: normalisers(row["expected"]) for key, row in planned.items()},
        transcripts=_transcripts([*served.judged, *references.judged]),
        normalisers=normalisers,
        options=chosen,
        waveforms=waveform_scores(served, references, raw_samples(plan)) if chosen.deterministic else {},
        twins=twins_of(plan),
    )
    sets = {key: row["set_id"] for key, row in planned.items()}
    with store.table_writer(floor_path, "floor", origin), store.table_writer(scores_path, "scores", origin) as writer:
        for arm in arms_of(plan, served, references, CONTROLS):
            log.info("scoring %s", arm.label)
            writer.write(score_table(plan["config"], arm.label, sets, rows_of(run.scores(arm.label))))


@dataclass(frozen=True)
class Twins:
    """Arms that give the same answers another way: whole instead of streamed, alone instead of under load."""

    whole: str | None = None
    alone: str | None = None


@dataclass(frozen=True)
class Run:
    """What the scores of any arm are computed from; `transcripts`: arm -> item -> its row."""

    texts: Mapping[str, Text]
    transcripts: Mapping[str, Mapping[str, Row]]
    normalisers: Normalisers
    options: TtsGates
    waveforms: Mapping[tuple[str, str], Score]  # (arm, item)
    twins: Mapping[str, Twins]  # of served passes; all other arms are held against the judge

    def scores(self, arm: str) -> dict[str, Scores]:
        """Item -> scores of an arm; an item that is lost has the worst case in all that it should have."""
        rows = self.transcripts[arm]
        found = {key: item_scores(rows.get(key), text, self.normalisers) for key, text in self.texts.items()}
        for item, bleed in self._bleeds(rows).items():
            found[item]["bleed"] = bleed
        twins = self.twins.get(arm, Twins() if arm == JUDGE else Twins(JUDGE, JUDGE))
        for item, scores in found.items():
            if is_answered(scores):
                scores |= self._beside(arm, item, scores, twins)
            else:
                found[item] = self._lost(arm, item, twins) | scores
        return found

    def _bleeds(self, rows: Mapping[str, Row]) -> Scores:
        heard = {key: self.normalisers(row["text"]).pinned for key, row in rows.items() if row["text"] is not None}
        return bleed_scores(heard, {key: text.pinned for key, text in self.texts.items()}, self.options.bleed)

    def _beside(self, arm: str, item: str, scores: Scores, twins: Twins) -> Scores:
        """What an answer has more than the same one whole, alone, or by the reference."""
        found = {}
        whole = self.transcripts[twins.whole].get(item) if twins.whole else None
        if whole and whole["samples"] is not None:
            found["stream_samples"] = stream_score(self.transcripts[arm][item], whole)
        alone = self.transcripts[twins.alone].get(item) if twins.alone else None
        if alone and alone["text"] is not None and "wer_errors" in scores:
            found["load_errors"] = load_score(
                scores["wer_errors"], heard_scores(self.texts[item], self.normalisers(alone["text"]))["wer_errors"]
            )
        voice, own = self._voice(item), self.transcripts[arm][item]["speaker_embedding"]
        if voice and own is not None and arm != JUDGE:
            found["speaker_similarity"] = speaker_score(voice, own)
        if (arm, item) in self.waveforms:
            found["waveform_noise"] = self.waveforms[arm, item]
        return found

    def _voice(self, item: str) -> Sequence[float] | None:
        """The embedding of the reference's voice; empty or None where there is none."""
        row = self.transcripts[JUDGE].get(item)
        return row["speaker_embedding"] if row else None

    def _lost(self, arm: str, item: str, twins: Twins) -> Scores:
        """The worst case in all that the reference has of an item."""
        row = self.transcripts[JUDGE].get(item)
        wanted = item_scores(row, self.texts[item], self.normalisers) if row else {}
        names = [*wanted, *(["stream_samples"] if twins.whole else []), *(["load_errors"] if twins.alone else [])]
        names += ["waveform_noise"] if self.options.deterministic and arm != JUDGE else []
        names += ["speaker_similarity"] if self._voice(item) and arm != JUDGE else []
        aux = {"words": float(len(self.texts[item].pinned.split()))}
        worst = {name: Score(np.inf, wanted[name].aux if name in wanted else aux) for name in names}
        return {"wer_errors": Score(np.inf, aux)} | worst


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


def _transcripts(paths: Iterable[Path]) -> dict[str, dict[str, Row]]:
    """Arm -> item -> its row; of an arm without rows no item."""
    found: dict[str, dict[str, Row]] = defaultdict(dict)
    for path in paths:
        for row in store.read_rows(path, "transcripts"):
            found[row["arm"]][row["item_id"]] = row
    return found


# --- both audios again -------------------------------------------------------------------------------------------


def waveform_scores(served: Files, references: Files, pcm: Pcm | None) -> dict[tuple[str, str], Score]:
    """(arm, item) -> how far the samples are from the judge's. Reads all answers of one item at a time.

    Planted faults are planted anew, where their gate is the one of waveforms. What cannot be decoded is left out.
    """
    columns = ["item_id", "arm", "status", "error", "audio", "chunk_bytes"]
    paths = [*served.responses, *references.responses]
    found = {}
    for item, rows in store.rows_by_item(paths, "responses", columns, BATCH):
        bodies = {row["arm"]: body for row in rows if (body := body_of(row))}
        judge = _decoded(bodies.pop(JUDGE, None), pcm)
        if judge is None:
            continue
        take = Take(item, judge.samples, judge.rate, ())
        planted = {f"control_{it.name}": it.plant(take, None) for it in CONTROLS if "G-waveform" in it.gates}
        for arm, body in (bodies | planted).items():
            audio = _decoded(body, pcm)
            if audio is not None:
                found[arm, item] = waveform_score(judge.samples, audio.samples, judge.rate)
    return found


def _decoded(body: Body | None, pcm: Pcm | None) -> Audio | None:
    try:
        return decode_named(body.content, body.name, pcm) if body else None
    except MediaError:
        return None


# --- one audio ---------------------------------------------------------------------------------------------------


def item_scores(transcript: Row | None, asked: Text, normalisers: Normalisers) -> Scores:
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
    if transcript["text"] is not None:
        found |= heard_scores(asked, normalisers(transcript["text"]))
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


def bleed_scores(heard: Mapping[str, str], texts: Mapping[str, str], least: float) -> Scores:
    """Item -> share of another item's text that was heard in it, where it is at least `least`; else 0.

    Args:
        heard, texts: item -> what was heard, and what was asked; both normalised.
    """
    found = {bleed.item: bleed.share for bleed in speech.bleeds(heard, texts, least)}
    return {item: _score(found.get(item, 0.0)) for item in heard}
