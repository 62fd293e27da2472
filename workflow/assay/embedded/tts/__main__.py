"""Serve a voice: python -m assay.embedded.tts --package hibari_tts --model DIR [--fault NAME=VALUE]."""

from __future__ import annotations

import argparse
import signal
import sys

import uvicorn

from assay.drivers.common import Synthesizer, model_options
from assay.embedded.tts.faults import FAULTS
from assay.embedded.tts.hooks import Hooks
from assay.embedded.tts.server import create_app
from assay.errors import AssayError

SHUTDOWN_S = 2


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m assay.embedded.tts",
        description="A speech server over a model's own package, on CPU, that can plant one fault.",
        epilog=FAULTS.listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model_options(parser)
    parser.add_argument("--package", required=True, choices=["hibari_tts", "kokoro_onnx"])
    parser.add_argument("--workers", type=int, default=2, help="requests that are computed at a time")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-name", help="model name that requests must give (default: the package's)")
    parser.add_argument("--fault", metavar="NAME[=VALUE]", help="plant one fault")
    return parser


def load(options: argparse.Namespace) -> Synthesizer:
    """The model that the options name."""
    if options.package == "kokoro_onnx":
        from assay.drivers.kokoro_onnx import KokoroModel

        return KokoroModel(options)
    from assay.drivers.hibari_tts import HibariModel

    return HibariModel(options)


def main() -> None:
    """Entry point. Exit status: 2 for a wrong argument, 128 + signal when stopped by one."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    options = arguments().parse_args()
    try:
        hooks = FAULTS.plant(options.fault) if options.fault else Hooks()
        app = create_app(load(options), options.served_name or options.package, hooks, options.workers)
        uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=SHUTDOWN_S)
    except AssayError as error:
        print(f"assay.embedded.tts: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
