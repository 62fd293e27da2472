"""Continuous batching of causal language models on CPU: requests join and leave between two steps of one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from assay.embedded.batching import Batcher
from assay.embedded.hooks import Hooks

CACHE_CELLS = 32_768  # rows x columns of the KV cache that may be in use: it bounds memory
_COLUMN_STEP = 256


@dataclass(frozen=True)
class Request:
    """One generation, as it will be done. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 cut nothing."""

    number: int  # counts from 0 over the server's life
    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    top_logprobs: int | None = None  # None: no logprobs at all


@dataclass(frozen=True)
class Token:
    """One sampled token. Logprobs in nat, raw (temperature 1, nothing cut), `top` descending."""

    id: int
    finish: str | None  # stop | length, on the last token
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Emit = Callable[[Token | Exception], None]


class Job:
    """A request on its way: who waits for its tokens, and what was sampled so far."""

    def __init__(self, request: Request, emit: Emit) -> None:
        self.request, self.emit = request, emit
        self.cancelled = False
        self.output: list[int] = []
        self.generator = torch.Generator()
        if request.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(request.seed)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.request.prompt_ids) + len(self.output)

    @property
    def longest(self) -> int:
        """Cache columns it can come to need."""
        return len(self.request.prompt_ids) + self.request.max_tokens


class SlotCache:
    """Keys and values of the running batch: one row per request, written in place, position p in column p.

    Rows in use are the first `rows`; a row that is freed is filled by the last. It stands in for a transformers cache:
    attention calls `update` once per layer and step. Shapes are [layer, row, head, column, head_dim].
    """

    def __init__(self, config: Any, dtype: torch.dtype, hooks: Hooks) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 0, config.num_key_value_heads, 0, head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.rows, self.width = 0, 0
        self._columns = torch.zeros(0, dtype=torch.long)
        self._hooks = hooks

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` x `columns`; what is stored stays."""
        columns += -columns % _COLUMN_STEP
        layers, held_rows, heads, held_columns, head_dim = self.keys.shape
        if rows <= held_rows and columns <= held_columns:
            return
        kept = slice(0, self.rows), slice(None), slice(0, min(columns, held_columns))
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = torch.zeros(layers, rows, heads, columns, head_dim, dtype=old.dtype)
            new[:, *kept] = old[:, *kept]
            setattr(self, name, new)

    def add(self, prefilled: DynamicCache) -> int:
        """Copy a prefilled prompt into a new row; return the row."""
        row, length = self.rows, prefilled.get_seq_length()
        for index, layer in enumerate(prefilled.layers):
            keys, values = self._hooks.kv(layer.keys, layer.values)
            self.keys[index, row, :, :length] = keys[0]
            self.values[index, row, :, :length] = values[0]
        self.rows += 1
        return row

    def free(self, row: int) -> None:
        """Give a row back; the last row moves into it."""
        self.rows -= 1
        self.keys[:, row], self.values[:, row] = self.keys[:, self.rows], self.values[:, self.rows]

    def write_at(self, columns: torch.Tensor) -> None:
        """Set the column of each row that the next step writes."""
        self._columns, self.width = columns, int(columns.max()) + 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one step's keys and values of a layer; return all that attention may read."""
        keys, values = self._hooks.kv(keys, values)
        rows = torch.arange(self.rows)
        self.keys[layer][rows, :, self._columns] = keys[:, :, 0]
        self.values[layer][rows, :, self._columns] = values[:, :, 0]
        return self.keys[layer, : self.rows, :, : self.width], self.values[layer, : self.rows, :, : self.width]

    def get_seq_length(self, layer: int = 0) -> int:
        """Columns in use."""
        return self.width


