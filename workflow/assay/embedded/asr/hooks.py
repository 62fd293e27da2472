"""The points of the transcription server at which a fault can be planted. As it stands, each does the right thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from assay.media.audio import Audio, resample

RATE = 16_000  # of Whisper [Hz]
NO_SPEECH, SURE = 0.6, -1.0  # Whisper's thresholds: probability of no speech, mean logprob [nat]

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Request:
    """One transcription, as it will be done."""

    number: int  # counts from 0 over the server's life
    samples: Samples  # [samples] at RATE
    language: str | None  # code; None: to be detected
    task: str = "transcribe"
    top_logprobs: int | None = None  # None: no logprobs at all


@dataclass(frozen=True)
class Token:
    """One token. Logprobs in nat, raw (no token forbidden), `top` descending."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Segment:
    """A stretch of speech [s], its tokens with the timestamps around them, and what Whisper says of its window."""

    start: float
    end: float
    text: str
    tokens: tuple[Token, ...]
    avg_logprob: float  # nat a token, end of text included, of the distribution that was chosen from
    no_speech_prob: float


@dataclass(frozen=True)
class Transcript:
    """The answer to one request."""

    text: str
    language: str
    duration: float  # s
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]


class Hooks:
    """One method for each point; a fault overrides one of them."""

    max_rows = 4  # windows in a batch: their logits take most of the memory

    def model(self, model: Any) -> None:
        """Called once with the loaded model."""

    def extractor(self, extractor: Any) -> None:
        """Called once with the feature extractor."""

    def ready(self) -> None:
        """Called once in the thread that runs the model."""

    def samples(self, audio: Audio) -> Samples:
        """What the model hears of a file; [samples] at RATE."""
        return resample(audio.samples.mean(0, keepdims=True), audio.rate, RATE)[0]

    def request(self, request: Request) -> Request:
        """The request that will be done, from the one that was asked."""
        return request

    def busy(self, request: Request, others: int) -> Request:
        """The request as it is begun, while `others` wait or run."""
        return request

    def features(self, window: torch.Tensor, length: int) -> torch.Tensor:
        """Log-mel features of a window, [mel, frame], of which the first `length` frames are of the audio."""
        return window

    def advance(self, seek: int) -> int:
        """Frame at which the next window begins."""
        return seek

    def silent(self, no_speech_prob: float, avg_logprob: float) -> bool:
        """Whether nothing is said in a window (https://arxiv.org/abs/2212.04356, section 4.5)."""
        return no_speech_prob > NO_SPEECH and avg_logprob < SURE

    def reported(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits that reported logprobs are made of; [vocabulary]."""
        return logits

    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        """The segments that are answered; the text is theirs, joined."""
        return segments

    def text(self, text: str) -> str:
        """The text of a segment as it is answered."""
        return text
