"""The command line of every embedded server, and its life until a signal ends it. Without torch."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from assay.embedded.switch import Switch
from assay.errors import AssayError

SHUTDOWN_S = 2


def command_line(prog: str, description: str, faults: Switch) -> argparse.ArgumentParser:
    """A parser of the options that every server has, to which it adds its own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}",
        description=description,
        epilog=faults.listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-name", help="model name that requests must give (default: that of the folder)")
    parser.add_argument("--fault", metavar="NAME[=VALUE]", help="plant one fault")
    return parser


def listen(app: FastAPI, options: argparse.Namespace) -> None:
    """Answer requests until a signal comes."""
    uvicorn.run(app, host=options.host, port=options.port, timeout_graceful_shutdown=SHUTDOWN_S)


def run(parser: argparse.ArgumentParser, serve: Callable[[argparse.Namespace], None]) -> None:
    """Serve as the command line says. Exit status: 2 for a wrong argument, 128 + signal when stopped by one."""
    # Uvicorn raises the signal again once it has shut down; leaving by an exception lets the engine stop too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    options = parser.parse_args()
    try:
        serve(options)
    except AssayError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(2)
