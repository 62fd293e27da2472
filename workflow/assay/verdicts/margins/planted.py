"""Faults planted on judged tokens: the judge's stored top 20 give the numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from assay.tokens import TokenBlock
from assay.verdicts.planted import Control


@dataclass(frozen=True)
class TokenControl(Control):
    """A planted fault that may change judged tokens."""

    tokens: Callable[[TokenBlock], TokenBlock] | None = None


def second_best(block: TokenBlock, share: float, late: bool = False) -> TokenBlock:
    """The judge's second choice at a share of the positions (of the last quarter only, if `late`)."""
    hit = chance(block, "second_best") < share
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


def chance(block: TokenBlock, salt: str) -> np.ndarray:
    """A number in [0, 1) for every token, fixed by item and salt, whatever else is in the block."""
    seeds = [int(hashlib.sha256(f"{salt}:{key}".encode()).hexdigest()[:16], 16) for key in block.item_ids]
    counts = np.diff(block.offsets)
    parts = [np.random.default_rng(seed).random(count) for seed, count in zip(seeds, counts, strict=True)]
    return np.concatenate(parts) if parts else np.empty(0)


MARGIN_CONTROLS = (
    TokenControl("second_best", ("G-hard", "G-soft", "G-mean"), tokens=lambda block: second_best(block, 0.05)),
    TokenControl("second_best_late", ("G-trend",), tokens=lambda block: second_best(block, 0.3, late=True)),
    TokenControl("shifted_logprobs", ("G-logprob", "G-KL"), tokens=shift_logprobs),
)
