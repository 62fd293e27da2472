"""Whisper's transcription of audio of any length, window after window, windows of several requests in one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from assay.embedded.asr.hooks import RATE, Hooks, Request, Segment, Token, Transcript
from assay.embedded.batching import Batcher

WINDOW = 3000  # frames of features that the encoder takes: 30 s
FRAME_S = 0.01
TIMESTAMP_S = 0.02  # between two timestamp tokens, which is 2 frames
FRAMES_PER_TIMESTAMP = 2

Emit = Callable[[Transcript | Exception], None]


@dataclass(frozen=True)
class Cut:
    """A segment of a window, before its text is known: times [s] from the window's start, and tokens by place."""

    start: float
    end: float
    first: int
    last: int  # exclusive


def cut(ids: list[int], timestamp_0: int, frames: int) -> tuple[list[Cut], int]:
    """Cut the tokens of a window at its timestamps; return the segments and how many frames they use up.

    Whisper's rule: two timestamps in a row end a segment; what follows the last pair is heard again by the next window,
    unless a single timestamp ends the window (https://github.com/openai/whisper/blob/v20250625/whisper/transcribe.py).

    Args:
        ids: tokens of the window, without prompt and end of text.
        timestamp_0: id of <|0.00|>.
        frames: of the window that are audio.
    """
    times = [(token - timestamp_0) * TIMESTAMP_S if token >= timestamp_0 else None for token in ids]
    pairs = [place for place in range(1, len(ids)) if times[place] is not None and times[place - 1] is not None]
    ends_single = len(ids) > 1 and times[-1] is not None and times[-2] is None
    if not pairs:
        stamps = [time for time in times if time]  # <|0.00|> says nothing of the end
        return [Cut(0.0, stamps[-1] if stamps else frames * FRAME_S, 0, len(ids))], frames
    bounds = [*pairs, len(ids)] if ends_single else pairs
    cuts = []
    for first, last in zip([0, *bounds], bounds, strict=False):
        start, end = times[first], times[last - 1]
        cuts.append(Cut(start or 0.0, end or 0.0, first, last))
    used = frames if ends_single else (ids[bounds[-1] - 1] - timestamp_0) * FRAMES_PER_TIMESTAMP
    return cuts, used or frames


