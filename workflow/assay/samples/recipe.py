"""What `samplesets/<set>.yaml` may say: a recipe of parts, or a subset of another set's recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter

from assay.config import Name, Strict, lookup, parse, read_yaml
from assay.errors import SampleError

T = TypeVar("T", bound="Part")


class Part(Strict):
    """Items of one kind."""

    name: Name


class Counted(Part):
    """A part that takes the lowest-ranked `count` of its candidates."""

    count: int = Field(ge=1)


class TextPart(Part):
    """Text prompts, with the sampling parameters they share."""

    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy")
    top_p: float | None = Field(default=None, gt=0, le=1)


class Picked(Counted, TextPart):
    """Text prompts that are picked."""


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


class NeedlePart(TextPart):
    """A number hidden in a long text, one of the same form to distract, and a question for it: the whole grid."""

    kind: Literal["needle"]
    lengths: list[int] = Field(min_length=1, description="Largest prompt lengths, chat template included [tokens]")
    depths: list[Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1, description="0 is the start of the text")
    seeds: list[int] = Field(min_length=1)

    @property
    def count(self) -> int:
        """Number of items."""
        return len(self.lengths) * len(self.depths) * len(self.seeds)


AnyTextPart = Annotated[
    ChatPart | CodePart | MultilingualPart | EmojiPart | RaggedPart | LongPart | NeedlePart,
    Field(discriminator="kind"),
]


class ClipPart(Counted):
    """Recordings of up to 30 s by what is said in them, in turn over the speakers."""

    kind: Literal["plain", "word", "digits", "names"]


class LongClipPart(Counted):
    """Audio longer than the 30 s that Whisper hears at once: such recordings as there are, and shorter ones joined."""

    kind: Literal["long"]
    seconds: list[float] = Field(min_length=1, description="Joined recordings are at least so long, in turn [s]")


class NonSpeechPart(Counted):
    """Audio in which nobody speaks: recordings of it, and sounds made from the seed, in turn over the sounds."""

    kind: Literal["nonspeech"]
    sounds: list[Literal["recorded", "silence", "white", "pink", "hum", "music"]] = Field(min_length=1)
    seconds: list[float] = Field(min_length=1, description="Lengths of the sounds that are made [s]")


class ResampledPart(Counted):
    """Plain recordings in other formats, in turn over the formats; all formats have the same recordings first."""

    kind: Literal["resampled"]
    formats: list[Annotated[str, Field(pattern=r"^[1-9]\d{3,5}x[12]$")]] = Field(
        min_length=1, description="Sample rate [Hz] x channels"
    )


AnyClipPart = Annotated[ClipPart | LongClipPart | NonSpeechPart | ResampledPart, Field(discriminator="kind")]


class SayPart(Counted):
    """Texts to be spoken, by what is hard about them, in turn over the sources."""

    kind: Literal["plain", "word", "digits", "names", "punctuation", "tail", "long"]


AnyPart = AnyTextPart | AnyClipPart | SayPart


def _named_once(parts: list[T]) -> list[T]:
    names = [part.name for part in parts]
    if len(set(names)) != len(names):
        raise ValueError(f"a part is named twice: {names}")
    return parts


Parts = Annotated[list[T], Field(min_length=1), AfterValidator(_named_once)]


class BaseRecipe(Strict):
    """What every recipe says, besides its parts."""

    description: str
    seed: int
    sources: list[Name] = Field(min_length=1, description="Sources that items are made of")

    @property
    def inputs(self) -> list[str]:
        """Every source that the set is built from."""
        return sorted(self.sources)


class TextRecipe(BaseRecipe):
    """How a set of text prompts is made."""

    modality: Literal["text"]
    tokenizer: Name = Field(description="Source whose tokenizer and chat template measure prompts")
    parts: Parts[AnyTextPart]

    @property
    def inputs(self) -> list[str]:
        """Every source that the set is built from; the tokenizer is one."""
        return sorted({*self.sources, self.tokenizer})


class AsrRecipe(BaseRecipe):
    """How a set of recordings to transcribe is made."""

    modality: Literal["asr"]
    parts: Parts[AnyClipPart]


class TtsRecipe(BaseRecipe):
    """How a set of texts to speak is made."""

    modality: Literal["tts"]
    parts: Parts[SayPart]


Recipe = Annotated[TextRecipe | AsrRecipe | TtsRecipe, Field(discriminator="modality")]
_RECIPES: dict[str, Any] = {"text": TextRecipe, "asr": AsrRecipe, "tts": TtsRecipe}


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
        modality = content.get("modality") if isinstance(content, dict) else None
        return parse(_RECIPES.get(str(modality), Recipe), content, str(path))  # messages then name the key alone
    subset: Subset = parse(Subset, content, str(path))
    return _take(subset, read_recipe(subset.subset_of, folder), str(path))


def _take(subset: Subset, parent: Recipe, where: str) -> Recipe:
    parts = {part.name: part for part in parent.parts}
    for name, count in subset.counts.items():
        part = lookup(parts, name, f"part in {where}")
        if isinstance(part, NeedlePart) or not 1 <= count <= part.count:
            raise SampleError(f"{where}: counts.{name} is {count}; '{subset.subset_of}' can give 1 to {part.count}")
    taken = [
        part.model_copy(update={"count": subset.counts[part.name]})
        for part in parent.parts
        if part.name in subset.counts
    ]
    return parent.model_copy(update={"description": subset.description, "parts": taken})
