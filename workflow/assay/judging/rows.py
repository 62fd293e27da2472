"""Rows of the `tokens` table: what every modality that is judged by teacher forcing shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from assay.references.forcing import Forced


def token_rows(
    key: dict[str, str], token_ids: Any, is_special: Any, forced: Forced, **served: Any
) -> list[dict[str, Any]]:
    """One row a token: `key` (item_id, set_id, arm, path), what the judge says, and what the server said of it."""
    columns: dict[str, Any] = {
        "pos": range(len(token_ids)),
        "token_id": np.asarray(token_ids),
        "is_special": is_special,
        "lp_judge": forced.lp_judge,
        "lp_judge_max": forced.lp_judge_max,
        "judge_rank": forced.judge_rank,
        "entropy": forced.entropy,
        "variance": forced.variance,
        "lp_asked": forced.lp_asked,
        "in_support": forced.in_support,
        "judge_top_ids": forced.judge_top_ids,
        "judge_top_lp": forced.judge_top_lp,
        **served,
    }
    return [key | dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
