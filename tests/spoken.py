"""Real speech, as it would be served, and a listener that knows what each piece of it says."""

from pathlib import Path

import numpy as np
import soundfile

from assay.judging.tts import Heard
from assay.media.audio import encode_wav
from assay.verdicts.tts.planted import Word

RATE = 24_000
TEXTS = {
    "alpha": "The meeting starts at nine, so please bring the keys.",
    "bravo": "Seven ships left the harbour before the storm came in.",
    "word": "Beijing.",
}
DATA = Path(__file__).parent / "data" / "speech"


def speech(name):
    """float32 [1, samples] of 24 kHz: a text of `TEXTS` as a voice says it."""
    samples, rate = soundfile.read(DATA / f"{name}.flac", dtype="float32", always_2d=True)
    assert rate == RATE
    return samples.T


class Listening:
    """Says what it was told to hear, whatever the audio, and counts how often it was asked."""

    def __init__(self, text="one two three four"):
        self.text, self.asked = text, []

    def __call__(self, samples, rate, timed):
        self.asked.append(samples)
        times = np.linspace(0.3, samples.shape[-1] / rate - 0.4, len(self.text.split()) + 1)
        words = [Word(word, a, b) for word, a, b in zip(self.text.split(), times, times[1:], strict=False)]
        return Heard(self.text, tuple(words) if timed else None, 0.01)


def response(item_id="alpha", arm="served_0_alone", samples=None, **changes):
    """A row of a `responses` table that holds speech; the bytes are a WAV of `samples`."""
    content = encode_wav(speech(item_id) if samples is None else samples, RATE)
    row = {
        "item_id": item_id,
        "set_id": "spoken",
        "arm": arm,
        "status": "ok",
        "error": None,
        "audio": {"bytes": content, "path": "speech.wav"},
        "chunk_bytes": None,
    }
    return row | changes
