"""The causal language model reference: transformers on the same weights.

It plays three parts. As the *judge* it generates greedily at the highest practical precision and teacher-forces every
served token. As a *floor arm* it generates again at the server's own dtype with one benign change, so that the spread
of same-code results is known. A reference arm's output is a `responses` row like a server's, with full evidence (E0).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from assay.references.arms import ArmSettings
from assay.references.forcing import TOP_K, Forced, look_up
from assay.references.placement import device_map, matmul, memory_told, require_on_devices

REPLACEMENT = "\ufffd"
MAX_PADDED = 1.25  # padded tokens of a batch over its own
SMALL = 512  # padded tokens not worth a batch of their own


@dataclass(frozen=True)
class Sampling:
    """The distribution a request asks for, over judge logits."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    @classmethod
    def of(cls, request: dict[str, Any]) -> Sampling:
        """Read from a request's JSON; absent fields are OpenAI's defaults, except that temperature must be given."""
        return cls(
            float(request["temperature"]), float(request.get("top_p", 1)), request.get("top_k", 0), request.get("seed")
        )

    @property
    def greedy(self) -> bool:
        """Whether the request asks for the most likely token."""
        return self.temperature == 0

    def logprobs(self, raw: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the asked distribution.

        Args:
            raw: float32 log-probabilities [..., vocabulary] at temperature 1.

        Returns:
            float32 [..., vocabulary], -inf outside the support. Greedy requests: `raw` itself. Order of the filters:
            temperature, then top-k, then top-p (the token that crosses the threshold is kept), as in vLLM and
            transformers.
        """
        if self.greedy:
            return raw
        scaled = torch.log_softmax(raw / self.temperature, -1)
        if self.top_k > 0:
            kth = scaled.topk(self.top_k, -1).values[..., -1:]
            scaled = torch.log_softmax(scaled.masked_fill(scaled < kth, -torch.inf), -1)
        if self.top_p < 1:
            ordered, order = scaled.sort(-1, descending=True)
            before = ordered.exp().cumsum(-1) - ordered.exp()
            outside = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            scaled = torch.log_softmax(scaled.masked_fill(outside, -torch.inf), -1)
        return scaled


@dataclass(frozen=True)
class Prompt:
    """One request, tokenised."""

    item_id: str
    ids: list[int]
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Generation:
    """What an arm generated for one prompt."""

    item_id: str
    token_ids: list[int]
    logprobs: list[float]  # nat, at temperature 1
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    finish_reason: str  # "stop" or "length"


class CausalLM:
    """A transformers model with its tokenizer, loaded one way."""

    def __init__(self, directory: str | Path, settings: ArmSettings, gpus: int = 0) -> None:
        """Load the model on the CPU, or on `gpus` devices: the ones, and no more, that this process sees.

        Raises:
            DeviceError: torch does not see the devices, or the weights do not fit on them.
        """
        self.settings = settings
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        with memory_told():
            self.model = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=getattr(torch, settings.dtype),
                attn_implementation=settings.attention,
                device_map=device_map(gpus),
            ).eval()
        require_on_devices(self.model, gpus)
        eos = GenerationConfig.from_pretrained(directory).eos_token_id
        self.eos_ids = frozenset(eos if isinstance(eos, list) else [eos])

    def knows(self, ids: Sequence[int]) -> bool:
        """Whether every id is in the model's vocabulary: no other can be judged."""
        return not ids or (min(ids) >= 0 and max(ids) < self.model.config.get_text_config().vocab_size)

    # --- text ---

    def prompt(self, item_id: str, request: dict[str, Any]) -> Prompt:
        """Tokenise a request: chat messages through the model's own template, a raw prompt as it is."""
        if "messages" in request:
            encoded = self.tokenizer.apply_chat_template(
                request["messages"], add_generation_prompt=True, return_dict=True
            )
        else:
            encoded = self.tokenizer(request["prompt"])
        return Prompt(item_id, list(encoded["input_ids"]), int(request["max_tokens"]), Sampling.of(request))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens, as servers return it."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def retokenise(self, text: str, finish_reason: str) -> list[int] | None:
        """The ids that `text` encodes to, with the EOS that a finish reason of "stop" implies.

        A character that the token limit cut in two shows as U+FFFD at the end; it is left out, for its bytes are gone.
        Returns None where the ids do not decode to exactly the text (evidence E3): there is nothing to judge then.
        """
        whole = text.rstrip(REPLACEMENT) if finish_reason == "length" else text
        ids = self.tokenizer(whole, add_special_tokens=False)["input_ids"]
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if REPLACEMENT in whole or decoded != whole:
            return None
        return [*ids, min(self.eos_ids)] if finish_reason == "stop" else ids

    # --- generation ---

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt]) -> Iterator[Generation]:
        """Generate for each prompt, in batches of prompts of like length; the results come in that order."""
        with self._computing():
            for batch in batches(prompts, self.settings.batch):
                yield from self._generate_batch(batch)

    def _generate_batch(self, prompts: list[Prompt]) -> list[Generation]:
        longest = max(len(prompt.ids) for prompt in prompts)
        filler = min(self.eos_ids)
        ids = self._tensor([[filler] * (longest - len(prompt.ids)) + prompt.ids for prompt in prompts])
        mask = self._tensor([[0] * (longest - len(prompt.ids)) + [1] * len(prompt.ids) for prompt in prompts])
        generators = [_generator(prompt.sampling) for prompt in prompts]
        results = [Generation(prompt.item_id, [], [], [], [], "length") for prompt in prompts]
        open_rows = set(range(len(prompts)))

        cache = DynamicCache(config=self.model.config)
        logits = self._prefill(ids, mask, cache)
        while open_rows:
            raw = torch.log_softmax(logits.float(), -1)
            chosen = [_choose(raw[row], prompt.sampling, generators[row]) for row, prompt in enumerate(prompts)]
            following = self._tensor(chosen)[:, None]
            logprobs, top = raw.gather(1, following)[:, 0].tolist(), raw.topk(TOP_K, -1)
            top_ids, top_logprobs = top.indices.tolist(), top.values.tolist()
            for row in sorted(open_rows):
                results[row].token_ids.append(chosen[row])
                results[row].logprobs.append(logprobs[row])
                results[row].top_ids.append(top_ids[row])
                results[row].top_logprobs.append(top_logprobs[row])
                if chosen[row] in self.eos_ids:
                    results[row] = replace(results[row], finish_reason="stop")
                    open_rows.discard(row)
                elif len(results[row].token_ids) == prompts[row].max_tokens:
                    open_rows.discard(row)
            if open_rows:
                mask = torch.cat([mask, torch.ones_like(following)], 1)
                logits = self._step(following, mask, cache)
        return results

    def _prefill(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        length = ids.shape[1]
        bounds = [0, length]
        if self.settings.prefill_chunk:
            # A first chunk that holds only padding for some row would leave that row nothing to attend to.
            first = max(self.settings.prefill_chunk, length - int(mask.sum(1).min()) + 1)
            bounds = [0, *range(first, length, self.settings.prefill_chunk), length]
        logits = torch.empty(0)
        for start, end in itertools.pairwise(bounds):
            logits = self._step(ids[:, start:end], mask[:, :end], cache)
        return logits

    def _step(self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        return output.logits[:, -1]

    # --- teacher forcing ---

    @torch.inference_mode()
    def force(self, prompt: Prompt, token_ids: Sequence[int], at: np.ndarray | None = None) -> Forced:
        """The judge's distribution at every token of `token_ids` after `prompt`, by one prefill.

        Args:
            prompt: the request.
            token_ids: n >= 1 token ids of the vocabulary (see `knows`), as are those of `at`.
            at: optional int32 [n, k] ids whose log-probabilities are wanted besides (a server's top-k).

        Returns:
            float32 arrays of n rows, in nats.
        """
        with self._computing():
            ids = self._tensor([[*prompt.ids, *token_ids]])
            logits = self.model(input_ids=ids, logits_to_keep=len(token_ids) + 1).logits[0, :-1]
            raw = torch.log_softmax(logits.float(), -1)
            return look_up(raw, token_ids, prompt.sampling.logprobs(raw), at)

    # --- devices ---

    def _tensor(self, values: Any) -> torch.Tensor:
        """`values` where the model's first layer is."""
        return torch.as_tensor(values, device=self.model.device)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with memory_told(), matmul(self.model.device, self.settings.alternative_matmul):
            yield


def batches(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Prompts in batches of up to `size`, shortest first; one is closed before padding adds over a quarter."""
    batch: list[Prompt] = []
    for prompt in sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.item_id)):
        together = [*batch, prompt]
        tokens = sum(len(other.ids) for other in together)
        padded = len(together) * len(prompt.ids)
        if batch and (len(together) > size or padded > MAX_PADDED * tokens + SMALL):
            yield batch
            together = [prompt]
        batch = together
    if batch:
        yield batch


def _generator(sampling: Sampling) -> torch.Generator | None:
    if sampling.greedy:
        return None
    generator = torch.Generator()  # of the CPU: the same draws on every site
    generator.manual_seed(sampling.seed or 0)
    return generator


def _choose(raw: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    if generator is None:
        return int(raw.argmax())
    return int(torch.multinomial(sampling.logprobs(raw.cpu()).exp(), 1, generator=generator))
