"""Speech on a page: the served and the reference's audio side by side, and what is heard in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.errors import MediaError
from assay.media.audio import Pcm, decode_named
from assay.media.served import body_of, raw_samples
from assay.metrics.speech import Aligned, align_words, normaliser
from assay.records import JUDGE
from assay.report.items import About, Case, Item, Listing, Modality, Pass, Standing, worst_first, worst_of
from assay.report.sound import Player, Room, player
from assay.run import Row, response_rows, transcript_rows
from assay.verdicts.scoretable import Mask
from assay.verdicts.tts.contract import bled, breaches, extra_headers
from assay.verdicts.tts.hits import CATASTROPHE, DAMAGE, ENDS, WAVEFORM, WINDOW, error_rates
from assay.verdicts.tts.trial import SpeechTrial

HITS = (DAMAGE, CATASTROPHE, ENDS, WINDOW)
MEASURES = {  # column of the transcripts -> what it is, with the unit
    "duration_s": "length (s)",
    "lead_s": "silence at the start (s)",
    "trail_s": "silence at the end (s)",
    "level_dbfs": "level (dBFS)",
    "peak": "peak (full scale 1)",
    "bandwidth_hz": "bandwidth (Hz)",
    "clicks": "clicks",
    "gaps": "gaps",
    "repeat": "likeness to itself, later",
    "headers": "file headers",
}


@dataclass(frozen=True)
class Take:
    """One audio of an item, and what was heard in it."""

    name: str
    audio: Player | None
    fault: str | None  # why there is none
    text: str | None  # as heard; None: nobody listened
    places: tuple[Aligned, ...]
    errors: int
    words: int  # asked for
    measures: Mapping[str, Any]  # columns of the transcripts


@dataclass(frozen=True)
class TtsView:
    """What is shown of one item."""

    asked: str
    takes: tuple[Take, ...]  # served, then the reference's
    measures: Mapping[str, str]  # column of a take's measures -> what it is


def tts_items(case: Case) -> Listing:
    """Every planned item with the audio of its worst pass beside the reference's."""
    planned = {row["item_id"]: row for row in case.run.items(case.plan)}
    passes = _passes(case)
    shown = {key: worst_of(found).arm for key, found in passes.items()}
    judge = dict.fromkeys(planned, JUDGE)
    served = response_rows(case.outputs, shown), transcript_rows([case.run.judged], shown)
    reference = (
        response_rows(case.run.reference(case.plan), judge),
        transcript_rows(case.run.judged_reference(case.plan), judge),
    )
    options: Any = case.verdict.options
    words, room, pcm = normaliser(options.normaliser).call, Room(), raw_samples(case.plan)

    def takes(key: str) -> tuple[Take, ...]:
        asked = words(planned[key]["expected"])
        return tuple(
            _take(name, responses.get(key), transcripts.get(key), asked, words, pcm, room)
            for name, (responses, transcripts) in (("served", served), ("reference", reference))
        )

    items = [
        Item(
            item_id=key,
            kind=str(planned[key]["tags"][0]) if planned[key]["tags"] else str(planned[key]["kind"]),
            tags=tuple(planned[key]["tags"]),
            passes=tuple(passes[key]),
            summary=planned[key]["expected"],
            view=TtsView(planned[key]["expected"], takes(key), MEASURES),
        )
        for key in worst_first(passes)
    ]
    return Listing(items, room.refused)


def _take(
    name: str,
    response: Row | None,
    transcript: Row | None,
    asked: str,
    words: Callable[[str], str],
    pcm: Pcm | None,
    room: Room,
) -> Take:
    heard = transcript["text"] if transcript else None
    alignment = align_words(asked, words(heard or ""))
    audio, fault = _audio(response, transcript, pcm, room)
    return Take(
        name=name,
        audio=audio,
        fault=fault,
        text=heard,
        places=alignment.places,
        errors=alignment.edits.errors,
        words=alignment.edits.words,
        measures=transcript or {},
    )


def _audio(
    response: Row | None, transcript: Row | None, pcm: Pcm | None, room: Room
) -> tuple[Player | None, str | None]:
    """The player of a response, or why there is none."""
    body = body_of(response) if response else None
    if response is None or body is None:
        return None, (response or {}).get("error") or "no audio was recorded"
    try:
        audio = decode_named(body.content, body.name, pcm)
    except MediaError as error:
        return None, str(error)
    return player(audio, room, (transcript or {}).get("seams") or ()), None


# --- how each answer stands --------------------------------------------------------------------------------------


