"""Candidates of needle prompts: a number hidden in a long text, with another of the same form to distract."""

from __future__ import annotations

import re
from collections.abc import Iterator

from assay.samples.corpora import questions
from assay.samples.ranking import Candidate, number, rank
from assay.samples.recipe import NeedlePart
from assay.samples.sizing import Sizer
from assay.samples.text import Sources

# Of six wordings tried on SmolLM2-135M, the one it answers most often.
_NEEDLE = "The special magic number for {name} is {code}."
_QUESTION = "What is the special magic number for {name} mentioned in the text?"
_NAMES = ("Paris", "Cairo", "Lima", "Oslo", "Tokyo", "Delhi", "Rome", "Berlin", "Madrid", "Dublin", "Athens", "Havana")


def needle(part: NeedlePart, sources: Sources, sizer: Sizer) -> Iterator[Candidate]:
    """The whole grid of lengths, depths and seeds."""
    filler = _sentences(sources)
    weights = {sentence: len(sizer.ids(f" {sentence}")) for sentence in filler}
    for length in part.lengths:
        for depth in part.depths:
            for seed in part.seeds:
                yield _candidate(part, length, depth, seed, weights, sizer)


def _candidate(
    part: NeedlePart, length: int, depth: float, seed: int, weights: dict[str, int], sizer: Sizer
) -> Candidate:
    key = f"{length:05}-d{round(100 * depth):03}-s{seed}"
    (name, code), (other, decoy) = _facts(seed, part.name, key)
    facts = (_NEEDLE.format(name=name, code=code), _NEEDLE.format(name=other, code=decoy))
    question = _QUESTION.format(name=name)
    sentences = sorted(weights, key=lambda sentence: rank(seed, key, sentence))
    room = length - sizer.count({"messages": [{"role": "user", "content": " ".join((*facts, question))}]}) - 4
    body = []
    for sentence in sentences:
        room -= weights[sentence]
        if room < 0:
            break
        body.append(sentence)
    text = _hide(body, depth, *facts)
    return Candidate(
        key=key,
        kind="needle",
        request={"messages": [{"role": "user", "content": f"{text}\n\n{question}"}]},
        source="lm_eval:mmlu",
        tags=(f"length:{length}", f"depth:{depth:g}"),
        expected=code,
    )


def _facts(seed: int, part: str, key: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Two different cities with two different numbers of five or six digits."""
    first = number(seed, part, f"{key} name", len(_NAMES))
    second = (first + 1 + number(seed, part, f"{key} other", len(_NAMES) - 1)) % len(_NAMES)
    digits = 5 + number(seed, part, f"{key} digits", 2)
    low = 10 ** (digits - 1)
    code = low + number(seed, part, f"{key} code", 9 * low)
    decoy = low + (code - low + 1 + number(seed, part, f"{key} decoy", 9 * low - 1)) % (9 * low)
    return (_NAMES[first], str(code)), (_NAMES[second], str(decoy))


def _hide(body: list[str], depth: float, fact: str, decoy: str) -> str:
    """`body` with `fact` at `depth` and `decoy` half a text away from it."""
    places = [(round(depth * len(body)), fact), (round((depth + 0.5) % 1 * len(body)), decoy)]
    for place, sentence in sorted(places, reverse=True):
        body = [*body[:place], sentence, *body[place:]]
    return " ".join(body)


def _sentences(sources: Sources) -> list[str]:
    """Sentences without a digit, of historical texts, questions and worked answers, each once."""
    texts = [text for item in questions(sources["lm_eval"]) for text in (item.stem, item.answer)]
    pieces = [" ".join(piece.split()) for text in texts for piece in re.split(r"(?<=[.!?])\s+", text)]
    whole = re.compile(r"[A-Z“\"][^\d$\\|_]{30,600}\.")
    return sorted({piece for piece in pieces if whole.fullmatch(piece)})
