"""The speech recognition reference: Whisper on transformers.

It plays the parts that `causal_lm` plays for text: as the judge and as the floor arms it transcribes greedily, as the
judge it teacher-forces what was served. It is also the pinned listener that transcribes served speech.

Long audio goes window by window, as in the original (github.com/openai/whisper, transcribe.py), with its defaults but
for these: temperature 0 alone, and no window is told the text of the one before.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from assay.media.audio import Container, decode, resample
from assay.metrics.audio import downmix
from assay.metrics.speech import Segment
from assay.references.arms import ArmSettings
from assay.references.forcing import Forced, look_up
from assay.references.placement import device_map, matmul, memory_told, require_on_devices
from assay.references.whisper_tokens import FRAME_S, Piece, Vocabulary, Window, cut, windows
from assay.references.word_times import Word, token_frames, words

Samples = npt.NDArray[np.float32]

RATE = 16_000  # Hz
WINDOW_FRAMES = 3_000
ENCODED_S = 0.02  # between encoder states
NO_SPEECH = 0.6  # a window is skipped that is likelier silent than this ...
LOGPROB = -1.0  # ... and whose tokens are on average less likely than this [nat]


@dataclass(frozen=True, eq=False)
class Clip:
    """Audio to transcribe: mono at `RATE`, full scale 1."""

    item_id: str
    samples: Samples
    language: str | None = None  # None: the model finds out

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.samples) / RATE

    @property
    def frames(self) -> int:
        """Frames of the spectrogram that hold audio."""
        return round(len(self.samples) / RATE / FRAME_S)


def clip_of(item: Mapping[str, Any]) -> Clip:
    """The clip of a row of `records.ITEMS`, decoded whole. Raises MediaError where its file is damaged."""
    audio = decode(item["audio"]["bytes"], Container(PurePath(item["audio"]["path"]).suffix.removeprefix(".")))
    return Clip(item["item_id"], listenable(audio.samples, audio.rate), json.loads(item["request"]).get("language"))


def listenable(samples: npt.NDArray[np.floating[Any]], rate: int) -> Samples:
    """[channels, samples] at any rate as the model hears it: [samples], mono at `RATE`."""
    mono = downmix(samples).astype(np.float32)[None]
    return (mono if rate == RATE else resample(mono, rate, RATE))[0]


def dithered(samples: Samples) -> Samples:
    """The same sound to any listener: with triangular noise of one 16-bit step, as a recorder would add it."""
    noise = np.random.default_rng(len(samples)).triangular(-1, 0, 1, len(samples)) / 32768
    return samples + noise.astype(np.float32)


@dataclass(frozen=True)
class Decoded:
    """What came of one window."""

    tokens: list[int]  # with the end token where it follows text
    logprobs: list[float]  # nat, of each token among those that the rules allow, all timestamps counted as one
    mean_logprob: float  # nat, of each token among those it was chosen from, the end token included
    no_speech: float  # probability


@dataclass(frozen=True)
class Transcript:
    """What the model hears in a clip. Tokens, timestamps included, are those of all segments in a row."""

    item_id: str
    language: str
    text: str
    token_ids: list[int]
    logprobs: list[float]  # nat, of every token
    segments: list[tuple[Segment, str]]  # with its text
    no_speech: list[float]  # probability that each window that was heard holds no speech
    words: list[Word] | None = None  # where they were asked for


@dataclass
class _Progress:
    """How far the transcription of a clip has come."""

    clip: Clip
    language: str
    seek: int = 0
    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    no_speech: list[float] = field(default_factory=list)

    @property
    def frames(self) -> int:
        return min(WINDOW_FRAMES, self.clip.frames - self.seek)


class Heard:
    """A clip's spectrogram, and the encoder's states of the windows that were asked for."""

    def __init__(self, whisper: Whisper, clip: Clip) -> None:
        self.clip = clip
        self._whisper = whisper
        self._encoded: dict[int, torch.Tensor] = {}

    @cached_property
    def _features(self) -> npt.NDArray[np.float32]:
        """[mel bins, frames], a window of silence after the audio's end, or of zeros (`config.Padding`)."""
        samples = dithered(self.clip.samples) if self._whisper.settings.dither else self.clip.samples
        padded = np.pad(samples, (0, round(WINDOW_FRAMES * FRAME_S * RATE)))
        extracted = self._whisper.extractor(padded, sampling_rate=RATE, truncation=False, padding=False)
        features: npt.NDArray[np.float32] = np.asarray(extracted["input_features"][0])
        if self._whisper.settings.padding == "features":
            features[:, self.clip.frames :] = 0
        return features

    def window(self, seek: int) -> torch.Tensor:
        """Spectrogram from frame `seek` on: [mel bins, WINDOW_FRAMES], of the model's dtype."""
        model = self._whisper.model
        return torch.from_numpy(self._features[:, seek : seek + WINDOW_FRAMES]).to(model.device, model.dtype)

    @torch.inference_mode()
    def encoded(self, seek: int) -> torch.Tensor:
        """Encoder states of that window: [1, states, width]."""
        if seek not in self._encoded:
            self._encoded[seek] = self._whisper.encode([self.window(seek)])
        return self._encoded[seek]


