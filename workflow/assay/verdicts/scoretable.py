"""A score table as aligned columns: one array per arm and metric, indexed by planned item."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from assay.errors import StoreError
from assay.records import Flag

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FloorValues = Mapping[str, Mapping[str, Floats]]  # gate -> arm -> values


class State(IntEnum):
    """What stands at one item, arm and metric."""

    ABSENT = 0
    OK = 1
    UNDEFINED = 2
    NONFINITE = 3
    MISSING_AS_WORST = 4


_STATES = {
    Flag.OK: State.OK,
    Flag.UNDEFINED: State.UNDEFINED,
    Flag.NONFINITE: State.NONFINITE,
    Flag.MISSING_AS_WORST: State.MISSING_AS_WORST,
}


@dataclass
class _Column:
    values: Floats
    states: npt.NDArray[np.uint8]
    aux: dict[str, Floats] = field(default_factory=dict)


class ScoreTable:
    """Columns of a SCORES table, aligned to `items` (the plan, sorted). Joins are by key, never by position.

    Memory: 9 bytes a score and 8 a helper number, whatever the size of the row groups it was read from.
    """

    def __init__(self, items: Iterable[str]) -> None:
        self.items: list[str] = sorted(items)
        if len(set(self.items)) != len(self.items):
            raise StoreError("the plan names an item twice")
        self._index = pa.array(self.items, pa.string())
        self._columns: dict[tuple[str, str], _Column] = {}

    @classmethod
    def from_tables(cls, tables: Iterable[pa.Table], items: Iterable[str]) -> ScoreTable:
        """Read tables (row groups) of schema SCORES for the planned `items`.

        Raises:
            StoreError: a row's item was not planned, or a key occurs twice.
        """
        scores = cls(items)
        for table in tables:
            scores._add(table)
        return scores

    def _add(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        rows = pc.index_in(table["item_id"].combine_chunks(), value_set=self._index)
        if rows.null_count:
            stray = table["item_id"].filter(pc.is_null(rows))[0].as_py()
            raise StoreError(f"scores hold item '{stray}', which is not in the plan")
        rows = rows.to_numpy(zero_copy_only=False)
        arms, arm_of = _codes(table["arm"])
        metrics, metric_of = _codes(table["metric"])
        flags, flag_of = _codes(table["flag"])
        states = np.array([_STATES[Flag(flag)] for flag in flags], np.uint8)[flag_of]
        values = table["value"].to_numpy()
        helpers = _Helpers(table["aux"])
        for code, group in _groups(arm_of * len(metrics) + metric_of):
            key = (arms[code // len(metrics)], metrics[code % len(metrics)])
            column = self._columns.setdefault(key, self._empty())
            at = rows[group]
            if column.states[at].any() or len(np.unique(at)) < len(at):
                raise StoreError(f"scores hold a row twice: arm '{key[0]}', metric '{key[1]}'")
            column.values[at], column.states[at] = values[group], states[group]
            helpers.fill(column.aux, group, at, len(self.items))

    def _empty(self) -> _Column:
        n = len(self.items)
        return _Column(np.full(n, np.nan), np.zeros(n, np.uint8))

    @property
    def arms(self) -> list[str]:
        """Arms that have any row, sorted."""
        return sorted({arm for arm, _ in self._columns})

    def metrics(self, arm: str) -> list[str]:
        """Metrics of an arm, sorted."""
        return sorted(metric for name, metric in self._columns if name == arm)

    def states(self, arm: str, metric: str) -> npt.NDArray[np.uint8]:
        """`State` of each item."""
        return self._columns.get((arm, metric), self._empty()).states

    def values(self, arm: str, metric: str, worst: float = np.nan) -> Floats:
        """Values, NaN where there is none; `worst` where a failed item stands for the worst case."""
        column = self._columns.get((arm, metric), self._empty())
        values = np.where(column.states == State.OK, column.values, np.nan)
        values[column.states == State.MISSING_AS_WORST] = worst
        return values

    def aux(self, arm: str, metric: str, key: str) -> Floats:
        """A helper number of each row, NaN where there is none."""
        column = self._columns.get((arm, metric), self._empty())
        return column.aux.get(key, np.full(len(self.items), np.nan))

    def has(self, metric: str) -> Mask:
        """Items for which any arm has a row of this metric: how greedy, sampled and needle items are told apart."""
        found = np.zeros(len(self.items), bool)
        for (_, name), column in self._columns.items():
            if name == metric:
                found |= column.states != State.ABSENT
        return found

    def digest(self, arm: str) -> str:
        """SHA-256 over every row of an arm: two arms with the same digest are one arm."""
        digest = hashlib.sha256()
        for metric in self.metrics(arm):
            column = self._columns[arm, metric]
            digest.update(metric.encode())
            digest.update(column.states.tobytes())
            digest.update(np.where(column.states == State.OK, column.values + 0.0, 0.0).tobytes())
            for key in sorted(column.aux):
                digest.update(key.encode())
                digest.update((column.aux[key] + 0.0).tobytes())
        return digest.hexdigest()


class _Helpers:
    """The `aux` maps of a table, flattened once."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        maps = column.combine_chunks()
        offsets = maps.offsets.to_numpy()
        owner = np.repeat(np.arange(len(maps)), np.diff(offsets))
        taken = slice(offsets[0], offsets[-1])
        keys = maps.keys[taken].dictionary_encode()
        self.names: list[str] = keys.dictionary.to_pylist()
        codes, values = keys.indices.to_numpy(), maps.items[taken].to_numpy(zero_copy_only=False)
        self.columns = [(owner[codes == code], values[codes == code]) for code in range(len(self.names))]

    def fill(self, aux: dict[str, Floats], group: npt.NDArray[Any], at: npt.NDArray[Any], n: int) -> None:
        """Scatter the helper numbers of rows `group` to items `at`."""
        for name, (owner, values) in zip(self.names, self.columns, strict=True):
            found = np.searchsorted(owner, group)  # owners ascend, one entry a row and key
            found[found == len(owner)] = 0
            hit = owner[found] == group if len(owner) else np.zeros(len(group), bool)
            if hit.any():
                aux.setdefault(name, np.full(n, np.nan))[at[hit]] = values[found[hit]]


