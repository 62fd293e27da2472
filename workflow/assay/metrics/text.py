"""Metrics of text: margins, divergences, structure, needles. Natural logarithms throughout [nat].

Forms over many items take ragged arrays: `values` [tokens] of all items in a row, and `offsets` int [items + 1] such
that item i owns values[offsets[i]:offsets[i + 1]]. An item without tokens gives NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import LCSseq
from scipy import special

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]

QUARTERS_FROM = 64  # tokens: from here on a trend compares quarters, below it halves
REST_FLOOR = 1e-7  # a rest bucket is known no better than the float32 rounding of a probability near one
MANTISSA_BITS = {"float32": 23, "float16": 10, "bfloat16": 7}

_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


# --- distributions -----------------------------------------------------------------------------------------------


def log_softmax(logits: npt.ArrayLike) -> Floats:
    """Log-probabilities [nat] of logits [..., vocabulary]."""
    return np.asarray(special.log_softmax(np.asarray(logits, dtype=np.float64), axis=-1))


def greedy_margin(best: npt.ArrayLike, chosen: npt.ArrayLike) -> Floats:
    """Margin deficit [nat, >= 0]: the judge's best logprob minus its logprob of the served token.

    0 when the served token ties with the best; inf when the judge gives it no probability.
    """
    return np.asarray(np.subtract(best, chosen, dtype=np.float64))


@dataclass(frozen=True)
class CensoredMargin:
    """A margin that is at least `bound` when `censored`, exactly `bound` otherwise [nat]."""

    bound: float
    censored: bool


def topk_margin(top: Mapping[int, float], served: int) -> CensoredMargin:
    """Margin from a top-k table alone: a token outside it is at least as far away as the k-th."""
    best = max(top.values())
    if served in top:
        return CensoredMargin(best - top[served], censored=False)
    return CensoredMargin(best - min(top.values()), censored=True)


def kl_divergence(p: npt.ArrayLike, q: npt.ArrayLike) -> Floats:
    """KL(p || q) [nat] over the last axis of probabilities."""
    return np.asarray(special.rel_entr(np.asarray(p, np.float64), np.asarray(q, np.float64)).sum(axis=-1))


def kl_topk(lp_judge: npt.ArrayLike, lp_served: npt.ArrayLike) -> Floats:
    """KL(judge || served) [nat] over k shared tokens and one bucket for all others: a lower bound of the full KL.

    Args:
        lp_judge, lp_served: logprobs [..., k] of the same ids. NaN marks an unused slot in both.

    The bucket is what the listed tokens leave, in float64. Leaving it out would bias the sum, even below zero.
    """
    judge, served = (np.nan_to_num(np.exp(np.asarray(x, np.float64)), nan=0.0) for x in (lp_judge, lp_served))
    rest = [np.maximum(1.0 - x.sum(axis=-1), REST_FLOOR) for x in (judge, served)]
    return np.asarray(special.rel_entr(judge, served).sum(axis=-1) + special.rel_entr(*rest))


def perplexity(logprobs: npt.ArrayLike) -> float:
    """exp of the mean negative logprob."""
    return float(np.exp(-np.mean(np.asarray(logprobs, dtype=np.float64))))


def gumbel_margin(logits: npt.ArrayLike, temperature: float, gumbel: npt.ArrayLike, served: int) -> float:
    """Margin [nat] of the served token under Gumbel-max sampling with known noise (Token-DiFR, arXiv:2511.20621)."""
    scores = np.asarray(logits, dtype=np.float64) + temperature * np.asarray(gumbel, dtype=np.float64)
    return float(scores.max() - scores[served])


def surprisal_z(excess: npt.ArrayLike, variance: npt.ArrayLike) -> float:
    """z of the summed excess surprisal: sum(-lp - H) / sqrt(sum of variances) over items (martingale CLT).

    The standard error is the larger of the judge's own and the spread of item sums, so neither a wrong variance nor
    dependence inside an item makes it too small.
    """
    sums, variances = np.asarray(excess, np.float64), np.asarray(variance, np.float64)
    spread = float(sums.var(ddof=1) * len(sums)) if len(sums) > 1 else 0.0
    scale = math.sqrt(max(float(variances.sum()), spread))
    return float(sums.sum()) / scale if scale else 0.0


# --- number formats ----------------------------------------------------------------------------------------------


def round_bf16(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Round finite values to bfloat16 (nearest, ties to even), kept as float32."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


def ulp(dtype: str, x: float) -> float:
    """Spacing of `dtype` numbers at a normal `x`: 0.125 for bfloat16 in [16, 32)."""
    return float(2.0 ** (math.frexp(x)[1] - 1 - MANTISSA_BITS[dtype]))


# --- ragged reductions -------------------------------------------------------------------------------------------


def ragged_sum(values: Floats, offsets: Ints) -> Floats:
    """Sum per item; 0 for an item without tokens."""
    return _reduce(np.add, values, offsets, 0.0)


def ragged_max(values: Floats, offsets: Ints) -> Floats:
    """Maximum per item."""
    return _reduce(np.maximum, values, offsets, np.nan)


def ragged_mean(values: Floats, offsets: Ints) -> Floats:
    """Mean per item."""
    counts = np.diff(offsets)
    return np.divide(ragged_sum(values, offsets), counts, out=np.full(len(counts), np.nan), where=counts > 0)


def ragged_rms(values: Floats, offsets: Ints) -> Floats:
    """Root mean square per item."""
    return np.sqrt(ragged_mean(np.square(values, dtype=np.float64), offsets))


def ragged_argmax(values: Floats, offsets: Ints) -> npt.NDArray[np.int64]:
    """Position inside its item of the first maximum; -1 for an item without tokens."""
    counts = np.diff(offsets)
    owner = np.repeat(np.arange(len(counts)), counts)
    hits = np.flatnonzero(values == ragged_max(values, offsets)[owner])
    first = np.full(len(counts), -1, dtype=np.int64)
    owners, at = np.unique(owner[hits], return_index=True)
    first[owners] = hits[at] - np.asarray(offsets)[owners]
    return first


def _reduce(ufunc: np.ufunc, values: Floats, offsets: Ints, empty: float) -> Floats:
    counts = np.diff(offsets)
    out = np.full(len(counts), empty)
    filled = np.flatnonzero(counts > 0)
    if len(filled):  # consecutive filled items are adjacent in `values`, so their starts delimit them
        out[filled] = ufunc.reduceat(np.asarray(values, dtype=np.float64), np.asarray(offsets)[filled])
    return out


def clipped_mean(margins: Floats, offsets: Ints, clip: float) -> Floats:
    """Mean per item of min(margin, clip) [nat]: one masked token (inf) counts `clip`, it does not poison the mean."""
    return ragged_mean(np.minimum(margins, clip), offsets)


@dataclass(frozen=True)
class Trend:
    """Clipped mean margins [nat] of the first and last part of each item."""

    early: Floats
    late: Floats

    @property
    def difference(self) -> Floats:
        """late - early: + when margins grow with position (a lost cache block), - when they start high."""
        return self.late - self.early


def margin_trend(margins: Floats, offsets: Ints, clip: float) -> Trend:
    """Clipped mean margins of the first and last quarter of each item (halves below `QUARTERS_FROM` tokens).

    An item of fewer than two tokens gives NaN.
    """
    starts, ends = np.asarray(offsets[:-1]), np.asarray(offsets[1:])
    counts = ends - starts
    width = np.where(counts >= QUARTERS_FROM, counts // 4, counts // 2)
    padded = np.append(np.minimum(margins, clip), 0.0)  # so that an end past the last token is a valid index

    def mean(first: Ints, last: Ints) -> Floats:
        sums = np.add.reduceat(padded, np.stack([first, last], axis=1).ravel())[::2]
        return np.divide(sums, width, out=np.full(len(counts), np.nan), where=width > 0)

    return Trend(early=mean(starts, starts + width), late=mean(ends - width, ends))


# --- sequences and structure -------------------------------------------------------------------------------------


def first_divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """0-based index of the first difference (a missing token differs), or None when identical."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def tokens_after_eos(ids: Sequence[int], eos: Collection[int]) -> int:
    """Tokens that follow the first end-of-sequence token; 0 when there is none."""
    return next((len(ids) - 1 - index for index, token in enumerate(ids) if token in eos), 0)


