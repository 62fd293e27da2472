"""What answers of every protocol share: how one is refused, and JSON read with care."""

from __future__ import annotations

import math
from typing import Any

from pydantic_core import from_json

from assay.records import ResponseStatus

MAX_ID = 2**31 - 1
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127  # a larger number is infinite in the table


class BadAnswer(Exception):
    """An answer that cannot be scored: its status, why, and the columns of its row that are known all the same."""

    def __init__(self, status: ResponseStatus, why: str, **known: Any) -> None:
        super().__init__(why)
        self.status, self.known = status, known


def malformed(why: str) -> BadAnswer:
    """HTTP 200 whose body is not what the protocol says."""
    return BadAnswer(ResponseStatus.MALFORMED, why)


def parse_json(text: str | bytes) -> Any:
    """JSON as servers write it: NaN and Infinity literals are read, to be refused where a number is due.

    Raises:
        BadAnswer: not JSON (malformed), or JSON that stops short (stream_error).
    """
    try:
        return from_json(text)
    except ValueError as error:
        why = str(error)
    try:
        from_json(text, allow_partial=True)
    except ValueError:
        raise malformed(f"not JSON ({why}): {excerpt(text)}") from None
    raise BadAnswer(ResponseStatus.STREAM_ERROR, f"JSON stops short ({why})")


def error_message(body: Any) -> str | None:
    """The message of an error object in any of the shapes servers use, or None if `body` is not one."""
    if not isinstance(body, dict):
        return None
    error = body.get("error") or body.get("detail") or (body if body.get("object") == "error" else None)
    if isinstance(error, dict):
        error = error.get("message") or error_message(error) or error
    return str(error) if error else None


def http_error_message(content: bytes) -> str:
    """What an HTTP error's body says, in at most one short paragraph."""
    try:
        message = error_message(from_json(content))
    except ValueError:
        message = None
    return message or excerpt(content) or "no body"


def excerpt(text: str | bytes) -> str:
    """The first 300 characters, for a message."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else text
    return shown if len(shown) <= 300 else shown[:300] + "..."


def typed(value: Any, kind: type, what: str) -> Any:
    """`value`, if it is a `kind`; else the answer is malformed."""
    if not isinstance(value, kind):
        raise malformed(f"{what} should be a {kind.__name__}, found {excerpt(repr(value))}")
    return value


def check_unicode(text: str) -> None:
    """Refuse a text that no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise malformed(f"the text holds a lone surrogate at character {error.start}") from None


def ids_or_none(value: Any, what: str) -> list[int] | None:
    """`value` if it is null or a list of token ids; else the answer is malformed."""
    if value is None:
        return None
    for token in typed(value, list, what):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_ID:
            raise malformed(f"{what} holds {token!r}, which is no token id")
    return value


def finite(value: Any, what: str) -> float:
    """`value` as a float. A null, or a number that is no finite float32, even as a string, is wrong, not a gap."""
    number = math.nan if value is None else value
    if isinstance(number, str):
        try:
            number = float(number)
        except ValueError:
            raise malformed(f"{what} should be a number, found {value!r}") from None
        if math.isfinite(number):
            raise malformed(f"{what} should be a number, found the string {value!r}")
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise malformed(f"{what} should be a number, found {value!r}")
    if not abs(number) <= _MAX_FLOAT32:  # compared as it is: NaN is no smaller, and a huge integer has no float
        raise BadAnswer(ResponseStatus.NONFINITE, f"{what} is {'null' if value is None else excerpt(str(value))}")
    return float(number)
