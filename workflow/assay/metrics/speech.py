"""Metrics of transcripts: word alignment and error rates, structure, and words that belong to somebody else.

Every function takes text as its normaliser left it; words are what white space separates. Rates are fractions.
"""

from __future__ import annotations

import inspect
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from typing import Any

import jiwer
import numpy as np
import numpy.typing as npt
import whisper_normalizer
from rapidfuzz.distance import Levenshtein
from whisper_normalizer import basic, english

from assay.canonical import sha256_json

Floats = npt.NDArray[np.float64]

WINDOW_WORDS = 20
BLEED_WORDS = 4  # shorter runs of words are shared by chance

_TYPOGRAPHIC = "–—‘’“”„…·"
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>")


# --- normalisers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normaliser:
    """A text normaliser and what pins it: two scores compare only where all three agree."""

    name: str
    version: str
    sha256: str  # of the code, its tables and the Unicode version it classifies characters by
    call: Callable[[str], str]


@cache
def normaliser(name: str) -> Normaliser:
    """A normaliser by its id. Both texts go through it once, raw.

    whisper_english: OpenAI's for English: numbers to digits, contractions, spelling (appendix C of arXiv:2212.04356).
    whisper_basic: OpenAI's for other languages; breaks words of Indic scripts, whose vowel signs become spaces.
    whisper_basic_marks: the same, with combining marks kept: for Indic scripts.
    whisper_basic_letters: the same, each letter a word of its own: for scripts without spaces.
    nfc: Unicode composition alone: what was said to the letter.

    Raises:
        ValueError: no normaliser of that name.
    """
    if name not in _NORMALISERS:
        raise ValueError(f"no normaliser '{name}': known are {', '.join(_NORMALISERS)}")
    call = _NORMALISERS[name]()
    identity: dict[str, Any] = {"name": name, "unicode": unicodedata.unidata_version}
    if name == "nfc":
        return Normaliser(name, unicodedata.unidata_version, sha256_json(identity), call)
    identity |= {"code": [inspect.getsource(module) for module in (basic, english)], "regex": version("regex")}
    if isinstance(call, english.EnglishTextNormalizer):
        identity["spellings"] = call.standardize_spellings.mapping
    return Normaliser(name, version(whisper_normalizer.__name__), sha256_json(identity), call)


_NORMALISERS: dict[str, Callable[[], Callable[[str], str]]] = {
    "whisper_english": english.EnglishTextNormalizer,
    "whisper_basic": basic.BasicTextNormalizer,
    "whisper_basic_marks": lambda: basic.BasicTextNormalizer(preserve_marks=True),
    "whisper_basic_letters": lambda: basic.BasicTextNormalizer(split_letters=True),
    "nfc": lambda: lambda text: unicodedata.normalize("NFC", text),
}


