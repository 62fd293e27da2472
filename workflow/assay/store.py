"""Parquet and JSON in and out: schema checked both ways, provenance in the metadata, writes that are all or nothing."""

from __future__ import annotations

import heapq
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from assay.errors import StoreError
from assay.records import SCHEMAS, SORT_KEYS

T = TypeVar("T")
METADATA_KEY = b"assay"
ITEMS_PER_ROW_GROUP = 64  # what a reader holds of a table at a time


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; move it there on success, remove it on failure.

    Raises:
        StoreError: the disk is full or the place is not writable; what stood at `path` before is untouched.
    """
    target = Path(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        temporary.chmod(0o644)
        yield temporary
        temporary.replace(target)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror or error}. Nothing was replaced.") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path`, all or nothing."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented, key-sorted JSON. NaN and infinity are refused (`ValueError`)."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file that a stage wrote.

    Raises:
        StoreError: the file is missing or is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise StoreError(f"{path} is not valid JSON ({error}); remove it and run again to rebuild it") from error


def table_from_rows(name: str, rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Rows (dicts) as a table of schema `SCHEMAS[name]`, sorted by its keys. Unknown keys raise `KeyError`."""
    schema = SCHEMAS[name]
    rows = list(rows)
    known = set(schema.names)
    for row in rows:
        if not known.issuperset(row):
            raise KeyError(f"unknown columns for '{name}': {sorted(set(row) - known)}")
    columns = [[row.get(field.name) for row in rows] for field in schema]
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return sort_table(name, pa.table(arrays, schema=schema))


def sort_table(name: str, table: pa.Table) -> pa.Table:
    """`table` sorted by the keys of schema `name` (dictionary columns sort by their values)."""
    keys = SORT_KEYS[name]
    plain = {
        key: pc.cast(table[key], pa.string()) if pa.types.is_dictionary(table[key].type) else table[key] for key in keys
    }
    order = pc.sort_indices(pa.table(plain), sort_keys=[(key, "ascending") for key in keys])
    return table.take(order)


class TableWriter:
    """Append tables of one schema to one Parquet file, as row groups, in bounded memory. Use through `table_writer`."""

    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer, self._schema = writer, schema

    def write(self, table: pa.Table) -> None:
        """Append `table`, checked against the schema."""
        _check(table, self._schema, "table to write")
        self._writer.write_table(table.cast(self._schema))


@contextmanager
def table_writer(path: str | Path, name: str, provenance: dict[str, Any]) -> Iterator[TableWriter]:
    """Open `path` for writing tables of schema `name`; the file appears only when the block ends well."""
    schema = SCHEMAS[name]
    record = {METADATA_KEY: json.dumps({"table": name, **provenance}).encode()}
    schema = schema.with_metadata({**(schema.metadata or {}), **record})
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
        yield TableWriter(writer, schema)


def write_table(path: str | Path, name: str, table: pa.Table, provenance: dict[str, Any]) -> None:
    """Write one table of schema `name` with its provenance."""
    with table_writer(path, name, provenance) as writer:
        writer.write(table)


def read_table(path: str | Path, name: str, columns: list[str] | None = None) -> pa.Table:
    """Read a table of schema `name`, checked.

    Raises:
        StoreError: the file is missing, truncated, or of another schema.
    """
    with _open(path, name) as file:
        return file.read(columns=columns)


def read_rows(path: str | Path, name: str, columns: list[str] | None = None) -> list[dict[str, Any]]:
    """Read a table of schema `name` as dicts."""
    return read_table(path, name, columns).to_pylist()


