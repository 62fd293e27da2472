"""What pages say of token margins, in every modality whose tokens are judged one by one."""

from __future__ import annotations

import math

from assay.report.items import About, Standing


def standing_of(margin: float, exact: bool, limit: float, broken: bool) -> Standing:
    """Of an answer; `margin` [nat] is its largest, NaN where its tokens are not judged one by one."""
    if broken or margin > limit:
        return Standing.WRONG
    if math.isnan(margin):
        return Standing.UNJUDGED
    return Standing.SAME if exact and margin == 0 else Standing.CLOSE


MARGIN_GATES = {
    "G-hard": About(
        "No token is clearly wrong",
        "Does any answer hold a token that the reference finds clearly less likely than its own choice?",
        "largest margin of an item (nat)",
        draws_limit=True,
    ),
    "G-soft": About(
        "Small differences are not too many",
        "Do more answers hold a noticeable margin than harmless changes of the reference itself bring about?",
        "largest margin of an item (nat)",
        draws_limit=True,
    ),
    "G-mean": About(
        "Answers are right on average",
        "Are the margins, averaged over all tokens, larger than those of harmless changes?",
        "mean margin of an item (nat)",
        draws_value=True,
        draws_limit=True,
    ),
    "G-trend": About(
        "Answers do not drift",
        "Do margins grow or shrink along an answer, as a broken cache or position makes them?",
        "mean margin at the end of an item minus that at its start (nat)",
        draws_value=True,
    ),
}

MARGIN_WORDS = {
    "reference": "the same weights, run by the plainest code there is in high precision. It is asked the same "
    "questions itself, and every served answer is shown to it token by token.",
    "margin": "how much less likely the reference finds a served token than its own first choice at that place: 0 is "
    "the first choice itself, 0.7 nat half as likely, 2.3 nat a tenth. (A nat is one unit of a natural logarithm.)",
    "near tie": "a place where the reference finds two tokens almost equally likely, so that rounding decides. A small "
    "margin there is harmless.",
}
