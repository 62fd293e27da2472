"""The HTTP routes of the embedded engine, in the shapes of OpenAI's API with vLLM's token-id fields."""

from __future__ import annotations

import asyncio
import itertools
import json
import platform
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import torch
import transformers
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

import assay
from assay.embedded.api import ApiError, check_model, create_api
from assay.embedded.engine import Engine, Job, Request, Token
from assay.embedded.hooks import Hooks, Piece
from assay.provenance import VERSION, git_state

MAX_TOP_LOGPROBS = 20
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class _Body(BaseModel):
    """Unknown fields are refused: a server that drops what it does not know answers another question."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool = False


class GenerationBody(_Body):
    """Fields that both routes take."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = None
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False


class Message(_Body):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0

    @property
    def top(self) -> int | None:
        """How many top logprobs were asked for; None: no logprobs."""
        return self.top_logprobs if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    logprobs: TopLogprobs | None = None

    @property
    def top(self) -> int | None:
        """How many top logprobs were asked for; None: no logprobs."""
        return self.logprobs


def create_app(engine: Engine, served_name: str) -> FastAPI:
    """The server of `engine`, which must be running; the model is called `served_name`."""
    started = versions()
    app = create_api(
        "Assay embedded engine",
        served_name,
        lambda: started,
        lambda: (engine.error, engine.running),
        max_model_len=engine.context,
    )
    numbers = itertools.count()

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Response:
        try:
            ids = engine.hooks.render(engine.tokenizer, [message.model_dump() for message in body.messages])
        except TemplateError as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", "messages") from None
        return await respond(ChatShape(engine, body), body, ids)

    @app.post("/v1/completions")
    async def completion(body: CompletionBody) -> Response:
        ids = engine.tokenizer.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        return await respond(CompletionShape(engine, body), body, ids)

    async def respond(shape: Shape, body: ChatBody | CompletionBody, ids: Sequence[int]) -> Response:
        check_model(body.model, served_name)
        if engine.error:
            raise ApiError(500, f"the engine stopped: {engine.error}")
        request = plan_request(engine, body, ids, next(numbers))
        if body.stream:
            return StreamingResponse(shape.stream(request), media_type="text/event-stream")
        return Response(_dumps(await shape.whole(request)), media_type="application/json")

    return app


def plan_request(engine: Engine, body: ChatBody | CompletionBody, ids: Sequence[int], number: int) -> Request:
    """The generation to do for `body` with the prompt `ids`.

    Raises:
        ApiError: the prompt holds unknown ids, or leaves no room for what is asked.
    """
    vocabulary = engine.model.config.vocab_size
    if any(token >= vocabulary for token in ids):
        raise ApiError(400, f"the prompt holds ids beyond the vocabulary of {vocabulary}", "prompt")
    room = engine.context - len(ids)
    wanted = body.max_tokens or room
    if wanted < 1 or wanted > room:
        raise ApiError(
            400,
            f"{len(ids)} prompt tokens and {max(wanted, 1)} to generate exceed the context of {engine.context}",
            "max_tokens",
        )
    request = Request(
        number=number,
        prompt_ids=tuple(ids),
        max_tokens=wanted,
        stop_ids=engine.stop_ids,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(0, body.top_k),
        seed=body.seed,
        top_logprobs=body.top,
    )
    return engine.hooks.request(request)


async def tokens(engine: Engine, request: Request) -> AsyncIterator[Token]:
    """The tokens of one generation as they are sampled. Leaving early frees the request's place in the batch.

    Raises:
        ApiError: the engine stopped.
    """
    arrived: asyncio.Queue[Token | Exception] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emit(token: Token | Exception) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, token)

    job = engine.submit(Job(request, emit))
    try:
        while True:
            token = await arrived.get()
            if isinstance(token, Exception):
                raise ApiError(500, f"the generation was cut short: {token}")
            yield token
            if token.finish is not None:
                return
    finally:
        job.cancelled = True


