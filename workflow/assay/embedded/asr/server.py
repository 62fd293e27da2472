"""POST /v1/audio/transcriptions in the shape of OpenAI's API, with token ids and logprobs as further fields."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile

from assay.embedded.api import ApiError, check_model, create_api
from assay.embedded.asr.engine import Engine, Job
from assay.embedded.asr.hooks import Request, Samples, Segment, Transcript
from assay.embedded.server import MAX_TOP_LOGPROBS, versions
from assay.errors import MediaError
from assay.media.audio import Container, decode

_SUFFIXES = {f".{container}": container for container in Container} | {".ogg": Container.OGG}


class Form(BaseModel):
    """The fields of a request but the file. Unknown ones are refused: dropping them would answer another question."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    model: str
    language: str | None = None
    response_format: Literal["json", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=0)] = 0  # the only one that is served: greedy
    include: Literal["logprobs"] | None = Field(default=None, alias="include[]")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0


def create_app(engine: Engine, served_name: str) -> FastAPI:
    """The server of `engine`, which must be running; the model is called `served_name`."""
    started = versions()
    app = create_api(
        "Assay embedded transcription engine", served_name, lambda: started, lambda: (engine.error, engine.running)
    )
    numbers = itertools.count()

    @app.post("/v1/audio/transcriptions")
    async def transcribe(http: HttpRequest) -> Response:
        async with http.form() as fields:
            form, samples = _form(fields), await _samples(engine, fields.get("file"))
        check_model(form.model, served_name)
        if form.language is not None and form.language not in engine.languages:
            raise ApiError(
                400, f"language: '{form.language}' is none of {', '.join(sorted(engine.languages))}", "language"
            )
        if engine.error:
            raise ApiError(500, f"the engine stopped: {engine.error}")
        top = form.top_logprobs if form.include else None
        transcript = await _transcribe(engine, Request(next(numbers), samples, form.language, top_logprobs=top))
        body = {"text": transcript.text} if form.response_format == "json" else verbose(transcript, top is not None)
        # NaN is written as Python writes it: a planted NaN must reach the client.
        return Response(json.dumps(body, ensure_ascii=False, separators=(",", ":")), media_type="application/json")

    return app


def verbose(transcript: Transcript, logprobs: bool) -> dict[str, Any]:
    """A transcript as `verbose_json`."""
    return {
        "task": "transcribe",
        "language": transcript.language,
        "duration": transcript.duration,
        "text": transcript.text,
        "prompt_token_ids": list(transcript.prompt_ids),
        "segments": [_segment(place, segment, logprobs) for place, segment in enumerate(transcript.segments)],
    }


def _segment(place: int, segment: Segment, logprobs: bool) -> dict[str, Any]:
    body = {
        "id": place,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": [token.id for token in segment.tokens],
        "avg_logprob": segment.avg_logprob,
        "no_speech_prob": segment.no_speech_prob,
    }
    if logprobs:
        body["token_logprobs"] = [token.logprob for token in segment.tokens]
        body["top_logprobs"] = [token.top for token in segment.tokens]
    return body


def _form(fields: Any) -> Form:
    try:
        return Form.model_validate({key: value for key, value in fields.items() if key != "file"})
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{param}: {first['msg']}", param) from None


async def _samples(engine: Engine, file: Any) -> Samples:
    """What the model hears of an uploaded file."""
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file: an audio file is missing", "file")
    suffix = PurePath(file.filename or "").suffix.lower()
    if suffix not in _SUFFIXES:
        raise ApiError(400, f"file: '{file.filename}' ends in none of {', '.join(_SUFFIXES)}", "file")
    try:
        audio = decode(await file.read(), _SUFFIXES[suffix])
    except MediaError as error:
        raise ApiError(400, f"file: {error}", "file") from None
    return engine.hooks.samples(audio)


async def _transcribe(engine: Engine, request: Request) -> Transcript:
    request = engine.hooks.request(request)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Transcript | Exception] = loop.create_future()

    def give(transcript: Transcript | Exception) -> None:
        if not answer.done():  # who asked may be gone
            answer.set_result(transcript)

    def emit(transcript: Transcript | Exception) -> None:
        loop.call_soon_threadsafe(give, transcript)

    engine.submit(Job(request, emit))
    transcript = await answer
    if isinstance(transcript, Exception):
        raise ApiError(500, f"the transcription was cut short: {transcript}")
    return transcript
