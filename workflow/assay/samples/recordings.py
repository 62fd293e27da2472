"""Real recordings with their transcripts, read from fetched sources."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import av
import numpy as np

from assay.canonical import sha256_file
from assay.config import lookup
from assay.errors import SampleError

RATE = 16_000  # of every recording [Hz]
_G722_BYTES = 8_000  # a second
_WAV_HEADER = 44  # bytes of a plain one

_PROMPTS = "usr/share/asterisk/sounds/en_US_f_Allison"
_PROMPT_TEXTS = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
_READINGS = "usr/share/pocketsphinx/test/data"
_READING_TEXTS = {"librivox": "librivox/transcription", "cards": "cards/cards.transcription"}

_PROMPT_LINE = re.compile(r"([^;:\s][^:]*):\s*(.*?)\s*")
_READING_LINE = re.compile(r"<s>\s*(.*?)\s*</s>\s*\((.*)\)")
_SOUND_ONLY = re.compile(r"[\[<(].*[\])>]")
# Transcripts that say more or less than the recording, or say it wrongly: nothing can be scored against them.
_REMARK = re.compile(r"[\[<(#*]")
_SLIP = re.compile(r"fourtieth|umute|represenatives|indentified|witheld|a more a amiable")


@dataclass(frozen=True)
class Recording:
    """One recording, mono at 16 kHz."""

    key: str  # unique among all
    speaker: str  # prompts | librivox | cards
    origin: str  # source and path
    file: Path
    text: str  # what is said; empty: nobody speaks
    seconds: float


@cache
def recordings(prompts: Path, texts: Path, readings: Path) -> tuple[Recording, ...]:
    """All recordings whose transcript can be trusted, sorted by key; of equal files the first.

    Args:
        prompts: directory of source `asterisk_sounds`.
        texts: directory of source `asterisk_sounds_text`.
        readings: directory of source `pocketsphinx_testdata`.

    Raises:
        SampleError: a source is not fetched.
    """
    found = [*_prompts(prompts, texts), *_readings(readings)]
    kept: dict[str, Recording] = {}
    for recording in sorted(found, key=lambda item: item.key):
        if not _REMARK.search(recording.text) and not _SLIP.search(recording.text):
            kept.setdefault(sha256_file(recording.file), recording)
    return tuple(kept.values())


def all_recordings(sources: Mapping[str, Path]) -> tuple[Recording, ...]:
    """`recordings` of a recipe's sources. Raises ConfigError where it does not name them."""
    names = ("asterisk_sounds", "asterisk_sounds_text", "pocketsphinx_testdata")
    return recordings(*(lookup(sources, name, "source of the recipe") for name in names))


def _prompts(directory: Path, texts: Path) -> Iterator[Recording]:
    with gzip.open(_existing(texts / _PROMPT_TEXTS), "rt", encoding="utf-8") as lines:
        matches = filter(None, map(_PROMPT_LINE.fullmatch, lines))
        said = {match[1]: match[2] for match in matches}
    folder = _existing(directory / _PROMPTS)
    for file in folder.rglob("*.g722"):
        name = file.relative_to(folder).with_suffix("").as_posix()
        if name in said:
            yield Recording(
                key=name.replace("/", "-"),
                speaker="prompts",
                origin=f"asterisk_sounds:{name}",
                file=file,
                text="" if _SOUND_ONLY.fullmatch(said[name]) else said[name],
                seconds=file.stat().st_size / _G722_BYTES,
            )


def _readings(directory: Path) -> Iterator[Recording]:
    for speaker, texts in _READING_TEXTS.items():
        transcript = _existing(directory / _READINGS / texts)
        for text, name in _READING_LINE.findall(transcript.read_text(encoding="utf-8")):
            file = _existing(transcript.parent / f"{name}.wav")
            yield Recording(
                key=f"{speaker}-{name}",
                speaker=speaker,
                origin=f"pocketsphinx_testdata:{speaker}/{name}",
                file=file,
                text=" ".join(text.split()),
                seconds=(file.stat().st_size - _WAV_HEADER) / (2 * RATE),
            )


def decode(recording: Recording) -> np.ndarray:
    """Its samples: int16, shape (samples,), at `RATE`.

    Raises:
        SampleError: the file does not decode to mono at that rate and of the length it should have.
    """
    with av.open(str(recording.file)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        stream = container.streams.audio[0]
        found = (stream.rate, stream.channels)
    samples = np.concatenate(frames, axis=1)[0]
    wanted = round(recording.seconds * RATE)
    if found != (RATE, 1) or samples.dtype != np.int16 or len(samples) != wanted:
        raise SampleError(
            f"{recording.file} decodes to {len(samples)} samples of {found[1]} channels at {found[0]} Hz; expected "
            f"{wanted} of 1 at {RATE}"
        )
    return samples


def _existing(path: Path) -> Path:
    if not path.exists():
        raise SampleError(f"{path} does not exist; fetch the recipe's `sources`")
    return path
