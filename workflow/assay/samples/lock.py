"""Building a sample set from its recipe, and the committed lock that says what must come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.canonical import canonical_json, sha256_json, sha256_lines
from assay.errors import SampleError
from assay.samples.needles import needle
from assay.samples.ranking import Candidate, number, pick
from assay.samples.recipe import AnyPart, NeedlePart, Recipe, read_recipe
from assay.samples.sizing import Sizer
from assay.samples.text import BUILDERS, Sources
from assay.sources import read_manifest
from assay.store import read_json, read_rows, table_from_rows, write_json, write_table

Row = dict[str, Any]


@dataclass(frozen=True)
class Lock:
    """What a sample set is: the recipe and pins it is made from, and every item by hash."""

    set: str
    recipe_sha256: str  # of the recipe as resolved
    sources: dict[str, dict[str, Any]]  # source -> pin
    tokenizer: dict[str, str]  # source, and sha256 of its tokenizer.json
    items: dict[str, str]  # item id -> sha256 of the canonical row
    set_sha256: str


def write_lock(name: str, folder: str | Path = "samplesets", resources: str | Path = "resources") -> Lock:
    """Build set `name` and make the result its lock: a deliberate act, whose difference is reviewed and committed."""
    lock = _lock(name, read_recipe(name, folder), Path(resources))[0]
    write_json(_lock_path(name, folder), asdict(lock))
    return lock


def read_lock(name: str, folder: str | Path = "samplesets") -> Lock:
    """The committed lock of set `name`.

    Raises:
        SampleError: there is none, or it is damaged.
    """
    path = _lock_path(name, folder)
    if not path.is_file():
        raise SampleError(f"sample set '{name}' has no lock ({path}); make one with write_lock and commit it")
    try:
        return Lock(**read_json(path))
    except TypeError:
        raise SampleError(f"{path} is not a lock of a sample set; restore the committed one") from None


def build_set(
    name: str,
    destination: str | Path,
    folder: str | Path = "samplesets",
    resources: str | Path = "resources",
    provenance: Mapping[str, Any] | None = None,
) -> Lock:
    """Build set `name` and write its Parquet, if and only if it is what its lock says.

    Raises:
        SampleError: the recipe, a source or an item is not the locked one; the first difference is named.
    """
    lock = read_lock(name, folder)
    built, rows = _lock(name, read_recipe(name, folder), Path(resources))
    _compare_inputs(name, lock, built)
    _compare_items(f"sample set '{name}' as built", lock, built.items)
    facts = {"set_sha256": lock.set_sha256, **(provenance or {})}
    write_table(destination, "items", table_from_rows("items", rows), facts)
    return lock


def verify_set(parquet: str | Path, lock: Lock) -> list[Row]:
    """The items of a sample set, after every one has been compared with the lock.

    Raises:
        SampleError: an item is changed, missing or not in the lock; the first such is named.
    """
    rows = read_rows(parquet, "items")
    _compare_items(str(parquet), lock, {row["item_id"]: sha256_json(row) for row in rows})
    if len(rows) != len(lock.items):
        raise SampleError(f"{parquet} holds an item twice; remove it and run again to rebuild it")
    return rows


def load_set(parquet: str | Path) -> list[Row]:
    """The items of a sample set, compared with the lock that lies beside its Parquet file."""
    path = Path(parquet)
    return verify_set(path, read_lock(path.stem, path.parent))


def _lock_path(name: str, folder: str | Path) -> Path:
    return Path(folder) / f"{name}.lock.json"


def _lock(name: str, recipe: Recipe, resources: Path) -> tuple[Lock, list[Row]]:
    rows = build_items(name, recipe, resources)
    items = {row["item_id"]: sha256_json(row) for row in rows}
    tokenizer = read_manifest(resources / recipe.tokenizer).files["tokenizer.json"].sha256
    lock = Lock(
        set=name,
        recipe_sha256=sha256_json(recipe.model_dump(mode="json")),
        sources={source: read_manifest(resources / source).pin for source in recipe.sources},
        tokenizer={"source": recipe.tokenizer, "sha256": tokenizer},
        items=items,
        set_sha256=sha256_lines(items.values()),
    )
    return lock, rows


def build_items(name: str, recipe: Recipe, resources: Path) -> list[Row]:
    """The rows (schema `items`) that a recipe makes of the sources under `resources`, sorted by item id."""
    sources = {source: resources / source for source in recipe.sources}
    sizer = Sizer(resources / recipe.tokenizer)
    rows = [row for part in recipe.parts for row in _part_rows(name, recipe, part, sources, sizer)]
    return sorted(rows, key=lambda row: row["item_id"])


def _part_rows(name: str, recipe: Recipe, part: AnyPart, sources: Sources, sizer: Sizer) -> Iterator[Row]:
    if isinstance(part, NeedlePart):
        picked = list(needle(part, sources, sizer))
    else:
        picked = pick(BUILDERS[part.kind](part, sources, sizer), part.count, recipe.seed, part.name)
    if len(picked) < part.count:
        raise SampleError(f"sample set '{name}': part '{part.name}' wants {part.count} items, can make {len(picked)}")
    for candidate in picked:
        yield _row(name, recipe, part, candidate, sizer)


def _row(name: str, recipe: Recipe, part: AnyPart, candidate: Candidate, sizer: Sizer) -> Row:
    item_id = f"{part.name}-{candidate.key}"
    request = {**candidate.request, "max_tokens": part.max_tokens, "temperature": part.temperature}
    if part.temperature > 0:
        request["top_p"] = 1.0 if part.top_p is None else part.top_p
        request["seed"] = number(recipe.seed, part.name, f"{candidate.key} seed", 2**31)
    return {
        "item_id": item_id,
        "set_id": name,
        "modality": recipe.modality,
        "kind": candidate.kind,
        "tags": [part.name, *candidate.tags],
        "request": canonical_json(request),
        "expected": candidate.expected,
        "prompt_tokens_ref": sizer.count(candidate.request),
        "prompt_sha256": sha256_json(candidate.request),
        "source": candidate.source,
    }


def _compare_inputs(name: str, lock: Lock, built: Lock) -> None:
    if built.recipe_sha256 != lock.recipe_sha256:
        raise SampleError(f"the recipe of sample set '{name}' has changed since its lock; lock it again on purpose")
    for source, pin in built.sources.items():
        if pin != lock.sources.get(source):
            raise SampleError(f"sample set '{name}': source '{source}' has another pin than its lock; lock it again")
    if built.tokenizer != lock.tokenizer:
        raise SampleError(f"sample set '{name}': the tokenizer is not the locked one; lock it again on purpose")


def _compare_items(what: str, lock: Lock, found: Mapping[str, str]) -> None:
    for item in sorted(lock.items.keys() | found.keys()):
        if found.get(item) != lock.items.get(item):
            problem = "is missing" if item not in found else "is not in it" if item not in lock.items else "differs"
            raise SampleError(
                f"{what} does not match the lock of '{lock.set}': item {item} {problem}. "
                "Remove the file to rebuild it; if the set was changed on purpose, lock it again."
            )
