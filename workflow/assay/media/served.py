"""Served audio as a `responses` table holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assay.media.audio import Pcm
from assay.records import ResponseStatus


@dataclass(frozen=True)
class Body:
    """The bytes of an answer, in the chunks they came in if it was streamed; the suffix of the name is the format."""

    content: bytes
    chunk_bytes: tuple[int, ...] | None = None
    name: str = "speech.wav"


def body_of(response: Mapping[str, Any]) -> Body | None:
    """The audio of a response, or None where there is none."""
    if response["status"] != ResponseStatus.OK or not response["audio"]:
        return None
    sizes = response["chunk_bytes"]
    return Body(response["audio"]["bytes"], tuple(sizes) if sizes else None, response["audio"]["path"])


def raw_samples(plan: Mapping[str, Any]) -> Pcm | None:
    """What raw samples are in the answers of a serve plan, where it says so: the bytes can't."""
    rate = plan.get("client", {}).get("sample_rate")
    return Pcm(rate) if rate else None
