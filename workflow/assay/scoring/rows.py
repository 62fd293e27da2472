"""What every scorer shares: the arms of a run, their responses, and score rows as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from assay import store
from assay.records import JUDGE, SCORES, Flag, served_arm
from assay.verdicts.planted import Control

C = TypeVar("C", bound=Control)


@dataclass(frozen=True)
class Files:
    """What the instances of a server answered, or the arms of a reference, and what was judged of it."""

    responses: list[Path]  # one an instance, instance 0 first; one a sample set and arm
    judged: list[Path]  # of all instances together; one a sample set

    @property
    def paths(self) -> list[Path]:
        """All of them."""
        return [*self.responses, *self.judged]

    def of(self, arm: str) -> list[Path]:
        """Responses of a reference arm."""
        return [path for path in self.responses if path.stem == arm]


@dataclass(frozen=True)
class Arm(Generic[C]):
    """One arm to score: the files that hold its responses and what was judged of them, and the fault planted on it."""

    name: str
    label: str  # the name it carries in the scores: its own, or that of the control planted on it
    responses: list[Path]
    judged: list[Path]
    control: C | None = None


@dataclass
class Rows:
    """Score rows of one metric, as columns. `nan` says what a NaN among the values means."""

    metric: str
    unit: str
    direction: int
    item_ids: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    aux: list[dict[str, float]] = field(default_factory=list)
    nan: Flag = Flag.UNDEFINED


def arms_of(plan: Mapping[str, Any], served: Files, references: Files, controls: Sequence[C]) -> Iterator[Arm[C]]:
    """Every arm of a run: served passes, then the reference's arms, and the judge's once more for each control."""
    for number, passes in enumerate(plan["instances"]):
        for item in passes:
            name = served_arm(number, item["name"])
            yield Arm(name, name, [served.responses[number]], served.judged)
    for name in plan["reference"]["arms"]:
        arm = Arm[C](name, name, references.of(name), references.judged)
        yield arm
        if name == JUDGE:
            yield from (
                Arm(name, f"control_{control.name}", arm.responses, arm.judged, control) for control in controls
            )


def read_responses(arm: Arm[C], columns: list[str]) -> dict[str, dict[str, Any]]:
    """Item -> these columns of its response (`item_id` and `arm` among them), the arm's fault planted."""
    found = {
        row["item_id"]: row
        for path in arm.responses
        for row in store.read_rows(path, "responses", columns)
        if row["arm"] == arm.name
    }
    return arm.control.responses(found) if arm.control and arm.control.responses else found


def score_table(config: str, arm: str, sets: Mapping[str, str], parts: Iterable[Rows]) -> pa.Table:
    """Rows as a `scores` table; `sets` is the sample set of each item.

    NaN becomes null (undefined, or not finite where only a broken judge gives it); infinity becomes null (counted as
    the worst case).
    """
    parts = [rows for rows in parts if rows.item_ids]
    counts = [len(rows.item_ids) for rows in parts]
    keys = [key for rows in parts for key in rows.item_ids]
    values = np.array([value for rows in parts for value in rows.values], dtype=np.float64)
    aux = [entry for rows in parts for entry in rows.aux or [{}] * len(rows.item_ids)]
    flags = np.full(len(keys), Flag.OK.value, dtype=object)
    undefined, worst = np.isnan(values), np.isinf(values)
    flags[undefined] = _each([rows.nan.value for rows in parts], counts)[undefined]
    flags[worst] = Flag.MISSING_AS_WORST.value
    columns = {
        "config": pa.repeat(config, len(keys)),
        "item_id": keys,
        "set_id": [sets[key] for key in keys],
        "arm": pa.repeat(arm, len(keys)),
        "metric": _each([rows.metric for rows in parts], counts),
        "value": pa.array(values, mask=undefined | worst),
        "flag": flags,
        "unit": _each([rows.unit for rows in parts], counts),
        "direction": pa.array(_each([rows.direction for rows in parts], counts), pa.int8()),
        "aux": pa.array(
            [[(k, v) for k, v in entry.items() if np.isfinite(v)] for entry in aux], SCORES.field("aux").type
        ),
    }
    arrays = [_as(columns[column.name], column.type) for column in SCORES]
    return pa.table(arrays, schema=SCORES)


def _each(values: list[Any], counts: list[int]) -> npt.NDArray[Any]:
    """The value of each metric for each of its rows."""
    return np.repeat(np.array(values, dtype=object), counts)


def _as(values: Any, kind: pa.DataType) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return (
        array.dictionary_encode() if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(array.type) else array
    )
