"""The speech route: sound comes back byte by byte as it was served, and whatever else comes is no answer."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
from fakes import RESET, FakeServer, http, json_reply, sse_head

from assay.client.openai import OpenAIPlan
from assay.client.transport import probe_generation, send_set
from assay.config import OpenAISpec, parse
from assay.embedded.tts.hooks import wav_header
from assay.errors import ConfigError
from assay.records import RESPONSES
from assay.store import table_from_rows

SPEECH = {"speech": "/v1/audio/speech"}
SAMPLES = bytes(range(200))
WAV = wav_header(24000, len(SAMPLES)) + SAMPLES
OPEN = wav_header(24000, None)
CHUNKED = b"HTTP/1.1 200 X\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"

UNBOUNDED = CHUNKED.replace(b"Transfer-Encoding: chunked\r\n", b"") % b"audio/wav"


def plan_for(url, **options):
    fields = {"logprobs": False, "timeout_s": 20, "extra_body": {"voice": "heart"}} | options
    return OpenAIPlan.of(OpenAISpec(protocol="openai", routes=SPEECH, model="x", **fields), url, "hibari")


def ask(reply, **options):
    """The one row of the one item, from a server that always sends `reply`."""
    item = {"item_id": "say-1", "set_id": "set", "request": json.dumps({"input": "Hi there."})}
    with FakeServer(lambda request: reply) as server:
        (row,) = asyncio.run(send_set(plan_for(server.url, **options), [item], "served_0_alone", 1))
    table_from_rows("responses", [row])  # it fits the schema
    assert row.keys() == set(RESPONSES.names)
    return row | {"asked": server.requests[0]}


def chunked(parts, kind=b"audio/wav", pause=0.05, whole=True):
    """A body that grows part by part."""
    pieces = [CHUNKED % kind]
    for part in parts:
        pieces += [b"%x\r\n%s\r\n" % (len(part), part), pause]
    return [*pieces, b"0\r\n\r\n"] if whole else pieces


def sse(payloads, name=None, pause=0.05):
    """Events, one by one."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return [sse_head()] + [
        piece for payload in payloads for piece in (head + b"data: " + json.dumps(payload).encode() + b"\n\n", pause)
    ]


def delta(audio):
    return {"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()}


DONE = {"type": "speech.audio.done", "usage": {"input_tokens": 3, "output_tokens": 9, "total_tokens": 12}}


# --- what is asked -----------------------------------------------------------------------------------------------


def test_the_request_names_model_text_format_and_what_the_arm_adds():
    asked = ask(http(WAV, kind="audio/wav"))["asked"]
    assert (asked.method, asked.path) == ("POST", "/v1/audio/speech")
    assert asked.body == {"model": "hibari", "input": "Hi there.", "response_format": "wav", "voice": "heart"}


def test_a_stream_is_asked_for_as_the_arm_says():
    options = {"stream": True, "stream_body": {"stream": True, "stream_format": "audio"}}
    body = ask(chunked([WAV]), **options)["asked"].body
    assert (body["stream"], body["stream_format"]) == (True, "audio")
    assert "stream_format" not in ask(http(WAV, kind="audio/wav"), **options | {"stream": False})["asked"].body


def test_the_probe_has_something_spoken():
    with FakeServer(lambda request: http(WAV, kind="audio/wav")) as server:
        row = asyncio.run(probe_generation(plan_for(server.url)))
    assert (row["status"], server.requests[0].body["input"]) == ("ok", "Hello")


def test_items_of_another_kind_are_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match=r"holds chat requests, but the arm's client.routes has only speech"):
        plan_for("http://x").exchange({"item_id": "a", "request": '{"messages": []}'})


def test_raw_samples_need_a_rate_because_they_say_none():
    fields = {"protocol": "openai", "routes": SPEECH, "model": "x", "logprobs": False, "audio_format": "pcm"}
    with pytest.raises(ConfigError, match="say the sample_rate"):
        parse(OpenAISpec, fields, "arm")
    assert parse(OpenAISpec, fields | {"sample_rate": 24000}, "arm").sample_rate == 24000


# --- sound -------------------------------------------------------------------------------------------------------


def test_a_whole_file_is_kept_byte_by_byte_under_the_items_name():
    row = ask(http(WAV, kind="audio/wav"))
    assert (row["status"], row["evidence"], row["text"]) == ("ok", "E3", None)
    assert row["audio"] == {"bytes": WAV, "path": "say-1.wav"}
    assert row["chunk_bytes"] is row["chunk_ms"] is row["ttft_ms"] is None


def test_raw_samples_are_kept_under_a_name_that_says_so():
    row = ask(http(SAMPLES, kind="audio/pcm;rate=24000"), audio_format="pcm", sample_rate=24000)
    assert row["audio"] == {"bytes": SAMPLES, "path": "say-1.pcm"}


def test_a_body_that_grows_is_kept_with_its_chunks_and_their_times():
    row = ask(chunked([OPEN, SAMPLES[:80], SAMPLES[80:]]), stream=True)
    assert (row["status"], row["audio"]["bytes"]) == ("ok", OPEN + SAMPLES)
    assert row["chunk_bytes"] == [44, 80, 120]
    assert row["chunk_ms"] == sorted(row["chunk_ms"]) and row["chunk_ms"][2] - row["chunk_ms"][0] > 90


