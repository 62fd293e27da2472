"""Judged tables, item by item, and the rows of `tokens`, which every modality that is judged by teacher forcing has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from assay import store
from assay.references.forcing import Forced

BATCH = 16  # responses of each table read at a time, audio and all


def write_by_item(writer: store.TableWriter, name: str, judged: Iterable[Iterable[dict[str, Any]]]) -> None:
    """Write what was judged of each item, of all its arms, to a table of schema `name`, a row group for 64 items."""
    tables = (store.table_from_rows(name, rows) for rows in judged)
    while group := list(islice(tables, store.ITEMS_PER_ROW_GROUP)):
        writer.write(pa.concat_tables(group).unify_dictionaries())


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
