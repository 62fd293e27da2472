"""Answers token by token: where a served one leaves the reference's, and what the reference would have said there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from assay.metrics.text import first_divergence
from assay.run import Row

CONTEXT = 12  # tokens shown before a diverging one
SHOWN_TOKENS = 8  # diverging tokens of one item; the page says how many more there are
ALTERNATIVES = 5
REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Passage:
    """A text around the token where two answers part; all of it is `before` where they do not."""

    before: str
    token: str = ""
    after: str = ""


@dataclass(frozen=True)
class Alternative:
    """A token that the reference could have said, with its probability."""

    text: str
    probability: float
    served: bool


@dataclass(frozen=True)
class Token:
    """A served token that is not the reference's first choice."""

    pos: int
    before: str
    text: str
    margin: float  # nat
    rank: int
    over: bool  # whether the margin is above the limit for a single token
    alternatives: tuple[Alternative, ...]  # the likeliest, and the served one wherever it stands


@dataclass(frozen=True)
class Comparison:
    """Two answers to one item; either may be missing."""

    served: Passage | None
    reference: Passage | None
    tokens: tuple[Token, ...]
    unshown: int  # diverging tokens that are not in `tokens`


@dataclass(frozen=True)
class Answer:
    """An answer, and its judged tokens; both empty where there is none."""

    response: Row | None
    tokens: list[Row]


def compare(served: Answer, reference: Answer, tokenizer: Tokenizer, limit: float) -> Comparison:
    """Lay two answers beside one another.

    Args:
        tokenizer: says what text tokens are; special tokens are shown.
        limit: margin [nat] above which a single token is wrong; infinite where tokens are not judged one by one.
    """

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    by_text = any(row["path"] == "text" for row in served.tokens)
    ids, ideal = ([row["token_id"] for row in _along(answer.tokens, by_text)] for answer in (served, reference))
    at = first_divergence(ids, ideal) if ids and ideal else None
    wrong = sorted((row for row in served.tokens if _margin(row) > 0), key=lambda row: (-_margin(row), row["pos"]))
    shown = sorted(wrong[:SHOWN_TOKENS], key=lambda row: row["pos"])
    return Comparison(
        served=passage(ids, at, decode) if ids else _whole(served.response),
        reference=passage(ideal, at, decode) if ideal else _whole(reference.response),
        tokens=tuple(_token(row, ids, decode, limit) for row in shown),
        unshown=len(wrong) - len(shown),
    )


def _along(rows: list[Row], by_text: bool) -> list[Row]:
    """Tokens along one path; where nothing was encoded again, the ids as sampled are those of the text."""
    return [row for row in rows if (row["path"] == "text") == by_text] or rows


def _whole(response: Row | None) -> Passage | None:
    return Passage(response["text"]) if response and response["text"] else None


def passage(ids: Sequence[int], at: int | None, decode: Decode) -> Passage:
    """The text of `ids`, with token `at` apart; a character that this token only begins or ends belongs to it."""
    text = decode(ids)
    if at is None:
        return Passage(text)
    before = decode(ids[:at]).rstrip(REPLACEMENT)
    through = decode(ids[: at + 1]).rstrip(REPLACEMENT)
    if not (text.startswith(before) and text.startswith(through)):
        return Passage(before, text[len(before) :])
    return Passage(before, text[len(before) : max(len(before), len(through))], text[max(len(before), len(through)) :])


def _margin(row: Row) -> float:
    return float(row["lp_judge_max"] - row["lp_judge"])


def _token(row: Row, ids: Sequence[int], decode: Decode, limit: float) -> Token:
    logprobs = dict(list(zip(row["judge_top_ids"], row["judge_top_lp"], strict=True))[:ALTERNATIVES])
    logprobs.setdefault(row["token_id"], row["lp_judge"])
    return Token(
        pos=row["pos"],
        before=decode(ids[max(0, row["pos"] - CONTEXT) : row["pos"]]),
        text=decode([row["token_id"]]),
        margin=_margin(row),
        rank=row["judge_rank"],
        over=_margin(row) > limit,
        alternatives=tuple(
            Alternative(decode([one]), math.exp(logprob), one == row["token_id"]) for one, logprob in logprobs.items()
        ),
    )
