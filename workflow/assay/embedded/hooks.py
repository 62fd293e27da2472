"""The points of the server at which a fault can be planted. As it stands, each does the right thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from assay.embedded.engine import Job, Request, SlotCache, Token

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    """What one token adds to the answer: `text` is what it completes, empty within a split character."""

    token: Token
    text: str


class Hooks:
    """One method for each point; a fault overrides one of them."""

    max_rows = 16  # requests in a batch
    prefill_chunk: int | None = None  # tokens; None: the whole prompt at once

    def model(self, model: Any) -> None:
        """Called once with the loaded model."""

    def ready(self) -> None:
        """Called once in the thread that runs the model."""

    def render(self, tokenizer: Any, messages: Messages) -> list[int]:
        """Prompt ids of a chat."""
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def request(self, request: Request) -> Request:
        """The request that will be done, from the one that was asked."""
        return request

    def admit(self, jobs: list[Job]) -> None:
        """Called with the jobs that join the batch together."""

    def prefilled(self, cache: SlotCache, row: int, job: Job) -> None:
        """Called when a prompt's keys and values are in the cache."""

    def kv(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values to store, from those computed; [row, head, column, head_dim]."""
        return keys, values

    def mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Which columns each row attends to in a decode step; bool [row, column]."""
        return mask

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens of a decode step; [row]."""
        return positions

    def stepped(self, cache: SlotCache, row: int, job: Job) -> None:
        """Called after each decode step of a row, before its next token is chosen."""

    def logits(self, job: Job, logits: torch.Tensor) -> torch.Tensor:
        """Logits to choose from; [vocabulary]."""
        return logits

    def choose(self, job: Job, logits: torch.Tensor, chosen: int) -> int:
        """The token taken, from the one chosen."""
        return chosen

    def reported_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits that reported logprobs are made of; [row, vocabulary]."""
        return logits

    def detokenize(self, tokenizer: Any, ids: list[int]) -> str:
        """Text of the ids of one answer so far."""
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def pieces(self) -> Callable[[Piece], list[Piece]]:
        """A filter for the pieces of one answer, made anew for each."""
        return lambda piece: [piece]
