"""The points of the speech server at which a fault can be planted. As it stands, each does the right thing."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from assay.drivers.common import Samples, Synthesizer

UNKNOWN = 0xFFFFFFFF  # the sizes of a file whose end is not known yet


@dataclass(frozen=True)
class Speech:
    """One request."""

    text: str
    voice: str
    seed: int
    speed: float
    format: Literal["wav", "pcm"]
    streamed: bool
    others: tuple[str, ...] = ()  # texts of the requests in flight beside it


class Hooks:
    """One method for each point; a fault overrides one of them."""

    def model(self, model: Synthesizer) -> None:
        """Called once with the loaded model."""

    def speech(self, speech: Speech) -> Speech:
        """What will be spoken, from what was asked for."""
        return speech

    def pieces(self, pieces: Iterator[Samples], speech: Speech) -> Iterator[Samples]:
        """Sound of the sentences."""
        return pieces

    def chunks(self, chunks: Iterator[Samples], speech: Speech) -> Iterator[Samples]:
        """Chunks of a stream, before they are encoded."""
        return chunks

    def pcm(self, samples: Samples) -> bytes:
        """16-bit samples, rounded as the models' packages do."""
        return (np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()

    def header(self, rate: int, size: int | None) -> bytes:
        """Head of a WAV file of `size` bytes of samples; None: not known yet."""
        return wav_header(rate, size)

    def parts(self, parts: Iterator[bytes], speech: Speech) -> Iterator[bytes]:
        """Parts of the body: of a whole answer its header and its samples, of a stream the header and the chunks."""
        return parts


def wav_header(rate: int, size: int | None, *, channels: int = 1, tag: int = 1, bits: int = 16) -> bytes:
    """The 44 bytes before the samples of a WAV file; tag 1: integers, 3: floats."""
    frame = channels * bits // 8
    riff, data = (UNKNOWN, UNKNOWN) if size is None else (36 + size, size)
    fields: tuple[Any, ...] = (tag, channels, rate, rate * frame, frame, bits)
    return struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, *fields, b"data", data)
