"""The RIFF/WAVE header as it was sent.

Decoders mend what they can: they cut a declared length to what is there, drop half a sample, skip what follows. Here
every such disagreement is told, because on a served file each is a fault of the server.
Layout: Microsoft and IBM, Multimedia Programming Interface and Data Specifications 1.0 (1991); WAVE_FORMAT_EXTENSIBLE:
https://learn.microsoft.com/windows/win32/api/mmreg/ns-mmreg-waveformatextensible
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from assay.errors import MediaError
from assay.media.faults import Fault

# No audio has others. A rate far off would be heard for days, or measured in frames of gigabytes, and fits no decoder.
RATES_HZ = 1_000, 1_000_000
MOST_CHANNELS = 64
STREAMED_FROM = 0x7FFFF000  # bytes: a size from here on (2 or 4 GiB, less a header) that is not there means "unknown"
ENCODINGS = {  # (format tag, bits) -> libsndfile's name
    (1, 8): "PCM_U8",
    (1, 16): "PCM_16",
    (1, 24): "PCM_24",
    (1, 32): "PCM_32",
    (3, 32): "FLOAT",
    (3, 64): "DOUBLE",
    (6, 8): "ALAW",
    (7, 8): "ULAW",
}
BITS = {name: bits for (_, bits), name in ENCODINGS.items()}  # of one sample
_EXTENSIBLE = 0xFFFE
_RIFF = re.compile(rb"RIFF.{4}WAVE", re.DOTALL)


@dataclass(frozen=True)
class Wav:
    """What a WAV header says and where its samples lie."""

    encoding: str  # a value of `ENCODINGS`
    rate: int  # Hz
    channels: int
    bits: int
    start: int  # of the samples [byte]
    size: int  # of the samples [byte]
    streamed: bool  # the header leaves the length open
    byte_rate_agrees: bool  # with rate, channels and bits, as that of a patched header doesn't


def read_header(content: bytes) -> Wav:
    """Read and check the header of a whole WAV file.

    Raises:
        MediaError: another kind of RIFF, several files in a row, a header or samples cut short, an encoding not in
            `ENCODINGS`, or bytes that belong to nothing.
    """
    if len(content) >= 12 and content[8:12] != b"WAVE":
        raise MediaError(Fault.WRONG_CONTAINER, f"the response is RIFF, but {content[8:12]!r} and no WAVE")
    files = count_files(content)
    if files > 1:
        raise MediaError(
            Fault.CONCATENATED,
            f"{files} WAV headers in one response: each chunk was sent as a file of its own, "
            "and the later headers would be played as noise",
        )
    at, fields = 12, None
    while True:
        if len(content) < at + 8:
            raise MediaError(
                Fault.TRUNCATED, f"the WAV header ends after {len(content)} bytes, before any 'data' chunk begins"
            )
        name, size = struct.unpack_from("<4sI", content, at)
        at += 8
        if name == b"data":
            break
        if name == b"fmt ":
            fields = content[at : at + size]
        at += size + size % 2
    return _wav(content, fields, at, size)


def count_files(content: bytes) -> int:
    """WAV files that begin anywhere in the bytes."""
    return len(_RIFF.findall(content))


def _wav(content: bytes, fields: bytes | None, start: int, declared: int) -> Wav:
    if fields is None or len(fields) < 16:
        raise MediaError(Fault.MALFORMED, "the WAV header has no complete 'fmt ' chunk before its samples")
    tag, channels, rate, byte_rate, _, bits = struct.unpack_from("<HHIIHH", fields)
    if tag == _EXTENSIBLE and len(fields) >= 26:
        (tag,) = struct.unpack_from("<H", fields, 24)  # the first field of the subformat's GUID
    if (tag, bits) not in ENCODINGS:
        raise MediaError(
            Fault.UNSUPPORTED,
            f"WAV format tag {tag} with {bits} bits is not read here: known are "
            + ", ".join(sorted(set(ENCODINGS.values()))),
        )
    if not (1 <= channels <= MOST_CHANNELS and RATES_HZ[0] <= rate <= RATES_HZ[1]):
        raise MediaError(
            Fault.MALFORMED,
            f"the WAV header declares {channels} channels at {rate} Hz: audio has 1 to {MOST_CHANNELS} of them, and "
            f"{RATES_HZ[0]} to {RATES_HZ[1]} Hz",
        )
    present = len(content) - start
    streamed = (declared == 0 and not _are_chunks(content, start)) or (present < declared >= STREAMED_FROM)
    size = present if streamed else declared
    if size > present:
        raise MediaError(
            Fault.TRUNCATED, f"the WAV header declares {declared} bytes of samples and {present} are there"
        )
    if not _are_chunks(content, start + size + size % 2):
        raise MediaError(
            Fault.LENGTH_MISMATCH,
            f"the WAV header declares {declared} bytes of samples and {present - size} more follow that belong to "
            "nothing: players would drop them",
        )
    return Wav(
        encoding=ENCODINGS[tag, bits],
        rate=rate,
        channels=channels,
        bits=bits,
        start=start,
        size=size,
        streamed=streamed,
        byte_rate_agrees=byte_rate == rate * channels * bits // 8,
    )


def _are_chunks(content: bytes, at: int) -> bool:
    """Whether RIFF chunks, or nothing, fill the rest of the file."""
    while at + 8 <= len(content) and re.fullmatch(rb"[ -~]{4}", content[at : at + 4]):
        (size,) = struct.unpack_from("<I", content, at + 4)
        at += 8 + size + size % 2
    return at in (len(content), len(content) + 1)
