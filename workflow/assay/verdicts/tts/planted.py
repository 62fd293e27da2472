"""Faults planted in the reference's own speech in every run: a gate that lets one through is blind.

Each control damages audio as a faulty server would have, and names the gates that must fail on it. What comes out is
decoded, measured and, where the gates go by words, transcribed like any served audio.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from assay.media.audio import encode_wav, resample
from assay.media.served import Body
from assay.metrics.audio import rms
from assay.verdicts.planted import Control

Samples = npt.NDArray[np.float32]  # [channels, samples]

CHUNK_S = 0.5  # of a stream that is made up
LOST_S = 0.023  # what a chunk lacks at its edge: 555 samples at 24 kHz, as in vllm-omni pull request 4706
LONG_WORDS = 25  # from here on a stretch can be lost while the ends are there
_BEFORE_WORD_S = 0.08  # times of words are no better than that


@dataclass(frozen=True)
class Word:
    """A word and when it is heard [s]."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Take:
    """One item as the reference says it."""

    item_id: str
    samples: Samples
    rate: int  # Hz
    words: tuple[Word, ...]  # as heard


@dataclass(frozen=True)
class SpeechControl(Control):
    """One fault planted in speech: what it makes of an item, given the item before, if any.

    `listen`: its gates go by what is heard.
    """

    plant: Callable[[Take, Take | None], Body | None] = lambda take, before: None  # None: a request without an answer
    listen: bool = False


def unanswered(take: Take, before: Take | None) -> Body | None:
    """No answer to one item in eight by hash, and to the first."""
    return None if before is None or _hash(take) % 8 == 0 else _whole(take, take.samples)


def mislabelled(take: Take, before: Take | None) -> Body:
    """A header that declares two thirds of the rate: 24 kHz played as 16 kHz."""
    return Body(encode_wav(take.samples, take.rate * 2 // 3))


def header_each_chunk(take: Take, before: Take | None) -> Body:
    """Every chunk a file of its own (vllm-omni pull request 5451)."""
    files = [encode_wav(part, take.rate) for part in _chunks(take)]
    return Body(b"".join(files), tuple(len(file) for file in files))


def overdriven(take: Take, before: Take | None) -> Body:
    """Eight times as loud, and clipped."""
    return _whole(take, np.clip(8 * take.samples, -1, 1))


def said_twice(take: Take, before: Take | None) -> Body:
    """Two generations in a row (vllm-omni issue 2907)."""
    return _whole(take, np.concatenate([take.samples, take.samples], axis=1))


def another_speaker(take: Take, before: Take | None) -> Body:
    """Pitch and formants a third higher, and faster by as much, as a smaller speaker has them."""
    return _whole(take, resample(take.samples, take.rate, take.rate * 3 // 4))


def noise(take: Take, before: Take | None) -> Body:
    """White noise as long and as loud as the speech."""
    return _whole(take, _noise(take, take.samples))


def last_word_lost(take: Take, before: Take | None) -> Body:
    """Cut before the last word (vllm-omni issue 826); all but a tenth of a second if there is only one."""
    end = take.words[-1].start_s - _BEFORE_WORD_S if len(take.words) > 1 else 0.1
    return _whole(take, take.samples[:, : max(round(0.1 * take.rate), round(end * take.rate))])


def stretch_lost(take: Take, before: Take | None) -> Body:
    """The middle half of a long text drowned in noise; short ones as they are."""
    samples = take.samples.copy()
    if len(take.words) >= LONG_WORDS:
        n = samples.shape[-1]
        samples[:, n // 4 : n * 3 // 4] = _noise(take, samples[:, n // 4 : n * 3 // 4])
    return _whole(take, samples)


def edges_lost(take: Take, before: Take | None) -> Body:
    """A stream whose chunks each lack their end."""
    lost = round(LOST_S * take.rate)
    *streamed, last = _chunks(take)
    return _streamed(take, [*(part[:, :-lost] for part in streamed), last])


def another_item(take: Take, before: Take | None) -> Body:
    """The answer to the request before (sglang-omni issue 350)."""
    return _whole(take, take.samples) if before is None else Body(encode_wav(before.samples, before.rate))


def inverted(take: Take, before: Take | None) -> Body:
    """Polarity reversed: what no ear and no level tells."""
    return _whole(take, -take.samples)


def _whole(take: Take, samples: Samples) -> Body:
    return Body(encode_wav(samples, take.rate))


def _streamed(take: Take, chunks: Sequence[Samples]) -> Body:
    content = encode_wav(np.concatenate(chunks, axis=1), take.rate)
    sizes = [2 * part.size for part in chunks]
    return Body(content, (len(content) - sum(sizes), *sizes))


def _chunks(take: Take) -> list[Samples]:
    size = round(CHUNK_S * take.rate)
    count = max(1, take.samples.shape[-1] // size)  # the last one takes the rest, so that none is tiny
    return np.split(take.samples, [size * number for number in range(1, count)], axis=1)


def _noise(take: Take, like: Samples) -> Samples:
    drawn = np.random.default_rng(_hash(take)).standard_normal(like.shape)
    return (rms(like) * drawn).astype(np.float32)


def _hash(take: Take) -> int:
    return int(hashlib.sha256(take.item_id.encode()).hexdigest()[:16], 16)


CONTROLS = (
    SpeechControl("unanswered", ("G-coverage",), plant=unanswered),
    SpeechControl("mislabelled", ("G-contract",), plant=mislabelled),
    SpeechControl("header_each_chunk", ("G-header",), plant=header_each_chunk),
    SpeechControl("overdriven", ("G-damage",), plant=overdriven),
    SpeechControl("said_twice", ("G-duration",), plant=said_twice),
    SpeechControl("another_speaker", ("G-speaker",), plant=another_speaker),
    SpeechControl("noise", ("G-wer", "G-catastrophe", "G-load"), plant=noise, listen=True),
    SpeechControl("last_word_lost", ("G-ends",), plant=last_word_lost, listen=True),
    SpeechControl("stretch_lost", ("G-window",), plant=stretch_lost, listen=True),
    SpeechControl("edges_lost", ("G-stream", "G-seams"), plant=edges_lost),
    SpeechControl("another_item", ("G-bleed",), plant=another_item, listen=True),
    SpeechControl("inverted", ("G-waveform",), plant=inverted),
)