def iter_tables(path: str | Path, name: str, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Read a table of schema `name` one row group at a time."""
    with _open(path, name) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns)


def iter_rows(path: str | Path, name: str, columns: list[str], size: int) -> Iterator[dict[str, Any]]:
    """Read a table of schema `name` as dicts, at most `size` of them in memory: for tables that hold media."""
    with _open(path, name) as file:
        for batch in file.iter_batches(size, columns=columns):
            yield from batch.to_pylist()


def merge_rows(paths: Iterable[str | Path], name: str, columns: list[str], size: int) -> Iterator[dict[str, Any]]:
    """Rows of several tables of schema `name`, each sorted by item, as those of one; `size` as in `iter_rows`.

    Raises:
        StoreError: a table is not sorted.
    """
    return heapq.merge(*(_ascending(path, name, columns, size) for path in paths), key=itemgetter("item_id"))


def _ascending(path: str | Path, name: str, columns: list[str], size: int) -> Iterator[dict[str, Any]]:
    before = ""
    for row in iter_rows(path, name, columns, size):
        if row["item_id"] < before:
            raise StoreError(f"{path}: item '{row['item_id']}' comes after '{before}', but the table must be sorted")
        before = row["item_id"]
        yield row


def rows_by_item(
    paths: Iterable[str | Path], name: str, columns: list[str], size: int
) -> Iterator[tuple[str, Iterator[dict[str, Any]]]]:
    """Each item with its rows in several tables, as `merge_rows` gives them."""
    return groupby(merge_rows(paths, name, columns, size), itemgetter("item_id"))


def beside(keys: Iterable[str], found: Iterator[tuple[str, T]], absent: T) -> Iterator[T]:
    """What was found of each of `keys`, `absent` where nothing was; both ascend, and one is read as far as the other.

    What was found of anything else is passed over.
    """
    head = next(found, None)
    for key in keys:
        while head and head[0] < key:
            head = next(found, None)
        yield head[1] if head and head[0] == key else absent


def read_provenance(path: str | Path) -> dict[str, Any]:
    """The provenance a stage wrote into a Parquet file's metadata.

    Raises:
        StoreError: the file is missing, truncated, or was not written by Assay.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(f"cannot read {path}: {error}; remove it and run again to rebuild it") from error
    if METADATA_KEY not in metadata:
        raise StoreError(f"{path} carries no Assay provenance: it was not written by this workflow")
    return json.loads(metadata[METADATA_KEY])


def add_provenance(path: str | Path, facts: Mapping[str, Any]) -> None:
    """Add what was known only after a table was written to its provenance; its rows stay as they are.

    Raises:
        StoreError: the file is missing, truncated, or was not written by Assay.
    """
    record = {**read_provenance(path), **facts}
    with pq.ParquetFile(path) as file, atomic_path(path) as temporary:
        schema = file.schema_arrow.with_metadata(
            {**file.schema_arrow.metadata, METADATA_KEY: json.dumps(record).encode()}
        )
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for group in range(file.num_row_groups):
                writer.write_table(file.read_row_group(group))


def run_options(paths: Sequence[str | Path]) -> dict[str, Any]:
    """The serve plan that a run's outputs were made with, as each instance's file recorded it.

    Raises:
        StoreError: a file cannot be read, or the instances ran with different options: they are no one run.
    """
    first, *others = [read_provenance(path)["options"] for path in paths]
    if any(options != first for options in others):
        raise StoreError(
            f"{' and '.join(map(str, paths))} were made with different run options; generate the instances again "
            "(without the rescore profile)"
        )
    return first


@contextmanager
def _open(path: str | Path, name: str) -> Iterator[pq.ParquetFile]:
    try:
        file = pq.ParquetFile(path, pre_buffer=False)  # what is read ahead stays in memory until the file is closed
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(f"cannot read {path}: {error}; remove it and run again to rebuild it") from error
    with file:
        found = read_provenance(path).get("table")
        if found != name:
            raise StoreError(f"{path} holds a '{found}' table where '{name}' was expected")
        _check(file.schema_arrow, SCHEMAS[name], str(path))
        yield file


def _check(found: pa.Table | pa.Schema, expected: pa.Schema, what: str) -> None:
    names, wanted = found.names if isinstance(found, pa.Schema) else found.column_names, expected.names
    if names != wanted:
        missing, extra = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
        raise StoreError(f"{what}: columns differ from the schema (missing {missing}, unknown {extra})")
