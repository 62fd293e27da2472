"""A sample set over HTTP, whatever the protocol: workers, one retry, time limits, and one `responses` row per item."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import httpx

from assay.client.answers import BadAnswer, http_error_message
from assay.records import RESPONSES, Evidence, ResponseStatus

Row = dict[str, Any]
Item = Mapping[
    str, Any
]  # of a sample set: at least `item_id`, `set_id` and `request` of `records.ITEMS`, and its media
PROBE_TEXT = "Hello"


@dataclass
class Attempt:
    """Times and HTTP status of one attempt, known even when it fails."""

    utc: datetime = field(default_factory=lambda: datetime.now(UTC))
    start: float = field(default_factory=time.perf_counter)
    http_code: int | None = None
    first_content_s: float | None = None

    def elapsed(self) -> float:
        """Seconds since just before the request was sent."""
        return time.perf_counter() - self.start

    def timing(self) -> Row:
        """The columns of a `responses` row that time the request."""
        return {
            "t_start_utc": self.utc,
            "latency_ms": 1000 * self.elapsed(),
            "ttft_ms": None if self.first_content_s is None else 1000 * self.first_content_s,
            "http_code": self.http_code,
        }


Exchange = Callable[[httpx.AsyncClient, Attempt], Awaitable[Row]]
"""Sends one request; returns the columns that a good answer decides, or raises BadAnswer."""


class Plan(Protocol):
    """How to talk to one running server: an arm's client spec with its address filled in."""

    @property
    def base_url(self) -> str:
        """Scheme, host and port."""

    @property
    def timeout_s(self) -> float:
        """Limit of one attempt, from the first byte sent to the last received."""

    def exchange(self, item: Item) -> Exchange:
        """What sends one item: its `request`, and its media where the request names a file.

        Raises:
            ConfigError: the protocol, or what the arm says of it, cannot express the request.
        """

    def probe_item(self) -> Item:
        """The smallest item that makes the model generate."""


async def send_set(
    plan: Plan,
    items: Sequence[Item],
    arm: str,
    concurrency: int,
    on_result: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Send every item, at most `concurrency` at a time, in order.

    Args:
        items: rows of `records.ITEMS`.
        arm: value of the rows' `arm` column.
        on_result: called with each row as it is done.

    Returns:
        One `records.RESPONSES` row per item, in the items' order, whatever became of the request.

    Raises:
        ConfigError: an item cannot be asked for in this protocol; nothing was sent.
    """
    exchanges = [plan.exchange(item) for item in items]
    rows: list[Row] = [{} for _ in items]
    todo = iter(range(len(items)))

    async def work(http: httpx.AsyncClient) -> None:
        for index in todo:  # shared by the workers: each item is taken once
            blank = blank_row(items[index], arm) | {"concurrency": concurrency}
            rows[index] = blank | await _ask(http, exchanges[index], plan.timeout_s)
            if on_result:
                on_result(rows[index])

    async with _http(plan, concurrency) as http, asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(items))):
            group.create_task(work(http))
    return rows


async def probe_generation(plan: Plan, timeout_s: float | None = None) -> Row:
    """Ask for one real answer: the only proof that a server serves. Its row's `status` is `ok` when it does.

    Health routes answer before the model is loaded, and some answer although no request can succeed.
    """
    item = plan.probe_item()
    exchange = plan.exchange(item)
    async with _http(plan, 1) as http:
        row = await _ask(http, exchange, timeout_s or plan.timeout_s)
    return blank_row(item, "probe") | row


def probe_of(request: Mapping[str, Any], **media: Any) -> Item:
    """An item of no sample set."""
    return {"item_id": "probe", "set_id": "probe", "request": json.dumps(request), **media}


def not_sent(items: Sequence[Item], arm: str, why: str) -> list[Row]:
    """Rows for items that no request was made for, because the server never came or was gone."""
    return [blank_row(item, arm) | {"error": why} for item in items]


def blank_row(item: Item, arm: str) -> Row:
    """The `responses` row of an item that nothing was heard of yet."""
    return dict.fromkeys(RESPONSES.names) | {
        "item_id": item["item_id"],
        "set_id": item["set_id"],
        "arm": arm,
        "status": ResponseStatus.NOT_SENT,
        "evidence": Evidence.NONE,
        "attempts": 0,
    }


@asynccontextmanager
async def post(http: httpx.AsyncClient, path: str, attempt: Attempt, **content: Any) -> AsyncIterator[httpx.Response]:
    """The answer to a POST, its head read and its body not; `content` as of `httpx.AsyncClient.stream`.

    Raises:
        BadAnswer: the HTTP status is not 200.
    """
    async with http.stream("POST", path, **content) as response:
        attempt.http_code = response.status_code
        if response.status_code != httpx.codes.OK:
            raise BadAnswer(ResponseStatus.HTTP_ERROR, http_error_message(await response.aread()))
        yield response


@asynccontextmanager
async def _http(plan: Plan, concurrency: int) -> AsyncIterator[httpx.AsyncClient]:
    # A connection for each request: a server may close an idle one at any moment (uvicorn does after 5 s), and what is
    # sent into that moment is lost. A client that is starved of CPU cannot even tell how long it has been idle.
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=0)
    # Time is limited per attempt, not per read: a stream that drips forever must end too. Environment proxies are not
    # for a server of our own.
    async with httpx.AsyncClient(base_url=plan.base_url, limits=limits, timeout=None, trust_env=False) as client:
        yield client


async def _ask(http: httpx.AsyncClient, exchange: Exchange, timeout_s: float) -> Row:
    """Columns of the answer to one request; one retry, and only where no answer had begun."""
    outcome = await _attempt(http, exchange, timeout_s)
    if outcome["status"] != ResponseStatus.TRANSPORT_ERROR:
        return outcome | {"attempts": 1}
    first = {"error": f"first attempt: {outcome['error']}"}  # kept where the second attempt has nothing to say
    return first | await _attempt(http, exchange, timeout_s) | {"attempts": 2}


async def _attempt(http: httpx.AsyncClient, exchange: Exchange, timeout_s: float) -> Row:
    attempt = Attempt()
    return await _outcome(http, exchange, timeout_s, attempt) | attempt.timing()


async def _outcome(http: httpx.AsyncClient, exchange: Exchange, timeout_s: float, attempt: Attempt) -> Row:
    try:
        async with asyncio.timeout(timeout_s):
            return await exchange(http, attempt) | {"status": ResponseStatus.OK}
    except BadAnswer as error:
        return {"status": error.status, "error": str(error), **error.known}
    except TimeoutError:
        return {"status": ResponseStatus.TIMEOUT, "error": f"no complete answer within {timeout_s:g} s"}
    except httpx.DecodingError as error:
        return {"status": ResponseStatus.MALFORMED, "error": f"the body cannot be decompressed: {error}"}
    except httpx.TransportError as error:
        why = f"{type(error).__name__}: {error}"
        if attempt.http_code is None:
            return {"status": ResponseStatus.TRANSPORT_ERROR, "error": why}
        return {"status": ResponseStatus.STREAM_ERROR, "error": f"the answer broke off: {why}"}
