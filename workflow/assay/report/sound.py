"""Audio on a page: a player whose file is inside the page, with waveform and spectrogram.

What is embedded is mono FLAC of 16 bits: lossless but for channels that are mixed down and rates above `MOST_HZ`, and
played by every browser. The pictures are of the same samples.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile

from assay.media.audio import Audio, resample
from assay.metrics.audio import downmix, float_to_int16, spectrogram

MOST_HZ = 24_000  # of embedded audio: as most speech models make it
MOST_BYTES = 24_000_000  # of all audio on a page, before base64
COLUMNS = 480  # of waveform and spectrogram
ROWS = 96  # of the spectrogram
RANGE_DB = 70.0  # from its loudest to white

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Player:
    """One audio on a page. `source` is None where the page had no room for it."""

    source: str | None  # data: URI of the FLAC file
    duration_s: float
    rate: int  # Hz, of the audio itself
    channels: int
    waveform: str  # path of an SVG of COLUMNS x 2, full scale
    spectrogram: str  # data: URI of a PNG, at most COLUMNS x ROWS
    seams: tuple[float, ...] = ()  # where chunks of a stream join, in the columns of the waveform


@dataclass
class Room:
    """How many bytes of audio a page still takes. What comes first gets in: ask in the order of the list."""

    left: int = field(default_factory=lambda: MOST_BYTES)
    refused: int = field(default=0, init=False)

    def take(self, size: int) -> bool:
        """Whether a file of so many bytes gets in; those that don't are counted."""
        if size > self.left:
            self.refused += 1
            return False
        self.left -= size
        return True


def player(audio: Audio, room: Room, seams: Sequence[int] = ()) -> Player:
    """Embed an audio, if there is room for it, and draw it; `seams` are samples at which a chunk of a stream starts."""
    mono = downmix(audio.samples).astype(np.float32)[np.newaxis]
    rate = min(audio.rate, MOST_HZ)
    content = _flac(mono if rate == audio.rate else resample(mono, audio.rate, rate), rate)
    return Player(
        source=_uri("audio/flac", content) if room.take(len(content)) else None,
        duration_s=audio.duration_s,
        rate=audio.rate,
        channels=len(audio.samples),
        waveform=waveform(mono[0]),
        spectrogram=_uri("image/png", _png(shades(mono[0], audio.rate))),
        seams=tuple(COLUMNS * start / mono.shape[-1] for start in seams),
    )


def waveform(samples: Samples) -> str:
    """The path of an SVG that goes along the highest samples of each column and back along the lowest.

    Time is 0 to COLUMNS, full scale 1 is 0 (above) to 2 (below); what is beyond is drawn at the edge.
    """
    edges = np.linspace(0, len(samples), min(COLUMNS, len(samples)) + 1).astype(int)
    columns = len(edges) - 1
    low = np.minimum.reduceat(samples, edges[:-1])
    high = np.maximum.reduceat(samples, edges[:-1])
    step = COLUMNS / columns
    along = [(step * (k + 0.5), 1 - float(value)) for k, value in enumerate(np.clip(high, -1, 1))]
    back = [(step * (k + 0.5), 1 - float(value)) for k, value in enumerate(np.clip(low, -1, 1))][::-1]
    return "M" + "L".join(f"{x:.4g} {y:.3g}" for x, y in along + back) + "Z"


def shades(samples: Samples, rate: int) -> npt.NDArray[np.uint8]:
    """The spectrogram as grey values, uint8 [at most ROWS, at most COLUMNS]: the loudest black, `RANGE_DB` below white.

    Low frequencies are below, half the rate is above.
    """
    power = spectrogram(samples, rate).power.T[::-1]  # [bins, frames]
    squeezed = _squeeze(_squeeze(power, ROWS).T, COLUMNS).T
    floor = squeezed.max() * 10 ** (-RANGE_DB / 10)
    if floor == 0:
        return np.full(squeezed.shape, 255, np.uint8)
    decibels = 10 * np.log10(np.maximum(squeezed, floor) / squeezed.max())
    return np.round(-decibels / RANGE_DB * 255).astype(np.uint8)


def _squeeze(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """[n, m] to [size, m], if there is more: the largest of each part."""
    return np.maximum.reduceat(values, np.arange(size) * len(values) // size) if len(values) > size else values


def _flac(samples: Samples, rate: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, float_to_int16(samples).T, rate, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def _png(grey: npt.NDArray[np.uint8]) -> bytes:
    codec: Any = av.CodecContext.create("png", "w")
    codec.height, codec.width = grey.shape
    codec.pix_fmt, codec.time_base = "gray", Fraction(1)
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(grey), format="gray")
    return b"".join(bytes(packet) for part in (frame, None) for packet in codec.encode(part))


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
