"""Building a sample set from its recipe, and cutting its lock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.canonical import canonical_json, sha256_bytes, sha256_json, sha256_lines
from assay.errors import SampleError
from assay.samples import speech, text
from assay.samples.lock import Lock, Row, compare_items, item_sha256, lock_path, read_lock
from assay.samples.needles import needle
from assay.samples.ranking import Candidate, number, pick
from assay.samples.recipe import AnyPart, AsrRecipe, NeedlePart, Recipe, TextPart, TextRecipe, TtsRecipe, read_recipe
from assay.samples.sizing import Sizer
from assay.samples.text import Sources
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
    items = {row["item_id"]: item_sha256(row) for row in rows}
    lock = Lock(
        set=name,
        recipe_sha256=sha256_json(recipe.model_dump(mode="json")),
        sources={source: read_manifest(resources / source).pin for source in recipe.sources},
        tokenizer=_tokenizer(recipe, resources),
        items=items,
        set_sha256=sha256_lines(items.values()),
    )
    return lock, rows


def _tokenizer(recipe: Recipe, resources: Path) -> dict[str, str]:
    if not isinstance(recipe, TextRecipe):
        return {}
    files = read_manifest(resources / recipe.tokenizer).files
    return {"source": recipe.tokenizer, "sha256": files["tokenizer.json"].sha256}


def build_items(name: str, recipe: Recipe, resources: Path) -> list[Row]:
    """The rows (schema `items`) that a recipe makes of the sources under `resources`, sorted by item id."""
    sources = {source: resources / source for source in recipe.sources}
    if isinstance(recipe, TextRecipe):
        rows = _text_rows(name, recipe, sources, Sizer(resources / recipe.tokenizer))
    else:
        rows = _speech_rows(name, recipe, sources)
    return sorted(rows, key=lambda row: row["item_id"])


def _text_rows(name: str, recipe: TextRecipe, sources: Sources, sizer: Sizer) -> Iterator[Row]:
    for part in recipe.parts:
        if isinstance(part, NeedlePart):
            picked = list(needle(part, sources, sizer))
        else:
            picked = pick(text.BUILDERS[part.kind](part, sources, sizer), part.count, recipe.seed, part.name)
        for candidate in _enough(name, part, picked):
            request = {**candidate.request, **_sampling(recipe.seed, part, candidate)}
            tokens = sizer.count(candidate.request)
            yield _row(name, recipe, part, candidate, request) | {"prompt_tokens_ref": tokens}


def _speech_rows(name: str, recipe: AsrRecipe | TtsRecipe, sources: Sources) -> Iterator[Row]:
    for part in recipe.parts:
        candidates = speech.BUILDERS[recipe.modality](part, sources, recipe.seed)
        for candidate in _enough(name, part, pick(candidates, part.count, recipe.seed, part.name)):
            row = _row(name, recipe, part, candidate, candidate.request)
            if candidate.audio is not None:
                content = candidate.audio()
                prompt = {**candidate.request, "file": sha256_bytes(content)}
                row["audio"] = {"bytes": content, "path": candidate.request["file"]}
                row["prompt_sha256"] = sha256_json(prompt)
            yield row


def _enough(name: str, part: AnyPart, picked: list[Candidate]) -> list[Candidate]:
    if len(picked) < part.count:
        raise SampleError(f"sample set '{name}': part '{part.name}' wants {part.count} items, can make {len(picked)}")
    return picked


def _row(name: str, recipe: Recipe, part: AnyPart, candidate: Candidate, request: dict[str, Any]) -> Row:
    return {
        "item_id": f"{part.name}-{candidate.key}",
        "set_id": name,
        "modality": recipe.modality,
        "kind": candidate.kind,
        "tags": [part.name, *candidate.tags],
        "request": canonical_json(request),
        "expected": candidate.expected,
        "prompt_tokens_ref": None,
        "prompt_sha256": sha256_json(candidate.request),
        "source": candidate.source,
    }


def _sampling(seed: int, part: TextPart, candidate: Candidate) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_tokens": part.max_tokens, "temperature": part.temperature}
    if part.temperature > 0:
        sampling["top_p"] = 1.0 if part.top_p is None else part.top_p
        sampling["seed"] = number(seed, part.name, f"{candidate.key} seed", 2**31)
    return sampling


def _compare_inputs(name: str, lock: Lock, built: Lock) -> None:
    if built.recipe_sha256 != lock.recipe_sha256:
        raise SampleError(f"the recipe of sample set '{name}' has changed since its lock; lock it again on purpose")
    for source, pin in built.sources.items():
        if pin != lock.sources.get(source):
            raise SampleError(f"sample set '{name}': source '{source}' has another pin than its lock; lock it again")
    if built.tokenizer != lock.tokenizer:
        raise SampleError(f"sample set '{name}': the tokenizer is not the locked one; lock it again on purpose")