class Job:
    """A request on its way: who waits for it, and how far it is."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.emit = request, emit
        self.features = torch.empty(0)  # [mel, frame], WINDOW frames of silence behind the audio
        self.frames = self.seek = 0
        self.language = ""
        self.segments: list[Segment] = []

    @property
    def done(self) -> bool:
        """Whether all of its audio was heard."""
        return self.seek >= self.frames


class Engine(Batcher[Job]):
    """Whisper, and the thread that runs it. Use as a context manager.

    Raises (on construction): whatever transformers raises for a folder that holds no such model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, hooks: Hooks | None = None) -> None:
        super().__init__()
        self.dtype, self.hooks = dtype, hooks or Hooks()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.hooks.model(self.model)
        self.hooks.extractor(self.extractor)
        config = self.model.generation_config
        self.languages = {name.strip("<|>"): token for name, token in config.lang_to_id.items()}
        self.timestamp_0 = config.no_timestamps_token_id + 1
        self.no_speech = config.no_timestamps_token_id - 1

    def _start(self) -> None:
        self.hooks.ready()

    def _admit(self) -> None:
        while self._ready and len(self._jobs) < self.hooks.max_rows:
            job = self._ready.pop(0)
            job.request = self.hooks.busy(job.request, len(self._jobs) + len(self._ready))
            self._listen(job)
            self._jobs.append(job)

    def _listen(self, job: Job) -> None:
        """Features of the whole audio, and its language."""
        samples = job.request.samples
        padded = np.pad(samples, (0, WINDOW * self.extractor.hop_length))
        found = self.extractor(padded, sampling_rate=RATE, truncation=False, padding=False, return_tensors="np")
        job.features = torch.from_numpy(found.input_features[0])
        job.frames = max(1, len(samples) // self.extractor.hop_length)
        job.language = job.request.language or self._detect(job)

    def _detect(self, job: Job) -> str:
        token = int(self.model.detect_language(input_features=self._window(job)[None]))
        return next(name for name, known in self.languages.items() if known == token)

    def _window(self, job: Job) -> torch.Tensor:
        """Features of the next window of a job; [mel, WINDOW]."""
        window = job.features[:, job.seek : job.seek + WINDOW]
        window = torch.nn.functional.pad(window, (0, WINDOW - window.shape[1]))
        return self.hooks.features(window, min(WINDOW, job.frames - job.seek)).to(self.dtype)

    def _step(self) -> None:
        """One window of every running request."""
        if not self._jobs:
            return
        encoded = BaseModelOutput(self.model.get_encoder()(torch.stack([self._window(job) for job in self._jobs]))[0])
        start = torch.full((len(self._jobs), 1), self.model.config.decoder_start_token_id)
        first = self.model(encoder_outputs=encoded, decoder_input_ids=start).logits[:, 0].float().softmax(-1)
        generated = self.model.generate(
            encoder_outputs=encoded,
            language=[job.language for job in self._jobs],
            task=self._jobs[0].request.task,
            return_timestamps=True,
            do_sample=False,
            force_unique_generate_call=True,
            return_dict_in_generate=True,
            output_logits=True,
            output_scores=True,
        )
        for row, job in enumerate(self._jobs):
            self._take(
                job,
                Decoded(generated, row, self.model.generation_config.eos_token_id),
                float(first[row, self.no_speech]),
            )
        self._finish()

    def _take(self, job: Job, decoded: Decoded, no_speech_prob: float) -> None:
        """Add the segments of a window, and go on to the next."""
        frames = min(WINDOW, job.frames - job.seek)
        if self.hooks.silent(no_speech_prob, decoded.avg_logprob):
            job.seek += frames
            return
        cuts, used = cut(decoded.ids, self.timestamp_0, frames)
        offset = job.seek * FRAME_S
        for part in cuts:
            tokens = decoded.tokens(part.first, part.last, job.request.top_logprobs or 0, self.hooks)
            text = self.tokenizer.decode([token.id for token in tokens], skip_special_tokens=True)
            if text.strip() and part.end > part.start:
                job.segments.append(
                    Segment(
                        round(offset + part.start, 2),
                        round(offset + part.end, 2),
                        self.hooks.text(text),
                        tokens,
                        decoded.avg_logprob,
                        no_speech_prob,
                    )
                )
        job.seek = self.hooks.advance(job.seek + used) if job.seek + used < job.frames else job.frames

    def _finish(self) -> None:
        for job in [job for job in self._jobs if job.done]:
            self._jobs.remove(job)
            job.emit(self._transcript(job))

    def _transcript(self, job: Job) -> Transcript:
        segments = self.hooks.segments(job.segments, job.request)
        config = self.model.generation_config
        prompt = (
            config.decoder_start_token_id,
            self.languages[job.language],
            config.task_to_id[job.request.task],
        )
        return Transcript(
            text="".join(segment.text for segment in segments),
            language=job.language,
            duration=len(job.request.samples) / RATE,
            prompt_ids=prompt,
            segments=tuple(segments),
        )


class Decoded:
    """One row of what `generate` gave: its tokens, those before the end of text, and their logits."""

    def __init__(self, generated: Any, row: int, end_of_text: int) -> None:
        self._logits, self._scores, self._row = generated.logits, generated.scores, row
        self._drawn: list[int] = generated.sequences[row, -len(self._logits) :].tolist()
        ends = [place for place, token in enumerate(self._drawn) if token == end_of_text]
        self.ids = self._drawn[: ends[0]] if ends else self._drawn

    @property
    def avg_logprob(self) -> float:
        """Mean logprob of the tokens and the end of text, where it came [nat]."""
        drawn = self._drawn[: len(self.ids) + 1]
        logprobs = [
            float(scores[self._row].float().log_softmax(-1)[token])
            for token, scores in zip(drawn, self._scores, strict=False)
        ]
        return sum(logprobs) / len(logprobs)

    def tokens(self, first: int, last: int, top: int, hooks: Hooks) -> tuple[Token, ...]:
        """The tokens from place `first` to before `last`, each with the `top` most likely ones."""
        return tuple(self._token(place, top, hooks) for place in range(first, last))

    def _token(self, place: int, top: int, hooks: Hooks) -> Token:
        logprobs = hooks.reported(self._logits[place][self._row].float()).log_softmax(-1)
        values, ids = logprobs.topk(top)
        return Token(
            self.ids[place], float(logprobs[self.ids[place]]), tuple(zip(ids.tolist(), values.tolist(), strict=True))
        )
