"""Sounds as arrays: made from a seed, joined, resampled, and written as WAV. Every result is the same on any machine.

Arrays are int16, shape (samples,) or (samples, channels). Noise comes from the raw numbers of a bit generator, since
NumPy may change what its distributions make of them; sums and resampling are in float64, whose last digits, which
differ between machines, no rounding to 16 bits can see.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Callable

import numpy as np
import soxr

_FULL = 32_767
_NOISE_PEAK = 0.05 * _FULL  # -26 dBFS


def wav(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of 16-bit samples: a plain header of 44 bytes, then the data."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return content.getvalue()


def resampled(samples: np.ndarray, rate: int, wanted: int, channels: int) -> np.ndarray:
    """Mono `samples` at another rate; a second channel has them at half the level, so that the two differ."""
    # In float64 at "VHQ" soxr computes in double precision; at lower settings it does not.
    mono = soxr.resample(samples.astype(np.float64), rate, wanted, quality="VHQ") if wanted != rate else samples
    columns = [_rounded(mono), _rounded(mono / 2)][:channels]
    return columns[0] if channels == 1 else np.stack(columns, axis=1)


def joined(pieces: list[np.ndarray], gap: int) -> np.ndarray:
    """Mono pieces one after the other with `gap` silent samples between."""
    silent = np.zeros(gap, np.int16)
    return np.concatenate([part for piece in pieces for part in (piece, silent)][:-1])


def silence(samples: int, seed: int, rate: int) -> np.ndarray:
    """Digital zero."""
    return np.zeros(samples, np.int16)


def white(samples: int, seed: int, rate: int) -> np.ndarray:
    """Noise of equal power at all frequencies."""
    return _rounded(_NOISE_PEAK * _uniform(samples, seed))


def pink(samples: int, seed: int, rate: int) -> np.ndarray:
    """Noise of about equal power in all octaves: noises held for 1, 2, 4, ... 2 048 samples, summed."""
    octaves = 12
    total = np.zeros(samples)
    for octave in range(octaves):
        held = 2**octave
        total += np.repeat(_uniform(-(-samples // held), seed + octave), held)[:samples]
    return _rounded(2 * _NOISE_PEAK * total / octaves)


def hum(samples: int, seed: int, rate: int) -> np.ndarray:
    """Mains hum: 50 Hz and two of its harmonics."""
    time = np.arange(samples) / rate
    tones = [np.sin(2 * np.pi * 50 * harmonic * time) / harmonic for harmonic in (1, 2, 3)]
    return _rounded(_NOISE_PEAK * np.sum(tones, axis=0) / 2)


def music(samples: int, seed: int, rate: int) -> np.ndarray:
    """Plucked notes of a pentatonic scale, four a second."""
    scale = 220 * 2 ** (np.array([0, 2, 4, 7, 9, 12, 14, 16]) / 12)  # Hz
    length = rate // 4
    time = np.arange(length) / rate
    picks = ((_uniform(-(-samples // length), seed) + 1) / 2 * len(scale)).astype(int)
    notes = [np.sin(2 * np.pi * scale[pick] * time) * np.exp(-8 * time) for pick in picks]
    return _rounded(0.3 * _FULL * np.concatenate(notes)[:samples])


def _uniform(count: int, seed: int) -> np.ndarray:
    """Numbers in [-1, 1) from the raw output of a bit generator."""
    raw = np.random.PCG64(seed).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) / 2**52 - 1


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), -_FULL - 1, _FULL).astype(np.int16)


MADE: dict[str, Callable[[int, int, int], np.ndarray]] = {  # (samples, seed, rate)
    "silence": silence,
    "white": white,
    "pink": pink,
    "hum": hum,
    "music": music,
}
