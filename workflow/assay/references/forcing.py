"""What a judge says of tokens that somebody else chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

TOP_K = 20


class Forced(NamedTuple):
    """The judge's view of one token sequence after its prompt. Arrays of n tokens; names as in `records.TOKENS`."""

    lp_judge: np.ndarray
    lp_judge_max: np.ndarray
    judge_rank: np.ndarray
    entropy: np.ndarray
    variance: np.ndarray
    lp_asked: np.ndarray
    in_support: np.ndarray
    judge_top_ids: np.ndarray  # [n, 20] int32
    judge_top_lp: np.ndarray  # [n, 20] float32
    at: np.ndarray | None = None  # [n, k] judge log-probabilities of the ids asked for, float32


def look_up(raw: torch.Tensor, token_ids: Sequence[int], asked: torch.Tensor, at: np.ndarray | None = None) -> Forced:
    """What two distributions say of the tokens that were chosen from them.

    Args:
        raw: float32 log-probabilities [n, vocabulary] at temperature 1, after each token's own past.
        token_ids: the n tokens that were chosen.
        asked: log-probabilities of the distribution that was asked for, -inf outside its support; greedy: `raw`.
        at: optional int32 [n, k] ids whose log-probabilities are wanted besides (a server's top-k).

    Returns:
        float32 arrays of n rows, in nats.
    """
    chosen = torch.as_tensor(token_ids, device=raw.device)[:, None]
    lp = raw.gather(1, chosen)
    probability = asked.exp()
    surprisal = -asked.masked_fill(probability == 0, 0.0)
    entropy = (probability * surprisal).sum(-1)
    variance = (probability * surprisal.square()).sum(-1) - entropy.square()
    lp_asked = asked.gather(1, chosen)[:, 0]
    top = raw.topk(TOP_K, -1)
    found = {
        "lp_judge": lp[:, 0],
        "lp_judge_max": raw.max(-1).values,
        "judge_rank": (raw > lp).sum(-1, dtype=torch.int32) + 1,
        "entropy": entropy,
        "variance": variance.clamp(min=0),
        "lp_asked": lp_asked,
        "in_support": torch.isfinite(lp_asked),
        "judge_top_ids": top.indices.int(),
        "judge_top_lp": top.values,
    }
    if at is not None:
        found["at"] = raw.gather(1, torch.as_tensor(at.astype(np.int64), device=raw.device))
    return Forced(**{name: values.cpu().numpy() for name, values in found.items()})
