"""The client of the transcription route: files go out whole, and every kind of answer is told apart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fakes import FakeServer, app_server, http, json_reply, unused_port
from fastapi import FastAPI, Request

from assay.client.openai import OpenAIPlan
from assay.client.transcription import probe_clip
from assay.client.transport import probe_generation, send_set
from assay.config import OpenAISpec
from assay.errors import ConfigError
from assay.media.audio import Container, decode
from assay.store import table_from_rows

DATA = Path(__file__).parent.parent / "data" / "openai"
PATH = "/v1/audio/transcriptions"
REQUEST = {"file": "clip.wav", "language": "en", "temperature": 0}
WAV = b"RIFF\x00\xff not looked into by the client"


def plan_for(url, **options):
    fields = {"routes": {"transcription": PATH}, "logprobs": False, "timeout_s": 20} | options
    return OpenAIPlan.of(OpenAISpec(protocol="openai", model="x", **fields), url, "whisper-base")


def item(number=0, request=REQUEST):
    return {
        "item_id": f"item-{number}",
        "set_id": "set",
        "request": json.dumps(request),
        "audio": {"bytes": WAV, "path": "clip.wav"},
    }


def ask(reply, **options):
    """The one row of the one item, from a server that always sends `reply`."""
    with FakeServer(lambda request: reply) as server:
        (row,) = asyncio.run(send_set(plan_for(server.url, **options), [item()], "served_0_alone", 1))
    assert table_from_rows("responses", [row]).num_rows == 1
    return row


def segment(**changes):
    return {"start": 0.0, "end": 2.0, "text": " Hi.", "tokens": [50364, 2421, 13, 50464], "avg_logprob": -0.1} | changes


def body(*segments, **changes):
    return {"text": " Hi.", "language": "en", "segments": list(segments)} | changes


def answer(*segments, **changes):
    return ask(json_reply(body(*segments, **changes)))


# --- what is sent ------------------------------------------------------------------------------------------------


def sent(**options):
    """Fields and file of the form that one item is sent as."""
    forms = []
    app = FastAPI()

    @app.post(PATH)
    async def transcribe(request: Request):
        async with request.form() as form:
            fields = {key: form.getlist(key) for key in form if key != "file"}
            forms.append((fields, form["file"].filename, await form["file"].read()))
        return body()

    with app_server(app) as url:
        (row,) = asyncio.run(send_set(plan_for(url, **options), [item()], "a", 1))
    assert row["status"] == "ok"
    return forms[0]


def test_the_file_is_sent_whole_under_its_name_with_the_items_fields():
    fields, name, content = sent()
    assert (name, content) == ("clip.wav", WAV)
    assert fields == {
        "model": ["whisper-base"],
        "language": ["en"],
        "temperature": ["0"],
        "response_format": ["verbose_json"],
    }


def test_an_arms_own_fields_go_into_the_form_and_logprobs_are_asked_for():
    fields, _, _ = sent(extra_body={"model_name": "base", "vad_filter": False}, logprobs=True, top_logprobs=7)
    assert fields["model_name"] == ["base"] and fields["vad_filter"] == ["false"]
    assert fields["include[]"] == ["logprobs"] and fields["top_logprobs"] == ["7"]


def test_an_arm_may_ask_for_the_text_alone():
    assert sent(transcript_format="json")[0]["response_format"] == ["json"]


def test_a_set_of_clips_needs_the_route_before_anything_is_sent():
    plan = plan_for("http://127.0.0.1:1", routes={"chat": "/v1/chat/completions"})
    with pytest.raises(ConfigError, match=r"transcription requests.*client\.routes"):
        asyncio.run(send_set(plan, [item()], "a", 1))


def test_a_server_without_another_route_is_probed_with_a_clip_that_can_be_decoded():
    app = FastAPI()
    clips = []

    @app.post(PATH)
    async def transcribe(request: Request):
        async with request.form() as form:
            clips.append(decode(await form["file"].read(), Container.WAV))
        return body(text="", segments=[])

    with app_server(app) as url:
        assert asyncio.run(probe_generation(plan_for(url)))["status"] == "ok"
    assert (clips[0].rate, clips[0].duration_s) == (16000, 1.0) and clips[0].samples.any()
    refused = plan_for(f"http://127.0.0.1:{unused_port()}")
    assert asyncio.run(probe_generation(refused))["status"] == "transport_error"


def test_the_probe_is_the_same_clip_every_time():
    assert probe_clip() == probe_clip()


# --- real bodies -------------------------------------------------------------------------------------------------


def test_faster_whisper_gives_ids_segments_and_language():
    row = ask(http((DATA / "faster_whisper_cards.json").read_bytes()))
    assert (row["status"], row["evidence"], row["text"], row["language"]) == ("ok", "E1", " 5 5", "en")
    assert row["token_ids"] == [50364, 1025, 1025, 50464] and row["output_tokens"] == 4
    assert row["segments"] == [{"start": 0.0, "end": 2.0, "text": " 5 5"}]
    assert row["token_logprobs"] is None and row["top_logprobs"] is None and row["finish_reason"] is None


def test_nothing_said_is_an_answer():
    row = ask(http((DATA / "faster_whisper_silence.json").read_bytes()))
    assert (row["status"], row["evidence"], row["text"], row["segments"]) == ("ok", "E2", "", [])
    assert row["token_ids"] is None and row["output_sha256"]


def test_an_unknown_model_is_told_in_the_servers_words():
    row = ask(http((DATA / "faster_whisper_error_model.json").read_bytes(), status="400 Bad Request"))
    assert (row["status"], row["http_code"], row["error"]) == ("http_error", 400, "unknown model: whispr-base")


# --- evidence ----------------------------------------------------------------------------------------------------


def test_ids_of_all_segments_are_joined_in_their_order():
    row = answer(segment(), segment(start=2.0, end=3.0, text=" You.", tokens=[50464, 509, 13, 50514]))
    assert row["token_ids"] == [50364, 2421, 13, 50464, 50464, 509, 13, 50514] and row["output_tokens"] == 8
    assert [it["text"] for it in row["segments"]] == [" Hi.", " You."]


@pytest.mark.parametrize(
    ("tokens", "lists", "prompt", "evidence"),
    [
        ([5], 5, [50258], "E0"),
        ([5], 4, [50258], "E1"),  # too few to see a distribution by
        ([5], 5, None, "E1"),
        ([5], None, [50258], "E1"),
        (None, None, None, "E2"),
    ],
)
def test_evidence_is_what_the_answer_proves(tokens, lists, prompt, evidence):
    tops = None if lists is None else [[[5 + place, -1.0 - place] for place in range(lists)]]
    row = answer(segment(tokens=tokens, top_logprobs=tops), prompt_token_ids=prompt)
    assert (row["status"], row["evidence"]) == ("ok", evidence)


def test_logprobs_are_read_and_top_lists_cut_in_descending_order():
    tops = [[[7, -3.0], [5, -0.5], [6, -2.0]]] * 4
    given = segment(token_logprobs=[-0.1, -0.2, -0.3, -0.4], top_logprobs=tops)
    row = ask(json_reply(body(given)), logprobs=True, top_logprobs=2)
    assert row["token_logprobs"] == [-0.1, -0.2, -0.3, -0.4]
    assert row["top_token_ids"][0] == [5, 6] and row["top_logprobs"][0] == [-0.5, -2.0]


def test_one_segment_without_ids_leaves_the_whole_answer_without():
    row = answer(segment(), segment(tokens=None))
    assert (row["evidence"], row["token_ids"], row["output_tokens"]) == ("E2", None, None)


def test_an_empty_list_of_ids_beside_text_is_no_evidence():
    row = answer(segment(tokens=[], token_logprobs=[], top_logprobs=[]))
    assert (row["token_logprobs"], row["top_logprobs"]) == (None, None)
    assert (row["evidence"], row["token_ids"], row["output_tokens"]) == ("E2", None, None)
    assert answer(segment(text="", tokens=[]), text="")["output_tokens"] == 0


def test_text_alone_is_an_answer_of_unknown_segments_and_language():
    row = ask(json_reply({"text": "Hi."}))
    assert (row["status"], row["evidence"], row["segments"], row["language"]) == ("ok", "E2", None, None)


def test_an_empty_list_of_segments_beside_text_says_nothing():
    row = answer()
    assert (row["status"], row["evidence"], row["text"], row["segments"]) == ("ok", "E2", " Hi.", None)


def test_segments_that_make_no_sense_are_for_the_judge_and_kept_as_they_are():
    row = answer(segment(start=9.0, end=-1.0), segment(start=3.0, end=2.0, text=" something else"))
    assert row["status"] == "ok" and [(it["start"], it["end"]) for it in row["segments"]] == [(9.0, -1.0), (3.0, 2.0)]


# --- answers that break the protocol -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        (b"Hi.", "malformed", "not JSON"),
        (b'{"text": " Hi', "stream_error", "stops short"),
        (b"[]", "malformed", "the answer should be a dict"),
        (b"{}", "malformed", "text should be a str, found None"),
        (b'{"text": null}', "malformed", "text should be a str"),
        (b'{"text": 5}', "malformed", "text should be a str, found 5"),
        (b'{"text": "\\ud800"}', "malformed", ""),
        (b'{"error": {"message": "out of memory"}}', "stream_error", "out of memory"),
        (b'{"text": "", "language": 3}', "malformed", "language should be a str"),
        (b'{"text": "", "segments": {}}', "malformed", "segments should be a list"),
        (b'{"text": "", "segments": [1]}', "malformed", "segments[] should be a dict"),
    ],
)
def test_a_body_that_is_not_what_the_protocol_says_is_told_apart(content, status, why):
    row = ask(http(content))
    assert row["status"] == status and row["text"] is None
    assert why in row["error"]


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({"start": float("nan")}, "nonfinite", "segments[0].start is nan"),
        ({"end": float("inf")}, "nonfinite", "segments[0].end is inf"),
        ({"end": None}, "nonfinite", "segments[0].end is null"),
        ({"avg_logprob": float("nan")}, "nonfinite", "segments[0].avg_logprob is nan"),
        ({"start": "0"}, "malformed", "segments[0].start should be a number"),
        ({"text": None}, "malformed", "segments[0].text should be a str"),
        ({"tokens": [1.5]}, "malformed", "segments[0].tokens holds 1.5"),
        ({"tokens": [-1]}, "malformed", "segments[0].tokens holds -1"),
        ({"token_logprobs": [-0.1]}, "malformed", "4 tokens but 1 token_logprobs"),
        ({"token_logprobs": [-0.1, float("nan"), -1, -1]}, "nonfinite", "segments[0].token_logprobs[1] is nan"),
        ({"tokens": None, "token_logprobs": [-0.1]}, "malformed", "0 tokens but 1 token_logprobs"),
        ({"top_logprobs": [[[5]]] * 4}, "malformed", "pairs of id and logprob"),
        ({"top_logprobs": [[["five", -1]]] * 4}, "malformed", "holds 'five'"),
        ({"top_logprobs": [[[5, float("nan")]]] * 4}, "nonfinite", "is nan"),
    ],
)
def test_a_wrong_value_in_a_segment_is_named(changes, status, why):
    row = answer(segment(**changes))
    assert row["status"] == status and why in row["error"]
