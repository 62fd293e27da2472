"""OpenAI-style routes. Chat and completions: an item's request as JSON, its answer as a body or as server-sent events.

Speech is in `client.speech`, transcriptions are in `client.transcription`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import httpx
from pydantic import Field

from assay.canonical import sha256_text
from assay.client.answers import BadAnswer, http_error_message, malformed, parse_json
from assay.client.payloads import Answer
from assay.client.speech import exchange_speech
from assay.client.sse import events
from assay.client.transcription import exchange_file, probe_clip
from assay.client.transport import PROBE_TEXT, Attempt, Exchange, Item, Row, post, probe_of
from assay.config import OpenAISpec, Strict
from assay.errors import ConfigError
from assay.records import ResponseStatus

Route = Literal["chat", "completion", "speech", "transcription"]


class OpenAIPlan(Strict):
    """How to talk to one running server: its arm's `OpenAISpec` with the address and model name filled in."""

    base_url: str = Field(pattern=r"^https?://", description="Scheme, host and port; routes are appended")
    routes: dict[Route, str] = Field(min_length=1, description="Route -> HTTP path")
    model: str
    stream: bool
    logprobs: bool
    top_logprobs: int = Field(ge=0, le=20)
    extra_body: dict[str, Any]
    audio_format: str
    stream_body: dict[str, Any]
    transcript_format: str
    timeout_s: float = Field(gt=0, description="Limit of one attempt, from the first byte sent to the last received")

    @classmethod
    def of(cls, spec: OpenAISpec, base_url: str, model: str) -> OpenAIPlan:
        """The plan of `spec` for the server at `base_url` that calls its model `model`."""
        shared = cls.model_fields.keys() - {"base_url", "model"}
        return cls(base_url=base_url, model=model, **{name: getattr(spec, name) for name in shared})

    def exchange(self, item: Item) -> Exchange:
        """What sends `item`. Raises ConfigError where the plan has no route for it."""
        request = json.loads(item["request"])
        route = route_of(self, request)
        path = self.routes[route]
        if route == "speech":
            body = {"model": self.model, **request, "response_format": self.audio_format, **self.extra_body}
            asked = body | self.stream_body if self.stream else body
            return partial(exchange_speech, path, asked, f"{item['item_id']}.{self.audio_format}", self.stream)
        if route == "transcription":
            top_logprobs = self.top_logprobs if self.logprobs else None
            fields = {"model": self.model, **request, **self.extra_body}
            return partial(exchange_file, path, fields, item["audio"], self.transcript_format, top_logprobs)
        return partial(_exchange, self, path, request_body(self, route, request))

    def probe_item(self) -> Item:
        """A greeting, answered by one token, or spoken; where nothing can be said, a clip to transcribe."""
        one_token = {"max_tokens": 1, "temperature": 0}
        if "chat" in self.routes:
            return probe_of({"messages": [{"role": "user", "content": PROBE_TEXT}], **one_token})
        if "completion" in self.routes:
            return probe_of({"prompt": PROBE_TEXT, **one_token})
        if "speech" in self.routes:
            return probe_of({"input": PROBE_TEXT})
        clip = probe_clip()
        return probe_of({"file": clip["path"], "language": "en", "temperature": 0}, audio=clip)


def route_of(plan: OpenAIPlan, request: Mapping[str, Any]) -> Route:
    """The route for one item's `request`.

    Raises:
        ConfigError: the plan has none for a request of this kind.
    """
    kinds: dict[str, Route] = {
        "messages": "chat",
        "prompt": "completion",
        "input": "speech",
        "file": "transcription",
    }
    route = next(route for key, route in kinds.items() if key in request)
    if route not in plan.routes:
        raise ConfigError(
            f"the sample set holds {route} requests, but the arm's client.routes has only "
            f"{', '.join(plan.routes)}; add the route to the arm or take another set"
        )
    return route


def request_body(plan: OpenAIPlan, route: Route, request: Mapping[str, Any]) -> dict[str, Any]:
    """JSON body for one item's `request`: its own fields, plus what the plan asks of every request."""
    body = {"model": plan.model, **request, **plan.extra_body}
    if plan.logprobs and route == "chat":
        body |= {"logprobs": True, "top_logprobs": plan.top_logprobs}
    elif plan.logprobs:
        body |= {"logprobs": plan.top_logprobs}
    if plan.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def _exchange(
    plan: OpenAIPlan, path: str, body: dict[str, Any], http: httpx.AsyncClient, attempt: Attempt
) -> Row:
    answer = Answer(ids_in_strings=plan.extra_body.get("return_tokens_as_token_ids") is True)
    async with post(http, path, attempt, json=body) as response:
        if plan.stream:
            await _read_stream(response, answer, attempt)
        else:
            answer.absorb(parse_json(await response.aread()))
    return answer.row(plan.top_logprobs) | {"output_sha256": sha256_text(answer.text)}


async def _read_stream(response: httpx.Response, answer: Answer, attempt: Attempt) -> None:
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        answer.absorb(parse_json(await response.aread()))  # an error object says more than the wrong type does
        raise malformed(f"a stream was asked for, but the answer is '{kind}'")
    done = False
    try:
        async for event in events(response.aiter_bytes()):
            if event.event == "error":
                raise BadAnswer(ResponseStatus.STREAM_ERROR, http_error_message(event.data.encode()))
            if done := event.data == "[DONE]":
                break
            if answer.absorb(parse_json(event.data)) and attempt.first_content_s is None:
                attempt.first_content_s = attempt.elapsed()
    except UnicodeDecodeError as error:
        raise malformed(f"the stream is not UTF-8: {error}") from None
    # Not every server sends [DONE] (transformers serve does not): either mark proves that the answer is whole.
    if not done and answer.finish_reason is None:
        raise BadAnswer(ResponseStatus.STREAM_ERROR, "the stream ended with neither a finish_reason nor [DONE]")
