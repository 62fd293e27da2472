"""hibari (English, 24 kHz) by its own package: python -m assay.drivers.hibari_tts --help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from hibari import SAMPLE_RATE, Hibari, write_wav

from assay.drivers.common import Samples, drive
from assay.drivers.onnx import session


class HibariModel:
    """The voice that the package brings; all others would be downloaded."""

    name = "hibari"
    rate = SAMPLE_RATE
    voices: tuple[str, ...] = ("heart",)
    options = frozenset({"speed"})

    def __init__(self, options: argparse.Namespace) -> None:
        path = options.model / "hibari/assets/hibari.onnx"
        # The package offers no choice of provider: its session is replaced by one that does.
        loaded = session(path, options.provider, options.threads)
        self._tts = Hibari(self.voices[0], model=str(path))
        self._tts.sess = loaded
        self.vocab: dict[str, int] = self._tts.vocab
        self.phonemize("Ready.")  # its tables are read at the first use

    def phonemize(self, text: str) -> list[str]:
        """Phonemes of each sentence."""
        return self._tts.phonemize(text)

    def pieces(self, text: str, voice: str, seed: int, speed: float = 1.0) -> Iterator[Samples]:
        """As `Synthesizer`; the seed draws the noise of unvoiced sounds."""
        return self._tts.stream(text, speed, seed)


def write(path: Path, samples: Samples) -> None:
    """The package's own 16-bit WAV."""
    write_wav(str(path), samples, SAMPLE_RATE)


if __name__ == "__main__":
    drive(HibariModel, write, ("hibari-tts", "onnxruntime", "numpy"))
