"""The committed lock of a sample set, and reading the set under it: every stage that uses a set reads it here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.canonical import sha256_bytes, sha256_json
from assay.errors import SampleError
from assay.records import ITEMS
from assay.store import iter_rows, read_json, read_rows

Row = dict[str, Any]
BATCH = 64  # items read at a time, audio and all


@dataclass(frozen=True)
class Lock:
    """What a sample set is: the recipe and pins it is made from, and every item by hash."""

    set: str
    recipe_sha256: str  # of the recipe as resolved
    sources: dict[str, dict[str, Any]]  # source -> pin
    tokenizer: dict[str, str]  # source, and sha256 of its tokenizer.json; empty where nothing is sized
    items: dict[str, str]  # item id -> sha256 (`item_sha256`)
    set_sha256: str


def item_sha256(row: Row) -> str:
    """SHA-256 (hex) of an item: of its canonical JSON, in which audio stands by its name and the hash of its bytes."""
    plain = {column: value for column, value in row.items() if column != "audio"}
    if audio := row.get("audio"):
        plain["audio"] = {"path": audio["path"], "sha256": sha256_bytes(audio["bytes"])}
    return sha256_json(plain)


def read_lock(name: str, folder: str | Path = "samplesets") -> Lock:
    """The committed lock of set `name`.

    Raises:
        SampleError: there is none, or it is damaged.
    """
    path = lock_path(name, folder)
    if not path.is_file():
        raise SampleError(f"sample set '{name}' has no lock ({path}); make one with `assay lock {name}` and commit it")
    try:
        return Lock(**read_json(path))
    except TypeError:
        raise SampleError(f"{path} is not a lock of a sample set; restore the committed one") from None


def verify_set(parquet: str | Path, lock: Lock) -> Iterator[Row]:
    """The items of a sample set, each compared with the lock before it is given; a few of them in memory.

    Raises:
        SampleError: an item is changed, missing or not in the lock; the first such is named.
    """
    found: dict[str, str] = {}
    for row in iter_rows(parquet, "items", ITEMS.names, BATCH):
        key, digest = row["item_id"], item_sha256(row)
        if key in found:
            raise SampleError(f"{parquet} holds an item twice; remove it and run again to rebuild it")
        if digest != lock.items.get(key):
            compare_items(str(parquet), lock, lock.items | {key: digest})
        found[key] = digest
        yield row
    compare_items(str(parquet), lock, found)


def load_set(parquet: str | Path) -> Iterator[Row]:
    """The items of a sample set, compared with the lock that lies beside its Parquet file (see `verify_set`)."""
    path = Path(parquet)
    return verify_set(path, read_lock(path.stem, path.parent))


def modality_of(parquets: Sequence[str | Path]) -> str:
    """The modality of some sample sets.

    Raises:
        SampleError: they hold items of none, or of more than one.
    """
    found = sorted({row["modality"] for path in parquets for row in read_rows(path, "items", ["modality"])})
    if len(found) != 1:
        where = ", ".join(map(str, parquets))
        raise SampleError(f"{where}: items of one modality are needed, not of {' and '.join(found) or 'none'}")
    return str(found[0])


def lock_path(name: str, folder: str | Path) -> Path:
    """Where the lock of set `name` lies."""
    return Path(folder) / f"{name}.lock.json"


def compare_items(what: str, lock: Lock, found: Mapping[str, str]) -> None:
    """Compare items (id -> `item_sha256`) with the lock; `what` names them in the message.

    Raises:
        SampleError: an item is changed, missing or not in the lock; the first such is named.
    """
    for item in sorted(lock.items.keys() | found.keys()):
        if found.get(item) != lock.items.get(item):
            problem = "is missing" if item not in found else "is not in it" if item not in lock.items else "differs"
            raise SampleError(
                f"{what} does not match the lock of '{lock.set}': item {item} {problem}. "
                "Remove the file to rebuild it; if the set was changed on purpose, lock it again."
            )
