"""Scores of judged tokens: what every modality that is judged by teacher forcing shares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from assay import store
from assay.metrics import text as metrics
from assay.records import Flag
from assay.scoring.rows import Arm, Rows
from assay.tokens import ID_COLUMNS, TokenBlock, split_blocks, split_ids
from assay.verdicts.margins.planted import TokenControl


def read_blocks(arms: Sequence[Arm[TokenControl]], lossy: bool) -> Iterator[tuple[Arm[TokenControl], TokenBlock]]:
    """Judged tokens of some arms with their faults planted, all arms of one row group after another.

    Args:
        arms: those that share judged tokens one after another.
        lossy: whether by the path through text where there is one.
    """
    for path in dict.fromkeys(path for arm in arms for path in arm.judged):
        here = [arm for arm in arms if path in arm.judged]
        for table in store.iter_tables(path, "tokens"):
            for name, alike in groupby(here, attrgetter("name")):
                blocks = split_blocks(table, name, lossy)
                for arm in alike:
                    yield from ((arm, _planted(arm, block)) for block in blocks)


def _planted(arm: Arm[TokenControl], block: TokenBlock) -> TokenBlock:
    return arm.control.tokens(block) if arm.control and arm.control.tokens else block


def read_ids(paths: Iterable[Path], arm: str, lossy: bool) -> dict[str, np.ndarray]:
    """Item -> ids of its judged tokens in an arm; `lossy` as above."""
    tables = (table for path in paths for table in store.iter_tables(path, "tokens", ID_COLUMNS))
    return {key: ids for table in tables for key, ids in split_ids(table, arm, lossy).items()}


def margin_rows(block: TokenBlock, reference_ids: Mapping[str, np.ndarray], clip: float) -> list[Rows]:
    """Margins, logprob errors and KL of greedy items, against the ids of the judge's own run; `clip` in nat."""
    if not block.item_ids:
        return []
    counts = np.diff(block.offsets)
    margins = metrics.greedy_margin(block.lp_judge_max, block.lp_judge)
    position = metrics.ragged_argmax(margins, block.offsets)
    trend = metrics.margin_trend(margins, block.offsets, clip)
    divergences = [
        metrics.first_divergence(ids.tolist(), reference_ids[key].tolist())
        for key, ids in zip(block.item_ids, block.split(block.token_id), strict=True)
    ]
    first = np.array([np.nan if at is None else at for at in divergences], dtype=np.float64)
    rows = [
        block_rows(block, "margin_max", "nat", -1, metrics.ragged_max(margins, block.offsets), pos=position),
        block_rows(block, "margin_mean", "nat", -1, metrics.clipped_mean(margins, block.offsets, clip), n=counts),
        block_rows(block, "margin_trend", "nat", -1, trend.difference, late=trend.late, early=trend.early, n=counts),
        block_rows(block, "exact", "bool", 1, np.isnan(first).astype(float)),
        block_rows(block, "first_divergence", "token", 0, first),
    ]
    if block.lp_served is not None:
        rows.append(_logprob_rows(block, block.lp_served))
    if block.served_top_lp is not None and block.served_top_lp_judge is not None:
        rows.append(_kl_rows(block, block.served_top_lp, block.served_top_lp_judge))
    return rows


def _logprob_rows(block: TokenBlock, lp_served: np.ndarray) -> Rows:
    delta = lp_served - block.lp_judge
    aux = {
        "n": np.diff(block.offsets),
        "mean": metrics.ragged_mean(delta, block.offsets),
        "max_abs": metrics.ragged_max(np.abs(delta), block.offsets),
    }
    if block.served_top_lp is not None and block.served_top_lp_judge is not None:
        aux["served_mass"] = metrics.ragged_mean(np.exp(block.served_top_lp).sum(1), block.offsets)
        aux["judge_mass"] = metrics.ragged_mean(np.exp(block.served_top_lp_judge).sum(1), block.offsets)
    return block_rows(block, "logprob_rms", "nat", -1, metrics.ragged_rms(delta, block.offsets), **aux)


def _kl_rows(block: TokenBlock, served: np.ndarray, judge: np.ndarray) -> Rows:
    divergence = metrics.kl_topk(judge, served)
    same_top = (served.argmax(1) == judge.argmax(1)).astype(float)
    return block_rows(
        block,
        "kl_mean",
        "nat",
        -1,
        metrics.ragged_mean(divergence, block.offsets),
        n=np.diff(block.offsets),
        max=metrics.ragged_max(divergence, block.offsets),
        same_top=metrics.ragged_mean(same_top, block.offsets),
    )


def block_rows(
    block: TokenBlock, metric: str, unit: str, direction: int, values: np.ndarray, **aux: np.ndarray
) -> Rows:
    """One metric of every item of a block, with its helper numbers [items]."""
    keys = list(aux)
    columns = [np.asarray(column, dtype=np.float64).tolist() for column in aux.values()]
    extra = [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)] if keys else []
    # Without a divergence, or with a single token, there is no such number; any other NaN is the judge's.
    nan = Flag.UNDEFINED if metric in ("first_divergence", "margin_trend") else Flag.NONFINITE
    return Rows(metric, unit, direction, block.item_ids, values.tolist(), extra, nan)


def floor_table(block: TokenBlock, arm: str) -> pa.Table:
    """Every positive margin of a floor arm's greedy items: what tau_soft is cut from."""
    margins = metrics.greedy_margin(block.lp_judge_max, block.lp_judge)
    owners = np.repeat(np.arange(len(block.item_ids)), np.diff(block.offsets))
    return store.table_from_rows(
        "floor",
        [
            {"gate": "G-soft", "metric": "margin", "item_id": block.item_ids[owner], "arm": arm, "value": margin}
            for owner, margin in zip(owners[margins > 0], margins[margins > 0], strict=True)
        ],
    )


def unjudged_margins(keys: list[str], logprobs: bool, value: float) -> list[Rows]:
    """Rows of greedy items without judged tokens, for each metric they should have had; `value` as the caller means it.

    Args:
        logprobs: whether the server was asked for them.
    """
    wanted = [("margin_max", "nat", -1), ("margin_mean", "nat", -1), ("margin_trend", "nat", -1), ("exact", "bool", 1)]
    if logprobs:
        wanted += [("logprob_rms", "nat", -1), ("kl_mean", "nat", -1)]
    return [Rows(name, unit, sign, keys, [value] * len(keys)) for name, unit, sign in wanted if keys]