class Whisper:
    """A Whisper model with its tokenizer, loaded one way."""

    def __init__(self, directory: str | Path, settings: ArmSettings, gpus: int = 0) -> None:
        """Load the model, on the CPU or on the `gpus` devices leased for this process.

        Raises:
            DeviceError: torch does not see these devices, or the model has no room on them.
        """
        self.settings = settings
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.extractor = WhisperFeatureExtractor.from_pretrained(directory)
        self.vocabulary = Vocabulary.of(directory)
        with memory_told():
            self.model = WhisperForConditionalGeneration.from_pretrained(
                directory,
                dtype=getattr(torch, settings.dtype),
                attn_implementation=settings.attention,
                device_map=device_map(gpus),
            ).eval()
        require_on_devices(self.model, gpus)

    @property
    def room(self) -> int:
        """Tokens that a window may have."""
        return int(self.model.config.max_target_positions) - len(self.vocabulary.prompt("en"))

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether every id is in the model's vocabulary: no other can be judged."""
        return not ids or (min(ids) >= 0 and max(ids) < self.model.config.vocab_size)

    # --- text ---

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without timestamps and special tokens."""
        text = [token for token in ids if token < self.vocabulary.end]
        return self.tokenizer.decode(text, clean_up_tokenization_spaces=False)

    def retokenise(self, text: str) -> list[int] | None:
        """The tokens that a window's text encodes to, as the model says it: after a space.

        None where they do not decode to exactly the text (evidence E3): there is nothing to judge then.
        """
        said = f" {text.strip()}"
        ids = self.tokenizer(said, add_special_tokens=False)["input_ids"]
        return ids if self.decode(ids) == said else None

    # --- transcription ---

    def transcribe(self, samples: Samples, language: str | None = None, with_words: bool = False) -> Transcript:
        """What is said in one clip: [samples], mono at `RATE`."""
        clip = Clip("", samples, language)
        (found,) = self.generate([clip])
        return found if not with_words else self.with_words(found, clip)

    @torch.inference_mode()
    def generate(self, clips: Iterable[Clip]) -> Iterator[Transcript]:
        """Transcribe each clip; windows of several are decoded together. The results come as they are done."""
        ahead = iter(clips)
        open_clips: list[tuple[Heard, _Progress]] = []
        with self._computing():
            while True:
                while len(open_clips) < self.settings.batch and (clip := next(ahead, None)) is not None:
                    heard = Heard(self, clip)
                    open_clips.append((heard, _Progress(clip, clip.language or self.language(heard))))
                if not open_clips:
                    return
                states = self.encode([heard.window(done.seek) for heard, done in open_clips])
                decoded = self._decode(states, [done.language for _, done in open_clips])
                for (_, done), window in zip(open_clips, decoded, strict=True):
                    self._take(done, window)
                yield from (self._transcript(done) for _, done in open_clips if done.frames <= 0)
                open_clips = [pair for pair in open_clips if pair[1].frames > 0]

    def _take(self, done: _Progress, window: Decoded) -> None:
        """Add what a window said to its clip, unless nobody speaks in it, and go on to the next."""
        done.no_speech.append(window.no_speech)
        if window.no_speech > NO_SPEECH and window.mean_logprob <= LOGPROB:
            done.seek += done.frames
            return
        pieces, frames = cut(window.tokens, self.vocabulary.first_stamp, done.seek, done.frames)
        place = 0
        for piece in pieces:
            logprobs = window.logprobs[place : place + len(piece.tokens)]
            place += len(piece.tokens)
            if piece.segment.start_s < piece.segment.end_s and self.decode(piece.tokens).strip():
                done.pieces.append(piece)
                done.logprobs += logprobs
        done.seek += frames

    def _transcript(self, done: _Progress) -> Transcript:
        segments = [(piece.segment, self.decode(piece.tokens)) for piece in done.pieces]
        return Transcript(
            item_id=done.clip.item_id,
            language=done.language,
            text="".join(text for _, text in segments).strip(),
            token_ids=[token for piece in done.pieces for token in piece.tokens],
            logprobs=done.logprobs,
            segments=segments,
            no_speech=done.no_speech,
        )

    def encode(self, spectra: Sequence[torch.Tensor]) -> torch.Tensor:
        """Encoder states [windows, states, width] of spectra of windows."""
        return self.model.model.encoder(torch.stack(list(spectra))).last_hidden_state

    @torch.inference_mode()
    def language(self, heard: Heard) -> str:
        """The language that the clip's first window is in."""
        start = self._tensor([[self.vocabulary.start]])
        logits = self._logits(start, heard.encoded(0))[0, -1]
        return max(self.vocabulary.languages, key=lambda name: float(logits[self.vocabulary.languages[name]]))

    def _logits(self, ids: torch.Tensor, states: torch.Tensor, cache: EncoderDecoderCache | None = None) -> Any:
        output = self.model(
            encoder_outputs=(states,), decoder_input_ids=ids, past_key_values=cache, use_cache=cache is not None
        )
        return output.logits.float()

    def _decode(self, states: torch.Tensor, languages: Sequence[str]) -> list[Decoded]:
        """Greedy transcripts of windows, from their encoder states."""
        vocabulary = self.vocabulary
        prompts = [vocabulary.prompt(language) for language in languages]
        cache = EncoderDecoderCache(DynamicCache(config=self.model.config), DynamicCache(config=self.model.config))
        logits = self._logits(self._tensor(prompts), states, cache)
        no_speech = torch.softmax(logits[:, 0], -1)[:, vocabulary.no_speech].tolist()
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        chosen_from: list[list[float]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))  # that are not done
        for _ in range(self.room):
            for row, row_logits in zip(rows, logits[:, -1], strict=True):
                lp = torch.log_softmax(vocabulary.rule_out(row_logits, tokens[row]), -1)
                choices = vocabulary.stamps_first(lp)
                token = int(choices.argmax())
                tokens[row].append(token)
                chosen_from[row].append(float(choices[token]))
                logprobs[row].append(float(vocabulary.stamps_as_one(lp)[min(token, vocabulary.first_stamp)]))
            going = [place for place, row in enumerate(rows) if tokens[row][-1] != vocabulary.end]
            if not going:
                break
            if len(going) < len(rows):
                rows, states = [rows[place] for place in going], states[going]
                cache.batch_select_indices(self._tensor(going))
            logits = self._logits(self._tensor([tokens[row][-1:] for row in rows]), states, cache)
        found = []
        for row, said in enumerate(tokens):
            closed = said[-1] == vocabulary.end and (len(said) == 1 or vocabulary.is_stamp(said[-2]))
            count = len(said) - closed
            found.append(Decoded(said[:count], logprobs[row][:count], float(np.mean(chosen_from[row])), no_speech[row]))
        return found

    # --- teacher forcing ---

    def windows(self, clip: Clip, token_ids: Sequence[int], starts_s: Sequence[float]) -> list[Window] | None:
        """The windows of a clip that a transcript's tokens come from; None where that can't be told."""
        found = windows(token_ids, starts_s, self.vocabulary.first_stamp)
        if found is None or any(not 0 <= window.seek < clip.frames for window in found):
            return None
        return None if any(len(window.tokens) > self.room for window in found) else found

    @torch.inference_mode()
    def force(self, heard: Heard, language: str, window: Window, timestamps: bool = True) -> tuple[list[int], Forced]:
        """The judge's distribution at every token of one window, all timestamps counted as one token.

        Args:
            heard: the clip.
            language: of the transcript.
            window: its place, and at least one token of the vocabulary (see `knows`).
            timestamps: whether the tokens have them; without any, the window is forced as a text that has none.

        Returns:
            The tokens, with the end token after text that nothing closes, and float32 arrays of as many rows, in nats.
            A token that the decoder's rules forbid there has the probability that it has without them.
        """
        vocabulary = self.vocabulary
        tokens = list(window.tokens)
        if tokens[-1] < vocabulary.end:
            tokens.append(vocabulary.end)
        prompt = vocabulary.prompt(language, timestamps)
        with self._computing():
            ids = self._tensor([[*prompt, *tokens[:-1]]])
            logits = self._logits(ids, heard.encoded(window.seek))[0, len(prompt) - 1 :]
        allowed = torch.stack(
            [vocabulary.rule_out(row, tokens[:place], timestamps) for place, row in enumerate(logits)]
        )
        own = self._tensor(tokens)[:, None]
        allowed.scatter_(1, own, logits.gather(1, own))
        raw = vocabulary.stamps_as_one(torch.log_softmax(allowed, -1))
        return tokens, look_up(raw, [min(token, vocabulary.first_stamp) for token in tokens], raw)

    # --- words ---

    @torch.inference_mode()
    def with_words(self, transcript: Transcript, clip: Clip) -> Transcript:
        """A transcript of `generate` with the time of every word."""
        heard = Heard(self, clip)
        starts = [segment.start_s for segment, _ in transcript.segments]
        found: list[Word] = []
        for window in self.windows(clip, transcript.token_ids, starts) or []:
            text = [token for token in window.tokens if token < self.vocabulary.end]
            times = self._times(heard, transcript.language, window.seek, text)
            found += words(text, times, self.decode)
        return Transcript(**{**vars(transcript), "words": found})

    def _times(self, heard: Heard, language: str, seek: int, text: Sequence[int]) -> list[float]:
        """When each token of a window's text is said, and when the last ends [s]."""
        prompt = self.vocabulary.prompt(language, timestamps=False)
        with self._eager():
            output = self.model(
                encoder_outputs=(heard.encoded(seek),),
                decoder_input_ids=self._tensor([[*prompt, *text, self.vocabulary.end]]),
                output_attentions=True,
            )
        heads = self.model.generation_config.alignment_heads
        states = min(WINDOW_FRAMES, heard.clip.frames - seek) // round(ENCODED_S / FRAME_S)
        weights = torch.stack([output.cross_attentions[layer][0, head] for layer, head in heads]).float().cpu().numpy()
        weights = weights[:, len(prompt) - 1 : -1, : max(1, states)]
        # Row n of the decoder's attention is what it looked at to say token n + 1; the last row says the end.
        first = token_frames(weights, self.model.config.median_filter_width)
        return [seek * FRAME_S + float(frame) * ENCODED_S for frame in first]

    @contextlib.contextmanager
    def _eager(self) -> Iterator[None]:
        """Attention that can be looked at."""
        self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            self.model.set_attn_implementation(self.settings.attention)

    # --- devices ---

    def _tensor(self, values: Any) -> torch.Tensor:
        """`values` where the model is."""
        return torch.as_tensor(values, device=self.model.device)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with memory_told(), matmul(self.model.device, self.settings.alternative_matmul):
            yield
