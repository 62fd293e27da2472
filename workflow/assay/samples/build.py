"""Building a sample set from its recipe, and cutting its lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.canonical import canonical_json, sha256_json, sha256_lines
from assay.errors import SampleError
from assay.samples.lock import Lock, Row, compare_items, lock_path, read_lock
from assay.samples.needles import needle
from assay.samples.ranking import Candidate, number, pick
from assay.samples.recipe import AnyPart, NeedlePart, Recipe, read_recipe
from assay.samples.sizing import Sizer
from assay.samples.text import BUILDERS, Sources
from assay.sources import read_manifest
from assay.store import table_from_rows, write_json, write_table


def write_lock(name: str, folder: str | Path = "samplesets", resources: str | Path = "resources") -> Lock:
    """Build set `name` and make the result its lock: a deliberate act, whose difference is reviewed and committed."""
    lock = _lock(name, read_recipe(name, folder), Path(resources))[0]
    write_json(lock_path(name, folder), asdict(lock))
    return lock


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
    compare_items(f"sample set '{name}' as built", lock, built.items)
    facts = {"set_sha256": lock.set_sha256, **(provenance or {})}
    write_table(destination, "items", table_from_rows("items", rows), facts)
    return lock


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
