"""The mended tokenizer gives llama.cpp's token ids; the one that transformers' conversion gives does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.sources.converters import gguf_file, mended_tokenizer

pytestmark = pytest.mark.model

ROOT = Path(__file__).parents[2]
PROBES = json.loads((ROOT / "tests" / "data" / "llamacpp_token_ids.json").read_text())["probes"]


@pytest.fixture(scope="module")
def gguf(fetched: Callable[..., Path]) -> Path:
    return gguf_file(fetched("smollm2_135m_gguf") / "smollm2_135m_gguf")


def differing(tokenizer: Any) -> list[str]:
    """Probe strings whose token ids are not llama.cpp's."""
    return [
        probe["text"]
        for probe in PROBES
        if tokenizer(probe["text"], add_special_tokens=False).input_ids != probe["ids"]
    ]


def test_the_mended_tokenizer_gives_llamacpps_ids_on_every_probe(gguf: Path) -> None:
    assert len(PROBES) >= 15
    assert differing(mended_tokenizer(gguf)) == []


def test_the_tokenizer_as_transformers_converts_it_does_not(gguf: Path) -> None:
    from transformers import AutoTokenizer

    wrong = differing(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    assert "a  2 b" in wrong
    assert "total\t\t42\t\t7" in wrong
    assert "Steps:\n\n1. Mix\n\n\n12. Bake" in wrong


def test_the_converted_source_keeps_the_mended_tokenizer(fetched: Callable[..., Path]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(fetched("smollm2_135m") / "smollm2_135m" / "tokenizer.json"))
    wrong = [p["text"] for p in PROBES if tokenizer.encode(p["text"], add_special_tokens=False).ids != p["ids"]]
    assert wrong == []
