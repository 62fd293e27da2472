"""mstar's own protocol: what is sent, and every way an answer can be wrong, against a server that speaks it."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest
from fake_mstar import ACTION, ERROR, SLOW_S, SOUND, TEXT, create_app
from fakes import FakeServer, app_server, unused_port

from assay.canonical import sha256_text
from assay.client.mstar import PATH, MstarAnswer, MstarPlan, form, multipart, read_answer
from assay.client.openai import OpenAIPlan
from assay.client.transport import Attempt, post, probe_generation, send_set
from assay.config import ArrayOutput, MstarModel, MstarSpec, OpenAISpec, PcmOutput, parse
from assay.errors import ConfigError
from assay.store import table_from_rows

TEXT_OUT = {"format": "utf8"}
SOUND_OUT = {"format": "pcm16", "sample_rate": 24000}
ACTION_OUT = {"format": "array", "modality": "action", "shape": [2, 3]}
OMNI = {
    "outputs": [TEXT_OUT, SOUND_OUT],
    "sampling": {"max_tokens": ["max_output_tokens"], "temperature": ["thinker_temperature"]},
    "model_kwargs": {"talker_temperature": 0.9},
}


def spec(timeout_s=20, **model):
    model = {"outputs": [TEXT_OUT], "sampling": OMNI["sampling"]} | model
    return MstarSpec(protocol="mstar", model="m", models={"m": model}, timeout_s=timeout_s)


def item(number=0, **request):
    request = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0} | request
    return {"item_id": f"item-{number}", "set_id": "set", "request": json.dumps(request)}


def ask(fault=None, timeout_s=20, items=1, **model):
    """The rows of some items, from a server with `fault`; and what it was asked."""
    app = create_app(fault)
    with app_server(app) as url:
        plan = MstarPlan.of(spec(timeout_s, **model), url, "m")
        rows = asyncio.run(send_set(plan, [item(number) for number in range(items)], "served_0_alone", 2))
    return rows, app.state.forms


def answer(fault=None, **model):
    """What the parser made of one answer, how the request was timed, and what was raised."""
    fields = form(spec(**model).models["m"], {"messages": [{"role": "user", "content": "Hi"}]})
    kept = MstarAnswer()

    async def read(url):
        attempt = Attempt()
        try:
            async with (
                httpx.AsyncClient(base_url=url) as http,
                post(http, PATH, attempt, files=multipart(fields)) as response,
            ):
                await read_answer(response, kept, attempt)
        except Exception as error:
            return attempt, error
        return attempt, None

    with app_server(create_app(fault)) as url:
        return kept, *asyncio.run(read(url))


# --- a right server ----------------------------------------------------------------------------------------------


def test_text_comes_whole_though_a_character_is_cut_between_two_chunks():
    [row, other], _ = ask(items=2)
    assert (row["status"], row["text"], row["http_code"], row["attempts"]) == ("ok", TEXT, 200, 1)
    assert row["output_sha256"] == sha256_text(TEXT) == other["output_sha256"]
    assert 0 < row["ttft_ms"] <= row["latency_ms"]
    assert table_from_rows("responses", [row, other]).num_rows == 2


def test_text_without_a_finish_reason_and_ids_is_weak_evidence():
    [row], _ = ask()
    assert row["evidence"] == "E3"
    assert row["finish_reason"] is row["token_ids"] is row["output_tokens"] is row["prompt_tokens"] is None


def test_sound_and_actions_have_the_types_the_arm_declares():
    kept, _, error = answer(outputs=[TEXT_OUT, SOUND_OUT, ACTION_OUT])
    assert error is None and kept.text == TEXT
    sound, stereo = (kept.values(PcmOutput(format="pcm16", sample_rate=24000, channels=n)) for n in (1, 2))
    assert sound.dtype == np.int16 and sound.tolist() == SOUND.reshape(12, 1).tolist()
    assert stereo.tolist() == SOUND.reshape(6, 2).tolist()
    np.testing.assert_array_equal(kept.values(ArrayOutput(**ACTION_OUT)), ACTION)
    assert kept.values(ArrayOutput(format="array", modality="action")).shape == (6,)
    assert [chunk.modality for chunk in kept.chunks] == ["text"] * 5 + ["audio"] * 2 + ["action"]


def test_all_asked_modalities_make_one_ok_row():
    [row], [asked] = ask(outputs=[TEXT_OUT, SOUND_OUT, ACTION_OUT])
    assert (row["status"], row["text"]) == ("ok", TEXT)
    assert asked["output_modalities"] == "text,audio,action"
    [sound], _ = ask(outputs=[SOUND_OUT])
    assert (sound["status"], sound["text"]) == ("ok", None)
    assert sound["output_sha256"] == ask(outputs=[SOUND_OUT])[0][0]["output_sha256"] != row["output_sha256"]


def test_the_first_content_of_each_modality_is_timed_and_an_empty_chunk_is_none():
    kept, attempt, _ = answer("slow", outputs=[TEXT_OUT, SOUND_OUT])
    blank, *rest = kept.chunks
    assert blank.data == b"" and rest[0].data
    first = kept.first_content_s
    assert first == {"text": rest[0].arrived_s, "audio": kept.chunks[-2].arrived_s}
    assert attempt.first_content_s == first["text"] <= first["audio"] <= attempt.elapsed()
    assert first["text"] - blank.arrived_s > SLOW_S / 2  # less than all of it: the blank line was on its way too
    [row], _ = ask("slow")
    assert 1000 * SLOW_S <= row["ttft_ms"] <= row["latency_ms"]


def test_lines_are_the_same_however_the_bytes_are_cut():
    lines = [
        {"modality": "text", "data": "Wm8=", "metadata": {}},
        {"modality": "text", "data": "w6s=", "metadata": None},
    ]
    body = b"\n\n".join(json.dumps(line).encode() for line in lines)  # blank lines count for nothing

    def read(pieces):
        kept = MstarAnswer()
        response = httpx.Response(200, headers={"content-type": "application/x-ndjson", "content-length": "1"})
        response.aiter_bytes = lambda: _stream(pieces)
        asyncio.run(read_answer(response, kept, Attempt()))
        return [(chunk.data, chunk.metadata) for chunk in kept.chunks]

    expected = [(b"Zo", {}), ("ë".encode(), {})]
    assert read([body]) == expected
    assert read([body[at : at + 1] for at in range(len(body))]) == expected
    assert all(read([body[:cut], body[cut:]]) == expected for cut in range(len(body)))


async def _stream(pieces):
    for piece in pieces:
        yield piece


# --- faults ------------------------------------------------------------------------------------------------------

ALL = [TEXT_OUT, SOUND_OUT, ACTION_OUT]
FAULTS = [  # fault, status, message
    ("error", "stream_error", f"error after HTTP 200 (status 500): {ERROR}"),
    ("error_rust", "stream_error", f"error after HTTP 200: {ERROR}"),
    ("http_500", "http_error", "the conductor does not answer"),
    ("truncated_line", "stream_error", "JSON stops short"),
    ("no_json", "malformed", "not JSON"),
    ("no_base64", "malformed", "the data of a chunk of text is not base64"),
    ("no_end", "stream_error", "the answer broke off: RemoteProtocolError"),
    ("wrong_type", "malformed", "application/x-ndjson was asked for, but the answer is 'application/json'"),
    ("not_utf8", "malformed", "the text is not UTF-8 at byte 16"),  # "Good morning, Zo", then half an ë
    ("empty", "empty", "a whole stream without text"),
    ("no_audio", "empty", "a whole stream without audio"),
    ("unasked", "malformed", "image was never asked for"),
    ("odd_pcm", "malformed", "audio: a chunk of 9 bytes is no whole number of int16"),
    ("wrong_rate", "malformed", "the arm declares sample_rate 24000, the server says 48000"),
    ("short_f32", "malformed", "action: a chunk of 22 bytes is no whole number of float32"),
    ("short_action", "malformed", "action: 3 values do not fill the declared shape [2, 3]"),
    ("nan", "nonfinite", "action: 2 values are not finite, the first at 4"),
]


@pytest.mark.parametrize(("fault", "status", "message"), FAULTS)
def test_a_fault_is_recorded_as_what_it_is_and_not_asked_again(fault, status, message):
    [row], asked = ask(fault, outputs=ALL)
    assert (row["status"], row["evidence"], row["text"], row["attempts"]) == (status, "none", None, 1)
    assert message in row["error"]
    assert len(asked) == 1 and row["http_code"] == (500 if fault == "http_500" else 200)
    assert table_from_rows("responses", [row]).num_rows == 1


def test_without_a_fault_the_same_request_is_ok():
    [row], _ = ask(outputs=ALL)
    assert (row["status"], row["error"]) == ("ok", None)


def test_a_worker_that_dies_leaves_a_silent_stream_which_times_out():
    [row], _ = ask("silent", timeout_s=0.3)
    assert (row["status"], row["error"]) == ("timeout", "no complete answer within 0.3 s")
    assert row["ttft_ms"] < row["latency_ms"] < 3000


def test_an_answer_that_breaks_off_or_holds_nan_keeps_what_came():
    kept, _, error = answer("no_end")
    assert isinstance(error, httpx.RemoteProtocolError) and kept.data("text") == b"Good"
    kept, _, error = answer("nan", outputs=[ACTION_OUT])
    assert error is None
    values = kept.values(ArrayOutput(**ACTION_OUT))
    assert np.isnan(values[1, 1:]).all() and np.isfinite(values[0]).all()


def test_a_body_that_ends_by_closing_the_connection_proves_no_end():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n"
    line = b'{"modality": "text", "data": "SGk=", "metadata": {}}\n'
    rows = []
    for framing in (b"", b"Content-Length: %d\r\n" % len(line)):
        with FakeServer(lambda request, framing=framing: [head + framing + b"\r\n" + line]) as server:
            plan = MstarPlan.of(spec(), server.url, "m")
            rows += asyncio.run(send_set(plan, [item()], "served_0_alone", 1))
    assert [row["status"] for row in rows] == ["stream_error", "ok"]
    assert "ended by closing the connection" in rows[0]["error"]


def test_a_refused_connection_is_a_transport_error():
    plan = MstarPlan.of(spec(), f"http://127.0.0.1:{unused_port()}", "m")
    [row] = asyncio.run(send_set(plan, [item()], "served_0_alone", 1))
    assert (row["status"], row["attempts"]) == ("transport_error", 2)


def test_a_server_that_is_always_healthy_is_ready_only_when_it_generates():
    for fault, status in [("http_500", "http_error"), ("error", "stream_error"), (None, "ok")]:
        with app_server(create_app(fault)) as url:
            assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
            assert asyncio.run(probe_generation(MstarPlan.of(spec(), url, "m")))["status"] == status


# --- requests ----------------------------------------------------------------------------------------------------


def test_sampling_goes_to_the_keys_of_the_models_stages_and_seeds_are_pinned():
    _, [asked] = ask(**OMNI)
    kwargs = json.loads(asked.pop("model_kwargs"))
    assert asked == {"text": "Hi", "output_modalities": "text,audio", "streaming": "true"}
    assert kwargs == {"max_output_tokens": 3, "thinker_temperature": 0, "talker_temperature": 0.9, "seed": 0}
    two_stages = MstarModel(outputs=[TEXT_OUT], sampling={"temperature": ["thinker_temperature", "talker_temperature"]})
    request = {"messages": [{"role": "user", "content": "Zoë"}], "temperature": 0.5, "seed": 7}
    assert json.loads(form(two_stages, request)["model_kwargs"]) == {
        "thinker_temperature": 0.5,
        "talker_temperature": 0.5,
        "seed": 7,
    }


def test_the_probe_limits_the_answer_only_where_that_leaves_one():
    prompt = {"messages": [{"role": "user", "content": "Hello"}]}
    assert MstarPlan.of(spec(), "http://x", "m").probe_item()["request"] == json.dumps(prompt | {"max_tokens": 1})
    for options in ({"sampling": {}}, OMNI):  # one token of text gives no sound
        assert MstarPlan.of(spec(**options), "http://x", "m").probe_item()["request"] == json.dumps(prompt)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"top_p": 0.9}, r"asks for top_p=0\.9, which .* does not map .*mapped: max_tokens, temperature"),
        ({"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]}, "one text"),
        ({"messages": None, "prompt": "Once"}, "prompt='Once'"),
    ],
)
def test_what_would_be_lost_on_the_way_is_refused_before_anything_is_sent(request_, message):
    app = create_app()
    with app_server(app) as url, pytest.raises(ConfigError, match=message):
        asyncio.run(send_set(MstarPlan.of(spec(), url, "m"), [item(), item(1, **request_)], "served_0_alone", 1))
    assert app.state.forms == []


def test_a_model_that_the_arm_does_not_know_is_named():
    with pytest.raises(ConfigError, match=r"unknown model of client\.models 'n'"):
        MstarPlan.of(spec(), "http://x", "n")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"outputs": []}, "outputs"),
        ({"outputs": [TEXT_OUT, TEXT_OUT]}, "text is there twice"),
        ({"outputs": [{"format": "pcm16"}]}, "sample_rate"),
        ({"outputs": [ACTION_OUT | {"shape": [0, 3]}]}, "shape"),
        ({"outputs": [TEXT_OUT], "model_kwargs": {"seed": 1}}, "seed is there twice"),
        ({"outputs": [TEXT_OUT], "sampling": {"top_p": ["p"]}, "model_kwargs": {"p": 1}}, "p is there twice"),
    ],
)
def test_a_wrong_declaration_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        parse(MstarModel, model, "arm.yaml")


# --- its OpenAI routes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_client_reads_mstars_openai_routes_and_takes_its_zero_counts_for_none(stream):
    routes = {"chat": "/v1/chat/completions"}
    openai = OpenAISpec(protocol="openai", routes=routes, model="x", logprobs=False, stream=stream)
    with app_server(create_app()) as url:
        [row] = asyncio.run(send_set(OpenAIPlan.of(openai, url, "qwen3_omni"), [item()], "served_0_alone", 1))
    assert (row["status"], row["text"], row["finish_reason"], row["evidence"]) == ("ok", TEXT, "stop", "E2")
    assert row["prompt_tokens"] is row["output_tokens"] is None
