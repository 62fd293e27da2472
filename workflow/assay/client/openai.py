"""OpenAI-style chat and completions over HTTP: a sample set in, one `responses` row per planned item out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import httpx
from pydantic import Field

from assay.canonical import sha256_text
from assay.client.payloads import Answer, BadAnswer, http_error_message, parse_json
from assay.client.sse import events
from assay.config import ClientSpec, Strict
from assay.errors import ConfigError
from assay.records import RESPONSES, Evidence, ResponseStatus

Route = Literal["chat", "completion"]
Row = dict[str, Any]
PROBE_TEXT = "Hello"
_TRANSPORT_ATTEMPTS = 2


class ClientPlan(Strict):
    """How to talk to one running server: its arm's `ClientSpec` with the address and model name filled in."""

    base_url: str = Field(pattern=r"^https?://", description="Scheme, host and port; routes are appended")
    routes: dict[Route, str] = Field(min_length=1, description="Route -> HTTP path")
    model: str
    stream: bool
    logprobs: bool
    top_logprobs: int = Field(ge=0, le=20)
    extra_body: dict[str, Any]
    timeout_s: float = Field(gt=0, description="Limit of one attempt, from the first byte sent to the last received")

    @classmethod
    def of(cls, spec: ClientSpec, base_url: str, model: str) -> ClientPlan:
        """The plan of `spec` for the server at `base_url` that calls its model `model`."""
        names = ("routes", "stream", "logprobs", "top_logprobs", "extra_body", "timeout_s")
        return cls(base_url=base_url, model=model, **{name: getattr(spec, name) for name in names})


def request_body(plan: ClientPlan, request: Mapping[str, Any]) -> tuple[Route, dict[str, Any]]:
    """Route and JSON body for one item's `request`: its own fields, plus what the plan asks of every request.

    Raises:
        ConfigError: the plan has no route for a request of this kind.
    """
    route: Route = "chat" if "messages" in request else "completion"
    if route not in plan.routes:
        raise ConfigError(
            f"the sample set holds {route} requests, but the arm's client.routes has only "
            f"{', '.join(plan.routes)}; add the route to the arm or take another set"
        )
    body = {"model": plan.model, **request, **plan.extra_body}
    if plan.logprobs and route == "chat":
        body |= {"logprobs": True, "top_logprobs": plan.top_logprobs}
    elif plan.logprobs:
        body |= {"logprobs": plan.top_logprobs}
    if plan.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return route, body