class Engine(Batcher[Job]):
    """A model, its tokenizer, and the thread that runs the batch. Use as a context manager.

    Raises (on construction): whatever transformers raises for a folder that holds no model.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, hooks: Hooks | None = None) -> None:
        super().__init__()
        self.hooks = hooks or Hooks()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self.model.eval()
        self.hooks.model(self.model)
        self.context: int = self.model.config.max_position_embeddings
        eos = self.model.generation_config.eos_token_id
        self.stop_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self._cache = SlotCache(self.model.config, dtype, self.hooks)

    def _start(self) -> None:
        self.hooks.ready()

    def _admit(self) -> None:
        """Prefill waiting requests, first come first served, while rows and cache cells are left."""
        fitting: list[Job] = []
        for job in self._ready:
            group = [*self._jobs, *fitting, job]
            cells = len(group) * max(other.longest for other in group)
            if len(group) > 1 and (len(group) > self.hooks.max_rows or cells > CACHE_CELLS):
                break
            fitting.append(job)
        if not fitting:
            return
        del self._ready[: len(fitting)]
        group = [*self._jobs, *fitting]
        self._cache.reserve(len(group), max(job.longest for job in group))
        self.hooks.admit(fitting)
        for job in fitting:
            self._prefill(job)

    def _prefill(self, job: Job) -> None:
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([job.request.prompt_ids])
        for chunk in ids.split(self.hooks.prefill_chunk or ids.shape[1], dim=1):
            logits = self.model(input_ids=chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        row = self._cache.add(cache)
        self._jobs.append(job)
        self.hooks.prefilled(self._cache, row, job)
        self._sample([job], logits)
        self._retire()

    def _step(self) -> None:
        """One token for every running request."""
        if not self._jobs:
            return
        # The last sampled token is not in the cache yet: this step computes it, at column length - 1.
        columns = torch.tensor([job.length - 1 for job in self._jobs])
        self._cache.write_at(columns)
        mask = torch.arange(self._cache.width)[None, :] <= columns[:, None]
        logits = self.model(
            input_ids=torch.tensor([job.output[-1:] for job in self._jobs]),
            attention_mask=self.hooks.mask(mask)[:, None, None, :],
            position_ids=self.hooks.positions(columns)[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        for row, job in enumerate(self._jobs):
            self.hooks.stepped(self._cache, row, job)
        self._sample(self._jobs, logits)
        self._retire()

    def _sample(self, jobs: list[Job], logits: torch.Tensor) -> None:
        """Choose a token for each row of `logits` [row, vocabulary] and hand it to its request."""
        logits = logits.float()
        logprobs = self.hooks.reported_logits(logits).log_softmax(-1)
        for row, job in enumerate(jobs):
            chosen = self.hooks.choose(job, logits[row], choose(job, self.hooks.logits(job, logits[row])))
            job.output.append(chosen)
            job.emit(_token(job, chosen, logprobs[row]))

    def _retire(self) -> None:
        for row in reversed(range(len(self._jobs))):
            job = self._jobs[row]
            if job.cancelled or _finish(job) is not None:
                self._cache.free(row)
                self._jobs[row] = self._jobs[-1]
                self._jobs.pop()


def choose(job: Job, logits: torch.Tensor) -> int:
    """The token of one step: greedy at temperature 0, else from the request's own generator. `logits` [vocabulary]."""
    request = job.request
    if request.temperature == 0:
        return int(logits.argmax())
    probabilities = cut(logits / request.temperature, request.top_k, request.top_p).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=job.generator))


def cut(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`logits` [vocabulary] with all but the top-k, then all but the nucleus of mass `top_p`, at minus infinity.

    The nucleus is the smallest set of most likely tokens whose mass reaches `top_p` (Holtzman et al. 2020).
    """
    if 0 < top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.index_fill(0, order[outside], -torch.inf)
    return logits


def _finish(job: Job) -> str | None:
    if job.output[-1] in job.request.stop_ids:
        return "stop"
    return "length" if len(job.output) >= job.request.max_tokens else None


def _token(job: Job, chosen: int, logprobs: torch.Tensor) -> Token:
    if job.request.top_logprobs is None:
        return Token(chosen, _finish(job))
    values, ids = logprobs.topk(job.request.top_logprobs)
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Token(chosen, _finish(job), float(logprobs[chosen]), top)
