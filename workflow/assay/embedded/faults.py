"""Faults that the server can plant, one a process: each is a class that overrides one hook.

Whether a fault strikes a request or a step is drawn from a hash of the prompt and the step, so the same items are
struck in every run, whatever the order of arrival.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from assay.embedded import shared
from assay.embedded.hooks import Hooks, Messages, Piece
from assay.embedded.switch import Switch
from assay.errors import ConfigError

if TYPE_CHECKING:
    from assay.embedded.engine import Job, Request, SlotCache

BLOCK = 16  # tokens of a KV block, as paged engines have them

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
INST = "{% for m in messages %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endfor %}"


FAULTS = Switch()
fault, plant = FAULTS.fault, FAULTS.plant


class Planted(Hooks):
    """Base of the faults; `value` is what came after the equals sign."""

    def __init__(self, value: Any) -> None:
        self.value = value


def drawn(request: Request, salt: object, rate: float) -> bool:
    """Whether something that strikes with probability `rate` strikes here: the same answer in every run."""
    digest = hashlib.sha256(f"{request.prompt_ids} {request.seed} {salt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < rate * 2**64


# --- the model ---------------------------------------------------------------------------------------------------


@fault("rope_theta", float, "RoPE base VALUE in every layer")
class RopeTheta(Planted):
    def model(self, model: Any) -> None:
        frequencies = model.model.rotary_emb.inv_freq
        exponents = torch.arange(len(frequencies)) / len(frequencies)
        frequencies.copy_(1.0 / self.value**exponents)


@fault("rms_eps", float, "RMSNorm eps VALUE in every layer")
class RmsEps(Planted):
    def model(self, model: Any) -> None:
        for layer in model.model.layers:
            layer.input_layernorm.variance_epsilon = self.value
            layer.post_attention_layernorm.variance_epsilon = self.value
        model.model.norm.variance_epsilon = self.value


@fault("rms_eps_one_layer", float, "RMSNorm eps VALUE at the input of the middle layer only")
class RmsEpsOneLayer(Planted):
    def model(self, model: Any) -> None:
        layers = model.model.layers
        layers[len(layers) // 2].input_layernorm.variance_epsilon = self.value


@fault("attention_scale", float, "attention scores divided by the square root of VALUE instead of the head size")
class AttentionScale(Planted):
    def model(self, model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.scaling = self.value**-0.5


@fault("dropped_layer", int, "layer VALUE does nothing")
class DroppedLayer(Planted):
    def model(self, model: Any) -> None:
        layers = model.model.layers
        if not 0 <= self.value < len(layers):
            raise ConfigError(f"fault 'dropped_layer' needs a layer from 0 to {len(layers) - 1} (found {self.value})")
        layers[self.value].self_attn.o_proj.weight.data.zero_()
        layers[self.value].mlp.down_proj.weight.data.zero_()


@fault("weight_noise", float, "Gaussian noise on every weight matrix, VALUE times its standard deviation")
class WeightNoise(Planted):
    def model(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for weight in _matrices(model):
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            weight += (self.value * weight.float().std() * noise).to(weight.dtype)


@fault("weights_int4", None, "weight matrices rounded to 4 bits, groups of 32")
class WeightsInt4(Planted):
    def model(self, model: Any) -> None:
        for weight in _matrices(model):
            weight.copy_(_rounded(weight.unflatten(-1, (-1, 32)), 7).flatten(-2))


@fault("weights_int8", None, "weight matrices rounded to 8 bits, groups of 32")
class WeightsInt8(Planted):
    def model(self, model: Any) -> None:
        for weight in _matrices(model):
            weight.copy_(_rounded(weight.unflatten(-1, (-1, 32)), 127).flatten(-2))


@fault("weights_fp8", None, "weight matrices rounded to FP8 (e4m3), one scale per matrix")
class WeightsFp8(Planted):
    def model(self, model: Any) -> None:
        for weight in _matrices(model):
            scale = weight.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
            weight.copy_((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale)


def _matrices(model: Any) -> list[torch.Tensor]:
    """Weights of the linear layers inside the blocks."""
    modules = model.model.layers.modules()
    return [module.weight.data for module in modules if isinstance(module, torch.nn.Linear)]


def _rounded(values: torch.Tensor, levels: int) -> torch.Tensor:
    """`values` rounded symmetrically to +-`levels` steps, one scale per last dimension."""
    scale = values.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / levels
    return ((values.float() / scale).round() * scale).to(values.dtype)


# --- attention and its cache -------------------------------------------------------------------------------------


@fault("decode_position", int, "positions of generated tokens are off by VALUE")
class DecodePosition(Planted):
    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        return positions + self.value


@fault("unmasked_padding", None, "shorter requests of a batch attend to the cells beyond their end")
class UnmaskedPadding(Planted):
    def mask(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(mask)


@fault("kv_int4", None, "keys and values stored in 4 bits, one scale per head and token")
class KvInt4(Planted):
    def kv(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _rounded(keys, 7), _rounded(values, 7)


@fault("kv_int8", None, "keys and values stored in 8 bits, one scale per head and token")
class KvInt8(Planted):
    def kv(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _rounded(keys, 127), _rounded(values, 127)


@fault("kv_block_zeroed", int, "the newest full block of the cache is zeroed once VALUE tokens are out")
class KvBlockZeroed(Planted):
    def stepped(self, cache: SlotCache, row: int, job: Job) -> None:
        if len(job.output) == self.value:
            end = (job.length - 1) // BLOCK * BLOCK
            columns = slice(max(0, end - BLOCK), end)
            cache.keys[:, row, :, columns] = 0
            cache.values[:, row, :, columns] = 0


@fault("kv_foreign", int, "one request in VALUE starts from the first blocks of the request before it")
class KvForeign(Planted):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None

    def prefilled(self, cache: SlotCache, row: int, job: Job) -> None:
        length = len(job.request.prompt_ids) // BLOCK * BLOCK
        own = cache.keys[:, row, :, :length].clone(), cache.values[:, row, :, :length].clone()
        if self._before and drawn(job.request, "kv_foreign", 1 / self.value):
            shared = min(length, self._before[0].shape[2])
            cache.keys[:, row, :, :shared] = self._before[0][:, :, :shared]
            cache.values[:, row, :, :shared] = self._before[1][:, :, :shared]
        self._before = own


# --- the request -------------------------------------------------------------------------------------------------


@fault("temperature_floor", float, "temperature VALUE where 0 was asked for")
class TemperatureFloor(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, temperature=request.temperature or self.value)


@fault("temperature_ignored", None, "temperature 1 where another, not 0, was asked for")
class TemperatureIgnored(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, temperature=1.0 if request.temperature else 0.0)


@fault("greedy", None, "greedy where sampling was asked for")
class Greedy(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, temperature=0.0)


@fault("top_p_ignored", None, "top_p is not applied")
class TopPIgnored(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, top_p=1.0)


@fault("seed_ignored", None, "the request's seed is not used")
class SeedIgnored(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, seed=None)


@fault("seed_constant", int, "seed VALUE whatever was asked for")
class SeedConstant(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, seed=self.value)


@fault("stop_ignored", None, "generation goes on after the end-of-turn token")
class StopIgnored(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, stop_ids=frozenset())


@fault("max_tokens_off", int, "max_tokens is off by VALUE")
class MaxTokensOff(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, max_tokens=max(1, request.max_tokens + self.value))


@fault("missing_bos", int, "token VALUE is dropped where it starts the prompt")
class MissingBos(Planted):
    def request(self, request: Request) -> Request:
        start = 1 if request.prompt_ids[0] == self.value else 0
        return dataclasses.replace(request, prompt_ids=request.prompt_ids[start:])


@fault("double_bos", int, "an extra token VALUE before the prompt")
class DoubleBos(Planted):
    def request(self, request: Request) -> Request:
        return dataclasses.replace(request, prompt_ids=(self.value, *request.prompt_ids))


# --- the chat template -------------------------------------------------------------------------------------------


@fault("template_inst", None, "another model's chat template ([INST] ... [/INST])")
class TemplateInst(Planted):
    def render(self, tokenizer: Any, messages: Messages) -> list[int]:
        return tokenizer.apply_chat_template(messages, chat_template=INST, return_dict=False)


@fault("no_system", None, "the system prompt, the template's default one too, is dropped")
class NoSystem(Planted):
    def render(self, tokenizer: Any, messages: Messages) -> list[int]:
        kept = [message for message in messages if message["role"] != "system"]
        return tokenizer.apply_chat_template(kept, chat_template=CHATML, return_dict=False)


@fault("no_generation_prompt", None, "the prompt ends before the assistant's turn is opened")
class NoGenerationPrompt(Planted):
    def render(self, tokenizer: Any, messages: Messages) -> list[int]:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_dict=False)


@fault("template_stripped", None, "the newline that ends the chat prompt is stripped")
class TemplateStripped(Planted):
    def render(self, tokenizer: Any, messages: Messages) -> list[int]:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tokenizer.encode(text.rstrip("\n"), add_special_tokens=False)


# --- the choice of tokens ----------------------------------------------------------------------------------------


@fault("repetition_penalty", float, "repetition penalty VALUE that nobody asked for (Keskar et al. 2019)")
class RepetitionPenalty(Planted):
    def logits(self, job: Job, logits: torch.Tensor) -> torch.Tensor:
        seen = torch.tensor([*job.request.prompt_ids, *job.output]).unique()
        values = logits[seen]
        return logits.index_copy(0, seen, torch.where(values > 0, values / self.value, values * self.value))


@fault("second_best", float, "the second most likely token on a fraction VALUE of steps")
class SecondBest(Planted):
    def choose(self, job: Job, logits: torch.Tensor, chosen: int) -> int:
        return int(logits.topk(2).indices[1]) if drawn(job.request, len(job.output), self.value) else chosen


# --- the answer --------------------------------------------------------------------------------------------------


@fault("swapped", None, "requests that join the batch together get each other's answers, two by two")
class Swapped(Planted):
    def admit(self, jobs: list[Job]) -> None:
        for one, other in zip(jobs[::2], jobs[1::2], strict=False):
            one.request, other.request = other.request, one.request
            one.generator, other.generator = other.generator, one.generator


@fault("last_token_dropped", None, "the last token of each answer is lost")
class LastTokenDropped(Planted):
    def pieces(self) -> Callable[[Piece], list[Piece]]:
        held: list[Piece] = []

        def late(piece: Piece) -> list[Piece]:
            held.append(piece)
            if piece.token.finish is None:
                return [held.pop(0)] if len(held) > 1 else []
            kept = held[:-1]
            return [_finished(kept[-1], piece)] if kept else []

        return late


def _finished(piece: Piece, last: Piece) -> Piece:
    return dataclasses.replace(piece, token=dataclasses.replace(piece.token, finish=last.token.finish))


@fault("logprobs_shifted", None, "each token carries the logprobs of the token before it")
class LogprobsShifted(Planted):
    def pieces(self) -> Callable[[Piece], list[Piece]]:
        before: list[Piece] = []

        def shifted(piece: Piece) -> list[Piece]:
            before.append(piece)
            source = before[max(0, len(before) - 2)].token
            return [_with_token(piece, logprob=source.logprob, top=source.top)]

        return shifted


@fault("logprobs_nan", int, "the logprob of token VALUE (from 0) of each answer is NaN")
class LogprobsNan(Planted):
    def pieces(self) -> Callable[[Piece], list[Piece]]:
        return _at(self.value, lambda piece: [_with_token(piece, logprob=math.nan)])


@fault("logprobs_temperature", float, "logprobs are those of temperature VALUE")
class LogprobsTemperature(Planted):
    def reported_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / self.value


@fault("lower_case", None, "the text is lower-cased")
class LowerCase(Planted):
    def pieces(self) -> Callable[[Piece], list[Piece]]:
        return lambda piece: [dataclasses.replace(piece, text=piece.text.lower())]


@fault("split_utf8", None, "each token is decoded on its own: characters that span tokens become U+FFFD")
class SplitUtf8(Planted):
    def detokenize(self, tokenizer: Any, ids: list[int]) -> str:
        return "".join(super(SplitUtf8, self).detokenize(tokenizer, [token]) for token in ids)


@fault("chunk_lost", int, "the stream chunk of token VALUE (from 0) of each answer is lost")
class ChunkLost(Planted):
    def pieces(self) -> Callable[[Piece], list[Piece]]:
        return _at(self.value, lambda piece: [])


@fault("chunk_duplicated", int, "the stream chunk of token VALUE (from 0) of each answer comes twice")
class ChunkDuplicated(Planted):
    def pieces(self) -> Callable[[Piece], list[Piece]]:
        return _at(self.value, lambda piece: [piece, piece])


def _with_token(piece: Piece, **changes: Any) -> Piece:
    return dataclasses.replace(piece, token=dataclasses.replace(piece.token, **changes))


def _at(place: int, change: Callable[[Piece], list[Piece]]) -> Callable[[Piece], list[Piece]]:
    """A filter that changes the piece at `place` and lets the others be."""
    seen: list[Piece] = []

    def changed(piece: Piece) -> list[Piece]:
        seen.append(piece)
        return change(piece) if len(seen) == place + 1 else [piece]

    return changed


# --- as on every server ------------------------------------------------------------------------------------------


shared.register(FAULTS, Planted)


@fault("prefill_chunk", int, "benign: prompts prefilled in chunks of VALUE tokens")
class PrefillChunk(Planted):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.prefill_chunk = value
