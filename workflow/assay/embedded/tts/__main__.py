"""Serve a voice: python -m assay.embedded.tts --package hibari_tts --model DIR [--fault NAME=VALUE]."""

from __future__ import annotations

import argparse

from assay.drivers.common import Synthesizer, model_options
from assay.embedded.command import command_line, listen, run
from assay.embedded.tts.faults import FAULTS
from assay.embedded.tts.hooks import Hooks
from assay.embedded.tts.server import create_app


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line(
        "assay.embedded.tts", "A speech server over a model's own package, on CPU, that can plant one fault.", FAULTS
    )
    model_options(parser)
    parser.add_argument("--package", required=True, choices=["hibari_tts", "kokoro_onnx"])
    parser.add_argument("--workers", type=int, default=2, help="requests that are computed at a time")
    return parser


def load(options: argparse.Namespace) -> Synthesizer:
    """The model that the options name."""
    if options.package == "kokoro_onnx":
        from assay.drivers.kokoro_onnx import KokoroModel

        return KokoroModel(options)
    from assay.drivers.hibari_tts import HibariModel

    return HibariModel(options)


def serve(options: argparse.Namespace) -> None:
    """Load the model and serve until a signal comes.

    Raises:
        AssayError: the model, the provider or the fault is wrong.
    """
    hooks = FAULTS.plant(options.fault) if options.fault else Hooks()
    listen(create_app(load(options), options.served_name or options.package, hooks, options.workers), options)


def main() -> None:
    """Entry point."""
    run(arguments(), serve)


if __name__ == "__main__":
    main()
