"""Text on a page: the tokens where a server left the reference, with what the reference would have said there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.records import JUDGE
from assay.report.items import About, Case, Item, Modality, Pass, Standing, worst_of
from assay.report.tokens import Answer, Comparison, compare
from assay.run import prompt_text, response_rows, token_rows
from assay.verdicts.text.structure import breaches

SUMMARY = 120  # characters of the prompt in the list


@dataclass(frozen=True)
class TextView:
    """What is shown of one item."""

    messages: tuple[tuple[str, str], ...]  # role, content
    expected: str | None
    answers: Comparison


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
            view=TextView(
                messages=_messages(row["request"]),
                expected=row["expected"],
                answers=compare(
                    Answer(responses.get(key), tokens.get(key, [])),
                    Answer(answers.get(key), ideal.get(key, [])),
                    tokenizer,
                    case.floor.tau_hard,
                ),
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


def _messages(request: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if "prompt" in request:
        return (("prompt", str(request["prompt"])),)
    return tuple((message["role"], str(message["content"])) for message in request["messages"])


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
