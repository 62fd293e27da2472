"""Text on a page: the tokens where a server left the reference, with what the reference would have said there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from assay.metrics.text import first_divergence
from assay.records import JUDGE
from assay.report.items import About, Case, Item, Modality, Pass, Standing, worst_of
from assay.run import Row, prompt_text, response_rows, token_rows
from assay.verdicts.text.structure import breaches

CONTEXT = 12  # tokens shown before a diverging one
SHOWN_TOKENS = 8  # diverging tokens of one item; the page says how many more there are
ALTERNATIVES = 5
SUMMARY = 120  # characters of the prompt in the list
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
    """A token that the reference could have said."""

    text: str
    probability: float
    served: bool


@dataclass(frozen=True)
class Token:
    """A served token that is not the reference's first choice."""

    pos: int
    before: str
    text: str
    preferred: str
    margin: float  # nat
    times: float  # how many times less likely than the first choice
    probability: float
    rank: int
    over: bool  # whether the margin is above the limit for a single token
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class TextView:
    """What is shown of one item."""

    messages: tuple[tuple[str, str], ...]  # role, content
    expected: str | None
    served: Passage | None
    reference: Passage | None
    tokens: tuple[Token, ...]
    unshown: int  # diverging tokens that are not in `tokens`


def text_items(case: Case) -> list[Item]:
    """Every planned item with its worst pass."""
    planned = {row["item_id"]: row for row in case.run.items(case.plan)}
    passes = _passes(case)
    shown = {key: worst_of(found).arm for key, found in passes.items()}
    judge = dict.fromkeys(planned, JUDGE)
    responses = response_rows(case.files("outputs"), shown)
    answers = response_rows(case.run.reference(case.plan, "reference"), judge)
    tokens = token_rows(case.files("judged"), shown)
    ideal = token_rows(case.run.reference(case.plan, "judged/reference"), judge)
    tokenizer = case.run.tokenizer(case.plan)
    return [
        Item(
            item_id=key,
            kind=row["kind"],
            tags=tuple(row["tags"]),
            passes=tuple(passes[key]),
            summary=" ".join(prompt_text(row["request"]).split())[:SUMMARY],
            view=_view(
                row,
                responses.get(key),
                answers.get(key),
                tokens.get(key, []),
                ideal.get(key, []),
                tokenizer,
                case.floor.tau_hard,
            ),
        )
        for key, row in planned.items()
    ]


# --- how each answer stands --------------------------------------------------------------------------------------


def _passes(case: Case) -> dict[str, list[Pass]]:
    """Item -> its passes, in the order of the plan."""
    found: dict[str, list[Pass]] = {key: [] for key in case.table.items}
    reasons = case.why_unscored()
    for arm, trial in case.trials.items():
        failed, broken = trial.failed(arm), breaches(trial)
        margins, exact = case.table.values(arm, "margin_max", np.inf), case.table.values(arm, "exact")
        lost = case.table.values(arm, "needle") == 0
        for k, key in enumerate(case.table.items):
            notes = [what for what, mask in broken.items() if mask[k]]
            if failed[k]:
                reason = reasons.get((arm, key), "not recorded")
                found[key].append(Pass(arm, Standing.UNANSWERED, None, (reason, *notes)))
                continue
            margin = float(margins[k])
            standing = _standing(margin, exact[k] == 1, case.floor.tau_hard, bool(notes))
            notes += ["the number asked for is not in the answer"] if lost[k] else []
            found[key].append(Pass(arm, standing, None if math.isnan(margin) else margin, tuple(notes)))
    return found


def _standing(margin: float, exact: bool, limit: float, broken: bool) -> Standing:
    """Of an answer; `margin` [nat] is its largest, NaN where its tokens are not judged one by one."""
    if broken or margin > limit:
        return Standing.WRONG
    if math.isnan(margin):
        return Standing.UNJUDGED
    return Standing.SAME if exact and margin == 0 else Standing.CLOSE


# --- what is shown of it -----------------------------------------------------------------------------------------


