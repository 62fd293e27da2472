"""Serve a model: python -m assay.embedded --model DIR [--fault NAME=VALUE]."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from assay.embedded.batching import set_threads
from assay.embedded.command import command_line, listen, run
from assay.embedded.engine import Engine
from assay.embedded.faults import FAULTS, plant
from assay.embedded.hooks import Hooks
from assay.embedded.server import create_app
from assay.errors import ServerError


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line(
        "assay.embedded", "An OpenAI-compatible server over transformers, on CPU, that can plant one fault.", FAULTS
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of a causal language model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
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
        listen(create_app(engine, options.served_name or options.model.name), options)


def main() -> None:
    """Entry point."""
    run(arguments(), serve)


if __name__ == "__main__":
    main()
