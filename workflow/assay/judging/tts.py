"""Judging speech: every audio that was served, decoded, measured, and transcribed by the pinned Whisper.

The table holds what was found in each audio by itself. Comparing with what was asked, or with the reference, is left to
the scores, so that a changed metric never needs the model again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from assay import store
from assay.errors import MediaError
from assay.judging.rows import BATCH, write_by_item
from assay.media.audio import Audio, Pcm, chunk_starts, count_headers, decode_named
from assay.media.served import Body, body_of, raw_samples
from assay.metrics import audio as metrics
from assay.progress import progress
from assay.provenance import provenance
from assay.records import JUDGE
from assay.references.arms import arm_settings
from assay.references.speaker import Embedding, SpeakerEncoder
from assay.references.whisper import Whisper, listenable
from assay.sources.manifest import MANIFEST, verify_weights
from assay.verdicts.tts.planted import CONTROLS, SpeechControl, Take, Word

COLUMNS = ["item_id", "set_id", "arm", "status", "error", "audio", "chunk_bytes"]
LANGUAGE = "en"  # of the texts
REMEMBERED = 512  # audios: those of some twenty items, with all arms and planted faults

Row = dict[str, Any]
T = TypeVar("T")


class Recent(dict[str, T]):
    """What was found in the audios that came last, by their digest: equal ones are near, and a set has any length."""

    def __setitem__(self, digest: str, found: T) -> None:
        super().__setitem__(digest, found)
        if len(self) > REMEMBERED:
            del self[next(iter(self))]


@dataclass(frozen=True)
class Heard:
    """What a recogniser heard in one audio."""

    text: str
    words: tuple[Word, ...] | None = None  # where their times were asked for
    no_speech_prob: float | None = None  # of the window where it is highest


Listen = Callable[[metrics.Samples, int, bool], Heard]  # samples [channels, samples], rate [Hz], times of words asked
Embed = Callable[[metrics.Samples, int], Embedding | None]  # samples, rate -> whose voice it is


@dataclass
class Listener:
    """Measures audio and listens to it, equal ones once: a deterministic model is heard once for all arms."""

    hear: Listen
    pcm: Pcm | None = None  # what raw samples are
    embed: Embed | None = None  # None: nothing here tells speakers apart
    _measured: Recent[Row] = field(default_factory=Recent)
    _heard: Recent[Heard] = field(default_factory=Recent)
    _embedded: Recent[list[float]] = field(default_factory=Recent)

    def decode(self, body: Body) -> Audio:
        """The samples of a body; raises `MediaError`."""
        return decode_named(body.content, body.name, self.pcm)

    def examine(self, body: Body, listen: bool = True, timed: bool = False, speaker: bool = True) -> Row:
        """Columns of a `transcripts` row that tell of a body; bytes that cannot be decoded give the reason.

        Args:
            body: bytes of an audio file.
            listen: whether what is said matters.
            timed: whether the times of the words do.
            speaker: whether it matters whose voice it is.
        """
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
            found |= self._listen(digest, audio, timed) if found["has_speech"] else {"text": "", "words": []}
        if speaker and self.embed:
            found["speaker_embedding"] = self._speaker(digest, audio, self.embed) if found["has_speech"] else []
        return found | _seams(body, audio)

    def _listen(self, digest: str, audio: Audio, timed: bool) -> Row:
        heard = self._heard.get(digest)
        if heard is None or (timed and heard.words is None):
            heard = self._heard[digest] = self.hear(audio.samples, audio.rate, timed)
        words = (heard.words or ()) if timed else ()
        return {
            "text": heard.text,
            "words": [{"text": word.text, "start": word.start_s, "end": word.end_s} for word in words],
            "no_speech_prob": heard.no_speech_prob,
        }

    def _speaker(self, digest: str, audio: Audio, embed: Embed) -> list[float]:
        if digest not in self._embedded:
            embedding = embed(audio.samples, audio.rate)
            self._embedded[digest] = [] if embedding is None else embedding.tolist()
        return self._embedded[digest]


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
    model_dir: Path,
    options: Mapping[str, Any],
    items_paths: list[Path],
    responses_paths: list[Path],
    output: Path,
    gpus: int = 0,
) -> None:
    """Examine every audio of some `responses` tables, equal ones once, and write a `transcripts` table.

    Args: as of `assay.judge.judge`; `model_dir` holds Whisper in transformers layout, `options` says its `dtype`, and
        in `speaker_encoder` which folder beside it holds the network that tells speakers apart, if there is one.
    """
    measured = {"dtype": options["dtype"], "language": LANGUAGE, "weights_sha256": verify_weights(model_dir)}
    models, embed = [model_dir], None
    if "speaker_encoder" in options:
        models.append(model_dir.with_name(options["speaker_encoder"]))
        measured["speaker_encoder_sha256"] = verify_weights(models[-1])
        embed = SpeakerEncoder(models[-1]).embed
    whisper = Whisper(model_dir, arm_settings(JUDGE, options), gpus)

    def hear(samples: metrics.Samples, rate: int, timed: bool) -> Heard:
        found = whisper.transcribe(listenable(samples, rate), LANGUAGE, with_words=timed)
        words = tuple(Word(word.text.strip(), word.start_s, word.end_s) for word in found.words or ())
        return Heard(found.text, words if timed else None, max(found.no_speech, default=None))

    listener = Listener(hear, raw_samples(store.read_provenance(responses_paths[0])["options"]), embed)
    origin = provenance("judge", [*(path / MANIFEST for path in models), *items_paths, *responses_paths], measured)
    total = sum(store.read_table(path, "responses", ["item_id"]).num_rows for path in responses_paths)
    with (
        store.table_writer(output, "transcripts", origin) as writer,
        progress("answers heard", total) as advance,
    ):

        def responses() -> Iterator[Row]:
            for row in store.merge_rows(responses_paths, "responses", COLUMNS, BATCH):
                yield row
                advance()

        judged = groupby(judge_rows(responses(), listener), itemgetter("item_id"))
        write_by_item(writer, "transcripts", (rows for _, rows in judged))


# --- a table of responses ----------------------------------------------------------------------------------------


def judge_rows(responses: Iterator[Row], listener: Listener) -> Iterator[Row]:
    """Rows of a `transcripts` table: one a response, and after each of the judge's own one for every planted fault.

    Args:
        responses: rows of `responses` tables, sorted by item. The times of words, by which faults are planted and which
            cost half as much again, are asked for in the judge's own answers alone.
    """
    before: Take | None = None
    for response in responses:
        key = {name: response[name] for name in ("item_id", "set_id", "arm")}
        own = response["arm"] == JUDGE
        body = body_of(response)
        row = key | (_unanswered(response) if body is None else listener.examine(body, timed=own))
        yield row
        if own and body is not None and row.get("fault") is None:
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
    if body is None:
        return {"error": "planted: no answer"}
    return listener.examine(body, control.listen, speaker="G-speaker" in control.gates)
