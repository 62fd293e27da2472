"""Where a reference computes: on the CPU, or on the devices that were leased for this process; never elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from assay.errors import DeviceError

MORE = "give the jobs more devices: `reference_gpus` in the site's file"


def device_map(gpus: int) -> str | None:
    """What transformers' `device_map` is to be: nothing for the CPU, the one device, or "auto" over several.

    PyTorch calls the devices of AMD "cuda" too: https://docs.pytorch.org/docs/stable/notes/hip.html

    Args:
        gpus: devices leased for this process; 0: it computes on the CPU.

    Raises:
        DeviceError: torch does not see them. Nothing falls back to the CPU.
    """
    if not gpus:
        return None
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen != gpus:
        raise DeviceError(
            f"{gpus} devices are leased for the reference, and torch {torch.__version__} sees {seen}; nothing falls "
            "back to the CPU. Install the build of torch for this site's devices and driver (this one is for CUDA "
            f"{torch.version.cuda}, HIP {torch.version.hip}), or set reference_gpus: 0 in the site's file"
        )
    return "cuda:0" if gpus == 1 else "auto"


def require_on_devices(model: torch.nn.Module, gpus: int) -> None:
    """Raise DeviceError if a weight of `model` is not on the leased devices: "auto" puts elsewhere what has no room."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    if gpus and kinds != {"cuda"}:
        raise DeviceError(f"the reference has no room on {gpus} devices: weights lie on {sorted(kinds)}; {MORE}")


@contextmanager
def memory_told() -> Iterator[None]:
    """Turn a device's running out of memory into a DeviceError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise DeviceError(f"the reference ran out of memory on its devices ({reason}); {MORE}") from None


@contextmanager
def matmul(device: torch.device, alternative: bool) -> Iterator[None]:
    """Products of matrices at full precision, whatever was set before; `alternative`: by another library.

    TF32 rounds float32 to 10 bits of mantissa: that is no difference of rounding, so it is off for every arm.
    CPU: with oneDNN or without. Devices: cuBLAS or cuBLASLt, rocBLAS or hipBLASLt, which the torch names are for.
    """
    cuda, onednn = torch.backends.cuda.matmul, torch.backends.mkldnn
    before = cuda.allow_tf32, torch.backends.cudnn.allow_tf32, onednn.enabled
    cuda.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    onednn.enabled = onednn.enabled and not alternative
    try:
        with _other_library() if alternative and device.type == "cuda" else nullcontext():
            yield
    finally:
        cuda.allow_tf32, torch.backends.cudnn.allow_tf32, onednn.enabled = before


@contextmanager
def _other_library() -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublas" if before.name == "Cublaslt" else "cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
