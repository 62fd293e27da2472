"""OmniVoice (24 kHz) by its own package: python -m assay.drivers.omnivoice --help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from omnivoice import OmniVoice

from assay.drivers.common import Samples, drive
from assay.drivers.torch import prepare, seeded, torch_options, whole, writer
from assay.errors import ServerError

_UNMASKING = {
    "num_step",
    "guidance_scale",
    "t_shift",
    "layer_penalty_factor",
    "position_temperature",
    "class_temperature",
    "denoise",
}


class OmniVoiceModel:
    """The voice that the model picks by itself, or one that `instruct` describes."""

    name = "omnivoice"
    rate = 24000
    voices: tuple[str, ...] = ("auto",)
    options = frozenset({"language", "instruct", "speed", *_UNMASKING})

    def __init__(self, options: argparse.Namespace) -> None:
        if not (options.model / "audio_tokenizer").is_dir():
            raise ServerError(f"{options.model} has no folder audio_tokenizer, and another would be downloaded")
        device = prepare(options)
        self._model = OmniVoice.from_pretrained(
            str(options.model), device_map=device, dtype=getattr(torch, options.dtype)
        )
        if self._model.sampling_rate != self.rate:
            raise ServerError(f"{self.name} speaks at {self._model.sampling_rate} Hz, and {self.rate} were expected")

    def pieces(self, text: str, voice: str, seed: int, **options: Any) -> Iterator[Samples]:
        """As `Speaker`; the seed draws the order in which codes are unmasked, and the voice."""
        return whole(seeded(seed, lambda: self._model.generate(text=text, **options)[0]))


if __name__ == "__main__":
    drive(OmniVoiceModel, writer(OmniVoiceModel.rate), ("omnivoice", "transformers", "torch"), torch_options)
