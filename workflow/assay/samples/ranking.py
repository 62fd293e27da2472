"""Picks that depend on a seed and on each candidate alone, never on the order or the number of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from assay.canonical import canonical_json, sha256_text


@dataclass(frozen=True)
class Candidate:
    """One possible item of a part."""

    key: str  # stable, unique within the part; becomes part of the item id
    kind: str  # chat | completion | needle | transcription | speech
    request: dict[str, Any]  # {"messages": [...]}, {"prompt": "..."}, {"file": "...", ...} or {"input": "..."}
    source: str  # source id and key of what it was made from
    stratum: str = ""  # strata take turns
    group: str = ""  # candidates of one group rank alike, so that they are picked together
    tags: tuple[str, ...] = ()
    expected: str | None = None
    audio: Callable[[], bytes] | None = None  # makes the audio file; called only if picked


def rank(seed: int, part: str, key: str) -> str:
    """Rank of a key under a seed: a SHA-256, so that ranks of different keys are independent."""
    return sha256_text(f"{seed}\n{part}\n{key}")


def number(seed: int, part: str, key: str, below: int) -> int:
    """A whole number in [0, below), drawn from the rank of `key`."""
    return int(rank(seed, part, key), 16) % below


def pick(candidates: Iterable[Candidate], count: int, seed: int, part: str) -> list[Candidate]:
    """The first `count` candidates when strata take turns (in order of appearance), lowest rank first within each.

    A candidate added or removed changes at most one pick, and a smaller count gives a prefix of a larger one. Only
    the order of the strata matters; that of candidates within a stratum does not. Of equal requests in a stratum,
    the lowest-ranked stays.
    """
    strata: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        strata.setdefault(candidate.stratum, []).append(candidate)
    ordered = [
        _distinct(sorted(members, key=lambda item: (rank(seed, part, item.group or item.key), item.key)))
        for members in strata.values()
    ]
    rounds = range(max(map(len, ordered), default=0))
    return [members[turn] for turn in rounds for members in ordered if turn < len(members)][:count]


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    first = {canonical_json(candidate.request): candidate for candidate in reversed(candidates)}
    return list(reversed(first.values()))