def _passes(case: Case) -> dict[str, list[Pass]]:
    """Item -> its passes, in the order of the plan. The score is the word error rate."""
    found: dict[str, list[Pass]] = {key: [] for key in case.table.items}
    reasons = case.why_unscored()
    for arm, trial in case.trials.items():
        failed, broken, rates = trial.failed(arm), _faults(trial), error_rates(trial, arm)
        ours = np.stack([error_rates(trial, name) for name in trial.references(arm)])
        inside = (rates <= np.fmax.reduce(ours)) & (rates >= np.fmin.reduce(ours))
        for k, key in enumerate(case.table.items):
            notes = tuple(what for what, mask in broken.items() if mask[k])
            if failed[k]:
                reason = reasons.get((arm, key), "not recorded")
                found[key].append(Pass(arm, Standing.UNANSWERED, None, (reason,)))
                continue
            standing = Standing.WRONG if notes else Standing.SAME if inside[k] else Standing.CLOSE
            if np.isnan(rates[k]) and not notes:
                standing = Standing.UNJUDGED
            found[key].append(Pass(arm, standing, None if np.isnan(rates[k]) else float(rates[k]), notes))
    return found


def _faults(trial: SpeechTrial) -> dict[str, Mask]:
    """Everything that a gate counts against an item -> the items."""
    faults = {**breaches(trial), **extra_headers(trial), **bled(trial)}
    for spec in (*HITS, *([WAVEFORM] if trial.options.deterministic else [])):
        if trial.asked(trial.arm, spec.metric):
            hits = spec.hits(trial, trial.arm)
            faults |= {kind: mask & hits.eligible for kind, mask in hits.kinds.items()}
    return faults


# --- in plain words ----------------------------------------------------------------------------------------------

GATES = {
    "G-contract": About(
        "Audio is what was promised",
        "Is every answer whole audio of the model's own rate and channels, inside full scale?",
    ),
    "G-header": About(
        "One file, one header",
        "Does every answer have one file header and no other in its middle, where it plays as noise?",
    ),
    "G-damage": About(
        "No audio is damaged",
        "Is any audio silent, cut, clipped, clicking, looping, too loud or too long, where the reference's is not?",
        "length of an item (s)",
    ),
    "G-duration": About(
        "Speech is as long as it should be",
        "Over all items, is speech longer or shorter than the reference's by more than matters?",
        "length of an item (s)",
    ),
    "G-speaker": About(
        "The voice is the right one",
        "Over all items, is the voice less like the reference's than its own is from take to take?",
        "likeness of an item's voice to the reference's",
    ),
    "G-wer": About(
        "Words are understood",
        "Over all items, does a recogniser mishear more words than in the reference's speech, by more than matters?",
        "misheard words of an item",
    ),
    "G-catastrophe": About(
        "No item is lost",
        "Is there any item of which most words are lost, and are not in the reference's speech?",
        "misheard words of an item",
    ),
    "G-ends": About(
        "Nothing is cut off",
        "Are first or last words missing that every reference says?",
        "words missing at the ends of an item",
    ),
    "G-window": About(
        "No stretch is garbled",
        "In longer texts, is there a run of twenty words of which most are wrong?",
        "word error rate of an item's worst run of twenty words",
        draws_limit=True,
    ),
    "G-bleed": About(
        "Nobody else's words",
        "Is another item's text heard in an answer, as when requests get mixed up under load?",
    ),
    "G-load": About(
        "Load changes nothing",
        "Are more words misheard under load than when requests come one at a time?",
        "misheard words of an item under load, beyond those alone",
    ),
    "G-stream": About(
        "A stream is as long as the whole",
        "Does a streamed answer have as much audio as the same one sent at once?",
        "samples more than in the same answer at once",
    ),
    "G-seams": About(
        "Chunks join without clicks",
        "Do places where chunks of a stream join click more than others, or repeat what went before?",
        "clicking seams of an item",
    ),
    "G-waveform": About(
        "Samples are the reference's",
        "If the model says the same each time: are the samples the reference's, but for rounding?",
        "level of the difference to the reference's samples (dBFS)",
        draws_limit=True,
    ),
}

WORDS = {
    "reference": "the model's own package, run directly on the same texts, and its repeats.",
    "word error rate": "words missed, replaced and added in what a recogniser (Whisper) hears, over those asked for. "
    "Both are first brought to one spelling. The recogniser errs too, on the reference's speech as well.",
    "seam": "a place where two chunks of a streamed answer join.",
}

MODALITY = Modality(GATES, WORDS, "word error rate", "tts.html", tts_items)
