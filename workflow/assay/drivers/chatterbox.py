"""Chatterbox (24 kHz) by its own package, chatterbox-tts: python -m assay.drivers.chatterbox --help.

The package puts Perth's watermark into all that it speaks: a server that is compared with it has to do so too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from chatterbox.mtl_tts import ChatterboxMultilingualTTS
from chatterbox.tts import ChatterboxTTS
from chatterbox.tts_turbo import ChatterboxTurboTTS

from assay.drivers.common import Samples, drive
from assay.drivers.torch import prepare, seeded, torch_options, whole, writer
from assay.errors import ServerError

_DRAWN = frozenset({"temperature", "top_p", "repetition_penalty", "watermark"})
_GUIDED = _DRAWN | {"min_p", "cfg_weight", "exaggeration"}  # which Turbo takes and ignores
VARIANTS = {
    "english": (ChatterboxTTS, _GUIDED),
    "multilingual": (ChatterboxMultilingualTTS, _GUIDED | {"language_id"}),
    "turbo": (ChatterboxTurboTTS, _DRAWN | {"top_k"}),
}


class Chatterbox:
    """One of the three models, with the voice that its weights bring."""

    rate = 24000
    voices: tuple[str, ...] = ("default",)

    def __init__(self, options: argparse.Namespace) -> None:
        if options.dtype != "float32":
            raise ServerError(f"chatterbox computes in float32 (asked for: {options.dtype})")
        model, self.options = VARIANTS[options.variant]
        self.name = f"chatterbox {options.variant}"
        self._model = model.from_local(options.model, str(prepare(options)))  # which it compares with "cpu"
        if self._model.conds is None:
            raise ServerError(f"{options.model} has no conds.pt, the voice that the model brings")

    def pieces(self, text: str, voice: str, seed: int, watermark: bool = True, **options: Any) -> Iterator[Samples]:
        """As `Speaker`; the seed draws the speech tokens, and the noise that S3Gen starts from."""
        if not watermark:
            raise ServerError("watermark: false was asked for, and chatterbox-tts marks all that it speaks")
        return whole(seeded(seed, lambda: self._model.generate(text, **options)))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    torch_options(parser)
    parser.add_argument("--variant", required=True, choices=sorted(VARIANTS))


if __name__ == "__main__":
    drive(Chatterbox, writer(Chatterbox.rate), ("chatterbox-tts", "resemble-perth", "torch"), arguments)