# --- alignment and error rates -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edits:
    """Counts of one alignment, or of many added up. A rate whose denominator is 0 is None, never 0."""

    hits: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: Edits) -> Edits:
        return Edits(
            self.hits + other.hits,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )

    @property
    def words(self) -> int:
        """Words (or characters) of the reference."""
        return self.hits + self.substitutions + self.deletions

    @property
    def heard(self) -> int:
        """Words (or characters) of the hypothesis."""
        return self.hits + self.substitutions + self.insertions

    @property
    def errors(self) -> int:
        """Edit distance."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float | None:
        """Errors over reference words: WER, or CER of characters; may exceed 1."""
        return self.errors / self.words if self.words else None

    @property
    def mer(self) -> float | None:
        """Match error rate: errors over all aligned places (Morris et al. 2004)."""
        return self.errors / (self.hits + self.errors) if self.hits + self.errors else None

    @property
    def wip(self) -> float | None:
        """Word information preserved: hits over words, times hits over words heard."""
        if not self.words:
            return None
        return self.hits / self.words * self.hits / self.heard if self.heard else 0.0

    @property
    def wil(self) -> float | None:
        """Word information lost: 1 - `wip`."""
        return None if self.wip is None else 1 - self.wip


class Edit(StrEnum):
    """What became of one place of an alignment."""

    EQUAL = "equal"
    SUBSTITUTE = "substitute"
    DELETE = "delete"
    INSERT = "insert"


@dataclass(frozen=True)
class Aligned:
    """One place of an alignment: a reference word, the word heard there, or both."""

    edit: Edit
    reference: str | None
    hypothesis: str | None


@dataclass(frozen=True)
class Alignment:
    """A hypothesis aligned with its reference at the smallest edit distance, place by place."""

    places: tuple[Aligned, ...]

    @property
    def edits(self) -> Edits:
        """The counts. Their total is unique; how it splits into kinds may differ between aligners."""
        kinds = Counter(place.edit for place in self.places)
        return Edits(kinds[Edit.EQUAL], kinds[Edit.SUBSTITUTE], kinds[Edit.DELETE], kinds[Edit.INSERT])


def align_words(reference: str, hypothesis: str) -> Alignment:
    """Word alignment. An empty hypothesis is all deletions, an empty reference all insertions."""
    return _alignment(jiwer.process_words(_spaced(reference), _spaced(hypothesis)))


def align_characters(reference: str, hypothesis: str) -> Alignment:
    """Character alignment; single spaces count, so strip them for scripts that have none."""
    return _alignment(jiwer.process_characters(_spaced(reference), _spaced(hypothesis)))


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _alignment(output: jiwer.WordOutput | jiwer.CharacterOutput) -> Alignment:
    (reference,), (hypothesis,), (chunks,) = output.references, output.hypotheses, output.alignments
    places: list[Aligned] = []
    for chunk in chunks:
        expected: Sequence[str | None] = reference[chunk.ref_start_idx : chunk.ref_end_idx]
        heard: Sequence[str | None] = hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx]
        edit = Edit(chunk.type)
        if edit is Edit.INSERT:
            expected = [None] * len(heard)
        elif edit is Edit.DELETE:
            heard = [None] * len(expected)
        places += (Aligned(edit, *pair) for pair in zip(expected, heard, strict=True))
    return Alignment(tuple(places))


def align_all(references: Mapping[str, str], hypotheses: Mapping[str, str | None]) -> dict[str, Alignment]:
    """Item -> word alignment, for every reference: one without a hypothesis is all deletions, and never left out.

    Raises:
        ValueError: a hypothesis of an item that nobody planned.
    """
    unplanned = sorted(hypotheses.keys() - references.keys())
    if unplanned:
        raise ValueError(f"hypotheses without a reference: {', '.join(unplanned)}")
    return {item: align_words(text, hypotheses.get(item) or "") for item, text in references.items()}


def pool(edits: Iterable[Edits]) -> Edits:
    """Counts added up: `pool(...).rate` is the corpus error rate, with empty references kept as insertions."""
    return sum(edits, Edits())


def macro_rate(edits: Iterable[Edits]) -> float | None:
    """Mean of the items' own rates: what many reports print. One short item outweighs a long one: never gate on it."""
    rates = [counts.rate for counts in edits if counts.rate is not None]
    return float(np.mean(rates)) if rates else None


# --- structure ---------------------------------------------------------------------------------------------------


def windowed_rate(alignment: Alignment, width: int = WINDOW_WORDS) -> Floats:
    """WER in every run of `width` reference words (all of them, if there are fewer): a garbled stretch stands out.

    Returns:
        float64 [max(1, words - width + 1)]; empty for an empty reference. An insertion counts with the word before it,
        at the very start with the first.
    """
    errors: list[int] = []
    pending = 0
    for place in alignment.places:
        if place.edit is Edit.INSERT:
            if errors:
                errors[-1] += 1
            else:
                pending += 1
        else:
            errors.append((place.edit is not Edit.EQUAL) + pending)
            pending = 0
    if not errors:
        return np.empty(0)
    size = min(width, len(errors))
    return np.asarray(np.convolve(errors, np.ones(size), "valid") / size)


def tail_deletions(reference: str, hypothesis: str) -> int:
    """Words missing at the end: the longest tail of the reference that some smallest alignment deletes.

    Among alignments of equal cost the one with the longest such tail is meant, so that a garbled last word does not
    hide what is missing behind it.
    """
    words, heard = reference.split(), hypothesis.split()
    total = Levenshtein.distance(words, heard)
    missing = 0
    while (
        missing < len(words) and Levenshtein.distance(words[: len(words) - missing - 1], heard) + missing + 1 == total
    ):
        missing += 1
    return missing


def head_deletions(reference: str, hypothesis: str) -> int:
    """Words missing at the start, found as `tail_deletions` finds them at the end."""
    return tail_deletions(_reversed(reference), _reversed(hypothesis))


def _reversed(text: str) -> str:
    return " ".join(reversed(text.split()))


