"""OpenAI's speech route: a text goes in, sound comes out; whole, as a body that grows, or as server-sent events.

Streams in use, read in their sources:

- the body itself grows: mstar at 6666c623 (mstar/api_server/openai/serving_speech.py: one open WAV header, then PCM),
  vLLM-Omni with `stream_format: audio` (docs/serving/speech_api.md);
- events `speech.audio.delta` with base64 in `audio`, then `speech.audio.done` or `speech.audio.error`: OpenAI
  (https://platform.openai.com/docs/api-reference/audio-streaming), vLLM-Omni with `stream: true`;
- events of object `audio.speech.chunk` with base64 in `audio.data`, the last with a `finish_reason`, then [DONE]:
  SGLang-Omni at 2489a10e (sglang_omni/serve/openai_api.py).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_core import from_json

from assay.client.answers import BadAnswer, error_message, http_error_message, malformed, parse_json, typed
from assay.client.sse import events
from assay.client.transport import Attempt, Row, check_ended, post
from assay.records import Evidence, ResponseStatus

EVENTS = "text/event-stream"
CONTENT_TYPES = {
    "wav": {"audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"},
    "pcm": {"audio/pcm", "audio/x-pcm", "audio/l16", "application/octet-stream"},
}


@dataclass
class Sound:
    """What came back, as it came."""

    name: str  # of the file
    streamed: bool
    chunks: list[bytes] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)  # since the request was sent

    @property
    def format(self) -> str:
        """Suffix of the name."""
        return self.name.rpartition(".")[2]

    @property
    def content(self) -> bytes:
        """All of it."""
        return b"".join(self.chunks)

    def take(self, chunk: bytes, attempt: Attempt) -> None:
        """Keep a chunk. Of a stream, the time of the first sample is kept too: a header alone can come early."""
        self.chunks.append(chunk)
        self.arrived_s.append(attempt.elapsed())
        if self.streamed and attempt.first_content_s is None and self._sounds():
            attempt.first_content_s = self.arrived_s[-1]

    def _sounds(self) -> bool:
        content = self.content
        if not content.startswith(b"RIFF"[: len(content)]):
            return bool(content)
        data = content.find(b"data")
        return data >= 0 and len(content) > data + 8  # behind the name and the size of the chunk that holds the samples

    def columns(self) -> Row:
        """The columns of a `responses` row that hold what came."""
        if not self.chunks:
            return {}
        row: Row = {"audio": {"bytes": self.content, "path": self.name}}
        if self.streamed:
            sizes = [len(chunk) for chunk in self.chunks]
            row |= {"chunk_bytes": sizes, "chunk_ms": [1000 * seconds for seconds in self.arrived_s]}
        return row


async def exchange_speech(
    path: str, body: Mapping[str, Any], name: str, stream: bool, http: httpx.AsyncClient, attempt: Attempt
) -> Row:
    """Send one text; return the columns of its sound.

    Args:
        path: HTTP path of the route.
        body: the request.
        name: file name of the sound; its suffix is the format that is asked for.
        stream: whether a stream is asked for.
        http, attempt: as of `Exchange`.

    Raises:
        BadAnswer: no sound, an error, or not what the protocol says; what came of the sound is kept.
    """
    sound = Sound(name, stream)
    async with post(http, path, attempt, json=dict(body)) as response:
        try:
            finish = await _read(response, sound, attempt)
        except BadAnswer as error:
            error.known |= sound.columns()
            raise
    # A sound says nothing of the tokens that it was made of.
    row = {"evidence": Evidence.E3, "finish_reason": finish}
    return row | sound.columns() | {"output_sha256": hashlib.sha256(sound.content).hexdigest()}


async def _read(response: httpx.Response, sound: Sound, attempt: Attempt) -> str | None:
    """Fill `sound`; return the finish reason, where the server tells one."""
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sound.streamed and media_type == EVENTS:
        finish = await _read_events(response, sound, attempt)
    else:
        finish = None
        async for chunk in response.aiter_bytes():
            sound.take(chunk, attempt)
        _check_type(media_type, sound)
        check_ended(response)
    if not sound.content:
        raise BadAnswer(ResponseStatus.EMPTY, "HTTP 200 and no audio")
    return finish


def _check_type(media_type: str, sound: Sound) -> None:
    """That the body is sound of the format asked for. An error object says more than its wrong type does."""
    if message := _error_in(sound.content):
        raise BadAnswer(ResponseStatus.STREAM_ERROR, f"error after HTTP 200: {message}")
    if media_type not in CONTENT_TYPES[sound.format]:
        raise malformed(f"{sound.format} was asked for, but the answer is '{media_type or 'of no type'}'")


def _error_in(content: bytes) -> str | None:
    if content.lstrip()[:1] != b"{":
        return None
    try:
        return error_message(from_json(content))
    except ValueError:
        return None


async def _read_events(response: httpx.Response, sound: Sound, attempt: Attempt) -> str | None:
    """Fill `sound` from events; return the finish reason, where the server tells one."""
    ended, finish = False, None
    try:
        async for event in events(response.aiter_bytes()):
            if event.event == "error":
                raise BadAnswer(ResponseStatus.STREAM_ERROR, http_error_message(event.data.encode()))
            if event.data == "[DONE]":
                ended = True
                break
            body = typed(parse_json(event.data), dict, "an event")
            if error := error_message(body):
                raise BadAnswer(ResponseStatus.STREAM_ERROR, f"error after HTTP 200: {error}")
            if chunk := _event_audio(body):
                sound.take(chunk, attempt)
            finish = finish or body.get("finish_reason")
            ended = ended or finish is not None or body.get("type") == "speech.audio.done"
    except UnicodeDecodeError as error:
        raise malformed(f"the stream is not UTF-8: {error}") from None
    if not ended:
        raise BadAnswer(ResponseStatus.STREAM_ERROR, "the stream ended without an event that says so")
    return finish


def _event_audio(body: dict[str, Any]) -> bytes | None:
    audio = body.get("audio")
    if isinstance(audio, dict):
        audio = audio.get("data")
    if audio is None:
        return None
    try:
        return base64.b64decode(typed(audio, str, "audio"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise malformed(f"the audio of an event is not base64: {error}") from None
