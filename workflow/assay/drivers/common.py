"""What drivers share: requests in as JSON lines; out come one WAV file for each, and the list of them.

The list, `manifest.json`, is `{"audio": [{"id", "file"}], "versions": {distribution: version}}`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from assay.errors import AssayError, ServerError

Samples = npt.NDArray[np.float32]  # [samples], full scale 1
CPU = "CPUExecutionProvider"


class Speaker(Protocol):
    """A model that speaks."""

    name: str
    rate: int  # Hz
    voices: tuple[str, ...]  # the first where none is asked for
    options: frozenset[str]  # what a request may say besides its text, voice and seed

    @property
    def pieces(self) -> Callable[..., Iterator[Samples]]:
        """(text, voice, seed, **options) -> sound, sentence by sentence; the same for the same arguments."""


class Synthesizer(Speaker, Protocol):
    """One that the embedded server serves: what else runs beside a request changes nothing of its sound."""

    vocab: dict[str, int]  # phoneme -> id


def model_options(parser: argparse.ArgumentParser) -> None:
    """Options of a command that loads a model."""
    parser.add_argument("--model", required=True, type=Path, help="folder of the weights")
    parser.add_argument("--provider", default=CPU, help="execution provider of onnxruntime; no other will do")
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator")


Loader = Callable[[argparse.Namespace], Speaker]


def drive(
    load: Loader,
    write: Callable[[Path, Samples], None],
    distributions: tuple[str, ...],
    arguments: Callable[[argparse.ArgumentParser], None] = model_options,
) -> None:
    """The whole of a driver: `load` a model, speak every request, `write` it as a WAV file.

    `arguments` adds what loading takes. Exit status 2 with one message for a wrong argument or request.
    """
    parser = argparse.ArgumentParser()
    arguments(parser)
    parser.add_argument("--requests", required=True, type=Path, help="JSON lines: id, input, voice, seed, options")
    parser.add_argument("--output", required=True, type=Path, help="folder to fill")
    parser.add_argument("--seed-offset", type=int, default=0, help="added to every request's seed")
    options = parser.parse_args()
    try:
        _speak_all(load(options), write, distributions, options)
    except AssayError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        sys.exit(2)


def _speak_all(
    model: Speaker,
    write: Callable[[Path, Samples], None],
    distributions: tuple[str, ...],
    options: argparse.Namespace,
) -> None:
    audio = []
    for number, line in enumerate(options.requests.read_text(encoding="utf-8").splitlines()):
        request = json.loads(line)
        file = f"{number:05}.wav"
        write(options.output / file, speak(model, request, options.seed_offset))
        audio.append({"id": request["id"], "file": file})
    manifest = {"audio": audio, "versions": {name: version(name) for name in distributions}}
    (options.output / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def speak(model: Speaker, request: Mapping[str, Any], seed_offset: int = 0) -> Samples:
    """The sound of one request.

    Raises:
        ServerError: an unknown voice, or an option that the model does not have: it would be lost.
    """
    if unknown := request.keys() - {"id", "input", "voice", "seed"} - model.options:
        raise ServerError(f"request {request['id']}: {model.name} has no option {', '.join(sorted(unknown))}")
    voice = request.get("voice", model.voices[0])
    if voice not in model.voices:
        raise ServerError(f"request {request['id']}: no voice '{voice}'; there are {', '.join(model.voices)}")
    options = {name: request[name] for name in sorted(request.keys() & model.options)}
    return joined(model.pieces(request["input"], voice, request.get("seed", 0) + seed_offset, **options))


def joined(pieces: Iterator[Samples]) -> Samples:
    """Pieces in one, and no samples where there is none."""
    return np.concatenate([np.zeros(0, np.float32), *pieces])
