"""What the drivers of models over PyTorch share: where they compute, what they draw by, and the files they write."""

from __future__ import annotations

import argparse
import random
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assay.drivers.common import Samples
from assay.errors import ServerError


def torch_options(parser: argparse.ArgumentParser) -> None:
    """Options of a command that loads a model over torch."""
    parser.add_argument("--model", required=True, type=Path, help="folder of the weights")
    parser.add_argument("--device", default="cpu", help="of torch: cpu, cuda:0, ...; no other will do")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator")


def prepare(options: argparse.Namespace) -> torch.device:
    """The device asked for, with the threads asked for.

    Raises:
        ServerError: torch does not see it; nothing falls back to the CPU.
    """
    device = torch.device(options.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ServerError(
            f"device '{options.device}' is not there: torch {torch.__version__} sees {torch.cuda.device_count()}; "
            "nothing falls back to the CPU. Install the build of torch for this machine, or ask for --device=cpu"
        )
    torch.set_num_threads(options.threads)
    return device


def seeded(seed: int, speak: Callable[[], Any]) -> Samples:
    """What `speak` draws after every generator was set to `seed`; an array or tensor of whatever shape, flat."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    sound = speak()
    return np.asarray(sound.detach().cpu() if isinstance(sound, torch.Tensor) else sound, np.float32).ravel()


def whole(sound: Samples) -> Iterator[Samples]:
    """Sound that comes in one piece."""
    yield sound


def writer(rate: int) -> Callable[[Path, Samples], None]:
    """How to write samples at `rate` [Hz] as a WAV file of 16 bits."""

    def write(path: Path, samples: Samples) -> None:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())

    return write
