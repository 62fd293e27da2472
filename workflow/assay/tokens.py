"""Judged tokens of some items of one arm, as arrays: what text metrics and planted controls work on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of several items in a row; item i owns positions offsets[i]:offsets[i + 1].

    Per-token arrays have the names, units and meaning of `records.TOKENS`; lists of k entries are [tokens, k].
    The server's columns are None where it reported none.
    """

    item_ids: list[str]
    offsets: np.ndarray  # int64 [items + 1]
    token_id: np.ndarray
    lp_judge: np.ndarray
    lp_judge_max: np.ndarray
    entropy: np.ndarray
    variance: np.ndarray
    lp_asked: np.ndarray
    in_support: np.ndarray
    judge_top_ids: np.ndarray
    judge_top_lp: np.ndarray
    lp_served: np.ndarray | None = None
    served_top_lp: np.ndarray | None = None
    served_top_lp_judge: np.ndarray | None = None

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """`values` [tokens] as one array an item."""
        return np.split(values, self.offsets[1:-1]) if self.item_ids else []

    def take(self, items: np.ndarray) -> TokenBlock:
        """The block of the items where the boolean mask `items` holds."""
        counts = np.diff(self.offsets)
        keep = np.repeat(items, counts)
        return replace(
            self,
            item_ids=[key for key, wanted in zip(self.item_ids, items, strict=True) if wanted],
            offsets=np.concatenate([[0], np.cumsum(counts[items])]),
            **{name: values[keep] for name, values in self.arrays().items()},
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """The per-token arrays that are there, by name."""
        names = [item.name for item in fields(self) if item.name not in ("item_ids", "offsets")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def positions(self) -> np.ndarray:
        """Position of every token inside its item."""
        return np.arange(len(self.token_id)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))


ID_COLUMNS = ["item_id", "arm", "path", "token_id"]
_SCALARS = ("token_id", "lp_judge", "lp_judge_max", "entropy", "variance", "lp_asked", "in_support")
_JUDGE_LISTS = ("judge_top_ids", "judge_top_lp")
_SERVED_LISTS = ("served_top_lp", "served_top_lp_judge")


def split_blocks(table: pa.Table, arm: str, lossy: bool) -> list[TokenBlock]:
    """Blocks of one arm in a `tokens` table (a row group, which holds whole items), each of uniform width.

    Args:
        table: rows of schema `records.TOKENS`, sorted by its keys.
        arm: the arm wanted.
        lossy: whether the path through text is wanted where there is one. Otherwise only ids as sampled count.
    """
    table, item = _of_arm(table, arm, lossy)
    if not len(item):
        return []
    width = _widths(table["served_top_lp"])
    starts = _starts(item)
    # A server may report fewer alternatives for some item; rectangles need one width a block.
    changes = np.flatnonzero(width[starts][1:] != width[starts][:-1]) + 1
    bounds = [0, *starts[changes], len(item)]
    return [_block(table.slice(low, high - low), item[low:high]) for low, high in itertools.pairwise(bounds)]


def split_ids(table: pa.Table, arm: str, lossy: bool) -> dict[str, np.ndarray]:
    """Item -> ids of its tokens in one arm; arguments as above, but that `ID_COLUMNS` are enough."""
    table, item = _of_arm(table, arm, lossy)
    starts = _starts(item)
    return dict(zip(item[starts].tolist(), np.split(table["token_id"].to_numpy(), starts)[1:], strict=True))


def _of_arm(table: pa.Table, arm: str, lossy: bool) -> tuple[pa.Table, np.ndarray]:
    """Rows of one arm along one path, and their items."""
    table = table.filter(pc.equal(table["arm"], arm))
    item, path = (np.asarray(table[name].cast(pa.string()), dtype=object) for name in ("item_id", "path"))
    if lossy:
        has_text = np.isin(item, np.unique(item[path == "text"]))
        wanted = (path == "text") | ~has_text
    else:
        wanted = path == "ids"
    return (table, item) if wanted.all() else (table.filter(pa.array(wanted)), item[wanted])


def _starts(item: np.ndarray) -> np.ndarray:
    """Where each item begins."""
    return np.flatnonzero(np.concatenate([[True], item[1:] != item[:-1]])[: len(item)])


def _widths(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(pc.fill_null(pc.list_value_length(column), -1))


def _block(table: pa.Table, item: np.ndarray) -> TokenBlock:
    starts = _starts(item)
    scalars = {name: table[name].to_numpy() for name in _SCALARS}
    lp_served = None if table["lp_served"].null_count else table["lp_served"].to_numpy()
    return TokenBlock(
        item_ids=item[starts].tolist(),
        offsets=np.append(starts, len(item)),
        lp_served=lp_served,
        **scalars,
        **{name: _rectangle(table[name]) for name in _JUDGE_LISTS},
        **{name: _rectangle(table[name]) for name in _SERVED_LISTS if not table[name].null_count},
    )


def _rectangle(column: pa.ChunkedArray) -> np.ndarray:
    values: np.ndarray = pc.list_flatten(column).to_numpy()
    return values.reshape(len(column), -1)
