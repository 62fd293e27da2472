"""ONNX models on the execution provider that was asked for, or not at all."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from assay.drivers.common import CPU
from assay.errors import ServerError


def session(path: Path, provider: str = CPU, threads: int = 1) -> ort.InferenceSession:
    """An ONNX model on one execution provider, and on no other.

    Asked for a provider that it lacks, onnxruntime warns and runs on the CPU:
    https://onnxruntime.ai/docs/execution-providers/

    Args:
        path: ONNX file.
        provider: name of the execution provider.
        threads: within an operator.

    Raises:
        ServerError: the provider is not there, or another one runs; or the file is missing.
    """
    available = ort.get_available_providers()
    if provider not in available:
        raise ServerError(
            f"execution provider '{provider}' is not there: onnxruntime {ort.__version__} has {', '.join(available)}. "
            "Install the onnxruntime package that brings it, or ask for another provider"
        )
    if not path.is_file():
        raise ServerError(f"no model at {path}")
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    loaded = ort.InferenceSession(path, options, providers=[provider])
    running = loaded.get_providers()[0]
    if running != provider:
        raise ServerError(f"execution provider '{provider}' was asked for, and {path.name} runs on {running}")
    return loaded