def _view(
    item: Row,
    response: Row | None,
    answer: Row | None,
    tokens: list[Row],
    ideal: list[Row],
    tokenizer: Tokenizer,
    limit: float,
) -> TextView:
    """What is shown of an item: `response` and `tokens` of its worst pass, `answer` and `ideal` of the reference."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    by_text = any(row["path"] == "text" for row in tokens)
    served, reference = ([row["token_id"] for row in _along(rows, by_text)] for rows in (tokens, ideal))
    at = first_divergence(served, reference) if served and reference else None
    wrong = sorted((row for row in tokens if _margin(row) > 0), key=lambda row: (-_margin(row), row["pos"]))
    shown = sorted(wrong[:SHOWN_TOKENS], key=lambda row: row["pos"])
    return TextView(
        messages=_messages(item["request"]),
        expected=item["expected"],
        served=passage(served, at, decode) if served else _whole(response),
        reference=passage(reference, at, decode) if reference else _whole(answer),
        tokens=tuple(_token(row, served, decode, limit) for row in shown),
        unshown=len(wrong) - len(shown),
    )


def _messages(request: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if "prompt" in request:
        return (("prompt", str(request["prompt"])),)
    return tuple((message["role"], str(message["content"])) for message in request["messages"])


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
    margin = _margin(row)
    top = list(zip(row["judge_top_ids"], row["judge_top_lp"], strict=True))[:ALTERNATIVES]
    return Token(
        pos=row["pos"],
        before=decode(ids[max(0, row["pos"] - CONTEXT) : row["pos"]]),
        text=decode([row["token_id"]]),
        preferred=decode([row["judge_top_ids"][0]]),
        margin=margin,
        times=math.exp(min(margin, 700.0)),
        probability=math.exp(row["lp_judge"]),
        rank=row["judge_rank"],
        over=margin > limit,
        alternatives=tuple(Alternative(decode([one]), math.exp(lp), one == row["token_id"]) for one, lp in top),
    )


# --- in plain words ----------------------------------------------------------------------------------------------

GATES = {
    "G-coverage": About(
        "Every request is answered",
        "Did every planned request get an answer that can be scored?",
    ),
    "G-struct": About(
        "Answers are whole and consistent",
        "Did the server read the right prompt, end each answer properly, and report text and counts that fit it?",
    ),
    "G-hard": About(
        "No token is clearly wrong",
        "Does any answer hold a token that the reference finds clearly less likely than its own choice?",
        "largest margin of an item (nat)",
        "item",
    ),
    "G-soft": About(
        "Small differences are not too many",
        "Do more answers hold a noticeable margin than harmless changes of the reference itself bring about?",
        "largest margin of an item (nat)",
        "item",
    ),
    "G-mean": About(
        "Answers are right on average",
        "Are the margins, averaged over all tokens, larger than those of harmless changes?",
        "mean margin of an item (nat)",
        "value",
    ),
    "G-trend": About(
        "Answers do not drift",
        "Do margins grow or shrink along an answer, as a broken cache or position makes them?",
        "mean margin at the end of an item minus that at its start (nat)",
    ),
    "G-logprob": About(
        "Reported log-probabilities are right",
        "Are the log-probabilities that the server reports for its tokens those of the reference?",
        "error of an item's log-probabilities, RMS (nat)",
        "value",
    ),
    "G-KL": About(
        "Reported distributions are right",
        "Is the whole distribution that the server reports at each token that of the reference?",
        "mean KL divergence of an item (nat)",
        "value",
    ),
    "G-needle": About(
        "Facts in long prompts are found",
        "Does the server lose numbers hidden in long prompts that the reference finds?",
    ),
    "G-surprisal": About(
        "Sampling is as random as asked",
        "Are sampled tokens as surprising, all in all, as the temperature that was asked for makes them?",
    ),
    "G-support": About(
        "Sampling stays inside what is allowed",
        "Are sampled tokens among those that top-p, top-k and min-p leave?",
    ),
}

WORDS = {
    "reference": "the same weights, run by the plainest code there is in high precision. It is asked the same "
    "questions itself, and every served answer is shown to it token by token.",
    "margin": "how much less likely the reference finds a served token than its own first choice at that place: 0 is "
    "the first choice itself, 0.7 nat half as likely, 2.3 nat a tenth. (A nat is one unit of a natural logarithm.)",
    "near tie": "a place where the reference finds two tokens almost equally likely, so that rounding decides. A small "
    "margin there is harmless.",
    "needle": "a number hidden in a long prompt, which the answer has to give back.",
}

MODALITY = Modality(GATES, WORDS, "largest margin (nat)", "text.html", text_items)
