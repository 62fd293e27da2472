"""Small sample sets for tests, with the lock that every reader of a set asks for."""

from dataclasses import asdict

from assay.canonical import canonical_json, sha256_json, sha256_lines
from assay.samples.lock import Lock, item_sha256, lock_path
from assay.store import read_rows, table_from_rows, write_json, write_table


def item(item_id, request, set_id="set", expected=None, kind="chat"):
    """One row of schema `items`."""
    return {
        "item_id": item_id,
        "set_id": set_id,
        "modality": "text",
        "kind": kind,
        "tags": [],
        "request": canonical_json(request),
        "expected": expected,
        "prompt_tokens_ref": 1,
        "prompt_sha256": sha256_json(request),
        "source": "test",
    }


def write_locked_set(path, rows):
    """Write `rows` as a sample set at `path`, and its lock beside it."""
    write_table(path, "items", table_from_rows("items", rows), {})
    items = {row["item_id"]: item_sha256(row) for row in read_rows(path, "items")}
    lock = Lock(
        set=path.stem, recipe_sha256="", sources={}, tokenizer={}, items=items, set_sha256=sha256_lines(items.values())
    )
    write_json(lock_path(path.stem, path.parent), asdict(lock))