class Detokenizer:
    """Text of a growing list of ids, piece by piece, never cutting a character in two."""

    def __init__(self, hooks: Hooks, tokenizer: Any) -> None:
        self._hooks, self._tokenizer = hooks, tokenizer
        self._ids: list[int] = []
        self._given = 0

    def push(self, token: Token) -> Piece:
        """What `token` adds. An incomplete character waits for its other tokens, or for the end."""
        self._ids.append(token.id)
        text = self._hooks.detokenize(self._tokenizer, self._ids)
        if text.endswith("\ufffd") and token.finish is None:
            return Piece(token, "")
        start, self._given = self._given, len(text)
        return Piece(token, text[start:])


class Shape:
    """Answers of one route. Both routes differ only in names."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, engine: Engine, body: ChatBody | CompletionBody) -> None:
        self.engine, self.body = engine, body

    async def _pieces(self, request: Request, usage: dict[str, int]) -> AsyncIterator[Piece]:
        detokenizer = Detokenizer(self.engine.hooks, self.engine.tokenizer)
        keep = self.engine.hooks.pieces()
        async for token in tokens(self.engine, request):
            usage["completion_tokens"] += 1
            for piece in keep(detokenizer.push(token)):
                yield piece
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]

    async def whole(self, request: Request) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": 0}
        pieces = [piece async for piece in self._pieces(request, usage)]
        choice = self.message("".join(piece.text for piece in pieces)) | self._choice(pieces)
        return self._envelope(request, self.kind) | {"choices": [self._with_prompt(choice, request)], "usage": usage}

    async def stream(self, request: Request) -> AsyncIterator[str]:
        """The events of a streamed answer: one for each token, then the usage if asked for, then [DONE]."""
        usage = {"prompt_tokens": len(request.prompt_ids), "completion_tokens": 0}
        envelope = self._envelope(request, self.chunk_kind)
        try:
            first = self._with_prompt(self.delta("") | {"index": 0, "finish_reason": None}, request)
            yield _event(envelope | {"choices": [first]})
            async for piece in self._pieces(request, usage):
                yield _event(envelope | {"choices": [self.delta(piece.text) | self._choice([piece])]})
            if self.body.stream_options and self.body.stream_options.include_usage:
                yield _event(envelope | {"choices": [], "usage": usage})
        except ApiError as error:
            yield _event(error.body)
        yield "data: [DONE]\n\n"

    def _envelope(self, request: Request, kind: str) -> dict[str, Any]:
        name = f"{self.prefix}-{request.number}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.body.model}

    def _with_prompt(self, choice: dict[str, Any], request: Request) -> dict[str, Any]:
        return choice | {"prompt_token_ids": list(request.prompt_ids)} if self.body.return_token_ids else choice

    def _choice(self, pieces: list[Piece]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": pieces[-1].token.finish if pieces else None}
        if self.body.top is not None:
            choice["logprobs"] = self.logprobs([piece.token for piece in pieces])
        if self.body.return_token_ids:
            choice["token_ids"] = [piece.token.id for piece in pieces]
        return choice

    def name(self, token: int) -> str:
        """The string that stands for a token in logprobs."""
        if self.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.engine.tokenizer.decode([token])

    def message(self, text: str) -> dict[str, Any]:
        """Text of a whole answer."""
        raise NotImplementedError

    def delta(self, text: str) -> dict[str, Any]:
        """Text of a stream chunk."""
        raise NotImplementedError

    def logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        """Logprobs of tokens."""
        raise NotImplementedError


class ChatShape(Shape):
    """Answers of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text}}

    def logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        return {
            "content": [
                self._entry(token.id, token.logprob) | {"top_logprobs": [self._entry(*entry) for entry in token.top]}
                for token in tokens
            ]
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        name = self.name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}


class CompletionShape(Shape):
    """Answers of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, tokens: list[Token]) -> dict[str, Any]:
        return {
            "tokens": [self.name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self.name(name): value for name, value in token.top} for token in tokens],
        }


def _dumps(value: Any) -> str:
    # NaN is written as Python writes it: a planted NaN must reach the client.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _event(payload: Any) -> str:
    return f"data: {_dumps(payload)}\n\n"


def versions() -> dict[str, str | None]:
    """What serves: versions, and the git tree of the code if it runs from a checkout. Call it at start: later the
    checkout may have moved on."""
    return {
        "assay": VERSION,
        "tree": git_state(assay.__file__).tree,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
