"""What `samplesets/<set>.yaml` may say: a recipe of parts, or a subset of another set's recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from assay.config import Name, Strict, lookup, parse, read_yaml
from assay.errors import SampleError


class Part(Strict):
    """Items of one kind, with the sampling parameters they share."""

    name: Name
    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy")
    top_p: float | None = Field(default=None, gt=0, le=1)


class Picked(Part):
    """A part that takes the lowest-ranked `count` of its candidates."""

    count: int = Field(ge=1)


class ChatPart(Picked):
    """Short questions, in turn over the styles."""

    kind: Literal["chat"]
    styles: list[Literal["open", "choice", "dialogue", "system", "problem"]] = Field(min_length=1)


class CodePart(Picked):
    """Python functions to explain, to write or to go on with, in turn over the styles."""

    kind: Literal["code"]
    styles: list[Literal["explain", "complete", "write"]] = Field(min_length=1)


class MultilingualPart(Picked):
    """Sentences of other languages to explain or translate, in turn over the languages."""

    kind: Literal["multilingual"]
    languages: list[str] = Field(min_length=1, description="Locale names of the message catalogues")


class EmojiPart(Picked):
    """Short requests made of emoji."""

    kind: Literal["emoji"]


class RaggedPart(Picked):
    """Raw prompts of an exact number of tokens, in turn over the lengths."""

    kind: Literal["ragged"]
    lengths: list[int] = Field(min_length=1, description="Prompt lengths [tokens of the sizing tokenizer]")


class LongPart(Picked):
    """A long document and a question about it; consecutive items share documents, so that prefixes are reused."""

    kind: Literal["long"]
    tokens: int = Field(ge=200, description="Largest prompt length, chat template included [tokens]")


class NeedlePart(Part):
    """A number hidden in a long text, one of the same form to distract, and a question for it: the whole grid."""

    kind: Literal["needle"]
    lengths: list[int] = Field(min_length=1, description="Largest prompt lengths, chat template included [tokens]")
    depths: list[Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1, description="0 is the start of the text")
    seeds: list[int] = Field(min_length=1)

    @property
    def count(self) -> int:
        """Number of items."""
        return len(self.lengths) * len(self.depths) * len(self.seeds)


AnyPart = Annotated[
    ChatPart | CodePart | MultilingualPart | EmojiPart | RaggedPart | LongPart | NeedlePart,
    Field(discriminator="kind"),
]


class Recipe(Strict):
    """How a sample set is made."""

    description: str
    modality: Literal["text"]
    seed: int
    tokenizer: Name = Field(description="Source whose tokenizer and chat template measure prompts")
    sources: list[Name] = Field(min_length=1, description="Sources of the text")
    parts: list[AnyPart] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_are_named_once(self) -> Recipe:
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError(f"a part is named twice: {names}")
        return self


class Subset(Strict):
    """The first items of each part of another set."""

    description: str
    subset_of: Name
    counts: dict[Name, int] = Field(min_length=1, description="Part -> number of items; parts not named are left out")


def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sampleset",
        **TypeAdapter(Recipe | Subset).json_schema(),
    }


def read_recipe(name: str, folder: str | Path = "samplesets") -> Recipe:
    """The recipe of set `name`, subsets resolved.

    Raises:
        ConfigError: the file is missing, or says something a recipe may not.
        SampleError: a subset asks for more than its parent has.
    """
    path = Path(folder) / f"{name}.yaml"
    content = read_yaml(path)
    if not (isinstance(content, dict) and "subset_of" in content):
        return parse(Recipe, content, str(path))
    subset: Subset = parse(Subset, content, str(path))
    return _take(subset, read_recipe(subset.subset_of, folder), str(path))


def _take(subset: Subset, parent: Recipe, where: str) -> Recipe:
    parts = {part.name: part for part in parent.parts}
    for name, count in subset.counts.items():
        part = lookup(parts, name, f"part in {where}")
        if not isinstance(part, Picked) or not 1 <= count <= part.count:
            raise SampleError(f"{where}: counts.{name} is {count}; '{subset.subset_of}' can give 1 to {part.count}")
    taken = [
        part.model_copy(update={"count": subset.counts[part.name]})
        for part in parent.parts
        if part.name in subset.counts
    ]
    return parent.model_copy(update={"description": subset.description, "parts": taken})