def leading_bos(ids: Sequence[int], bos: int) -> int:
    """How many BOS tokens a prompt starts with: exactly one where the tokenizer adds one."""
    return next((index for index, token in enumerate(ids) if token != bos), len(ids))


def length_ratio(served: npt.ArrayLike, reference: npt.ArrayLike) -> float:
    """Sum of served lengths over sum of reference lengths."""
    return float(np.sum(np.asarray(served, np.float64)) / np.sum(np.asarray(reference, np.float64)))


def is_canonical(ids: Sequence[int], decode: Callable[[Sequence[int]], str], encode: Callable[[str], Any]) -> bool:
    """Whether ids survive decoding and encoding. If not, nothing may be aligned to re-encoded ids."""
    return list(encode(decode(ids))) == list(ids)


def decode_bytes(parts: Sequence[bytes]) -> str:
    """Text of token byte strings: joined first, because one character may be split over tokens."""
    return b"".join(parts).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Flips:
    """Task accuracy before and after, and the share of items that changed sides [fraction]."""

    base: float
    new: float
    rate: float


def flips(base_correct: npt.ArrayLike, new_correct: npt.ArrayLike) -> Flips:
    """Items that flip between right and wrong: equal accuracy can hide many (arXiv:2407.09141)."""
    base, new = np.asarray(base_correct, bool), np.asarray(new_correct, bool)
    return Flips(float(base.mean()), float(new.mean()), float((base != new).mean()))