async def send_set(
    plan: ClientPlan,
    items: Sequence[Mapping[str, Any]],
    arm: str,
    concurrency: int,
    on_result: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Send every item, at most `concurrency` at a time, in order.

    Args:
        items: dicts with at least `item_id`, `set_id` and `request` of `records.ITEMS`.
        arm: value of the rows' `arm` column.
        on_result: called with each row as it is done.

    Returns:
        One `records.RESPONSES` row per item, in the items' order, whatever became of the request.

    Raises:
        ConfigError: an item needs a route that the plan lacks; nothing was sent.
    """
    calls = [request_body(plan, json.loads(item["request"])) for item in items]
    rows: list[Row] = [{} for _ in items]
    todo = iter(range(len(items)))

    async def work(http: httpx.AsyncClient) -> None:
        for index in todo:  # shared by the workers: each item is taken once
            blank = blank_row(items[index], arm) | {"concurrency": concurrency}
            rows[index] = blank | await _ask(http, plan, *calls[index])
            if on_result:
                on_result(rows[index])

    async with _http(plan, concurrency) as http, asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(items))):
            group.create_task(work(http))
    return rows


def not_sent(items: Sequence[Mapping[str, Any]], arm: str, why: str) -> list[Row]:
    """Rows for items that no request was made for, because the server never came or was gone."""
    return [blank_row(item, arm) | {"error": why} for item in items]


async def probe_generation(plan: ClientPlan, timeout_s: float | None = None) -> Row:
    """Ask for one real token: the only proof that a server serves. Its row's `status` is `ok` when it does.

    Health routes answer before the model is loaded, and some answer although no request can succeed.
    """
    limit = {"timeout_s": timeout_s} if timeout_s else {}
    plan = plan.model_copy(update=limit)
    prompt = (
        {"messages": [{"role": "user", "content": PROBE_TEXT}]} if "chat" in plan.routes else {"prompt": PROBE_TEXT}
    )
    route, body = request_body(plan, prompt | {"max_tokens": 1, "temperature": 0})
    async with _http(plan, 1) as http:
        return blank_row({"item_id": "probe", "set_id": "probe"}, "probe") | await _ask(http, plan, route, body)


def blank_row(item: Mapping[str, Any], arm: str) -> Row:
    """The `responses` row of an item that nothing was heard of yet."""
    return dict.fromkeys(RESPONSES.names) | {
        "item_id": item["item_id"],
        "set_id": item["set_id"],
        "arm": arm,
        "status": ResponseStatus.NOT_SENT,
        "evidence": Evidence.NONE,
        "attempts": 0,
    }


@dataclass
class _Attempt:
    """Times and HTTP status of one attempt, known even when it fails."""

    utc: datetime = field(default_factory=lambda: datetime.now(UTC))
    start: float = field(default_factory=time.perf_counter)
    http_code: int | None = None
    first_token: float | None = None

    def timing(self) -> Row:
        return {
            "t_start_utc": self.utc,
            "latency_ms": 1000 * (time.perf_counter() - self.start),
            "ttft_ms": None if self.first_token is None else 1000 * (self.first_token - self.start),
            "http_code": self.http_code,
        }


@asynccontextmanager
async def _http(plan: ClientPlan, concurrency: int) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    # Time is limited per attempt, not per read: a stream that drips forever must end too. Environment proxies are not
    # for a server of our own.
    async with httpx.AsyncClient(base_url=plan.base_url, limits=limits, timeout=None, trust_env=False) as client:
        yield client


async def _ask(http: httpx.AsyncClient, plan: ClientPlan, route: Route, body: dict[str, Any]) -> Row:
    """Columns of the answer to one request; one retry, and only where no answer had begun."""
    for number in range(1, _TRANSPORT_ATTEMPTS + 1):
        attempt = _Attempt()
        outcome = await _outcome(http, plan, route, body, attempt) | attempt.timing() | {"attempts": number}
        if outcome["status"] != ResponseStatus.TRANSPORT_ERROR:
            break
    return outcome


async def _outcome(
    http: httpx.AsyncClient, plan: ClientPlan, route: Route, body: dict[str, Any], attempt: _Attempt
) -> Row:
    try:
        async with asyncio.timeout(plan.timeout_s):
            answer = await _exchange(http, plan, plan.routes[route], body, attempt)
        row = answer.row(plan.top_logprobs)
        return row | {"status": ResponseStatus.OK, "output_sha256": sha256_text(answer.text)}
    except BadAnswer as error:
        return {"status": error.status, "error": str(error), **error.known}
    except TimeoutError:
        return {"status": ResponseStatus.TIMEOUT, "error": f"no complete answer within {plan.timeout_s:g} s"}
    except httpx.DecodingError as error:
        return {"status": ResponseStatus.MALFORMED, "error": f"the body cannot be decompressed: {error}"}
    except httpx.TransportError as error:
        why = f"{type(error).__name__}: {error}"
        if attempt.http_code is None:
            return {"status": ResponseStatus.TRANSPORT_ERROR, "error": why}
        return {"status": ResponseStatus.STREAM_ERROR, "error": f"the answer broke off: {why}"}


async def _exchange(
    http: httpx.AsyncClient, plan: ClientPlan, path: str, body: dict[str, Any], attempt: _Attempt
) -> Answer:
    answer = Answer(ids_in_strings=plan.extra_body.get("return_tokens_as_token_ids") is True)
    async with http.stream("POST", path, json=body) as response:
        attempt.http_code = response.status_code
        if response.status_code != httpx.codes.OK:
            raise BadAnswer(ResponseStatus.HTTP_ERROR, http_error_message(await response.aread()))
        if plan.stream:
            await _read_stream(response, answer, attempt)
        else:
            answer.absorb(parse_json(await response.aread()))
    return answer


async def _read_stream(response: httpx.Response, answer: Answer, attempt: _Attempt) -> None:
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        answer.absorb(parse_json(await response.aread()))  # an error object says more than the wrong type does
        raise BadAnswer(ResponseStatus.MALFORMED, f"a stream was asked for, but the answer is '{kind}'")
    done = False
    try:
        async for event in events(response.aiter_bytes()):
            if event.event == "error":
                raise BadAnswer(ResponseStatus.STREAM_ERROR, http_error_message(event.data.encode()))
            if done := event.data == "[DONE]":
                break
            if answer.absorb(parse_json(event.data)) and attempt.first_token is None:
                attempt.first_token = time.perf_counter()
    except UnicodeDecodeError as error:
        raise BadAnswer(ResponseStatus.MALFORMED, f"the stream is not UTF-8: {error}") from None
    # Not every server sends [DONE] (transformers serve does not): either mark proves that the answer is whole.
    if not done and answer.finish_reason is None:
        raise BadAnswer(ResponseStatus.STREAM_ERROR, "the stream ended with neither a finish_reason nor [DONE]")
