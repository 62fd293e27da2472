"""Faults that the transcription server can plant, one a process: each is a class that overrides one hook.

Which items a fault of some of them strikes is drawn from a hash of their sound: the same in every run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from typing import Any

import numpy as np
import torch
from transformers.audio_utils import mel_filter_bank

from assay.embedded import shared
from assay.embedded.asr.engine import WINDOW
from assay.embedded.asr.hooks import RATE, Hooks, Request, Samples, Segment
from assay.embedded.switch import Switch
from assay.errors import ConfigError
from assay.media.audio import Audio

FAULTS = Switch()
fault = FAULTS.fault

FRAMES_PER_S = 100
WINDOW_SAMPLES = WINDOW // FRAMES_PER_S * RATE
_DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class Planted(Hooks):
    """Base of the faults; `value` is what came after the equals sign."""

    def __init__(self, value: Any) -> None:
        self.value = value


def drawn(request: Request, salt: object, one_in: int) -> bool:
    """Whether something that strikes one request in `one_in` strikes this one: the same answer in every run."""
    digest = hashlib.sha256(request.samples.tobytes() + str(salt).encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


# --- the file ----------------------------------------------------------------------------------------------------


@fault("rate_ignored", None, "samples are taken for 16 kHz, whatever the file says")
class RateIgnored(Planted):
    def samples(self, audio: Audio) -> Samples:
        return super().samples(dataclasses.replace(audio, rate=RATE))


@fault("rate_as", int, "the sample rate is taken for VALUE [Hz], whatever the file says")
class RateAs(Planted):
    def samples(self, audio: Audio) -> Samples:
        return super().samples(dataclasses.replace(audio, rate=self.value))


@fault("resampled_by_steps", None, "samples are repeated or left out, with no filter, to come to 16 kHz")
class ResampledBySteps(Planted):
    def samples(self, audio: Audio) -> Samples:
        mono = audio.samples.mean(0)
        places = np.arange(round(audio.duration_s * RATE)) * audio.rate // RATE
        return mono[np.minimum(places, len(mono) - 1)]


@fault("channels_interleaved", None, "several channels are read as one: the sound is slow and low")
class ChannelsInterleaved(Planted):
    def samples(self, audio: Audio) -> Samples:
        return super().samples(dataclasses.replace(audio, samples=audio.samples.T.reshape(1, -1)))


@fault("channels_subtracted", None, "of two channels, one is subtracted from the other")
class ChannelsSubtracted(Planted):
    def samples(self, audio: Audio) -> Samples:
        if len(audio.samples) == 1:
            return super().samples(audio)
        return super().samples(dataclasses.replace(audio, samples=audio.samples[:1] - audio.samples[1:2]))


@fault("audio_clipped", float, "samples are multiplied by VALUE and clipped")
class AudioClipped(Planted):
    def samples(self, audio: Audio) -> Samples:
        return np.clip(super().samples(audio) * np.float32(self.value), -1, 1)


@fault("start_lost", float, "the first VALUE seconds are lost")
class StartLost(Planted):
    def request(self, request: Request) -> Request:
        return _with(request, request.samples[round(self.value * RATE) :])


@fault("tail_lost", float, "the last VALUE seconds are lost")
class TailLost(Planted):
    def request(self, request: Request) -> Request:
        return _with(request, request.samples[: max(0, len(request.samples) - round(self.value * RATE))])


@fault("tail_lost_rarely", int, "of one request in VALUE, the second half is lost")
class TailLostRarely(Planted):
    def request(self, request: Request) -> Request:
        struck = drawn(request, "tail", self.value)
        return _with(request, request.samples[: len(request.samples) // 2]) if struck else request


@fault("tail_lost_under_load", int, "the last quarter is lost while VALUE or more other requests are there")
class TailLostUnderLoad(Planted):
    def busy(self, request: Request, others: int) -> Request:
        if others < self.value:
            return request
        return _with(request, request.samples[: len(request.samples) * 3 // 4])


def _with(request: Request, samples: Samples) -> Request:
    """`request` of `samples`, of which one is there."""
    return dataclasses.replace(request, samples=samples if len(samples) else np.zeros(1, np.float32))


# --- features ----------------------------------------------------------------------------------------------------


@fault("mel_htk", None, "mel filters of HTK's scale without area normalisation, instead of Slaney's")
class MelHtk(Planted):
    def extractor(self, extractor: Any) -> None:
        extractor.mel_filters = mel_filter_bank(
            num_frequency_bins=1 + extractor.n_fft // 2,
            num_mel_filters=extractor.feature_size,
            min_frequency=0.0,
            max_frequency=RATE / 2,
            sampling_rate=RATE,
            norm=None,
            mel_scale="htk",
        )


@fault("mel_hop", int, "VALUE samples between two frames instead of 160")
class MelHop(Planted):
    def extractor(self, extractor: Any) -> None:
        extractor.hop_length = self.value


@fault("mel_unscaled", None, "log-mel values are not brought to Whisper's range")
class MelUnscaled(Planted):
    def features(self, window: torch.Tensor, length: int) -> torch.Tensor:
        return window * 4 - 4


@fault("padding_zero", None, "what follows the audio in its window is zero instead of silence")
class PaddingZero(Planted):
    def features(self, window: torch.Tensor, length: int) -> torch.Tensor:
        return torch.nn.functional.pad(window[:, :length], (0, WINDOW - length))


@fault("padding_stale", None, "what follows the audio in its window is left from the window before it")
class PaddingStale(Planted):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._before: torch.Tensor | None = None

    def features(self, window: torch.Tensor, length: int) -> torch.Tensor:
        before, self._before = self._before, window
        return window if before is None else torch.cat([window[:, :length], before[:, length:]], 1)


# --- the windows of long audio -----------------------------------------------------------------------------------


@fault("last_window_lost", None, "of audio of several windows of 30 seconds, the last is lost")
class LastWindowLost(Planted):
    def request(self, request: Request) -> Request:
        whole = (len(request.samples) - 1) // WINDOW_SAMPLES * WINDOW_SAMPLES
        return _with(request, request.samples[: whole or len(request.samples)])


@fault("later_windows_lost", None, "only the first 30 seconds are transcribed")
class LaterWindowsLost(Planted):
    def request(self, request: Request) -> Request:
        return _with(request, request.samples[:WINDOW_SAMPLES])


@fault("windows_overlap", float, "each further window begins VALUE seconds early: words at the seam come twice")
class WindowsOverlap(Planted):
    def advance(self, seek: int) -> int:
        return seek - round(self.value * FRAMES_PER_S)


@fault("windows_gap", float, "each further window begins VALUE seconds late: words at the seam are lost")
class WindowsGap(Planted):
    def advance(self, seek: int) -> int:
        return seek + round(self.value * FRAMES_PER_S)


# --- the model ---------------------------------------------------------------------------------------------------


@fault("encoder_layer_dropped", int, "layer VALUE of the encoder does nothing")
class EncoderLayerDropped(Planted):
    def model(self, model: Any) -> None:
        layer = _layer(model.model.encoder.layers, self.value, "encoder_layer_dropped")
        for linear in (layer.self_attn.out_proj, layer.fc2):
            linear.weight.data.zero_()
            linear.bias.data.zero_()


@fault("decoder_layer_dropped", int, "layer VALUE of the decoder does nothing")
class DecoderLayerDropped(Planted):
    def model(self, model: Any) -> None:
        layer = _layer(model.model.decoder.layers, self.value, "decoder_layer_dropped")
        for linear in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
            linear.weight.data.zero_()
            linear.bias.data.zero_()


def _layer(layers: Any, number: int, name: str) -> Any:
    if not 0 <= number < len(layers):
        raise ConfigError(f"fault '{name}' needs a layer from 0 to {len(layers) - 1} (found {number})")
    return layers[number]


@fault("positions_shifted", int, "the encoder's positions are off by VALUE")
class PositionsShifted(Planted):
    def model(self, model: Any) -> None:
        weight = model.model.encoder.embed_positions.weight.data
        weight.copy_(weight.roll(-self.value, 0))


@fault("weights", int, "weight matrices rounded to VALUE bits, one scale a row")
class Weights(Planted):
    def model(self, model: Any) -> None:
        levels = 2 ** (self.value - 1) - 1
        for weight in _matrices(model):
            scale = weight.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels
            weight.copy_((weight.float() / scale).round() * scale)


@fault("weight_noise", float, "Gaussian noise on every weight matrix, VALUE times its standard deviation")
class WeightNoise(Planted):
    def model(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for weight in _matrices(model):
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            weight += (self.value * weight.float().std() * noise).to(weight.dtype)


def _matrices(model: Any) -> list[torch.Tensor]:
    """Weights of the linear layers inside the blocks."""
    stacks = (model.model.encoder.layers, model.model.decoder.layers)
    return [module.weight.data for stack in stacks for module in stack.modules() if isinstance(module, torch.nn.Linear)]


# --- the request -------------------------------------------------------------------------------------------------


@fault("language_forced", str, "the language is VALUE, whatever was asked for")
class LanguageForced(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, language=self.value)


@fault("translated", None, "speech is translated into English instead of transcribed")
class Translated(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, task="translate")


# --- decoding ----------------------------------------------------------------------------------------------------


@fault("silence_unchecked", None, "what Whisper makes of silence is answered, however sure it is that nobody speaks")
class SilenceUnchecked(Planted):
    def silent(self, no_speech_prob: float, avg_logprob: float) -> bool:
        return False


@fault(
    "silence_everywhere", float, "windows are taken for silence from a probability of VALUE on, however sure the text"
)
class SilenceEverywhere(Planted):
    def silent(self, no_speech_prob: float, avg_logprob: float) -> bool:
        return no_speech_prob > self.value


@fault("silence_filled", None, "where nothing was said, a phrase of subtitles is answered")
class SilenceFilled(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        end = len(request.samples) / RATE
        return segments or [Segment(0.0, end, " Thank you for watching!", (), -0.5, 0.9)]


@fault("repeated", int, "the last segment comes VALUE times more")
class Repeated(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return segments + segments[-1:] * self.value


# --- timestamps --------------------------------------------------------------------------------------------------


@fault("times_shifted", float, "times of segments are off by VALUE seconds")
class TimesShifted(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [
            dataclasses.replace(it, start=round(it.start + self.value, 2), end=round(it.end + self.value, 2))
            for it in segments
        ]


@fault("times_of_window", None, "times of segments begin at zero again in each window")
class TimesOfWindow(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [dataclasses.replace(it, start=it.start % 30, end=it.end % 30) for it in segments]


@fault("times_swapped", None, "start and end of each segment are swapped")
class TimesSwapped(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [dataclasses.replace(it, start=it.end, end=it.start) for it in segments]


@fault("times_in_text", None, "timestamp tokens are left in the text")
class TimesInText(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [dataclasses.replace(it, text=f"<|{it.start:.2f}|>{it.text}<|{it.end:.2f}|>") for it in segments]


# --- the answer --------------------------------------------------------------------------------------------------


@fault("neighbours", None, "while others are there, a request gets the transcript of the one that began before it")
class Neighbours(Planted):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._before: Request | None = None

    def busy(self, request: Request, others: int) -> Request:
        before, self._before = self._before, request
        return _with(request, before.samples) if before and others else request


@fault("empty_rarely", int, "one request in VALUE is answered with nothing")
class EmptyRarely(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [] if drawn(request, "empty", self.value) else segments


@fault("last_segment_lost", None, "of several segments, the last is lost")
class LastSegmentLost(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return segments[:-1] if len(segments) > 1 else segments


@fault("first_word_lost", None, "the first word of each answer is lost from its text")
class FirstWordLost(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [_only_text(segments[0], r"^\s*\S+", ""), *segments[1:]] if segments else []


@fault("last_word_lost", None, "the last word of each answer is lost from its text")
class LastWordLost(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [*segments[:-1], _only_text(segments[-1], r"\s*\S+\s*$", "")] if segments else []


def _only_text(segment: Segment, pattern: str, replacement: str) -> Segment:
    return dataclasses.replace(segment, text=re.sub(pattern, replacement, segment.text))


@fault("lower_case", None, "the text is lower-cased")
class LowerCase(Planted):
    def text(self, text: str) -> str:
        return text.lower()


@fault("unpunctuated", None, "the text is without punctuation")
class Unpunctuated(Planted):
    def text(self, text: str) -> str:
        return re.sub(r"[^\w\s']", "", text)


@fault("digits_spelled", None, "digits of the text are spelled as words")
class DigitsSpelled(Planted):
    def text(self, text: str) -> str:
        return re.sub(r"(?a:\d)(?=(\d?))", lambda match: _DIGITS[int(match[0])] + (" " if match[1] else ""), text)


@fault("logprobs_nan", None, "the first logprob of each answer is NaN")
class LogprobsNan(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        if not segments:
            return segments
        first, *rest = segments[0].tokens
        return [
            dataclasses.replace(segments[0], tokens=(dataclasses.replace(first, logprob=math.nan), *rest)),
            *segments[1:],
        ]


@fault("logprobs_shifted", None, "each token carries the logprobs of the token before it")
class LogprobsShifted(Planted):
    def segments(self, segments: list[Segment], request: Request) -> list[Segment]:
        return [dataclasses.replace(it, tokens=_shifted(it)) for it in segments]


def _shifted(segment: Segment) -> Any:
    before = (segment.tokens[:1] + segment.tokens)[: len(segment.tokens)]
    return tuple(
        dataclasses.replace(token, logprob=source.logprob, top=source.top)
        for token, source in zip(segment.tokens, before, strict=True)
    )


@fault("logprobs_temperature", float, "logprobs are those of temperature VALUE")
class LogprobsTemperature(Planted):
    def reported(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.value


# --- as on every server ------------------------------------------------------------------------------------------


shared.register(FAULTS, Planted)