def repeat_fraction(text: str, n: int = 3) -> float:
    """1 - distinct / all word n-grams: near 1 when a decoder loops, 0 for text too short to have one."""
    grams = _grams(text.split(), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def insertions_per_minute(edits: Edits, seconds: float) -> float:
    """Words invented per minute of audio: the score of clips that hold no speech, which have no WER."""
    return edits.insertions * 60 / seconds


def special_tokens(text: str) -> list[str]:
    """Decoder tokens that leaked into raw text: timestamps, language and task marks, such as <|en|> or <|0.00|>."""
    return _SPECIAL_TOKEN.findall(text)


@dataclass(frozen=True)
class Segment:
    """A stretch of a transcript with its times [s]."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timing:
    """How segments lie on the clip."""

    inverted: int  # segments that end before they start
    backward: int  # segments that start before the one ahead of them
    outside: int  # segments that start before 0 or end after the clip
    covered: float  # where the last one ends, over the clip's duration [fraction]


def segment_timing(segments: Sequence[Segment], duration_s: float, tolerance_s: float = 0.05) -> Timing:
    """Faults of timestamps, each beyond `tolerance_s`; no segments cover nothing."""
    starts = np.array([segment.start_s for segment in segments])
    ends = np.array([segment.end_s for segment in segments])
    return Timing(
        inverted=int((ends < starts - tolerance_s).sum()),
        backward=int((np.diff(starts) < -tolerance_s).sum()),
        outside=int(((starts < -tolerance_s) | (ends > duration_s + tolerance_s)).sum()),
        covered=float(ends.max(initial=0.0) / duration_s),
    )


# --- words of somebody else --------------------------------------------------------------------------------------


def overheard(heard: str, own: str, other: str, n: int = BLEED_WORDS) -> float | None:
    """How much of `other` is in what was heard though `own` doesn't say it [fraction].

    `other` is another item's text, a voice prompt or an instruction. Counted in its word n-grams that `own` lacks;
    text shorter than `n` words counts only as the whole of what was heard.

    Returns:
        None when `own` says all of `other`: nothing could be told.
    """
    words, wanted = heard.split(), other.split()
    if len(wanted) < n:
        return None if wanted == own.split() or not wanted else float(words == wanted)
    telling = set(_grams(wanted, n)) - set(_grams(own.split(), n))
    return len(telling & set(_grams(words, n))) / len(telling) if telling else None


@dataclass(frozen=True)
class Bleed:
    """Another item's words in an item's transcript."""

    item: str
    other: str
    share: float  # of the other's text, as of `overheard`


class BleedIndex:
    """Finds another item's text in a transcript: requests that got mixed up under load.

    Args:
        texts: item -> what it should say; may hold more than the items heard, such as voice prompts.
        least: share of another's text from which on it counts.
        n: words of a run that tells (see `overheard`).
    """

    def __init__(self, texts: Mapping[str, str], least: float = 0.5, n: int = BLEED_WORDS) -> None:
        self.texts, self.least, self.n = texts, least, n
        self._named: dict[str, str] = {}  # text -> the first item that says it: equal texts cannot be told apart
        self._said: dict[tuple[str, ...], list[str]] = {}  # run of words -> texts that hold it
        for name, text in sorted(texts.items()):
            if text not in self._named:
                self._named[text] = name
                for gram in _telling_grams(text, n):
                    self._said.setdefault(gram, []).append(text)

    def find(self, item: str, transcript: str) -> Bleed | None:
        """The other item whose text makes up most of what was heard in `item`; None: none does."""
        grams = _telling_grams(transcript, self.n)
        others = {self._named[text]: text for gram in grams for text in self._said.get(gram, ())}
        own = self.texts[item]
        shares = [Bleed(item, name, overheard(transcript, own, others[name], self.n) or 0.0) for name in sorted(others)]
        worst = max(shares, key=lambda bleed: bleed.share, default=None)
        return worst if worst and worst.share >= self.least else None


def _telling_grams(text: str, n: int) -> set[tuple[str, ...]]:
    """Its n-grams, or the whole of a text that is shorter: what `overheard` goes by."""
    words = text.split()
    return set(_grams(words, min(n, len(words))))


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)] if n else []


# --- what other projects' gates would say ------------------------------------------------------------------------


def seed_tts_eval_wer(references: Mapping[str, str], hypotheses: Mapping[str, str | None]) -> float | None:
    """seed-tts-eval's English rule: lower case, no punctuation, mean over the utterances that have a result at all.

    Source: github.com/BytedanceSpeech/seed-tts-eval, run_wer.py and average_wer.py; issues 12 and 13 there.
    """
    strip = str.maketrans("", "", string.punctuation.replace("'", "") + _TYPOGRAPHIC)
    pairs = ((references[item], text) for item, text in hypotheses.items() if text is not None)
    return macro_rate(align_words(*(text.translate(strip).lower() for text in pair)).edits for pair in pairs)