def test_the_first_sound_is_what_comes_behind_the_header():
    row = ask(chunked([OPEN, SAMPLES], pause=0.2), stream=True)
    assert row["ttft_ms"] == row["chunk_ms"][1] > 190
    together = ask(chunked([OPEN + SAMPLES[:2], SAMPLES[2:]]), stream=True)
    assert together["ttft_ms"] == together["chunk_ms"][0]
    raw = ask(chunked([SAMPLES, SAMPLES], b"audio/pcm"), stream=True, audio_format="pcm", sample_rate=24000)
    assert raw["ttft_ms"] == raw["chunk_ms"][0]


@pytest.mark.parametrize("name", [None, "speech.audio.delta"])
def test_openais_events_are_sound_in_base64(name):
    row = ask(sse([delta(OPEN), delta(SAMPLES[:80]), delta(SAMPLES[80:]), DONE], name), stream=True)
    assert (row["status"], row["audio"]["bytes"], row["chunk_bytes"]) == ("ok", OPEN + SAMPLES, [44, 80, 120])
    assert row["ttft_ms"] == row["chunk_ms"][1]


def test_sglang_omnis_events_are_sound_in_base64_and_a_finish_reason():
    def chunk(index, audio, finish=None):
        data = audio and {"data": base64.b64encode(audio).decode(), "format": "pcm", "sample_rate": 24000}
        return {"object": "audio.speech.chunk", "index": index, "audio": data, "finish_reason": finish}

    events = [chunk(0, SAMPLES[:80]), chunk(1, SAMPLES[80:]), chunk(2, None, "stop")]
    row = ask([*sse(events), b"data: [DONE]\n\n"], stream=True, audio_format="pcm", sample_rate=24000)
    assert (row["status"], row["finish_reason"], row["audio"]["bytes"]) == ("ok", "stop", SAMPLES)
    assert row["chunk_bytes"] == [80, 120]


# --- no sound ----------------------------------------------------------------------------------------------------

ERROR = {"error": {"message": "out of memory"}}


@pytest.mark.parametrize(
    ("reply", "options", "status", "says"),
    [
        (json_reply(ERROR), {}, "stream_error", "error after HTTP 200: out of memory"),
        (json_reply(ERROR), {"stream": True}, "stream_error", "error after HTTP 200: out of memory"),
        (http(json.dumps(ERROR).encode(), kind="audio/wav"), {}, "stream_error", "out of memory"),
        (json_reply(ERROR, 500), {}, "http_error", "out of memory"),
        (json_reply({"audio": "abc"}), {}, "malformed", "wav was asked for, but the answer is 'application/json'"),
        (http(b"<html>", kind="text/html"), {}, "malformed", "the answer is 'text/html'"),
        (http(b"ID3", kind="audio/mpeg"), {}, "malformed", "the answer is 'audio/mpeg'"),
        (http(SAMPLES, kind="audio/pcm"), {}, "malformed", "the answer is 'audio/pcm'"),
        (http(WAV, kind=""), {}, "malformed", "of no type"),
        (http(WAV, kind="text/event-stream"), {}, "malformed", "the answer is 'text/event-stream'"),
        (http(b"", kind="audio/wav"), {}, "empty", "no audio"),
        (chunked([]), {"stream": True}, "empty", "no audio"),
        (sse([DONE]), {"stream": True}, "empty", "no audio"),
        (sse([delta(b""), DONE]), {"stream": True}, "empty", "no audio"),
        (http(WAV, kind="audio/wav", length=300), {}, "stream_error", "broke off"),
        (chunked([WAV], whole=False), {"stream": True}, "stream_error", "broke off"),
        ([*chunked([WAV], whole=False), RESET], {"stream": True}, "stream_error", "broke off"),
        ([UNBOUNDED, WAV], {}, "stream_error", "may be cut short"),
        (sse([delta(WAV)]), {"stream": True}, "stream_error", "ended without an event that says so"),
        (sse([delta(WAV), {"type": "speech.audio.error", **ERROR}]), {"stream": True}, "stream_error", "out of memory"),
        (sse([ERROR], name="error"), {"stream": True}, "stream_error", "out of memory"),
        (sse([{"type": "speech.audio.delta", "audio": "%%%"}]), {"stream": True}, "malformed", "is not base64"),
        (sse([{"type": "speech.audio.delta", "audio": 7}]), {"stream": True}, "malformed", "should be a str"),
        (sse(["hello"]), {"stream": True}, "malformed", "an event should be a dict"),
        ([*sse([delta(WAV)]), b"data: {nonsense\n\n"], {"stream": True}, "malformed", "not JSON"),
        ([*sse([delta(WAV)]), b"data: \xff\n\n"], {"stream": True}, "malformed", "not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_sound_is_no_answer(reply, options, status, says):
    row = ask(reply, **options)
    assert (row["status"], row["evidence"]) == (status, "none")
    assert says in row["error"]


def test_what_came_before_an_error_is_kept_to_be_listened_to():
    row = ask(sse([delta(OPEN), delta(SAMPLES), ERROR]), stream=True)
    assert (row["status"], row["audio"]["bytes"], row["chunk_bytes"]) == ("stream_error", OPEN + SAMPLES, [44, 200])


def test_samples_that_look_like_json_are_samples():
    row = ask(http(b'{"error": 5' + SAMPLES, kind="audio/pcm"), audio_format="pcm", sample_rate=24000)
    assert row["status"] == "ok"
