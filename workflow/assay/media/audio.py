"""Served audio: bytes to samples and back. A response is decoded whole or refused with one reason."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from assay.errors import MediaError
from assay.media.faults import Fault
from assay.media.wav import BITS, count_files, read_header
from assay.metrics.audio import float_to_int16

Samples = npt.NDArray[np.float32]


class Container(StrEnum):
    """Files that are read, under the names of the OpenAI speech route's `response_format`."""

    WAV = "wav"
    FLAC = "flac"
    MP3 = "mp3"
    OGG = "opus"  # Opus (or Vorbis) in Ogg


_MARKS = {b"RIFF": Container.WAV, b"fLaC": Container.FLAC, b"OggS": Container.OGG, b"ID3": Container.MP3}
_FILES = {  # what each file has once
    Container.FLAC: re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),  # the mark and the head of a block of 34 bytes
    Container.MP3: re.compile(rb"(?:Xing|Info)\x00\x00\x00[\x00-\x0f]", re.DOTALL),  # the frame that counts, if any
}
_OGG_HEAD = re.compile(rb"OggS\x00[\x02\x03\x06\x07]")  # the first page of a stream
_OGG_FIRST, _OGG_LAST = 2, 4  # bits of a page's header type
_XING_FRAMES, _XING_BYTES = 1, 2  # bits that tell which counts follow


@dataclass(frozen=True)
class Pcm:
    """Samples without a header: what the request must say, because the bytes can't."""

    rate: int  # Hz
    channels: int = 1
    encoding: str = "PCM_16"  # libsndfile's name; little-endian


@dataclass(frozen=True)
class Header:
    """What the file says of itself."""

    frames: int | None = None  # samples of one channel; None where the length is left open, or there is no header
    bits: int | None = None  # of a sample in a WAV
    byte_rate_agrees: bool = True  # a WAV whose rate was patched keeps the old one here


@dataclass(frozen=True, eq=False)
class Audio:
    """Decoded audio. Finite; at least one sample; full scale 1, which only floats and lossy codecs may exceed."""

    samples: Samples  # [channels, samples]
    rate: int  # Hz
    container: Container | None  # None: raw samples
    codec: str  # flac, mp3, opus, vorbis; in a WAV or raw, libsndfile's name of the encoding
    header: Header

    @property
    def duration_s(self) -> float:
        """Seconds, as many as there are samples: no header is believed."""
        return self.samples.shape[-1] / self.rate


PCM_SUFFIX = ".pcm"
_SUFFIXES = {".wav": Container.WAV, ".flac": Container.FLAC, ".mp3": Container.MP3}
_SUFFIXES |= {".opus": Container.OGG, ".ogg": Container.OGG}


def decode_named(content: bytes, name: str, pcm: Pcm | None = None) -> Audio:
    """Decode audio as it lies in a table: bytes, and a file name whose suffix tells the format that was declared.

    Args:
        pcm: what raw samples (suffix `.pcm`) are.

    Raises:
        MediaError: with the `Fault` that was found first.
    """
    suffix = Path(name).suffix
    if suffix == PCM_SUFFIX and pcm is not None:
        return decode_pcm(content, pcm)
    if suffix not in _SUFFIXES:
        raise MediaError(Fault.UNSUPPORTED, f"'{name}' is none of {', '.join(_SUFFIXES)}, and no raw samples either")
    return decode(content, _SUFFIXES[suffix])


def count_headers(content: bytes) -> int:
    """Beginnings of audio files anywhere in the bytes: 1 in a file, 0 in raw samples; more are played as noise.

    An MP3 without a frame that counts has no header to find, and gives 0.
    """
    return count_files(content) + sum(len(mark.findall(content)) for mark in (*_FILES.values(), _OGG_HEAD))


