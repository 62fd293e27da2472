"""mstar's own protocol: one multipart `POST /generate`, answered by NDJSON lines of base64 chunks.

Facts, read in https://github.com/mstar-project/mstar at 6666c623 (2026-08-17):

- Form fields: `text`, `files`, `input_modalities`, `output_modalities`, `streaming`, `model_kwargs` (a JSON object) and
  `request_id`; a line is `{"modality", "data": base64, "metadata"}` (mstar/api_server/entrypoint.py).
- No line marks the end. Only the end of the chunked HTTP body tells a whole answer from one that broke off.
- A request that fails after HTTP 200 sends a last line with modality `error`, its message as data, and
  `metadata.status` (same file); the Rust front end sends `{"error": message}` instead (rust/server/src/main.rs).
- `model_kwargs.seed` wins over a seed drawn from the request's id, which is a new one each time
  (mstar/conductor/conductor.py). Sampling keys differ by model and stage, `max_output_tokens` is the limit of the text
  stage (mstar/api_server/openai/adapters.py, mstar/model/*), and keys that a model does not know are ignored.
- The prompt is one text that the model's own code puts into its template: there are no roles and no raw completions.
- Sound is int16 without a header, its rate and channels in the chunk's metadata (mstar/api_server/data_worker.py);
  actions, latents and costs are float32, and `scalar` int64, without a shape (mstar/model/{pi05,vjepa2}).
- Neither token ids, logprobs, token counts nor a finish reason are sent.
- The OpenAI routes beside it write token counts of 0 and the finish reason `stop`, always; their stream leaves an error
  out and ends as if nothing were wrong (mstar/api_server/openai/serving_chat.py; later versions send it).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import numpy as np

from assay.client.answers import BadAnswer, error_message, malformed, parse_json, typed
from assay.client.transport import PROBE_TEXT, Attempt, Exchange, Item, Row, post, probe_of
from assay.config import ArrayOutput, MstarModel, MstarSpec, Output, PcmOutput, lookup
from assay.errors import ConfigError
from assay.records import Evidence, ResponseStatus

PATH = "/generate"
NDJSON = "application/x-ndjson"
DEFAULT_SEED = 0  # of a request that names none: mstar would draw one from an id that is new each time

_INT16: np.dtype[Any] = np.dtype("<i2")
_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


@dataclass(frozen=True)
class MstarPlan:
    """How to talk to one running mstar server."""

    base_url: str
    model: MstarModel
    timeout_s: float

    @classmethod
    def of(cls, spec: MstarSpec, base_url: str, model: str) -> MstarPlan:
        """The plan of `spec` for the server of `model` at `base_url`; ConfigError where `spec` does not know it."""
        return cls(base_url, lookup(spec.models, model, "model of client.models"), spec.timeout_s)

    def exchange(self, item: Item) -> Exchange:
        """What sends `item`. Raises ConfigError where the protocol, or `model`, has no way to say its request."""
        return partial(_exchange, self.model, form(self.model, json.loads(item["request"])))

    def probe_item(self) -> Item:
        """A greeting; where only text is answered and its length can be set, by one token."""
        only_text = all(output.format == "utf8" for output in self.model.outputs)
        limit = {"max_tokens": 1} if only_text and "max_tokens" in self.model.sampling else {}
        return probe_of({"messages": [{"role": "user", "content": PROBE_TEXT}], **limit})


def form(model: MstarModel, request: Mapping[str, Any]) -> dict[str, str]:
    """Form fields for one item's `request`: `messages` (one of a user), `seed`, and what `model.sampling` maps.

    Raises:
        ConfigError: the request says something that would be lost.
    """
    kwargs = dict(model.model_kwargs)
    for name, value in request.items():
        if name in ("messages", "seed"):
            continue
        if name not in model.sampling:
            raise ConfigError(
                f"the sample set asks for {name}={value!r}, which the arm's client.models does not map to a key of "
                f"mstar's; add it to `sampling` (mapped: {', '.join(model.sampling) or 'nothing'}) or take another set"
            )
        kwargs |= dict.fromkeys(model.sampling[name], value)
    return {
        "text": _only_text(request.get("messages")),
        "output_modalities": ",".join(output.modality for output in model.outputs),
        "streaming": "true",
        "model_kwargs": json.dumps(kwargs | {"seed": request.get("seed", DEFAULT_SEED)}),
    }


def multipart(fields: Mapping[str, str]) -> dict[str, tuple[None, str]]:
    """`fields` for httpx, which makes a form multipart only for files: here files without a name, so plain fields."""
    return {name: (None, value) for name, value in fields.items()}


def _only_text(messages: Any) -> str:
    match messages:
        case [{"role": "user", "content": str(text)}]:
            return text
    raise ConfigError(
        "mstar's /generate takes one text, which it puts into the model's own template, but the sample set holds "
        "completions, system messages or several turns; take a set of single user messages"
    )


@dataclass(frozen=True)
class Chunk:
    """One line of a stream."""

    modality: str
    data: bytes
    arrived_s: float  # seconds after the request was sent
    metadata: dict[str, Any]


@dataclass
class MstarAnswer:
    """What came back, as it came: also of an answer that broke off, or that holds what it should not."""

    chunks: list[Chunk] = field(default_factory=list)

    def absorb(self, line: bytes, arrived_s: float) -> None:
        """Take in one line that came `arrived_s` seconds after the request was sent.

        Raises:
            BadAnswer: it carries an error, or is not what the protocol says.
        """
        body = typed(parse_json(line), dict, "a line")
        if "modality" not in body and (error := error_message(body)):
            raise BadAnswer(ResponseStatus.STREAM_ERROR, f"error after HTTP 200: {error}")
        modality = typed(body.get("modality"), str, "modality")
        metadata = typed(body.get("metadata") or {}, dict, "metadata")
        data = _decoded(typed(body.get("data"), str, "data"), modality)
        if modality == "error":
            message = data.decode(errors="replace")
            raise BadAnswer(
                ResponseStatus.STREAM_ERROR, f"error after HTTP 200 (status {metadata.get('status')}): {message}"
            )
        self.chunks.append(Chunk(modality, data, arrived_s, metadata))

    @property
    def first_content_s(self) -> dict[str, float]:
        """Modality -> seconds from the request to its first chunk that holds anything."""
        return {chunk.modality: chunk.arrived_s for chunk in reversed(self.chunks) if chunk.data}

    @property
    def text(self) -> str:
        """The text; BadAnswer if it is not UTF-8."""
        try:
            return self.data("text").decode()
        except UnicodeDecodeError as error:
            raise malformed(f"the text is not UTF-8 at byte {error.start}") from None

    def data(self, modality: str) -> bytes:
        """All bytes of a modality, joined."""
        return b"".join(chunk.data for chunk in self.chunks if chunk.modality == modality)

    def values(self, output: PcmOutput | ArrayOutput) -> np.ndarray:
        """The numbers of an output: int16 of shape (frames, channels), or `output.dtype` of `output.shape`.

        Values that are not finite are given as they came.

        Raises:
            BadAnswer: the bytes are not whole numbers, or not as many as the shape says.
        """
        if isinstance(output, PcmOutput):
            dtype, shape = _INT16, [-1, output.channels]
        else:
            dtype, shape = _DTYPES[output.dtype], output.shape or [-1]
        for chunk in self.chunks:
            if chunk.modality == output.modality and len(chunk.data) % dtype.itemsize:
                raise malformed(f"{output.modality}: a chunk of {len(chunk.data)} bytes is no whole number of {dtype}")
        flat = np.frombuffer(self.data(output.modality), dtype)
        try:
            return flat.reshape(shape)
        except ValueError:
            raise malformed(f"{output.modality}: {flat.size} values do not fill the declared shape {shape}") from None

    def row(self, outputs: Sequence[Output]) -> Row:
        """The columns of a `responses` row that the answer decides, `outputs` being what was asked for.

        Without a finish reason a text is weak evidence, however whole it is.

        Raises:
            BadAnswer: an output is missing, not as declared or not finite, or was never asked for.
        """
        for output in outputs:
            self._check(output)
        asked = [output.modality for output in outputs]
        if strange := {chunk.modality for chunk in self.chunks} - {*asked}:
            raise malformed(f"{', '.join(sorted(strange))} was never asked for")
        content = b"".join(self.data(modality) for modality in asked)
        return {
            "evidence": Evidence.E3,
            "text": self.text if "text" in asked else None,
            "output_sha256": hashlib.sha256(content).hexdigest(),
        }

    def _check(self, output: Output) -> None:
        if not self.data(output.modality):
            raise BadAnswer(ResponseStatus.EMPTY, f"HTTP 200 and a whole stream without {output.modality}")
        if isinstance(output, PcmOutput):
            self._check_sound(output)
        if isinstance(output, PcmOutput | ArrayOutput):
            bad = np.flatnonzero(~np.isfinite(self.values(output)))
            if bad.size:
                raise BadAnswer(
                    ResponseStatus.NONFINITE,
                    f"{output.modality}: {bad.size} values are not finite, the first at {bad[0]}",
                )

    def _check_sound(self, output: PcmOutput) -> None:
        declared = {"sample_rate": output.sample_rate, "num_channels": output.channels}
        for chunk in self.chunks:
            for key, value in declared.items():
                if chunk.modality == output.modality and chunk.metadata.get(key, value) != value:
                    raise malformed(f"audio: the arm declares {key} {value}, the server says {chunk.metadata[key]!r}")


async def read_answer(response: httpx.Response, answer: MstarAnswer, attempt: Attempt) -> None:
    """Fill `answer`, and the time of the first content of all in `attempt`, from a stream as it comes.

    Raises:
        BadAnswer: the stream carries an error or breaks the protocol; `answer` keeps what came before.
        httpx.TransportError: it broke off; so it does.
    """
    kind = response.headers.get("content-type", "")
    if not kind.startswith(NDJSON):
        error = error_message(parse_json(await response.aread()))  # it says more than the wrong type does
        raise malformed(error or f"{NDJSON} was asked for, but the answer is '{kind}'")
    async for line in _lines(response.aiter_bytes()):
        arrived_s = attempt.elapsed()
        answer.absorb(line, arrived_s)
        if attempt.first_content_s is None and answer.chunks[-1].data:
            attempt.first_content_s = arrived_s
    if not {"transfer-encoding", "content-length"} & response.headers.keys():
        raise BadAnswer(ResponseStatus.STREAM_ERROR, "the stream ended by closing the connection: it may be cut short")


async def _exchange(model: MstarModel, fields: Mapping[str, str], http: httpx.AsyncClient, attempt: Attempt) -> Row:
    answer = MstarAnswer()
    async with post(http, PATH, attempt, files=multipart(fields)) as response:
        await read_answer(response, answer, attempt)
    return answer.row(model.outputs)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Lines that hold anything, each as soon as it is whole; time linear in a line's length, which may be megabytes."""
    parts: list[bytes] = []
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            if line := b"".join([*parts, end]):
                yield line
            parts = []
        parts.append(rest)
    if line := b"".join(parts):
        yield line


def _decoded(data: str, modality: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise malformed(f"the data of a chunk of {modality} is not base64: {error}") from None
