"""POST /v1/audio/speech in the shapes of OpenAI's API: whole, as a body that grows, or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
import platform
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Literal, TypeVar

import numpy as np
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from assay.drivers.common import Samples, Synthesizer
from assay.embedded.tts.hooks import Hooks, Refusal, Speech

CHUNK_S = 0.5  # of sound in a chunk of a stream; a sentence ends with a shorter one
MEDIA_TYPES = {"wav": "audio/wav", "pcm": "audio/pcm"}

T = TypeVar("T")


class SpeechBody(BaseModel):
    """The request. Unknown fields are refused: a server that drops what it does not know answers another question."""

    model_config = ConfigDict(extra="forbid")

    model: str
    input: str = Field(min_length=1)
    voice: str
    response_format: Literal["wav", "pcm"] = "wav"
    speed: float = Field(default=1.0, ge=0.5, le=2.0)
    seed: int = 0
    stream: bool = False
    stream_format: Literal["audio", "sse"] = "audio"


class ApiError(Exception):
    """An error to answer with."""

    def __init__(self, code: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    @property
    def response(self) -> JSONResponse:
        """OpenAI's error object."""
        kind = "server_error" if self.code >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.code)


def create_app(model: Synthesizer, served_name: str, hooks: Hooks, workers: int) -> FastAPI:
    """The server of `model`, called `served_name`; `workers` requests are computed at a time."""
    app = FastAPI(title="Assay embedded speech server")
    pool = ThreadPoolExecutor(workers)
    running: list[str] = []
    created = int(time.time())
    hooks.model(model)

    @app.exception_handler(ApiError)
    async def api_error(_: object, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: object, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])
        return ApiError(400, f"{param or 'body'}: {first['msg']}", param or None).response

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "running": len(running)}

    @app.get("/version")
    async def versions() -> dict[str, str]:
        packages = {name: version(name) for name in ("hibari-tts", "onnxruntime", "numpy")}
        return packages | {"model": model.name, "python": platform.python_version()}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": served_name, "object": "model", "created": created, "owned_by": "assay"}
        return {"object": "list", "data": [entry]}

    @app.post("/v1/audio/speech")
    async def speech(body: SpeechBody) -> Response:
        if body.model != served_name:
            raise ApiError(404, f"the model '{body.model}' does not exist; this server has '{served_name}'", "model")
        if body.voice not in model.voices:
            raise ApiError(400, f"no voice '{body.voice}'; there are {', '.join(model.voices)}", "voice")
        asked = Speech(
            text=body.input,
            voice=body.voice,
            seed=body.seed,
            speed=body.speed,
            format=body.response_format,
            streamed=body.stream,
            others=tuple(running),
        )
        try:
            parts = spoken(model, hooks, hooks.speech(asked))
        except Refusal as refusal:
            raise ApiError(refusal.code, "planted error") from None
        arriving = _counted(_in_pool(pool, parts), running, body.input)
        if not body.stream:
            return Response(b"".join([part async for part in arriving]), media_type=MEDIA_TYPES[body.response_format])
        if body.stream_format == "sse":
            return StreamingResponse(_events(arriving), media_type="text/event-stream")
        return StreamingResponse(arriving, media_type=MEDIA_TYPES[body.response_format])

    return app


def spoken(model: Synthesizer, hooks: Hooks, speech: Speech) -> Iterator[bytes]:
    """The parts of the body that answers `speech`, each as soon as its sound is there."""
    return hooks.parts(_parts(model, hooks, speech), speech)


def _parts(model: Synthesizer, hooks: Hooks, speech: Speech) -> Iterator[bytes]:
    pieces = hooks.pieces(model.pieces(speech.text, speech.voice, speech.seed, speech.speed), speech)
    if not speech.streamed:
        samples = hooks.pcm(np.concatenate([np.zeros(0, np.float32), *pieces]))
        if speech.format == "wav":
            yield hooks.header(model.rate, len(samples))
        yield samples
        return
    if speech.format == "wav":
        yield hooks.header(model.rate, None)
    for chunk in hooks.chunks(_cut(pieces, round(CHUNK_S * model.rate)), speech):
        yield hooks.pcm(chunk)


def _cut(pieces: Iterator[Samples], length: int) -> Iterator[Samples]:
    for piece in pieces:
        for start in range(0, len(piece), length):
            yield piece[start : start + length]


async def _in_pool(pool: ThreadPoolExecutor, items: Iterator[T]) -> AsyncIterator[T]:
    """Items that are computed in a thread, one at a time."""
    loop, end = asyncio.get_running_loop(), object()
    while (item := await loop.run_in_executor(pool, next, items, end)) is not end:
        yield item  # type: ignore[misc]


async def _counted(parts: AsyncIterator[bytes], running: list[str], text: str) -> AsyncIterator[bytes]:
    """`parts`, their text being among those `running` until they end."""
    running.append(text)
    try:
        async for part in parts:
            yield part
    finally:
        running.remove(text)


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    async for part in parts:
        audio = {"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()}
        yield f"event: speech.audio.delta\ndata: {json.dumps(audio)}\n\n"
    yield f"event: speech.audio.done\ndata: {json.dumps({'type': 'speech.audio.done'})}\n\n"
