"""Faults planted on the judge's own output in every run: a gate that lets one through is blind and proves nothing.

Each control changes the stored output of the judge's own run as a faulty server would have, and names the gates that
must fail on it. No server and no model is needed. What is judged of an output, each modality changes in its own way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from assay.records import ResponseStatus

Responses = dict[str, dict[str, Any]]  # item_id -> its row


@dataclass(frozen=True)
class Control:
    """One planted fault: what it changes, and the gates that must each catch it."""

    name: str
    gates: tuple[str, ...]
    responses: Callable[[Responses], Responses] | None = None


def unanswered(rows: Responses) -> Responses:
    """HTTP 500 on one request in eight, and on one at least, chosen by hash."""
    ranked = sorted(rows, key=lambda key: hashlib.sha256(key.encode()).digest())
    failed = ranked[: max(1, len(ranked) // 8)]
    return rows | {key: rows[key] | {"status": ResponseStatus.HTTP_ERROR} for key in failed}
