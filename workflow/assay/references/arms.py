"""How a reference computes: as the judge, or as one floor arm that differs from it in one harmless thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from assay.records import JUDGE


@dataclass(frozen=True)
class ArmSettings:
    """How a reference arm computes. Floor arms differ from the base of their dtype in exactly one field."""

    dtype: str
    batch: int = 8
    attention: str = "sdpa"
    prefill_chunk: int | None = None  # tokens; None: the whole prompt at once. Causal language models only
    dither: bool = False  # audio only: noise of one 16-bit step
    padding: str | None = None  # speech recognition only: `config.Padding`; floor arms have that of their judge
    alternative_matmul: bool = False  # another library for the products of matrices


_CHANGES: dict[str, dict[str, Any]] = {
    "batch": {"batch": 16},
    "attention": {"attention": "eager"},
    "chunked": {"prefill_chunk": 16},
    "dither": {"dither": True},
    "matmul": {"alternative_matmul": True},
}


def arm_settings(arm: str, options: Mapping[str, Any]) -> ArmSettings:
    """Settings of the arm called `judge` or `<dtype>-<change>`; `options` are those of the judge (`config.Config`)."""
    judge = ArmSettings(options["dtype"], padding=options.get("padding"))
    if arm == JUDGE:
        return judge
    dtype, _, change = arm.partition("-")
    return replace(judge, dtype=dtype, **_CHANGES[change])
