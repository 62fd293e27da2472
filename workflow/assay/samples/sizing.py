"""Prompt lengths in tokens, by the tokenizer and chat template that a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from assay.errors import SampleError

_CHARS_PER_TOKEN = 8  # more than long texts have


class Sizer:
    """Counts, cuts and measures prompts with the tokenizer in a transformers model directory."""

    def __init__(self, directory: str | Path) -> None:
        from transformers import AutoTokenizer

        if not (Path(directory) / "tokenizer.json").is_file():
            raise SampleError(f"{directory} holds no tokenizer.json; fetch the recipe's `tokenizer` source")
        self._tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)

    def ids(self, text: str) -> list[int]:
        """Token ids of raw text, with whatever the tokenizer adds to a raw prompt."""
        return self._tokenizer(text).input_ids

    def count(self, request: dict[str, Any]) -> int:
        """Prompt tokens of a request; the chat template and the generation prompt count."""
        if "prompt" in request:
            return len(self.ids(request["prompt"]))
        text = self._tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True, tokenize=False)
        return len(self._tokenizer(text, add_special_tokens=False).input_ids)

    def start(self, text: str, tokens: int) -> str:
        """The first `tokens` tokens of `text`, as text; all of it when it is shorter."""
        ids = self.ids(text[: _CHARS_PER_TOKEN * tokens + 80])[:tokens]
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def cut(self, text: str, tokens: int) -> str | None:
        """The start of `text` that encodes to exactly `tokens` tokens; None where there is none."""
        start = self.start(text, tokens)
        exact = start.strip() and text.startswith(start) and len(self.ids(start)) == tokens
        return start if exact else None
