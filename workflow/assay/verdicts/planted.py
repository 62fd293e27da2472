"""Faults planted on the judge's own output in every run: a gate that lets one through is blind and proves nothing.

Each control changes judged tokens or responses of the judge's greedy run as a faulty server would have, and names the
gates that must fail on it. No server and no model is needed: the judge's stored top 20 give the numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from assay.records import ResponseStatus
from assay.tokens import TokenBlock

Responses = dict[str, dict[str, Any]]  # item_id -> its row


@dataclass(frozen=True)
class Control:
    """One planted fault: what it changes, and the gates that must each catch it."""

    name: str
    gates: tuple[str, ...]
    tokens: Callable[[TokenBlock], TokenBlock] | None = None
    responses: Callable[[Responses], Responses] | None = None


def second_best(block: TokenBlock, share: float, late: bool = False) -> TokenBlock:
    """The judge's second choice at a share of the positions (of the last quarter only, if `late`)."""
    hit = _chance(block, "second_best") < share
    if late:
        hit &= block.positions() >= np.repeat(np.diff(block.offsets) * 3 // 4, np.diff(block.offsets))
    return replace(
        block,
        token_id=np.where(hit, block.judge_top_ids[:, 1], block.token_id),
        lp_judge=np.where(hit, block.judge_top_lp[:, 1], block.lp_judge),
    )


def shift_logprobs(block: TokenBlock) -> TokenBlock:
    """The server's logprobs, chosen and top-k, reported one position late."""
    order = np.arange(len(block.token_id)) - 1
    order[block.offsets[:-1]] = block.offsets[1:] - 1  # the first position of an item shows its last

    def shifted(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[order]

    return replace(block, lp_served=shifted(block.lp_served), served_top_lp=shifted(block.served_top_lp))


def always_first(block: TokenBlock) -> TokenBlock:
    """The most likely token where sampling was asked for: no surprise anywhere."""
    return replace(
        block, lp_asked=np.maximum(block.lp_asked, block.lp_judge_max), in_support=np.ones_like(block.in_support)
    )


def outside_support(block: TokenBlock) -> TokenBlock:
    """A token outside the asked top-p or top-k at every tenth position."""
    hit = _chance(block, "outside_support") < 0.1
    return replace(block, in_support=block.in_support & ~hit, lp_asked=np.where(hit, -np.inf, block.lp_asked))


def extra_prompt_token(rows: Responses) -> Responses:
    """Prompts one token longer than the reference's: a doubled BOS."""

    def doubled(row: dict[str, Any]) -> dict[str, Any]:
        ids = row["prompt_token_ids"]
        return row | {"prompt_tokens": row["prompt_tokens"] + 1, "prompt_token_ids": [ids[0], *ids]}

    return {key: doubled(row) for key, row in rows.items()}


def unanswered(rows: Responses) -> Responses:
    """HTTP 500 on one request in eight, and on one at least, chosen by hash."""
    ranked = sorted(rows, key=lambda key: hashlib.sha256(key.encode()).digest())
    failed = ranked[: max(1, len(ranked) // 8)]
    return rows | {key: rows[key] | {"status": ResponseStatus.HTTP_ERROR} for key in failed}


def wrong_number(rows: Responses) -> Responses:
    """Every digit of every answer moved up by one: a needle that was not found."""
    shift = str.maketrans("0123456789", "1234567890")
    return {key: row | {"text": row["text"].translate(shift)} for key, row in rows.items()}


def _chance(block: TokenBlock, salt: str) -> np.ndarray:
    """A number in [0, 1) for every token, fixed by item and salt, whatever else is in the block."""
    seeds = [int(hashlib.sha256(f"{salt}:{key}".encode()).hexdigest()[:16], 16) for key in block.item_ids]
    counts = np.diff(block.offsets)
    parts = [np.random.default_rng(seed).random(count) for seed, count in zip(seeds, counts, strict=True)]
    return np.concatenate(parts) if parts else np.empty(0)


CONTROLS = (
    Control("unanswered", ("G-coverage",), responses=unanswered),
    Control("extra_prompt_token", ("G-struct",), responses=extra_prompt_token),
    Control("second_best", ("G-hard", "G-soft", "G-mean"), tokens=lambda block: second_best(block, 0.05)),
    Control("second_best_late", ("G-trend",), tokens=lambda block: second_best(block, 0.3, late=True)),
    Control("shifted_logprobs", ("G-logprob", "G-KL"), tokens=shift_logprobs),
    Control("wrong_number", ("G-needle",), responses=wrong_number),
    Control("always_first", ("G-surprisal",), tokens=always_first),
    Control("outside_support", ("G-support",), tokens=outside_support),
)
