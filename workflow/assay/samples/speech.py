"""Candidates of speech items: recordings to transcribe, and texts to speak."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from assay.canonical import sha256_text
from assay.config import lookup
from assay.samples.corpora import problems, questions
from assay.samples.ranking import Candidate, number, rank
from assay.samples.recipe import AnyClipPart, ClipPart, LongClipPart, NonSpeechPart, ResampledPart, SayPart
from assay.samples.recordings import RATE, Recording, all_recordings, decode
from assay.samples.sounds import MADE, joined, resampled, wav
from assay.samples.text import Sources

Builder = Callable[[Any, Sources, int], Iterator[Candidate]]  # (part, sources, seed of the recipe)

WINDOW = 30.0  # what Whisper hears at once [s]
_GAP = 0.3  # between joined recordings [s]
_EDGE = 0.2  # a window ends at least so far inside a recording [s]
_WORTHWHILE = 2.5  # a wrong sample rate is heard in so much [s]
_SPEAKERS = ("librivox", "cards", "prompts")

# "one", "first" and "second" are left out: they are ordinary words as often.
_NUMBER = re.compile(
    r"""\d|\b(?:
        zero | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve
        | third | (?:four|fif|six|seven|eigh|nin|ten|eleven|twelf)th
        | (?:thir|four|fif|six|seven|eigh|nine)teen(?:th)?
        | (?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ieth)
        | (?:hundred|thousand|million|billion)(?:th)?
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
_ALPHABET = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet", "kilo"]
_ALPHABET += ["lima", "mike", "november", "oscar", "papa", "quebec", "romeo", "sierra", "tango", "uniform", "victor"]
_ALPHABET += ["whiskey", "yankee", "zulu"]
_NAMES = "charlie juliet mike oscar romeo victor dashwood waldo india lima quebec asterisk digium comedian bluetooth"
_DATES = (
    "January February March April May June July August September October November December "
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
)
_NAME = re.compile(rf"\b(?:(?i:{_NAMES.replace(' ', '|')})|{_DATES.replace(' ', '|')})\b")


def kind_of(text: str) -> str | None:
    """What is hard about a short utterance: names, digits, that it is one word, or nothing ("plain").

    None where it is a letter or two words, which no context helps to hear.
    """
    words = re.findall(r"[\w'.]+", text)
    if _NAME.search(text):
        return "names"
    if _NUMBER.search(text):
        return "digits"
    if len(words) == 1 and len(words[0].strip(".")) > 2:
        return "word"
    return "plain" if len(words) > 2 else None


# --- recordings to transcribe -------------------------------------------------------------------------------------


def _short(sources: Sources, kind: str) -> list[Recording]:
    """Recordings of a kind that fit one window, speaker by speaker."""
    found = [it for it in all_recordings(sources) if it.text and it.seconds <= WINDOW and kind_of(it.text) == kind]
    return sorted(found, key=lambda it: _SPEAKERS.index(it.speaker))


def _transcription(key: str, source: str, text: str, audio: Callable[[], bytes], **more: Any) -> Candidate:
    request = {"file": f"{key}.wav", "language": "en", "temperature": 0}
    return Candidate(key, "transcription", request, source, expected=text, audio=audio, **more)


def _as_recorded(recording: Recording) -> bytes:
    return wav(decode(recording), RATE)


def clips(part: ClipPart, sources: Sources, seed: int) -> Iterator[Candidate]:
    """Recordings as they are."""
    for recording in _short(sources, part.kind):
        yield _transcription(
            recording.key,
            recording.origin,
            recording.text,
            partial(_as_recorded, recording),
            stratum=recording.speaker,
            tags=("recorded", f"speaker:{recording.speaker}"),
        )


def long_clips(part: LongClipPart, sources: Sources, seed: int) -> Iterator[Candidate]:
    """Recordings longer than a window, and shorter ones joined so that each window ends while somebody speaks.

    Shorter ones are joined in the order of their ranks, so a recording added changes only the clips it falls into.
    """
    for recording in all_recordings(sources):
        if recording.text and recording.seconds > WINDOW:
            yield _transcription(
                recording.key,
                recording.origin,
                recording.text,
                partial(_as_recorded, recording),
                stratum="recorded",
                tags=("recorded", f"speaker:{recording.speaker}"),
            )
    order = sorted(_short(sources, "plain") + _short(sources, "digits"), key=lambda it: rank(seed, part.name, it.key))
    for seconds in part.seconds:
        for start, first in enumerate(order):
            run = _run(order[start:] + order[:start], seconds)
            if run is not None:
                yield _transcription(
                    f"joined-{seconds:g}s-{first.key}",
                    " + ".join(it.origin for it in run),
                    " ".join(it.text for it in run),
                    partial(_joined, run),
                    stratum=f"joined {seconds:g}",
                    tags=("joined", *sorted({f"speaker:{it.speaker}" for it in run})),
                )


def _run(order: list[Recording], seconds: float) -> list[Recording] | None:
    """As many of `order` from the first on as last `seconds`; None unless every window ends inside one of them."""
    ends = [end - _GAP for end in accumulate(it.seconds + _GAP for it in order)]
    count = next((place for place, end in enumerate(ends, 1) if end >= seconds), None)
    if count is None:
        return None
    spans = [(end - it.seconds, end) for it, end in zip(order[:count], ends, strict=False)]
    seams = [WINDOW * number for number in range(1, int(ends[count - 1] // WINDOW) + 1)]
    inside = all(any(start + _EDGE < seam < end - _EDGE for start, end in spans) for seam in seams)
    return order[:count] if inside else None


def _joined(run: list[Recording]) -> bytes:
    return wav(joined([decode(it) for it in run], round(_GAP * RATE)), RATE)


def nonspeech(part: NonSpeechPart, sources: Sources, seed: int) -> Iterator[Candidate]:
    """Audio in which nobody speaks: what should come back is nothing."""
    for sound in part.sounds:
        yield from _recorded_sounds(sources) if sound == "recorded" else _made_sounds(part, sound, seed)


def _recorded_sounds(sources: Sources) -> Iterator[Candidate]:
    for recording in all_recordings(sources):
        if not recording.text:
            yield _transcription(
                recording.key,
                recording.origin,
                "",
                partial(_as_recorded, recording),
                stratum="recorded",
                tags=("recorded",),
            )


def _made_sounds(part: NonSpeechPart, sound: str, seed: int) -> Iterator[Candidate]:
    for seconds in part.seconds:
        key = f"{sound}-{seconds:g}s"
        content = partial(MADE[sound], round(seconds * RATE), number(seed, part.name, key, 2**32), RATE)
        yield _transcription(
            key, f"synthetic:{key}", "", partial(_made, content), stratum=sound, tags=("synthetic", f"sound:{sound}")
        )


def _made(content: Callable[[], Any]) -> bytes:
    return wav(content(), RATE)


def resampled_clips(part: ResampledPart, sources: Sources, seed: int) -> Iterator[Candidate]:
    """Plain recordings of some length at other sample rates and with two channels."""
    for form in part.formats:
        rate, channels = map(int, form.split("x"))
        for recording in (it for it in _short(sources, "plain") if it.seconds > _WORTHWHILE):
            yield _transcription(
                f"{form}-{recording.key}",
                recording.origin,
                recording.text,
                partial(_resampled, recording, rate, channels),
                stratum=form,
                group=recording.key,
                tags=("resampled", f"rate:{rate}", f"channels:{channels}", f"speaker:{recording.speaker}"),
            )


def _resampled(recording: Recording, rate: int, channels: int) -> bytes:
    return wav(resampled(decode(recording), RATE, rate, channels), rate)


_CLIPS: dict[type, Builder] = {
    ClipPart: clips,
    LongClipPart: long_clips,
    NonSpeechPart: nonspeech,
    ResampledPart: resampled_clips,
}


def asr(part: AnyClipPart, sources: Sources, seed: int) -> Iterator[Candidate]:
    """Audio to transcribe, of the kind that the part asks for."""
    return _CLIPS[type(part)](part, sources, seed)


# --- texts to speak -----------------------------------------------------------------------------------------------

_LETTERS = re.compile(r"[A-Za-z ,.?!;:'’“”\"()—–-]+")
_NAMED = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+")  # a capital inside a sentence
_MARKS = re.compile(r"[;:()“”\"—–?!]|, ")
_LEANING = re.compile(
    r"\([^)]{,4}\)|\b(?:questions?|answers?|options?|choices?|following|correct|wrong|statements?|passage)\b|\bU\.",
    re.IGNORECASE,
)  # on an exam's options, or cut at an abbreviation
_CREED = re.compile(r"\b(?:God|church|priesthood|faith|adultery)\b")  # nothing to greet an engineer with
_SUBJECTS = {"astronomy", "business_ethics", "computer_security", "global_facts", "high_school_geography", "management"}
_SUBJECTS |= {"high_school_government_and_politics", "high_school_macroeconomics", "high_school_microeconomics"}
_SUBJECTS |= {"international_law", "marketing", "miscellaneous", "nutrition", "prehistory", "public_relations"}
_SUBJECTS |= {"us_foreign_policy"}
_SHORT_WORDS, _LONG_WORDS, _LONG_PROMPT = (6, 25), (70, 130), 45


def tts(part: SayPart, sources: Sources, seed: int) -> Iterator[Candidate]:
    """Texts to speak, of the kind that the part asks for; what should be heard is the text itself."""
    for stratum, source, texts in _TEXTS[part.kind](sources, seed):
        for text in sorted({it.casefold(): it for it in sorted(texts)}.values()):
            digest = sha256_text(text)[:10]
            yield Candidate(
                key=f"{stratum}-{digest}",
                kind="speech",
                request={"input": text},
                source=f"{source}/{digest}",
                stratum=stratum,
                tags=(f"text:{stratum}",),
                expected=text,
            )


Texts = Iterator[tuple[str, str, list[str]]]  # stratum, source, texts


def _lm_eval(sources: Sources) -> Path:
    return lookup(sources, "lm_eval", "source of the recipe")


def _prompt_texts(sources: Sources, kind: str) -> list[str]:
    """What the recordings of a kind say, where it stands alone."""
    return [it.text for it in _short(sources, kind) if "..." not in it.text and it.speaker == "prompts"]


def _prose(sources: Sources, wanted: Callable[[str], bool]) -> list[str]:
    """Sentences of everyday subjects, of a length to speak, of letters and marks only, that stand alone."""
    low, high = _SHORT_WORDS
    asked = [item for item in questions(_lm_eval(sources)) if item.subject in _SUBJECTS]
    found = (piece for item in asked for text in (item.stem, item.answer) for piece in _sentences(text))
    spoken = (it for it in found if low <= len(it.split()) <= high and _LETTERS.fullmatch(it))
    return [it for it in spoken if wanted(it) and not _LEANING.search(it)]


def _sentences(text: str) -> list[str]:
    """The sentences of a text, whole ones only."""
    pieces = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [piece for piece in pieces if re.fullmatch(r"[A-Z“\"].*[.!?]", piece)]


def _words(sources: Sources, seed: int) -> Texts:
    yield "prompt", "asterisk_sounds_text:word", _prompt_texts(sources, "word")


def _plain(sources: Sources, seed: int) -> Texts:
    yield "prompt", "asterisk_sounds_text:plain", _prompt_texts(sources, "plain")
    plain = _prose(sources, lambda it: not _MARKS.search(it) and not _NAMED.search(it))
    yield "prose", "lm_eval:mmlu", plain


def _digits(sources: Sources, seed: int) -> Texts:
    prompts = [it for it in _prompt_texts(sources, "digits") if len(it.split()) > 2]
    yield "prompt", "asterisk_sounds_text:digits", prompts
    yield "problem", "lm_eval:gsm8k", [it for it in problems(_lm_eval(sources)) if re.search(r"\d", it)]


def _names(sources: Sources, seed: int) -> Texts:
    yield "prompt", "asterisk_sounds_text:names", _prompt_texts(sources, "names")
    yield "prose", "lm_eval:mmlu", _prose(sources, lambda it: len(_NAMED.findall(it)) > 1)


def _punctuation(sources: Sources, seed: int) -> Texts:
    prompts = _prompt_texts(sources, "plain")
    several = [it for it in prompts if len(re.findall(r"[.,:?!]", it)) > 1]
    yield "prompt", "asterisk_sounds_text:plain", several
    yield "prose", "lm_eval:mmlu", _prose(sources, lambda it: len(_MARKS.findall(it)) > 1)


def _tails(sources: Sources, seed: int) -> Texts:
    """Lists without sense, whose last word nothing before it suggests: only the sound tells whether it is there."""
    found = []
    for last in _ALPHABET:
        before = sorted(set(_ALPHABET) - {last}, key=lambda word: rank(seed, last, word))[:5]
        found.append(f"Please write down these words: {', '.join(before)}, and at the very end, {last}.")
    yield "list", "synthetic:alphabet", found


def _long(sources: Sources, seed: int) -> Texts:
    """Long prompts, and whole sentences of historical texts."""
    prompts = [it.text for it in all_recordings(sources) if len(it.text.split()) >= _LONG_PROMPT]
    yield "prompt", "asterisk_sounds_text:long", prompts
    passages = [item.passage for item in questions(_lm_eval(sources)) if item.passage]
    yield "passage", "lm_eval:mmlu", [text for passage in passages for text in _paragraphs(passage)]


def _paragraphs(passage: str) -> Iterator[str]:
    """The whole sentences of a passage in texts that are long enough; those that become too long are left out."""
    low, high = _LONG_WORDS
    text = ""
    for sentence in _sentences(passage):
        text = f"{text} {sentence}".strip()
        if len(text.split()) >= low:
            if len(text.split()) <= high and _LETTERS.fullmatch(text) and not _CREED.search(text):
                yield text
            text = ""


_TEXTS: dict[str, Callable[[Sources, int], Texts]] = {
    "word": _words,
    "plain": _plain,
    "digits": _digits,
    "names": _names,
    "punctuation": _punctuation,
    "tail": _tails,
    "long": _long,
}

BUILDERS: dict[str, Builder] = {"asr": asr, "tts": tts}
