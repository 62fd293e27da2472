"""The client: every planned item gives one row, whatever the server does."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
from fakes import (
    RESET,
    FakeServer,
    app_server,
    chat_body,
    chat_chunk,
    http,
    json_reply,
    sse_head,
    sse_reply,
    unused_port,
)
from fastapi import FastAPI, Request

from assay.client.openai import OpenAIPlan, request_body
from assay.client.sse import Event, events
from assay.client.transport import not_sent, probe_generation, send_set
from assay.config import OpenAISpec
from assay.errors import ConfigError
from assay.records import RESPONSES
from assay.store import table_from_rows

DATA = Path(__file__).parent.parent / "data" / "openai"
ROUTES = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def plan_for(url, **options):
    fields = {"logprobs": True, "stream": False, "extra_body": IDS, "timeout_s": 20} | options
    return OpenAIPlan.of(OpenAISpec(protocol="openai", routes=ROUTES, model="x", **fields), url, "smollm2")


def item(number=0, completion=False):
    content = {"prompt": "Hi"} if completion else {"messages": [{"role": "user", "content": "Hi"}]}
    request = json.dumps(content | {"max_tokens": 3, "temperature": 0})
    return {"item_id": f"item-{number}", "set_id": "set", "request": request}


def ask(reply, completion=False, **options):
    """The one row of the one item, from a server that always sends `reply`."""
    with FakeServer(lambda request: reply) as server:
        (row,) = asyncio.run(
            send_set(plan_for(server.url, **options), [item(completion=completion)], "served_0_alone", 1)
        )
        row["asked"] = [request.body for request in server.requests]
    return row


def fixture(name):
    content = (DATA / name).read_bytes()
    return [sse_head(), content] if name.endswith(".sse") else http(content)


# --- real bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "completion"),
    [("vllm_chat.json", False), ("vllm_chat_stream.sse", False)],
)
def test_vllm_chat_gives_full_evidence(name, completion):
    row = ask(fixture(name), completion, stream=name.endswith(".sse"))
    assert (row["status"], row["evidence"], row["finish_reason"]) == ("ok", "E0", "length")
    assert (row["text"], row["token_ids"]) == ("I'm here", [57, 5248, 1535])
    assert row["prompt_token_ids"][:3] == [1, 9690, 198]
    assert (row["prompt_tokens"], row["output_tokens"]) == (41, 3) == (len(row["prompt_token_ids"]), 3)
    assert row["token_logprobs"][0] == pytest.approx(-2.241849660873413)
    assert [len(top) for top in row["top_token_ids"]] == [20, 20, 20]
    assert row["top_token_ids"][0][:2] == [57, 19556]
    assert all(top == sorted(top, reverse=True) for top in row["top_logprobs"])


@pytest.mark.parametrize("name", ["vllm_completion.json", "vllm_completion_stream.sse"])
def test_vllm_completion_gives_full_evidence_and_a_character_split_over_tokens(name):
    row = ask(fixture(name), completion=True, stream=name.endswith(".sse"))
    assert (row["status"], row["evidence"], row["text"]) == ("ok", "E0", " \U0001f31e")
    assert row["token_ids"] == [15107, 230, 248]
    assert row["prompt_token_ids"] == [504, 2388, 15107, 230, 248, 284, 260, 6783]
    assert row["token_logprobs"] == pytest.approx([-0.657401442527771, -0.3703395128250122, -1.4354170560836792])
    assert row["top_token_ids"][1][:2] == [230, 236]


@pytest.mark.parametrize("name", ["vllm_chat_immediate_eos.json", "vllm_chat_immediate_eos_stream.sse"])
def test_an_immediate_end_of_turn_is_an_answer(name):
    row = ask(fixture(name), stream=name.endswith(".sse"))
    assert (row["status"], row["evidence"], row["finish_reason"]) == ("ok", "E0", "stop")
    assert (row["text"], row["token_ids"]) == ("", [2])


def test_token_strings_are_never_identities():
    row = ask(fixture("vllm_chat_strings.json"), extra_body={})
    assert (row["status"], row["evidence"]) == ("ok", "E2")
    assert row["token_ids"] is None and row["top_token_ids"] is None
    assert len(row["token_logprobs"]) == 3


def test_a_token_spelt_like_an_id_is_text_when_ids_were_not_asked_for():
    entry = {"token": "token_id:7", "logprob": -0.5, "top_logprobs": []}
    body = chat_body("token_id:7", logprobs={"content": [entry]})
    assert ask(json_reply(body), extra_body={})["token_ids"] is None
    assert ask(json_reply(body))["token_ids"] == [7]


@pytest.mark.parametrize("name", ["transformers_chat.json", "transformers_chat_stream.sse"])
def test_transformers_serve_gives_text_evidence_and_needs_no_done(name):
    row = ask(fixture(name), stream=name.endswith(".sse"), logprobs=False, extra_body={})
    assert (row["status"], row["evidence"], row["text"]) == ("ok", "E2", "I'm here")
    assert (row["finish_reason"], row["output_tokens"]) == ("length", 3)


@pytest.mark.parametrize("name", ["transformers_completion.json", "transformers_completion_stream.sse"])
def test_transformers_serve_completion(name):
    row = ask(fixture(name), completion=True, stream=name.endswith(".sse"), logprobs=False, extra_body={})
    assert (row["status"], row["evidence"], row["text"]) == ("ok", "E2", " \U0001f31e")


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("vllm_error_too_long.json", 400, "maximum context length is 2048"),
        ("vllm_error_model.json", 404, "`nope` does not exist"),
        ("transformers_error_model.json", 400, "requested 'nope'"),
    ],
)
def test_an_http_error_carries_the_servers_words(name, code, message):
    row = ask(http((DATA / name).read_bytes(), code))
    assert (row["status"], row["http_code"], row["evidence"], row["attempts"]) == ("http_error", code, "none", 1)
    assert message in row["error"]


# --- evidence ----------------------------------------------------------------------------------------------------


def step(token, logprob, k):
    top = [{"token": f"token_id:{token + rank}", "logprob": logprob - rank} for rank in range(k)]
    return {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": top}


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        ({}, "E0"),
        ({"prompt_token_ids": None}, "E1"),
        ({"logprobs": None}, "E1"),
        ({"logprobs": {"content": [step(5, -0.1, 4)]}}, "E1"),  # k = 4 < 5
        ({"token_ids": None}, "E0"),  # the ids are in the token strings too
        ({"token_ids": None, "logprobs": None}, "E2"),
        ({"finish_reason": None}, "E3"),
    ],
)
def test_evidence_is_what_the_answer_proves(changes, evidence):
    full = {"token_ids": [5], "prompt_token_ids": [1, 2], "logprobs": {"content": [step(5, -0.1, 5)]}}
    assert ask(json_reply(chat_body("Hi", **full | changes)))["evidence"] == evidence


def test_the_chosen_token_listed_beside_the_top_k_is_cut():
    content = [
        {
            "token": "token_id:9",
            "logprob": -9.0,
            "top_logprobs": [{"token": "token_id:9", "logprob": -9.0}, *step(1, -0.5, 5)["top_logprobs"]],
        }
    ]
    row = ask(json_reply(chat_body("Hi", token_ids=[9], logprobs={"content": content})), top_logprobs=5)
    assert row["top_token_ids"] == [[1, 2, 3, 4, 5]] and row["token_logprobs"] == [-9.0]


# --- what goes wrong ---------------------------------------------------------------------------------------------

ONE_STEP = {"token_ids": [5], "prompt_token_ids": [1]}


HUGE = -(10**400)  # an integer that no float holds


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "NaN", "-Infinity", None, pytest.param(HUGE, id="huge"), -1e300]
)
@pytest.mark.parametrize("where", ["chosen", "top"])
def test_a_logprob_that_is_no_number_is_nonfinite(value, where):
    entry = step(5, -0.1, 5)
    (entry if where == "chosen" else entry["top_logprobs"][2])["logprob"] = value
    row = ask(json_reply(chat_body("Hi", logprobs={"content": [entry]}, **ONE_STEP)))
    assert (row["status"], row["evidence"]) == ("nonfinite", "none")


@pytest.mark.parametrize("name", ["token_id:9999999999", "token_id:2147483648", "token_id:" + "9" * 5000])
def test_a_named_id_that_no_table_holds_is_malformed(name):
    row = ask(json_reply(chat_body("Hi", logprobs={"content": [step(5, -0.1, 5) | {"token": name}]})))
    assert row["status"] == "malformed" and "names no token id" in row["error"]


def test_the_largest_named_id_and_logprob_fit_their_table():
    entry = step(5, -0.1, 1) | {"token": "token_id:2147483647", "logprob": -3e38}
    row = ask(json_reply(chat_body("Hi", logprobs={"content": [entry]})))
    del row["asked"]
    assert table_from_rows("responses", [row])["token_ids"].to_pylist() == [[2147483647]]


def test_a_nonfinite_completion_logprob_in_a_stream_is_found():
    logprobs = {"tokens": ["token_id:5"], "token_logprobs": [math.nan], "top_logprobs": [{"token_id:5": -1.0}]}
    chunk = {"choices": [{"index": 0, "text": "Hi", "finish_reason": "stop", "logprobs": logprobs}]}
    assert ask(sse_reply([chunk]), completion=True, stream=True)["status"] == "nonfinite"


@pytest.mark.parametrize(
    "reply",
    [
        http(b"<html>busy</html>", kind="text/html"),
        http(b""),
        http(b"[1, 2]"),
        json_reply({"object": "chat.completion"}),
        json_reply({"choices": "none"}),
        json_reply({"choices": [{"index": 0, "finish_reason": "stop"}]}),
        json_reply(chat_body(7)),
        json_reply(chat_body("lone \ud83d surrogate")),
        json_reply(chat_body(token_ids=[1.5])),
        json_reply(chat_body(token_ids=[-1])),
        json_reply(chat_body(token_ids=[2**31])),
        json_reply(chat_body(token_ids=[True])),
        json_reply(chat_body(token_ids=[5, 6], logprobs={"content": [step(5, -0.1, 5)]})),
        json_reply(chat_body(token_ids=[6], logprobs={"content": [step(5, -0.1, 5)]})),
        json_reply(chat_body(logprobs={"content": [{"token": "a", "logprob": "-0.5"}]})),
        json_reply(chat_body(logprobs={"content": [{"token": "a", "logprob": True}]})),
        json_reply(chat_body(index=1)),
        json_reply(chat_body() | {"usage": {"prompt_tokens": -1}}),
        http(b'{"choices": [{"index": 0, "message": {"content": "\xff"}}]}'),
    ],
)
def test_a_body_that_breaks_the_protocol_is_malformed(reply):
    row = ask(reply)
    assert (row["status"], row["http_code"], row["attempts"]) == ("malformed", 200, 1)
    assert row["error"]


@pytest.mark.parametrize(
    ("reply", "stream"),
    [
        (json_reply({"error": {"message": "engine died", "code": 500}}), False),
        (json_reply({"object": "error", "message": "engine died"}), False),
        (json_reply({"error": {"message": "engine died"}}), True),  # no stream, although one was asked for
        (sse_reply([chat_chunk("H"), {"error": {"message": "engine died"}}]), True),
        ([sse_head(), b'event: error\ndata: {"error": "engine died"}\n\n'], True),
        ([sse_head(), b"event: error\ndata: engine died\n\n"], True),
    ],
)
def test_an_error_sent_after_http_200_is_recognised(reply, stream):
    row = ask(reply, stream=stream)
    assert (row["status"], row["http_code"], row["attempts"]) == ("stream_error", 200, 1)
    assert "engine died" in row["error"]


@pytest.mark.parametrize(
    ("reply", "stream"),
    [
        (sse_reply([chat_chunk("H"), chat_chunk("i")], done=False), True),
        ([sse_head()], True),
        ([sse_head(), b'data: {"choices": [{"index": 0, "del'], True),
        ([sse_head(), b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n', RESET], True),
        (http(b'{"choices": [{"ind'), False),
        (http(json.dumps(chat_body()).encode(), length=9999), False),
        (json_reply(chat_body(finish="error")), False),
    ],
)
def test_an_answer_that_stops_short_is_a_stream_error_and_is_not_asked_again(reply, stream):
    row = ask(reply, stream=stream)
    assert (row["status"], row["attempts"], len(row["asked"])) == ("stream_error", 1, 1)


def test_a_stream_with_done_and_no_finish_reason_is_weak_evidence():
    row = ask(sse_reply([chat_chunk("Hi")]), stream=True)
    assert (row["status"], row["evidence"], row["text"]) == ("ok", "E3", "Hi")


def test_a_body_where_a_stream_was_asked_for_is_malformed():
    assert ask(json_reply(chat_body()), stream=True)["status"] == "malformed"


def test_no_text_and_no_tokens_is_empty():
    assert ask(json_reply(chat_body("")))["status"] == "empty"
    assert ask(json_reply(chat_body(None)))["status"] == "empty"
    assert ask(sse_reply([chat_chunk(finish="stop")]), stream=True)["status"] == "empty"
    # A server without token ids that counted the end-of-turn token did answer.
    assert ask(json_reply(chat_body("") | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}))["status"] == "ok"


def test_an_empty_answer_keeps_the_prompt_count_that_tells_a_wrong_template():
    row = ask(json_reply(chat_body("") | {"usage": {"prompt_tokens": 13, "completion_tokens": 0}}))
    assert (row["status"], row["prompt_tokens"], row["output_tokens"]) == ("empty", 13, 0)


def test_a_slow_answer_and_a_dripping_stream_time_out():
    drip = [sse_head(), *[piece for _ in range(40) for piece in (b": still here\n\n", 0.05)]]
    for reply, stream in [([5.0], False), (drip, True)]:
        row = ask(reply, stream=stream, timeout_s=0.3)
        assert (row["status"], row["attempts"]) == ("timeout", 1)
        assert 300 <= row["latency_ms"] < 1500


@pytest.mark.parametrize("reply", [[RESET], []])
def test_a_connection_lost_before_any_answer_is_tried_once_more(reply):
    row = ask(reply)
    assert (row["status"], row["attempts"], len(row["asked"]), row["http_code"]) == ("transport_error", 2, 2, None)


def test_the_retry_can_succeed_and_is_counted():
    script = lambda request: [RESET] if request.number == 0 else json_reply(chat_body())  # noqa: E731
    with FakeServer(script) as server:
        (row,) = asyncio.run(send_set(plan_for(server.url), [item()], "a", 1))
    assert (row["status"], row["attempts"]) == ("ok", 2)
    assert row["error"].startswith("first attempt: ")


def test_every_request_has_a_connection_of_its_own():
    app, ports = FastAPI(), set()

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> dict:
        ports.add(request.client.port)
        return chat_body("hi")

    with app_server(app) as url:
        rows = asyncio.run(send_set(plan_for(url), [item(n) for n in range(6)], "a", 2))
    assert [row["status"] for row in rows] == ["ok"] * 6
    assert len(ports) == 6


def test_a_refused_connection_is_a_transport_error():
    (row,) = asyncio.run(send_set(plan_for(f"http://127.0.0.1:{unused_port()}"), [item()], "a", 1))
    assert (row["status"], row["attempts"], row["evidence"]) == ("transport_error", 2, "none")


def test_http_errors_are_never_retried():
    row = ask(json_reply({"error": {"message": "boom"}}, 500))
    assert (row["status"], row["error"], len(row["asked"])) == ("http_error", "boom", 1)


def test_more_or_fewer_tokens_than_asked_are_recorded_as_they_came():
    row = ask(json_reply(chat_body("a b c d e", "length", token_ids=[1, 2, 3, 4, 5])))
    assert (row["status"], row["token_ids"], row["finish_reason"]) == ("ok", [1, 2, 3, 4, 5], "length")


# --- the set -----------------------------------------------------------------------------------------------------


def test_one_row_per_item_in_order_under_concurrency_and_the_rows_fit_the_schema():
    def script(request):
        return (
            [0.05, *json_reply({"error": "no"}, 503)] if request.number % 3 == 0 else [0.05, *json_reply(chat_body())]
        )

    items, seen = [item(number) for number in range(12)], []
    with FakeServer(script) as server:
        rows = asyncio.run(send_set(plan_for(server.url), items, "served_0_load", 4, seen.append))
    assert [row["item_id"] for row in rows] == [each["item_id"] for each in items]
    assert sorted(row["item_id"] for row in seen) == sorted(row["item_id"] for row in rows)
    assert sum(row["status"] == "http_error" for row in rows) == 4
    assert server.most_active == 4
    assert {row["concurrency"] for row in rows} == {4}
    assert table_from_rows("responses", rows).num_rows == 12
    assert set(rows[0]) == set(RESPONSES.names)


def test_times_are_measured():
    first, last = chat_chunk("H"), chat_chunk("i", "stop")
    frames = [sse_head(), *(b"data: " + json.dumps(chat_chunk()).encode() + b"\n\n",), 0.1]
    frames += [b"data: " + json.dumps(first).encode() + b"\n\n", 0.2, b"data: " + json.dumps(last).encode() + b"\n\n"]
    row = ask(frames, stream=True)
    assert 100 <= row["ttft_ms"] < 290 and row["latency_ms"] >= 300
    assert row["t_start_utc"].tzinfo is not None
    assert ask(json_reply(chat_body()))["ttft_ms"] is None


def test_the_request_is_the_items_own_with_what_the_plan_asks():
    chat = ask(json_reply(chat_body()), stream=True, top_logprobs=7)["asked"][0]
    assert chat == {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        **IDS,
    }
    completion = ask(json_reply(chat_body()), completion=True, logprobs=False, extra_body={})["asked"][0]
    assert completion == {"model": "smollm2", "prompt": "Hi", "max_tokens": 3, "temperature": 0}
    assert request_body(plan_for("http://x"), "completion", {"prompt": "Hi"})["logprobs"] == 20


def test_a_missing_route_is_a_configuration_error_before_anything_is_sent():
    with FakeServer(lambda request: json_reply(chat_body())) as server:
        plan = plan_for(server.url).model_copy(update={"routes": {"chat": ROUTES["chat"]}})
        with pytest.raises(ConfigError, match=r"completion requests.*client\.routes"):
            asyncio.run(send_set(plan, [item(), item(1, completion=True)], "a", 2))
        assert server.requests == []


def test_items_never_sent_have_rows():
    rows = not_sent([item(0), item(1)], "served_1_load", "the server died while loading")
    assert [row["status"] for row in rows] == ["not_sent"] * 2 and rows[0]["attempts"] == 0
    assert table_from_rows("responses", rows).num_rows == 2


def test_the_probe_asks_for_one_real_token():
    with FakeServer(lambda request: json_reply(chat_body())) as server:
        row = asyncio.run(probe_generation(plan_for(server.url)))
    assert row["status"] == "ok" and server.requests[0].body["max_tokens"] == 1
    with FakeServer(lambda request: http(b"OK", kind="text/plain")) as server:  # healthy, and no server of ours
        assert asyncio.run(probe_generation(plan_for(server.url)))["status"] == "malformed"
    with FakeServer(lambda request: [5.0]) as server:
        assert asyncio.run(probe_generation(plan_for(server.url), timeout_s=0.2))["status"] == "timeout"


# --- server-sent events ------------------------------------------------------------------------------------------


def decode(*chunks):
    async def stream():
        for chunk in chunks:
            yield chunk

    async def collect():
        return [event async for event in events(stream())]

    return asyncio.run(collect())


def test_events_survive_any_cut_and_every_line_end():
    content = (
        'event: a\r\ndata: x\r\n\r\n: note\n\ndata: "é\u2028\x85y"\ndata: z\n\nid: 1\rdata:w\r\rdata: last'.encode()
    )
    expected = [Event("x", "a"), Event('"é\u2028\x85y"\nz'), Event("w"), Event("last")]
    assert decode(content) == expected
    assert decode(*[bytes([byte]) for byte in content]) == expected
    assert all(decode(content[:cut], content[cut:]) == expected for cut in range(len(content)))
