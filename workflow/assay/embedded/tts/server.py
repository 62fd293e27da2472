"""POST /v1/audio/speech in the shapes of OpenAI's API: whole, as a body that grows, or as server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
import platform
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from typing import Literal, TypeVar

import numpy as np
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from assay.drivers.common import Samples, Synthesizer
from assay.embedded.api import ApiError, check_model, create_api
from assay.embedded.tts.hooks import Hooks, Speech

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


def create_app(model: Synthesizer, served_name: str, hooks: Hooks, workers: int) -> FastAPI:
    """The server of `model`, called `served_name`; `workers` requests are computed at a time."""
    pool = ThreadPoolExecutor(workers)
    running: list[str] = []
    hooks.model(model)
    app = create_api(
        "Assay embedded speech server", served_name, lambda: _versions(model), lambda: (None, len(running))
    )

    @app.post("/v1/audio/speech")
    async def speech(body: SpeechBody) -> Response:
        check_model(body.model, served_name)
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
        with ExitStack() as until_spoken:
            running.append(body.input)  # before anything waits: of requests that come at once, each sees the others
            until_spoken.callback(running.remove, body.input)
            parts = spoken(model, hooks, hooks.speech(asked))
            arriving = _then(_in_pool(pool, parts), until_spoken.pop_all())
        if not body.stream:
            return Response(b"".join([part async for part in arriving]), media_type=MEDIA_TYPES[body.response_format])
        if body.stream_format == "sse":
            return StreamingResponse(_events(arriving), media_type="text/event-stream")
        return StreamingResponse(arriving, media_type=MEDIA_TYPES[body.response_format])

    return app


def _versions(model: Synthesizer) -> dict[str, str | None]:
    packages: dict[str, str | None] = {name: version(name) for name in ("hibari-tts", "onnxruntime", "numpy")}
    return packages | {"model": model.name, "python": platform.python_version()}


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


async def _then(parts: AsyncIterator[bytes], at_end: ExitStack) -> AsyncIterator[bytes]:
    """`parts`, and what is to be done when they end."""
    with at_end:
        async for part in parts:
            yield part


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    async for part in parts:
        audio = {"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()}
        yield f"event: speech.audio.delta\ndata: {json.dumps(audio)}\n\n"
    yield f"event: speech.audio.done\ndata: {json.dumps({'type': 'speech.audio.done'})}\n\n"
