"""Kokoro (82 M, 24 kHz) as ONNX: python -m assay.drivers.kokoro_onnx --help.

Tensors as in https://github.com/thewh1teagle/kokoro-onnx (MIT). The voices at hand are Japanese; English phonemes, in
the alphabet that Kokoro was trained on (misaki's), come from hibari's package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np
from hibari import Hibari, write_wav

from assay.drivers.common import Samples, drive
from assay.drivers.onnx import session

_LONGEST = 510  # tokens, and rows of a voice


class KokoroModel:
    """Folder: `kokoro.onnx`, `vocab.json`, `voices.npz` (a style for each voice and length)."""

    name = "kokoro"
    rate = 24000
    options = frozenset({"speed"})

    def __init__(self, options: argparse.Namespace) -> None:
        self._session = session(options.model / "kokoro.onnx", options.provider, options.threads)
        self.vocab: dict[str, int] = json.loads((options.model / "vocab.json").read_text(encoding="utf-8"))["vocab"]
        with np.load(options.model / "voices.npz") as voices:
            self._styles = {name: voices[name] for name in sorted(voices.files)}
        self.voices = tuple(self._styles)
        self._g2p = Hibari()
        self.phonemize("Ready.")  # its tables are read at the first use

    def phonemize(self, text: str) -> list[str]:
        """Phonemes of each sentence."""
        return self._g2p.phonemize(text)

    def pieces(self, text: str, voice: str, seed: int, speed: float = 1.0) -> Iterator[Samples]:
        """As `Synthesizer`. Nothing is drawn: the seed changes nothing."""
        for phonemes in self.phonemize(text):
            tokens = [self.vocab[sign] for sign in phonemes if sign in self.vocab][:_LONGEST]
            feed = {
                "tokens": np.array([[0, *tokens, 0]], np.int64),
                "style": self._styles[voice][max(len(tokens), 1) - 1].reshape(1, 256).astype(np.float32),
                "speed": np.array([speed], np.float32),
            }
            yield np.asarray(self._session.run(None, feed)[0], np.float32).ravel()


if __name__ == "__main__":
    drive(KokoroModel, lambda path, samples: write_wav(str(path), samples), ("hibari-tts", "onnxruntime", "numpy"))
