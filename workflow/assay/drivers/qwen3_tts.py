"""Qwen3-TTS CustomVoice (24 kHz) by its own package, qwen-tts: python -m assay.drivers.qwen3_tts --help."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from qwen_tts import Qwen3TTSModel

from assay.drivers.common import Samples, drive
from assay.drivers.torch import prepare, seeded, torch_options, whole, writer
from assay.errors import ServerError

_TALKER = {"do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens"}
_RESIDUAL_CODES = {"subtalker_dosample", "subtalker_temperature", "subtalker_top_p", "subtalker_top_k"}


class Qwen3Tts:
    """The speakers that the weights bring."""

    name = "qwen3-tts"
    rate = 24000
    options = frozenset({"language", "instruct", *_TALKER, *_RESIDUAL_CODES})

    def __init__(self, options: argparse.Namespace) -> None:
        device = prepare(options)
        self._model = Qwen3TTSModel.from_pretrained(
            str(options.model), device_map=device, dtype=getattr(torch, options.dtype)
        )
        self.voices = tuple(sorted(self._model.get_supported_speakers() or ()))
        if not self.voices:
            raise ServerError(f"{options.model} has no speakers of its own: it is no CustomVoice model")

    def pieces(self, text: str, voice: str, seed: int, **options: Any) -> Iterator[Samples]:
        """As `Speaker`; the seed draws the codes of both stages."""

        def speak() -> Any:
            sounds, rate = self._model.generate_custom_voice(text=text, speaker=voice, **options)
            if rate != self.rate:
                raise ServerError(f"{self.name} speaks at {rate} Hz, and {self.rate} were expected")
            return sounds[0]

        return whole(seeded(seed, speak))


if __name__ == "__main__":
    drive(Qwen3Tts, writer(Qwen3Tts.rate), ("qwen-tts", "transformers", "torch"), torch_options)
