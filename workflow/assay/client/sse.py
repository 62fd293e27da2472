"""Server-sent events out of a byte stream (WHATWG HTML, "Server-sent events", §9.2.6)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

# The three line ends of the standard and no other: `str.splitlines` (and httpx's `aiter_lines`) would also cut at
# U+2028 or U+0085, which JSON strings may hold raw. A final CR may be half of a CRLF: it waits for the next chunk.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


@dataclass(frozen=True)
class Event:
    """One dispatched event."""

    data: str
    event: str = "message"


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Yield the events of a stream as soon as each is whole, however the bytes were cut.

    A last event that lacks its closing blank line is yielded too: some servers close the connection right after it.

    Raises:
        UnicodeDecodeError: an event is not UTF-8.
    """
    rest = b""
    fields: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = _LINE_END.split(rest + chunk)
        for line in lines:
            if line:
                fields.append(line)
                continue
            if event := _event(fields):
                yield event
            fields = []
    if event := _event([*fields, rest.rstrip(b"\r")]):
        yield event


def _event(lines: list[bytes]) -> Event | None:
    data, name = [], "message"
    for line in lines:
        field, _, value = line.decode("utf-8").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
    return Event("\n".join(data), name) if data else None