def _codes(column: pa.ChunkedArray) -> tuple[list[str], npt.NDArray[Any]]:
    encoded = column.unify_dictionaries().combine_chunks()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _groups(codes: npt.NDArray[Any]) -> Iterable[tuple[int, npt.NDArray[Any]]]:
    order = np.argsort(codes, kind="stable")
    found, starts = np.unique(codes[order], return_index=True)
    return zip(found.tolist(), np.split(order, starts[1:]), strict=True)


def planned_items(tables: Iterable[pa.Table], missing: Sequence[str] = ()) -> list[str]:
    """Every item named in SCORES tables, with those known to be missing."""
    found = set(missing)
    for table in tables:
        found.update(pc.unique(table["item_id"]).to_pylist())
    return sorted(found)


def floor_values(tables: Iterable[pa.Table]) -> FloorValues:
    """Values of each gate and floor arm from FLOOR tables, sorted: the exact inputs of what is cut from the floor."""
    found: dict[str, dict[str, list[Floats]]] = {}
    for table in tables:
        if not table.num_rows:
            continue
        gates, gate_of = _codes(table["gate"])
        arms, arm_of = _codes(table["arm"])
        values = table["value"].to_numpy()
        for code, group in _groups(gate_of * len(arms) + arm_of):
            parts = found.setdefault(gates[code // len(arms)], {})
            parts.setdefault(arms[code % len(arms)], []).append(values[group])
    return {gate: {arm: np.sort(np.concatenate(parts)) for arm, parts in arms.items()} for gate, arms in found.items()}