# --- answers -----------------------------------------------------------------------------------------------------


def extract_numbers(text: str) -> list[str]:
    """Numbers of a text with their decimals, thousands separators removed: "48,213. 1.5" -> ["48213", "1.5"]."""
    return [match.replace(",", "") for match in _NUMBER.findall(text)]


def needle_correct(expected: str, answer: str) -> bool:
    """Whether the expected number stands in the answer as a number of its own; neither 482130 nor 48213.5 is 48213."""
    return expected in extract_numbers(answer)


def tool_call_f1(tp: int, fp: int, fn: int) -> float | None:
    """F1 of tool-call triggers; None when nobody called and nobody should have."""
    return 2 * tp / (2 * tp + fp + fn) if tp + fp + fn else None


def mmd2_hamming(x: Sequence[Sequence[Any]], y: Sequence[Sequence[Any]]) -> float:
    """Unbiased squared MMD of two samples of sequences; kernel: share of equal positions (arXiv:2410.20247)."""

    def kernel(a: Sequence[Any], b: Sequence[Any]) -> float:
        return sum(map(lambda left, right: left == right, a, b)) / max(len(a), len(b), 1)

    def within(sample: Sequence[Sequence[Any]]) -> float:
        n = len(sample)
        return sum(kernel(sample[i], sample[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))

    between = sum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))
    return within(x) + within(y) - 2 * between


# --- what other projects' gates would say ------------------------------------------------------------------------


def check_logprobs_close(
    a: Sequence[int], a_top: Sequence[Collection[int]], b: Sequence[int], b_top: Sequence[Collection[int]]
) -> bool:
    """vLLM's rule: at the first differing token each side's token is in the other's top N; nothing after counts."""
    for left, left_top, right, right_top in zip(a, a_top, b, b_top, strict=False):
        if left != right:
            return left in right_top and right in left_top
    return True


def rouge_l(a: Sequence[Any], b: Sequence[Any]) -> float:
    """ROUGE-L F1 of two sequences of words or ids (longest common subsequence); 1 when both are empty."""
    total = len(a) + len(b)
    return 2 * LCSseq.similarity(a, b) / total if total else 1.0
