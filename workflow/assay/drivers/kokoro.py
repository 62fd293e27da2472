"""Kokoro (82 M, 24 kHz) by its own package: python -m assay.drivers.kokoro --help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import spacy
import torch
from kokoro import KModel, KPipeline

from assay.drivers.common import Samples, drive
from assay.drivers.torch import prepare, seeded, torch_options, whole, writer
from assay.errors import ServerError

_REPOSITORY = "hexgrad/Kokoro-82M"
_GRAMMAR = "en_core_web_sm"  # what misaki tells homographs by; it would download it


class KokoroModel:
    """Folder: `config.json`, `kokoro-v1_0.pth` and `voices/NAME.pt`. English, American."""

    name = "kokoro"
    rate = 24000
    options = frozenset({"speed"})

    def __init__(self, options: argparse.Namespace) -> None:
        if options.dtype != "float32":
            raise ServerError(f"kokoro computes in float32 (asked for: {options.dtype})")
        if not spacy.util.is_package(_GRAMMAR):
            raise ServerError(
                f"{_GRAMMAR} is missing, which misaki needs and no package index has: install the wheel that "
                f"https://github.com/explosion/spacy-models publishes for spaCy {spacy.__version__}"
            )
        self._voices = {path.stem: path for path in sorted((options.model / "voices").glob("*.pt"))}
        self.voices = tuple(self._voices)
        weights, config = options.model / "kokoro-v1_0.pth", options.model / "config.json"
        model = KModel(_REPOSITORY, config=str(config), model=str(weights)).to(prepare(options)).eval()
        self._pipeline = KPipeline("a", _REPOSITORY, model=model)

    def pieces(self, text: str, voice: str, seed: int, **options: Any) -> Iterator[Samples]:
        """As `Speaker`; the seed draws the noise of the harmonic source."""
        path = str(self._voices[voice])  # by its name a voice would be downloaded

        def speak() -> torch.Tensor:
            spoken = self._pipeline(text, voice=path, **options)
            return torch.cat([torch.zeros(0), *(piece.audio for piece in spoken if piece.audio is not None)])

        return whole(seeded(seed, speak))


if __name__ == "__main__":
    drive(KokoroModel, writer(KokoroModel.rate), ("kokoro", "misaki", "torch"), torch_options)
