"""Faults planted on transcripts. Those that change text leave no token ids and no segments to disagree with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from assay.verdicts.margins.planted import MARGIN_CONTROLS, TokenControl
from assay.verdicts.planted import Responses, unanswered

INVENTED = " Thank you very much for watching this video."


def rewritten(rows: Responses, text: Callable[[str], str]) -> Responses:
    """Every transcript through `text`."""
    return {key: row | {"text": text(row["text"]), "token_ids": None, "segments": None} for key, row in rows.items()}


def lost_words(text: str) -> str:
    """Without every second word."""
    return " ".join(text.split()[::2])


def cut_off(text: str) -> str:
    """Without its last eight words, but never empty."""
    words = text.split()
    return " ".join(words[: max(1, len(words) - 8)])


def looping(text: str) -> str:
    """Its last three words ten times more."""
    return " ".join([text, *text.split()[-3:] * 10])


def in_german(rows: Responses) -> Responses:
    """Decoded as another language, as the server says itself."""
    return {key: row | {"language": "de"} for key, row in rows.items()}


def backwards(rows: Responses) -> Responses:
    """Segments that end before they start."""

    def swapped(row: dict[str, Any]) -> dict[str, Any]:
        segments = [entry | {"start": entry["end"] + 1, "end": entry["start"]} for entry in row["segments"]]
        return row | {"segments": segments, "token_ids": None}

    return {key: swapped(row) for key, row in rows.items()}


CONTROLS = (
    TokenControl("unanswered", ("G-coverage",), responses=unanswered),
    TokenControl("cut_off", ("G-struct",), responses=lambda rows: rewritten(rows, cut_off)),
    TokenControl("looping", ("G-struct",), responses=lambda rows: rewritten(rows, looping)),
    TokenControl("leaked_timestamps", ("G-struct",), responses=lambda rows: rewritten(rows, "<|0.00|> {}".format)),
    TokenControl("in_german", ("G-struct",), responses=in_german),
    TokenControl("backwards", ("G-struct",), responses=backwards),
    *(control for control in MARGIN_CONTROLS if control.name != "shifted_logprobs"),
    TokenControl("lost_words", ("G-transcript", "G-wer"), responses=lambda rows: rewritten(rows, lost_words)),
    TokenControl("invented_words", ("G-silence",), responses=lambda rows: rewritten(rows, f"{{}}{INVENTED}".format)),
)
