"""Faults that the speech server can plant, one a process: each is a class that overrides one hook.

Which requests a fault of some of them strikes is drawn from a hash of the text: the same in every run.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from assay.drivers.common import Samples, Synthesizer, joined
from assay.embedded.api import ApiError
from assay.embedded.switch import Switch
from assay.embedded.tts.hooks import Hooks, Speech, wav_header
from assay.errors import ConfigError

FAULTS = Switch()
fault = FAULTS.fault

INSTRUCTION = "Read the following sentence aloud in a calm and friendly voice."


class Planted(Hooks):
    """Base of the faults; `value` is what came after the equals sign."""

    rate = 0  # of the model [Hz]

    def __init__(self, value: Any) -> None:
        self.value = value

    def model(self, model: Synthesizer) -> None:
        self.rate = model.rate

    def samples(self, seconds: float) -> int:
        """How many samples last so long."""
        return round(seconds * self.rate)


class PlantedSound(Planted):
    """Base of the faults of the whole sound of an answer, streamed or not."""

    def pieces(self, pieces: Iterator[Samples], speech: Speech) -> Iterator[Samples]:
        yield self.sound(joined(pieces), speech).astype(np.float32)

    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        """What is sent of the sound."""
        raise NotImplementedError


class PlantedStream(Planted):
    """Base of the faults of the chunks of a stream."""

    def chunks(self, chunks: Iterator[Samples], speech: Speech) -> Iterator[Samples]:
        yield from self.sent(list(chunks))

    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        """What is sent of the chunks."""
        raise NotImplementedError


def drawn(text: str, salt: object, rate: float) -> bool:
    """Whether something that strikes with probability `rate` strikes here: the same answer in every run."""
    digest = hashlib.sha256(f"{text} {salt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < rate * 2**64


def _rms(sound: Samples) -> float:
    return float(np.sqrt(np.mean(np.square(sound, dtype=np.float64)))) if sound.size else 0.0


# --- the text that is spoken -------------------------------------------------------------------------------------


class PlantedText(Planted):
    """Base of the faults of the text."""

    def speech(self, speech: Speech) -> Speech:
        return dataclasses.replace(speech, text=self.text(speech) or speech.text)

    def text(self, speech: Speech) -> str:
        """What is spoken; of a text that nothing is left of, all."""
        raise NotImplementedError


@fault("last_word", None, "the last word is not spoken")
class LastWord(PlantedText):
    def text(self, speech: Speech) -> str:
        return " ".join(speech.text.split()[:-1])


@fault("last_sentence", None, "of several sentences the last one is not spoken")
class LastSentence(Planted):
    def pieces(self, pieces: Iterator[Samples], speech: Speech) -> Iterator[Samples]:
        sentences = list(pieces)
        return iter(sentences[:-1] or sentences)


@fault("words_skipped", float, "each word is skipped with probability VALUE")
class WordsSkipped(PlantedText):
    def text(self, speech: Speech) -> str:
        words = enumerate(speech.text.split())
        return " ".join(word for place, word in words if not drawn(speech.text, place, self.value))


@fault("words_skipped_load", float, "each word is skipped with probability VALUE while other requests run")
class WordsSkippedLoad(WordsSkipped):
    def text(self, speech: Speech) -> str:
        return super().text(speech) if speech.others else speech.text


@fault("neighbour", float, "under load, with probability VALUE, the text of another request is spoken instead")
class Neighbour(PlantedText):
    def text(self, speech: Speech) -> str:
        others = [text for text in speech.others if text != speech.text]
        return others[-1] if others and drawn(speech.text, "neighbour", self.value) else speech.text


@fault("instruction", float, "with probability VALUE an instruction is spoken before the text")
class Instruction(PlantedText):
    def text(self, speech: Speech) -> str:
        return f"{INSTRUCTION} {speech.text}" if drawn(speech.text, "instruction", self.value) else speech.text


@fault("digits_dropped", None, "digits are not spoken")
class DigitsDropped(PlantedText):
    def text(self, speech: Speech) -> str:
        return re.sub(r"\d[\d,.:]*", "", speech.text)


@fault("phonemes", float, "each sign of the phoneme alphabet stands for another with probability VALUE")
class Phonemes(Planted):
    def model(self, model: Synthesizer) -> None:
        super().model(model)
        struck = [sign for sign in sorted(model.vocab) if sign.isalpha() and drawn(sign, "phonemes", self.value)]
        ids = [model.vocab[sign] for sign in struck]
        model.vocab.update(zip(struck, ids[1:] + ids[:1], strict=True))


# --- the request -------------------------------------------------------------------------------------------------


@fault("speed", float, "spoken VALUE times as fast")
class Speed(Planted):
    def speech(self, speech: Speech) -> Speech:
        return dataclasses.replace(speech, speed=speech.speed * self.value)


@fault("voice", str, "voice VALUE instead of the one asked for")
class Voice(Planted):
    def model(self, model: Synthesizer) -> None:
        super().model(model)
        if self.value not in model.voices:
            raise ConfigError(f"fault 'voice' needs one of {', '.join(model.voices)} (found '{self.value}')")

    def speech(self, speech: Speech) -> Speech:
        return dataclasses.replace(speech, voice=self.value)


@fault("seed_off", int, "the seed is VALUE more than the one asked for")
class SeedOff(Planted):
    def speech(self, speech: Speech) -> Speech:
        return dataclasses.replace(speech, seed=speech.seed + self.value)


@fault("http_500", float, "with probability VALUE a request is answered with HTTP 500")
class Http500(Planted):
    code = 500

    def speech(self, speech: Speech) -> Speech:
        if drawn(speech.text, "error", self.value):
            raise ApiError(self.code, "planted error")
        return speech


@fault("error_200", float, "with probability VALUE a request is answered with HTTP 200 and an error object")
class Error200(Http500):
    code = 200


# --- the sound ---------------------------------------------------------------------------------------------------


@fault("truncated", float, "the last VALUE of the sound is missing, as a fraction")
class Truncated(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return sound[: round(len(sound) * (1 - self.value))]


@fault("truncated_rare", float, "with probability VALUE the second half of the sound is missing")
class TruncatedRare(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return sound[: len(sound) // 2] if drawn(speech.text, "truncated", self.value) else sound


@fault("tail_cut", float, "the last VALUE seconds are missing")
class TailCut(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return sound[: max(1, len(sound) - self.samples(self.value))]


@fault("head_cut", float, "the first VALUE seconds are missing")
class HeadCut(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return sound[min(self.samples(self.value), len(sound) - 1) :]


@fault("silence", float, "with probability VALUE an answer is silent, as long as it should be")
class Silence(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return np.zeros_like(sound) if drawn(speech.text, "silence", self.value) else sound


@fault("short_silent", None, "answers to one or two words are silent")
class ShortSilent(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return np.zeros_like(sound) if len(speech.text.split()) <= 2 else sound


@fault("lead_silence", float, "VALUE seconds of silence before the sound")
class LeadSilence(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return np.pad(sound, (self.samples(self.value), 0))


@fault("trail_silence", float, "VALUE seconds of silence after the sound")
class TrailSilence(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return np.pad(sound, (0, self.samples(self.value)))


@fault("noise", float, "with probability VALUE an answer is noise of the same level and length")
class Noise(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        if not drawn(speech.text, "noise", self.value):
            return sound
        return np.random.default_rng(0).standard_normal(len(sound)) * _rms(sound)


@fault("hiss", float, "white noise of level VALUE (RMS, full scale 1) over the sound")
class Hiss(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return sound + np.random.default_rng(0).standard_normal(len(sound)) * self.value


@fault("hum", None, "one tone instead of speech, as from codes that never change")
class Hum(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return np.sin(2 * np.pi * 220 * np.arange(len(sound)) / self.rate) * _rms(sound) * np.sqrt(2)


@fault("gain", float, "VALUE times as loud, clipped")
class Gain(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return sound * self.value


@fault("dc_offset", float, "VALUE added to every sample")
class DcOffset(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return sound + self.value


@fault("polarity", None, "every sample negated")
class Polarity(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return -sound


@fault("resampled", int, "the sound resampled to VALUE Hz and declared to have the model's rate")
class Resampled(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        length = round(len(sound) * self.value / self.rate)
        return np.interp(np.arange(length) * self.rate / self.value, np.arange(len(sound)), sound)


@fault("lowpass", float, "nothing above VALUE Hz")
class Lowpass(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        spectrum = np.fft.rfft(sound)
        spectrum[np.fft.rfftfreq(len(sound), 1 / self.rate) > self.value] = 0
        return np.fft.irfft(spectrum, len(sound))


@fault("twice", None, "everything is said twice")
class Twice(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return np.tile(sound, 2)


@fault("stutter", float, "half a second in the middle is repeated VALUE times")
class Stutter(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        middle, half = len(sound) // 2, self.samples(0.25)
        start, end = max(0, middle - half), middle + half
        return np.concatenate([sound[:start], np.tile(sound[start:end], int(self.value)), sound[end:]])


@fault("gaps", float, "VALUE seconds of silence every half second")
class Gaps(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        step = self.samples(0.5)
        gap = np.zeros(self.samples(self.value))
        return np.concatenate([part for at in range(0, len(sound), step) for part in (sound[at : at + step], gap)])


@fault("pitch", float, "another speaker: formants and pitch VALUE times as high, the words as long")
class Pitch(PlantedSound):
    def sound(self, sound: Samples, speech: Speech) -> npt.NDArray[Any]:
        return _shifted(sound, self.value, self.samples(0.04))


def _shifted(sound: Samples, ratio: float, window: int) -> npt.NDArray[Any]:
    """Each of the overlapping windows is read `ratio` times as fast."""
    taper, result = np.hanning(window), np.zeros(len(sound) + window)
    for start in range(0, len(sound), window // 2):
        at = start + np.arange(window) * ratio
        result[start : start + window] += taper * np.interp(at, np.arange(len(sound)), sound, right=0)
    return result[: len(sound)]


# --- a stream ----------------------------------------------------------------------------------------------------


@fault("last_chunk", None, "the last chunk of a stream of several is not sent")
class LastChunk(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        return chunks[:-1] or chunks


@fault("first_chunk", None, "the first chunk of a stream of several is not sent")
class FirstChunk(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        return chunks[1:] or chunks


@fault("chunk_doubled", None, "the second chunk of a stream is sent twice")
class ChunkDoubled(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        return [*chunks[:2], *chunks[1:2], *chunks[2:]]


@fault("chunks_swapped", None, "the second and third chunk of a stream change places")
class ChunksSwapped(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        return [*chunks[:1], *reversed(chunks[1:3]), *chunks[3:]]


@fault("cumulative", None, "each chunk of a stream holds all sound so far")
class Cumulative(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        return [np.concatenate(chunks[: count + 1]) for count in range(len(chunks))]


@fault("seam_loss", int, "VALUE samples are missing at every seam of a stream")
class SeamLoss(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        return [chunk[self.value if place else 0 :] for place, chunk in enumerate(chunks)]


@fault("seam_overlap", int, "VALUE samples are repeated at every seam of a stream")
class SeamOverlap(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        tails = (np.concatenate([before[-self.value :], chunk]) for before, chunk in pairwise(chunks))
        return [*chunks[:1], *tails]


@fault("seam_click", float, "a sample of VALUE (full scale 1) at every seam of a stream")
class SeamClick(PlantedStream):
    def sent(self, chunks: list[Samples]) -> Iterable[Samples]:
        return [np.concatenate([np.full(1, self.value if place else chunk[0], np.float32), chunk[1:]])
                for place, chunk in enumerate(chunks)]  # fmt: skip


# --- the bytes ---------------------------------------------------------------------------------------------------


@fault("int16_overflow", float, "VALUE times as loud, and samples beyond the range wrap around")
class Int16Overflow(Planted):
    def pcm(self, samples: Samples) -> bytes:
        return (samples * self.value * 32767).astype(np.int64).astype("<i2").tobytes()


@fault("big_endian", None, "the two bytes of every sample change places")
class BigEndian(Planted):
    def pcm(self, samples: Samples) -> bytes:
        return np.frombuffer(super().pcm(samples), "<i2").byteswap().tobytes()


@fault("eight_bits", None, "the lower eight bits of every sample are lost")
class EightBits(Planted):
    def pcm(self, samples: Samples) -> bytes:
        return (np.frombuffer(super().pcm(samples), "<i2") & -256).tobytes()


@fault("nan", None, "samples as 32-bit floats, one in a thousand NaN")
class Nan(Planted):
    def pcm(self, samples: Samples) -> bytes:
        wrong = samples.astype("<f4")
        wrong[::1000] = np.nan
        return wrong.tobytes()

    def header(self, rate: int, size: int | None) -> bytes:
        return wav_header(rate, size, tag=3, bits=32)


@fault("header_rate", int, "the header says VALUE Hz")
class HeaderRate(Planted):
    def header(self, rate: int, size: int | None) -> bytes:
        return wav_header(self.value, size)


@fault("header_stereo", None, "the header says two channels")
class HeaderStereo(Planted):
    def header(self, rate: int, size: int | None) -> bytes:
        return wav_header(rate, size, channels=2)


@fault("header_short", None, "the header says half of the samples that follow")
class HeaderShort(Planted):
    def header(self, rate: int, size: int | None) -> bytes:
        return wav_header(rate, size // 4 * 2 if size is not None else self.samples(0.5))


@fault("header_long", None, "the header says twice the samples that follow, as after a truncation")
class HeaderLong(Planted):
    def header(self, rate: int, size: int | None) -> bytes:
        return wav_header(rate, 2 * size if size is not None else self.samples(3600))


@fault("header_missing", None, "samples without a header")
class HeaderMissing(Planted):
    def header(self, rate: int, size: int | None) -> bytes:
        return b""


class PlantedParts(Planted):
    """Base of the faults of the body: a header, and what follows it."""

    def parts(self, parts: Iterator[bytes], speech: Speech) -> Iterator[bytes]:
        yield from self.sent(list(parts))

    def sent(self, parts: list[bytes]) -> Iterable[bytes]:
        """What is sent of the parts."""
        raise NotImplementedError


@fault("header_per_chunk", None, "every chunk of a stream is a file of its own")
class HeaderPerChunk(Planted):
    def parts(self, parts: Iterator[bytes], speech: Speech) -> Iterator[bytes]:
        if not speech.streamed or speech.format != "wav":
            yield from parts
            return
        next(parts)
        yield from (wav_header(self.rate, len(part)) + part for part in parts)


@fault("odd_bytes", None, "the last byte is missing")
class OddBytes(PlantedParts):
    def sent(self, parts: list[bytes]) -> Iterable[bytes]:
        return [*parts[:-1], parts[-1][:-1]]


@fault("misaligned", None, "the first byte of the samples is missing, so that all are read across")
class Misaligned(PlantedParts):
    def sent(self, parts: list[bytes]) -> Iterable[bytes]:
        head = [part for part in parts if part.startswith(b"RIFF")]
        sound = b"".join(parts[len(head) :])
        return [*head, sound[1:] + b"\0"]


@fault("empty", float, "with probability VALUE a body of no bytes")
class Empty(Planted):
    def parts(self, parts: Iterator[bytes], speech: Speech) -> Iterator[bytes]:
        return iter(()) if drawn(speech.text, "empty", self.value) else parts


@fault("header_only", None, "a header and no sample")
class HeaderOnly(PlantedParts):
    def sent(self, parts: list[bytes]) -> Iterable[bytes]:
        return [struct.pack("<40sI", parts[0][:40], 0)]


@fault("base64_body", None, "the file as base64, where bytes are due")
class Base64Body(PlantedParts):
    def sent(self, parts: list[bytes]) -> Iterable[bytes]:
        return [base64.b64encode(b"".join(parts))]


@fault("broken_off", float, "with probability VALUE the connection breaks off before the last part")
class BrokenOff(Planted):
    def parts(self, parts: Iterator[bytes], speech: Speech) -> Iterator[bytes]:
        sent = list(parts)
        if drawn(speech.text, "broken_off", self.value):
            yield from sent[:-1]
            raise ConnectionError("planted: the connection breaks off")
        yield from sent


# --- benign: must not fail ---------------------------------------------------------------------------------------


@fault("rounded", None, "benign: samples rounded to the nearest integer, not towards zero")
class Rounded(Planted):
    def pcm(self, samples: Samples) -> bytes:
        return np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
