"""When each word was said: what the decoder attended to, by dynamic time warping.

The method of github.com/openai/whisper (timing.py): heads of the cross-attention that follow the audio, each
normalised over tokens and smoothed over time, averaged, and the cheapest monotone path through them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Word:
    """A word and when it is said on the clip [s]."""

    text: str
    start_s: float
    end_s: float


def token_frames(weights: Floats, width: int) -> npt.NDArray[np.int64]:
    """First frame of every token.

    Args:
        weights: attention [heads, tokens, frames].
        width: of the median filter [frames, odd].
    """
    spread = weights.std(axis=1, keepdims=True)
    normal = (weights - weights.mean(axis=1, keepdims=True)) / np.where(spread, spread, 1)
    return warp(ndimage.median_filter(normal, (1, 1, width), mode="reflect").mean(axis=0))


def warp(gain: Floats) -> npt.NDArray[np.int64]:
    """First column of each row on the monotone path from corner to corner that gains most; [rows, columns] -> [rows].

    A step goes one row on, one column on, or both.
    """
    rows, columns = gain.shape
    best = np.full((rows + 1, columns + 1), -np.inf)
    best[0, 0] = 0
    for row in range(1, rows + 1):
        along = np.cumsum(gain[row - 1])
        entering = np.maximum(best[row - 1, :-1], best[row - 1, 1:])  # from the row above, straight or across
        best[row, 1:] = along + np.maximum.accumulate(entering - np.concatenate([[0], along[:-1]]))
    first = np.zeros(rows, np.int64)
    row, column = rows, columns
    while row:
        first[row - 1] = column - 1
        ways = best[row - 1, column - 1], best[row - 1, column], best[row, column - 1] if column > 1 else -np.inf
        way = int(np.argmax(ways))
        row, column = row - (way != 2), column - (way != 1)
    return first


def words(tokens: Sequence[int], starts_s: Sequence[float], decode: Callable[[Sequence[int]], str]) -> list[Word]:
    """Tokens joined to words at white space; a script without any gives one word.

    Args:
        tokens: n tokens of text.
        starts_s: n + 1: when each is said, and when the last ends [s].
        decode: text of tokens.
    """
    bounds = [0]
    for place in range(1, len(tokens)):
        if decode(tokens[place : place + 1])[:1].isspace():
            bounds.append(place)
    bounds.append(len(tokens))
    return [
        Word(text, float(starts_s[low]), float(starts_s[high]))
        for low, high in itertools.pairwise(bounds)
        if (text := decode(tokens[low:high]).strip())
    ]
