"""Judging speech: every audio that was served, decoded, measured, and transcribed by the pinned Whisper.

The table holds what was found in each audio by itself. Comparing with what was asked, or with the reference, is left to
the scores, so that a changed metric never needs the model again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from assay import store
from assay.errors import MediaError
from assay.media.audio import Audio, Pcm, chunk_starts, count_headers, decode_named
from assay.media.served import Body, body_of, raw_samples
from assay.metrics import audio as metrics
from assay.progress import progress
from assay.provenance import provenance
from assay.records import JUDGE
from assay.references.arms import arm_settings
from assay.references.whisper import Whisper, listenable
from assay.sources.manifest import MANIFEST, verify_weights
from assay.verdicts.tts.planted import CONTROLS, SpeechControl, Take, Word

ITEMS_PER_ROW_GROUP = 64
BATCH = 16  # responses read at a time, audio and all
COLUMNS = ["item_id", "set_id", "arm", "status", "error", "audio", "chunk_bytes"]
LANGUAGE = "en"  # of the texts

Row = dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """What a recogniser heard in one audio."""

    text: str
    words: tuple[Word, ...] = ()
    no_speech_prob: float | None = None  # of the window where it is highest


Listen = Callable[[metrics.Samples, int], Heard]  # samples [channels, samples], rate [Hz]


@dataclass
class Listener:
    """Measures audio and listens to it, each distinct one once: a deterministic model is heard once for all passes."""

    hear: Listen
    pcm: Pcm | None = None  # what raw samples are
    _measured: dict[str, Row] = field(default_factory=dict)
    _heard: dict[str, Row] = field(default_factory=dict)

    def decode(self, body: Body) -> Audio:
        """The samples of a body; raises `MediaError`."""
        return decode_named(body.content, body.name, self.pcm)

    def examine(self, body: Body, listen: bool = True) -> Row:
        """Columns of a `transcripts` row that tell of a body; bytes that cannot be decoded give the reason."""
        found: Row = {"format": Path(body.name).suffix.lstrip("."), "headers": count_headers(body.content)}
        try:
            audio = self.decode(body)
        except MediaError as error:
            return found | {"fault": error.fault, "error": str(error)}
        digest = pcm_digest(audio)
        if digest not in self._measured:
            self._measured[digest] = _measured(audio)
        found |= _declared(audio) | {"pcm_sha256": digest} | self._measured[digest]
        if listen:
            if digest not in self._heard:
                self._heard[digest] = self._listen(audio) if found["has_speech"] else _NOTHING
            found |= self._heard[digest]
        return found | _seams(body, audio)

    def _listen(self, audio: Audio) -> Row:
        heard = self.hear(audio.samples, audio.rate)
        words = [{"text": word.text, "start": word.start_s, "end": word.end_s} for word in heard.words]
        return {"text": heard.text, "words": words, "no_speech_prob": heard.no_speech_prob}


_NOTHING: Row = {"text": "", "words": []}


def pcm_digest(audio: Audio) -> str:
    """SHA-256 of the samples with their rate and number of channels: two files with the same one sound the same."""
    digest = hashlib.sha256(f"{audio.rate} {len(audio.samples)}\n".encode())
    digest.update(audio.samples.tobytes())
    return digest.hexdigest()


def _declared(audio: Audio) -> Row:
    return {
        "container": audio.container,
        "codec": audio.codec,
        "rate": audio.rate,
        "channels": len(audio.samples),
        "samples": audio.samples.shape[-1],
        "samples_declared": audio.header.frames,
        "byte_rate_agrees": audio.header.byte_rate_agrees,
        "duration_s": audio.duration_s,
    }


def _measured(audio: Audio) -> Row:
    found = metrics.profile(audio.samples, audio.rate)
    return {
        "level_dbfs": found.ac_rms_dbfs if np.isfinite(found.ac_rms_dbfs) else None,
        "peak": found.peak,
        "dc": found.dc,
        "clip_fraction": found.clip_fraction,
        "silence_fraction": found.silence_fraction,
        "lead_s": found.lead_s,
        "trail_s": found.trail_s,
        "sound_s": found.sound_s,
        "bandwidth_hz": found.bandwidth_hz,
        "centroid_hz": found.centroid_hz,
        "flatness": found.flatness,
        "repeat": found.repeat.correlation,
        "repeat_lag_s": found.repeat.lag_s,
        "gaps": found.gaps,
        "clicks": found.clicks,
        "has_speech": metrics.has_speech(audio.samples, audio.rate),
    }


def _seams(body: Body, audio: Audio) -> Row:
    seams = chunk_starts(body.content, audio, body.chunk_bytes) if body.chunk_bytes else None
    if seams is None:
        return {}
    score = metrics.click_score(audio.samples, audio.rate)
    return {
        "seams": seams,
        "seam_ranks": metrics.seam_ranks(score, audio.rate, seams).tolist() if seams else [],
        "seam_repeats": [metrics.repeat_at(audio.samples, audio.rate, seam).correlation for seam in seams],
    }


# --- the stage ---------------------------------------------------------------------------------------------------


def judge(
    model_dir: Path, dtype: str, items_paths: list[Path], responses_path: Path, output: Path, gpus: int = 0
) -> None:
    """Examine every audio of a `responses` table and write a `transcripts` table.

    Args:
        model_dir: Whisper in transformers layout, checked against its source's manifest.
        dtype: its precision.
        items_paths: `items` tables of the sample sets the responses answer.
        responses_path: `responses` table of a server instance or of a reference arm.
        output: Parquet file to write.
        gpus: devices that this process sees, leased for it; 0: it computes on the CPU.
    """
    options = {"dtype": dtype, "language": LANGUAGE, "weights_sha256": verify_weights(model_dir)}
    whisper = Whisper(model_dir, arm_settings(JUDGE, dtype), gpus)
    timed = responses_path.stem == JUDGE  # faults are planted by the times of words, which cost half as much again

    def hear(samples: metrics.Samples, rate: int) -> Heard:
        found = whisper.transcribe(listenable(samples, rate), LANGUAGE, with_words=timed)
        words = tuple(Word(word.text.strip(), word.start_s, word.end_s) for word in found.words or ())
        return Heard(found.text, words, max(found.no_speech, default=None))

    listener = Listener(hear, raw_samples(store.read_provenance(responses_path)["options"]))
    origin = provenance("judge", [model_dir / MANIFEST, *items_paths, responses_path], options)
    total = store.read_table(responses_path, "responses", ["item_id"]).num_rows
    with (
        store.table_writer(output, "transcripts", origin) as writer,
        progress("answers heard", total) as advance,
    ):

        def responses() -> Iterator[Row]:
            for row in store.iter_rows(responses_path, "responses", COLUMNS, BATCH):
                yield row
                advance()

        by_item = (list(rows) for _, rows in groupby(judge_rows(responses(), listener), itemgetter("item_id")))
        while items := list(islice(by_item, ITEMS_PER_ROW_GROUP)):
            writer.write(store.table_from_rows("transcripts", chain.from_iterable(items)))


# --- a table of responses ----------------------------------------------------------------------------------------


def judge_rows(responses: Iterator[Row], listener: Listener) -> Iterator[Row]:
    """Rows of a `transcripts` table: one a response, and after each of the judge's own one for every planted fault.

    Args:
        responses: rows of a `responses` table, sorted by item.
    """
    before: Take | None = None
    for response in responses:
        key = {name: response[name] for name in ("item_id", "set_id", "arm")}
        body = body_of(response)
        row = key | (_unanswered(response) if body is None else listener.examine(body))
        yield row
        if response["arm"] == JUDGE and body is not None and row.get("fault") is None:
            take = take_of(response["item_id"], listener.decode(body), row["words"])
            yield from (key | {"arm": f"control_{it.name}"} | _planted(it, take, before, listener) for it in CONTROLS)
            before = take


def take_of(item_id: str, audio: Audio, words: list[Row]) -> Take:
    """The reference's own speech, to plant faults in."""
    return Take(
        item_id, audio.samples, audio.rate, tuple(Word(word["text"], word["start"], word["end"]) for word in words)
    )


def _unanswered(response: Mapping[str, Any]) -> Row:
    return {"error": f"{response['status']}: {response['error'] or 'no audio came'}"}


def _planted(control: SpeechControl, take: Take, before: Take | None, listener: Listener) -> Row:
    body = control.plant(take, before)
    return {"error": "planted: no answer"} if body is None else listener.examine(body, control.listen)