def chunk_starts(content: bytes, audio: Audio, chunk_bytes: Sequence[int]) -> list[int] | None:
    """Index of the first sample of each chunk of a body but the first: where seams may be heard.

    Args:
        content: the body.
        audio: the same, decoded.
        chunk_bytes: sizes of the chunks it came in.

    Returns:
        Ascending, inside the audio, each once; a sample cut in two begins the chunk that holds its end. None for coded
        audio, whose bytes are no samples.
    """
    if audio.container not in (None, Container.WAV):
        return None
    start = read_header(content).start if audio.container is Container.WAV else 0
    frame = BITS[audio.codec] // 8 * len(audio.samples)
    places = {(end - start) // frame for end in accumulate(chunk_bytes)}
    return sorted(place for place in places if 0 < place < audio.samples.shape[-1])


def decode(content: bytes, container: Container, *, rate: int | None = None, channels: int | None = None) -> Audio:
    """Decode a whole audio file.

    Args:
        content: the body of a response, its chunks joined.
        container: what was asked for, or what the response says it is.
        rate, channels: what the model makes [Hz, count]; None checks nothing.

    Raises:
        MediaError: with the `Fault` that was found first.
    """
    found = _sniff(content)
    if found is not container:
        raise MediaError(Fault.WRONG_CONTAINER, f"the response is declared to be {container} and is {found}")
    if container is Container.WAV:
        audio = _decode_wav(content)
    else:
        audio = _decode_ogg(content) if container is Container.OGG else _decode_coded(content, container)
    if rate not in (None, audio.rate):
        raise MediaError(Fault.WRONG_RATE, f"the header says {audio.rate} Hz, the model makes {rate} Hz")
    if channels not in (None, len(audio.samples)):
        raise MediaError(
            Fault.WRONG_CHANNELS, f"the header says {len(audio.samples)} channels, the model makes {channels}"
        )
    return audio


def decode_pcm(content: bytes, pcm: Pcm) -> Audio:
    """Decode samples without a header.

    Raises:
        MediaError: with the `Fault` that was found first; a file's header among them, which would play as a click.
    """
    found = _marked(content)
    if found:
        raise MediaError(
            Fault.WRONG_CONTAINER, f"the response is declared to be raw samples and begins with a {found} header"
        )
    return Audio(_decode_raw(content, pcm), pcm.rate, None, pcm.encoding, Header())


def encode_wav(samples: npt.NDArray[np.floating[Any]], rate: int) -> bytes:
    """A 16-bit WAV file of float samples, [samples] or [channels, samples]; decoding gives the same 16 bits again."""
    buffer = io.BytesIO()
    # Integers, because libsndfile rounds floats down.
    soundfile.write(buffer, float_to_int16(np.atleast_2d(samples)).T, rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def resample(samples: Samples, rate: int, target: int) -> Samples:
    """Band-limited resampling of [channels, samples] (soxr, high quality); the very same on either side of a score."""
    return np.ascontiguousarray(soxr.resample(samples.T, rate, target).T)


# --- what the bytes are ------------------------------------------------------------------------------------------


def _sniff(content: bytes) -> Container:
    found = _marked(content)
    if found is None and len(content) > 1 and content[0] == 0xFF and content[1] & 0xE6 == 0xE2:
        found = Container.MP3  # the sync word of a layer III frame
    if found is None:
        raise MediaError(Fault.NOT_MEDIA, f"the response is no audio known here: it begins {content[:16]!r}")
    return found


def _marked(content: bytes) -> Container | None:
    """Container by the mark at its start; None where there is none. Raises for what can't be samples either."""
    if not content:
        raise MediaError(Fault.EMPTY, "the response has no bytes")
    found = next((container for mark, container in _MARKS.items() if content.startswith(mark)), None)
    if found is None:
        _refuse_text(content)
    return found


def _refuse_text(content: bytes) -> None:
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        return
    if text.startswith(("{", "[")):
        kind = "JSON"
    elif text.startswith("<"):
        kind = "HTML or XML"
    elif text.isprintable() and text:
        kind = _base64_kind(text) or "text"
    else:
        return
    raise MediaError(Fault.NOT_MEDIA, f"the response is {kind}, not audio: it begins {text[:60]!r}")


def _base64_kind(text: str) -> str | None:
    try:
        start = base64.b64decode(text[:16], validate=True)
    except binascii.Error:
        return None
    return next((f"a {kind} file left in base64" for mark, kind in _MARKS.items() if start.startswith(mark)), None)


# --- decoders ----------------------------------------------------------------------------------------------------


def _decode_wav(content: bytes) -> Audio:
    wav = read_header(content)
    samples = _decode_raw(content[wav.start : wav.start + wav.size], Pcm(wav.rate, wav.channels, wav.encoding))
    header = Header(None if wav.streamed else samples.shape[-1], wav.bits, wav.byte_rate_agrees)
    return Audio(samples, wav.rate, Container.WAV, wav.encoding, header)


def _decode_raw(content: bytes, pcm: Pcm) -> Samples:
    frame = BITS[pcm.encoding] // 8 * pcm.channels
    if len(content) % frame:
        raise MediaError(
            Fault.PARTIAL_FRAME,
            f"{len(content)} bytes of samples are not a whole number of frames of {frame} bytes "
            f"({pcm.encoding}, {pcm.channels} channels): {len(content) % frame} too many",
        )
    data, _ = soundfile.read(
        io.BytesIO(content),
        dtype="float32",
        always_2d=True,
        samplerate=pcm.rate,
        channels=pcm.channels,
        format="RAW",
        subtype=pcm.encoding,
        endian="LITTLE",
    )
    return _checked(data)


def _decode_coded(content: bytes, container: Container) -> Audio:
    """FLAC and MP3 by FFmpeg, which needs no count of samples; a second file in the response is counted first."""
    files = len(_FILES[container].findall(content))
    if files > 1:
        raise _concatenated(files, container)
    if container is Container.MP3:
        _check_mp3_size(content)
    try:
        with av.open(io.BytesIO(content), mode="r") as file:
            stream = file.streams.audio[0]
            planes = av.AudioResampler(format="fltp")
            frames = [part for frame in (*file.decode(stream), None) for part in planes.resample(frame)]
            declared = stream.duration if container is Container.FLAC else None
    except (av.FFmpegError, IndexError) as error:
        raise MediaError(Fault.TRUNCATED, f"the {container} file is cut short or damaged: {error}") from error
    data = np.concatenate([frame.to_ndarray() for frame in frames], axis=1) if frames else np.empty((1, 0), np.float32)
    if declared is not None and data.shape[-1] < declared:
        raise MediaError(
            Fault.TRUNCATED, f"the {container} file declares {declared} samples and {data.shape[-1]} can be decoded"
        )
    return Audio(_checked(data.T), stream.rate, container, container.value, Header(declared))


def _check_mp3_size(content: bytes) -> None:
    """An MP3 may begin with a frame that counts the bytes of the stream from there on (Xing, LAME)."""
    tag = _FILES[Container.MP3].search(content)
    if tag is None or not tag[0][-1] & _XING_BYTES:
        return
    at = tag.end() + 4 * (tag[0][-1] & _XING_FRAMES)
    declared = int.from_bytes(content[at : at + 4], "big")
    present = len(content) - content.rindex(b"\xff", 0, tag.start())  # from the frame's sync word
    if present < declared:
        raise MediaError(Fault.TRUNCATED, f"the mp3 file declares {declared} bytes and {present} are there")


def _decode_ogg(content: bytes) -> Audio:
    """Opus at the rate it was made from, where FFmpeg always gives 48 kHz; Vorbis."""
    streams = _ogg_streams(content)
    if streams > 1:
        raise _concatenated(streams, Container.OGG)
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            data = file.read(dtype="float32", always_2d=True)
            header = Header(file.frames)
            return Audio(_checked(data), file.samplerate, Container.OGG, file.subtype.lower(), header)
    except soundfile.LibsndfileError as error:
        raise MediaError(Fault.MALFORMED, f"the Ogg file cannot be decoded: {error.error_string}") from error


def _ogg_streams(content: bytes) -> int:
    """Streams that begin in an Ogg file (RFC 3533), whose last page must be whole and marked as the last."""
    at, streams, kind = 0, 0, 0
    while content[at : at + 4] == b"OggS" and len(content) >= at + 27:
        kind, segments = content[at + 5], content[at + 26]
        at += 27 + segments + sum(content[at + 27 : at + 27 + segments])
        streams += bool(kind & _OGG_FIRST)
    if at != len(content) or not kind & _OGG_LAST:
        raise MediaError(Fault.TRUNCATED, f"the Ogg file of {len(content)} bytes stops before its last page is over")
    return streams


def _concatenated(files: int, container: Container) -> MediaError:
    return MediaError(Fault.CONCATENATED, f"{files} {container} files in one response: players stop after the first")


def _checked(data: Samples) -> Samples:
    """[frames, channels] as [channels, frames], if there are any and all are numbers."""
    if not len(data):
        raise MediaError(Fault.NO_SAMPLES, "the response has a header and no samples")
    bad = int(np.count_nonzero(~np.isfinite(data)))
    if bad:
        raise MediaError(Fault.NONFINITE, f"{bad} of {data.size} samples are NaN or infinite")
    return np.ascontiguousarray(data.T)
