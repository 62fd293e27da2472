"""Serve a model: python -m assay.embedded --model DIR [--fault NAME=VALUE]."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch
import uvicorn

from assay.embedded.engine import Engine, set_threads
from assay.embedded.faults import FAULTS, plant
from assay.embedded.hooks import Hooks
from assay.embedded.server import create_app
from assay.errors import AssayError, ServerError

SHUTDOWN_S = 2


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m assay.embedded",
        description="An OpenAI-compatible server over transformers, on CPU, that can plant one fault.",
        epilog=FAULTS.listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of a causal language model")
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
    hooks = plant(options.fault) if options.fault else Hooks()
    if not (options.model / "config.json").is_file():
        raise ServerError(f"--model {options.model}: no config.json there; give the folder of a transformers model")
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
        print(f"assay.embedded: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
