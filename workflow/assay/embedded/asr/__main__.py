"""Serve Whisper: python -m assay.embedded.asr --model DIR [--fault NAME=VALUE]."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch
import uvicorn

from assay.embedded.asr.engine import Engine
from assay.embedded.asr.faults import FAULTS
from assay.embedded.asr.hooks import Hooks
from assay.embedded.asr.server import create_app
from assay.embedded.engine import set_threads
from assay.errors import AssayError, ServerError

SHUTDOWN_S = 2


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m assay.embedded.asr",
        description="A transcription server of Whisper over transformers, on CPU, that can plant one fault.",
        epilog=FAULTS.listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of a Whisper model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-name", help="model name that requests must give (default: the folder's name)")
    parser.add_argument("--fault", metavar="NAME[=VALUE]", help="plant one fault")
    return parser


def serve(options: argparse.Namespace) -> None:
    """Load the model and serve until a signal comes.

    Raises:
        AssayError: the model folder or the fault is wrong.
    """
    hooks = FAULTS.plant(options.fault) if options.fault else Hooks()
    if not (options.model / "preprocessor_config.json").is_file():
        raise ServerError(f"--model {options.model}: no preprocessor_config.json there; give the folder of a Whisper")
    set_threads()
    with Engine(options.model, getattr(torch, options.dtype), hooks) as engine:
        app = create_app(engine, options.served_name or options.model.name)
        uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=SHUTDOWN_S)


def main() -> None:
    """Entry point. Exit status: 2 for a wrong argument, 128 + signal when stopped by one."""
    # Uvicorn raises the signal again once it has shut down; leaving by an exception lets the engine stop too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        serve(arguments().parse_args())
    except AssayError as error:
        print(f"assay.embedded.asr: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
