"""Faults planted on text: on prompts, on answers and on sampled tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from assay.tokens import TokenBlock
from assay.verdicts.margins.planted import MARGIN_CONTROLS, TokenControl, chance
from assay.verdicts.planted import Responses, unanswered


def always_first(block: TokenBlock) -> TokenBlock:
    """The most likely token where sampling was asked for: no surprise anywhere."""
    return replace(
        block, lp_asked=np.maximum(block.lp_asked, block.lp_judge_max), in_support=np.ones_like(block.in_support)
    )


def outside_support(block: TokenBlock) -> TokenBlock:
    """A token outside the asked top-p or top-k at every tenth position."""
    hit = chance(block, "outside_support") < 0.1
    return replace(block, in_support=block.in_support & ~hit, lp_asked=np.where(hit, -np.inf, block.lp_asked))


def extra_prompt_token(rows: Responses) -> Responses:
    """Prompts one token longer than the reference's: a doubled BOS."""

    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        ids = row["prompt_token_ids"]
        return row | {"prompt_tokens": row["prompt_tokens"] + 1, "prompt_token_ids": [ids[0], *ids]}

    return {key: doubled(row) for key, row in rows.items()}


def wrong_number(rows: Responses) -> Responses:
    """Every digit of every answer moved up by one: a needle that was not found."""
    shift = str.maketrans("0123456789", "1234567890")
    return {key: row | {"text": row["text"].translate(shift)} for key, row in rows.items()}


CONTROLS = (
    TokenControl("unanswered", ("G-coverage",), responses=unanswered),
    TokenControl("extra_prompt_token", ("G-struct",), responses=extra_prompt_token),
    *MARGIN_CONTROLS,
    TokenControl("wrong_number", ("G-needle",), responses=wrong_number),
    TokenControl("always_first", ("G-surprisal",), tokens=always_first),
    TokenControl("outside_support", ("G-support",), tokens=outside_support),
)
