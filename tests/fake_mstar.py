"""A server that speaks mstar's protocol (facts and sources: assay.client.mstar), with one fault at will.

In a test: `with app_server(create_app("no_end")) as url`. As an arm's command: `python fake_mstar.py --port 8000`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import email
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse

WORDS = ["Good", " morning, ", "Zoë", "!"]
TEXT = "".join(WORDS)
SOUND = np.arange(-6, 6, dtype="<i2")  # 12 samples
SOUND_FACTS = {"sample_rate": 24000, "num_channels": 1}
ACTION = np.arange(6, dtype="<f4").reshape(2, 3)
ERROR = "text output postprocessing failed: RuntimeError: boom"
SLOW_S = 0.2

Chunk = tuple[str, bytes, dict[str, Any]]


def create_app(fault: str | None = None, after: int = 0) -> FastAPI:
    """The application: /generate has `fault` after `after` requests, and lists what it was asked in `state.forms`."""
    app = FastAPI()
    app.state.forms = []

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}  # whatever became of the workers

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "qwen3_omni", "object": "model", "owned_by": "mstar"}]}

    @app.post("/generate")
    async def generate(request: Request) -> Any:
        form = read_form(request.headers["content-type"], await request.body())
        app.state.forms.append(form)
        now = fault if len(app.state.forms) > after else None
        if now == "http_500":
            raise HTTPException(500, "the conductor does not answer")
        chunks = [chunk for name in form["output_modalities"].split(",") for chunk in _chunks(name, now)]
        if now == "wrong_type":
            return JSONResponse({"request_id": "r", "outputs": {name: [] for name, *_ in chunks}})
        return StreamingResponse(_lines(chunks, now), media_type="application/x-ndjson")

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        if body.get("stream"):
            return StreamingResponse(_events(), media_type="text/event-stream")
        choice = {"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # always
        return {"object": "chat.completion", "choices": [choice], "usage": usage}

    return app


def read_form(content_type: str, body: bytes) -> dict[str, Any]:
    """Field -> its text; `files` -> name and bytes of the file."""
    message = email.message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    assert message.get_content_type() == "multipart/form-data"
    form: dict[str, Any] = {}
    for part in message.get_payload():
        field, content = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
        # FastAPI answers 422 to a file where a field is due, and to a field where a file is.
        assert (part.get_filename() is not None) == (field == "files")
        form[field] = (part.get_filename(), content) if field == "files" else content.decode()
    return form


def _chunks(modality: str, fault: str | None) -> list[Chunk]:
    """What is answered in one modality, as a right server and as a faulty one does."""
    if modality == "text":
        words = [word.encode() for word in WORDS]
        split = [*words[:2], words[2][:3], words[2][3:], words[3]]  # inside the two bytes of ë
        data = {"slow": [b"", *split], "not_utf8": split[:3], "empty": [], "silent": split[:1]}.get(fault, split)
        return [("text", part, {}) for part in data]
    if modality == "audio":
        raw = SOUND.tobytes()
        data = {"odd_pcm": [raw[:9], raw[9:]], "no_audio": []}.get(fault, [raw[:8], raw[8:]])
        facts = SOUND_FACTS | ({"sample_rate": 48000} if fault == "wrong_rate" else {})
        picture = [("image", b"png", {})] if fault == "unasked" else []
        return [*(("audio", part, facts) for part in data), *picture]
    action = ACTION.copy()
    if fault == "nan":
        action[1, 1:] = np.nan
    if fault == "short_f32":
        return [("action", action.tobytes()[:-2], {})]
    return [("action", (action[:1] if fault == "short_action" else action).tobytes(), {})]


async def _lines(chunks: list[Chunk], fault: str | None) -> AsyncIterator[bytes]:
    for number, chunk in enumerate(chunks):
        if number == 1:
            await _disturb(fault)
            if fault in ("error", "error_rust"):  # the worker's line, and the one that ends the stream
                yield (
                    _line("error", ERROR.encode(), {"status": 500}) * 2 if fault == "error" else _json({"error": ERROR})
                )
                return
            if fault == "truncated_line":
                yield _line(*chunk)[:25]
                return
            if fault == "no_json":
                yield b"Internal Server Error\n"
        yield _line(*chunk).replace(b'"data": "', b'"data": "!') if fault == "no_base64" else _line(*chunk)
    if fault == "silent":
        await asyncio.Event().wait()


async def _disturb(fault: str | None) -> None:
    if fault == "slow":
        await asyncio.sleep(SLOW_S)
    elif fault == "no_end":
        raise RuntimeError("Request timed out")
    elif fault == "dies":
        os._exit(9)


def _line(modality: str, data: bytes, metadata: dict[str, Any]) -> bytes:
    return _json({"modality": modality, "data": base64.b64encode(data).decode(), "metadata": metadata})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


async def _events() -> AsyncIterator[str]:
    deltas = [({"role": "assistant"}, None), *(({"content": word}, None) for word in WORDS), ({}, "stop")]
    for delta, finish in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        yield f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault")
    parser.add_argument("--after", type=int, default=0)
    options = parser.parse_args()
    uvicorn.run(create_app(options.fault, options.after), host="127.0.0.1", port=options.port, log_level="critical")
