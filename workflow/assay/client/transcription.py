"""OpenAI's transcription route: an audio file as a multipart form, answered by `verbose_json` (or `json`, text alone).

Route and fields: https://platform.openai.com/docs/api-reference/audio/createTranscription. Beyond it, a segment may
have `token_logprobs` (nat, one a token) and `top_logprobs` (of each token, pairs of id and logprob), and the answer
`prompt_token_ids`; Assay's own server gives them to who asks for logprobs.
"""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np

from assay.canonical import sha256_text
from assay.client.answers import (
    BadAnswer,
    check_unicode,
    error_message,
    finite,
    ids_or_none,
    malformed,
    parse_json,
    typed,
)
from assay.client.payloads import MIN_TOP_K
from assay.client.transport import Attempt, Row, post
from assay.records import Evidence, ResponseStatus

PROBE_RATE, PROBE_S, PROBE_HZ = 16_000, 1.0, 440.0

Top = list[tuple[int, float]]


async def exchange_file(
    path: str,
    fields: Mapping[str, Any],
    audio: Mapping[str, Any],
    response_format: str,
    top_logprobs: int | None,
    http: httpx.AsyncClient,
    attempt: Attempt,
) -> Row:
    """Send one file and read its transcript: the columns of a `responses` row that the answer decides.

    Args:
        path: HTTP path of the route.
        fields: of the form; `file` is the file's name.
        audio: the file, as `records.MEDIA`.
        response_format: the form of answer to ask for.
        top_logprobs: how many to ask for beside each token's logprob; None: ask for no logprobs.

    Raises:
        BadAnswer: an error, or an answer that is not what the protocol says.
    """
    asked = {} if top_logprobs is None else {"include[]": ["logprobs"], "top_logprobs": top_logprobs}
    data = {**fields, "response_format": response_format, **asked}
    file = (data.pop("file"), audio["bytes"])
    async with post(http, path, attempt, data=data, files={"file": file}) as response:
        return read_transcription(parse_json(await response.aread()), top_logprobs or 0)


def probe_clip() -> dict[str, Any]:
    """A second of a tone, as `records.MEDIA`: a server that answers it has loaded its model."""
    times = np.arange(round(PROBE_S * PROBE_RATE)) / PROBE_RATE
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, PROBE_RATE, 0, "NONE", ""))
        writer.writeframes((3000 * np.sin(2 * np.pi * PROBE_HZ * times)).astype("<i2").tobytes())
    return {"bytes": file.getvalue(), "path": "probe.wav"}


def read_transcription(payload: Any, top_k: int) -> Row:
    """The columns of a `responses` row that a body decides; top lists are cut to `top_k`, descending.

    An empty text is an answer: nothing was said. Whether the segments make sense is the judge's to say.

    Raises:
        BadAnswer: it carries an error, a number that is not finite, or is not what the protocol says.
    """
    body = typed(payload, dict, "the answer")
    if error := error_message(body):
        raise BadAnswer(ResponseStatus.STREAM_ERROR, f"error after HTTP 200: {error}")
    text = typed(body.get("text"), str, "text")
    check_unicode(text)
    segments = _segments(body.get("segments"))
    if text.strip() and not segments:
        segments = None  # an empty list beside text says nothing, as one of tokens does
    ids = _joined(segments, "tokens")
    tops = _joined(segments, "tops")
    prompt = ids_or_none(body.get("prompt_token_ids"), "prompt_token_ids")
    full = prompt and tops and min(map(len, tops)) >= MIN_TOP_K
    return {
        "evidence": Evidence.E0 if full else Evidence.E1 if ids else Evidence.E2,
        "output_tokens": None if ids is None else len(ids),
        "text": text,
        "prompt_token_ids": prompt,
        "token_ids": ids,
        "token_logprobs": _joined(segments, "logprobs"),
        "top_token_ids": tops and [[token for token, _ in top[:top_k]] for top in tops],
        "top_logprobs": tops and [[value for _, value in top[:top_k]] for top in tops],
        "language": None if body.get("language") is None else typed(body["language"], str, "language"),
        "segments": segments and [{key: segment[key] for key in ("start", "end", "text")} for segment in segments],
        "output_sha256": sha256_text(text),
    }


def _segments(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    return [
        _segment(typed(segment, dict, "segments[]"), place)
        for place, segment in enumerate(typed(value, list, "segments"))
    ]


def _segment(segment: dict[str, Any], place: int) -> dict[str, Any]:
    where = f"segments[{place}]"
    text = typed(segment.get("text"), str, f"{where}.text")
    check_unicode(text)
    if segment.get("avg_logprob") is not None:
        finite(segment["avg_logprob"], f"{where}.avg_logprob")
    ids = ids_or_none(segment.get("tokens"), f"{where}.tokens")
    if text.strip() and not ids:
        ids = None  # an empty list beside text says nothing: M* sends one
    return {
        "start": finite(segment.get("start"), f"{where}.start"),
        "end": finite(segment.get("end"), f"{where}.end"),
        "text": text,
        "tokens": ids,
        "logprobs": _of_each(segment, "token_logprobs", ids, where, finite),
        "tops": _of_each(segment, "top_logprobs", ids, where, _top),
    }


def _of_each(segment: dict[str, Any], key: str, ids: list[int] | None, where: str, read: Any) -> list[Any] | None:
    """What a segment says of each of its tokens."""
    if segment.get(key) is None:
        return None
    values = typed(segment[key], list, f"{where}.{key}")
    if len(values) != len(ids or []):
        raise malformed(f"{where}: {len(ids or [])} tokens but {len(values)} {key}")
    return None if ids is None else [read(value, f"{where}.{key}[{place}]") for place, value in enumerate(values)]


def _top(value: Any, where: str) -> Top:
    pairs = [typed(pair, list, where) for pair in typed(value, list, where)]
    if any(len(pair) != 2 for pair in pairs):
        raise malformed(f"{where} should hold pairs of id and logprob, found {pairs!r}")
    ids = ids_or_none([pair[0] for pair in pairs], where) or []
    logprobs = [finite(pair[1], where) for pair in pairs]
    return sorted(zip(ids, logprobs, strict=True), key=lambda entry: -entry[1])


def _joined(segments: list[dict[str, Any]] | None, key: str) -> list[Any] | None:
    """What all segments say, in a row; None unless each says it."""
    if not segments or any(segment[key] is None for segment in segments):
        return None
    return [value for segment in segments for value in segment[key]]
