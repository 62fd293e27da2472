"""Text on a page: the tokens where a server left the reference, with what the reference would have said there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.records import JUDGE
from assay.report.items import About, Case, Item, Listing, Modality, Pass, Standing, worst_first, worst_of
from assay.report.margins import MARGIN_GATES, MARGIN_WORDS, standing_of
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


def text_items(case: Case) -> Listing:
    """Every planned item, with the answers of its worst pass."""
    planned = {row["item_id"]: row for row in case.run.items(case.plan)}
    passes = _passes(case)
    shown = {key: worst_of(found).arm for key, found in passes.items()}
    judge = dict.fromkeys(planned, JUDGE)
    responses = response_rows(case.outputs, shown)
    answers = response_rows(case.run.reference(case.plan), judge)
    tokens = token_rows([case.run.judged], shown)
    ideal = token_rows(case.run.judged_reference(case.plan), judge)
    tokenizer = case.run.tokenizer(case.plan)
    return Listing(
        [
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
                        math.inf if worst_of(passes[key]).standing is Standing.UNJUDGED else case.floor.tau_hard,
                    ),
                ),
            )
            for key, row in ((key, planned[key]) for key in worst_first(passes))
        ]
    )


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
            standing = standing_of(margin, exact[k] == 1, case.floor.tau_hard, bool(notes))
            notes += ["the number asked for is not in the answer"] if lost[k] else []
            found[key].append(Pass(arm, standing, None if math.isnan(margin) else margin, tuple(notes)))
    return found


def _messages(request: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    if "prompt" in request:
        return (("prompt", str(request["prompt"])),)
    return tuple((message["role"], str(message["content"])) for message in request["messages"])


# --- in plain words ----------------------------------------------------------------------------------------------

GATES = {
    "G-struct": About(
        "Answers are whole and consistent",
        "Did the server read the right prompt, end each answer properly, and report text and counts that fit it?",
    ),
    **MARGIN_GATES,
    "G-logprob": About(
        "Reported log-probabilities are right",
        "Are the log-probabilities that the server reports for its tokens those of the reference?",
        "error of an item's log-probabilities, RMS (nat)",
        draws_value=True,
        draws_limit=True,
    ),
    "G-KL": About(
        "Reported distributions are right",
        "Is the whole distribution that the server reports at each token that of the reference?",
        "mean KL divergence of an item (nat)",
        draws_value=True,
        draws_limit=True,
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
    **MARGIN_WORDS,
    "needle": "a number hidden in a long prompt, which the answer has to give back.",
}

MODALITY = Modality(GATES, WORDS, "largest margin (nat)", "text.html", text_items)
