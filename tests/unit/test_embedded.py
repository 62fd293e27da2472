"""The embedded engine serves what transformers generates, alone and in a batch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import tiny
import torch
from fakes import unused_port
from served import NAME, served
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.client.openai import OpenAIPlan
from assay.client.transport import send_set
from assay.config import OpenAISpec
from assay.embedded import __main__ as command
from assay.embedded.engine import Job, Request, Token, choose, cut
from assay.embedded.hooks import Hooks
from assay.embedded.server import Detokenizer

ROOT = Path(__file__).parents[2]
ROUTES = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
TEXTS = ["Hi", "What is 2 + 2?", "a" * 70, "Écrivez «déjà vu» 🌞", "", "x y z", "The end", "\n\t!"]


def chat(text, **options):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0} | options


def ask(url, requests, concurrency=1, stream=False, **plan):
    spec = OpenAISpec(
        protocol="openai", routes=ROUTES, model="x", stream=stream, timeout_s=120,
        **{"logprobs": True, "extra_body": IDS} | plan,
    )  # fmt: skip
    items = [
        {"item_id": str(number), "set_id": "set", "request": json.dumps(request)}
        for number, request in enumerate(requests)
    ]
    return asyncio.run(send_set(OpenAIPlan.of(spec, url, NAME), items, "served_0_alone", concurrency))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def url(folder):
    with served(folder) as address:
        yield address


def generate(folder, requests):
    """Greedy ids of transformers' own `generate`, one request at a time, and the prompts' ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request in requests:
        prompt = tokenizer.apply_chat_template(
            request["messages"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        output = model.generate(**prompt, do_sample=False, max_new_tokens=request["max_tokens"])[0]
        start = prompt["input_ids"].shape[1]
        logits = model(output[None]).logits[0, start - 1 : -1]
        yield output[:start].tolist(), output[start:].tolist(), logits.log_softmax(-1)


@pytest.mark.parametrize(("concurrency", "stream"), [(1, False), (1, True), (8, False), (8, True)])
def test_greedy_is_transformers_own_token_for_token_alone_and_in_a_batch(folder, url, concurrency, stream):
    requests = [chat(text, max_tokens=8 + 5 * number) for number, text in enumerate(TEXTS)]
    rows = ask(url, requests, concurrency, stream)
    for row, (prompt, output, logprobs) in zip(rows, generate(folder, requests), strict=True):
        assert (row["status"], row["evidence"]) == ("ok", "E0")
        assert (row["prompt_token_ids"], row["token_ids"]) == (prompt, output)
        assert row["token_logprobs"] == pytest.approx(
            logprobs.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist(), abs=1e-4
        )
        values, ids = logprobs.topk(20)
        assert torch.tensor(row["top_logprobs"]).sub(values).abs().max() < 1e-4
        assert [top[0] for top in row["top_token_ids"]] == ids[:, 0].tolist()
        assert (row["prompt_tokens"], row["output_tokens"]) == (len(prompt), len(output))


def test_text_is_what_the_ids_decode_to_streamed_or_not(folder, url):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    requests = [chat(text) for text in TEXTS]
    for row, streamed in zip(ask(url, requests), ask(url, requests, 8, stream=True), strict=True):
        assert row["text"] == streamed["text"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)


def test_completions_take_text_and_ids(folder, url):
    prompt = AutoTokenizer.from_pretrained(folder).encode("Once")
    text, ids = ask(url, [{"prompt": "Once", "max_tokens": 5, "temperature": 0},
                          {"prompt": prompt, "max_tokens": 5, "temperature": 0}], stream=True)  # fmt: skip
    assert text["prompt_token_ids"] == prompt and text["evidence"] == "E0"
    assert text["token_ids"] == ids["token_ids"] and text["top_logprobs"] == ids["top_logprobs"]


def test_generation_stops_at_every_end_token_of_the_generation_config(tmp_path, folder, url):
    (clean,) = ask(url, [chat("Hi")])
    early = clean["token_ids"][4]
    with served(tiny.build(tmp_path, eos=(2, early))) as address:
        (row,) = ask(address, [chat("Hi")])
        (first,) = ask(address, [chat("Hi", max_tokens=5)])
    end = clean["token_ids"].index(early) + 1
    assert (row["token_ids"], row["finish_reason"]) == (clean["token_ids"][:end], "stop")
    assert first["finish_reason"] == "stop"  # an end token that is also the last allowed one
    assert clean["finish_reason"] == "length"


# --- sampling ----------------------------------------------------------------------------------------------------


def test_seeded_samples_are_the_same_alone_and_under_load_and_differ_between_seeds(url):
    requests = [chat(TEXTS[number % 4], temperature=1.0, top_p=0.95, seed=number) for number in range(16)]
    alone, load = ask(url, requests), ask(url, requests, 16)
    assert [row["token_ids"] for row in alone] == [row["token_ids"] for row in load]
    assert alone[0]["token_ids"] != alone[4]["token_ids"]  # the same prompt


def test_without_a_seed_two_answers_differ(url):
    one, other = ask(url, [chat("Hi", temperature=2.0)] * 2)
    assert one["token_ids"] != other["token_ids"]


def test_logprobs_of_sampled_tokens_are_raw(folder, url):
    (row,) = ask(url, [chat("Hi", temperature=0.5, top_k=3, seed=1)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
    logprobs = model(ids).logits[0, len(row["prompt_token_ids"]) - 1 : -1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(row["token_ids"])[:, None])[:, 0]
    assert row["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_cut_keeps_the_top_k_then_the_nucleus():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = lambda **options: torch.isfinite(cut(logits, **options)).tolist()  # noqa: E731
    assert kept(top_k=0, top_p=1.0) == [True, True, True, True]
    assert kept(top_k=2, top_p=1.0) == [True, True, False, False]
    assert kept(top_k=0, top_p=0.7) == [True, True, False, False]  # 0.5 < 0.7 <= 0.8
    assert kept(top_k=0, top_p=0.81) == [True, True, True, False]
    assert kept(top_k=0, top_p=0.01) == [True, False, False, False]  # never empty
    assert kept(top_k=2, top_p=0.6) == [True, False, False, False]  # of the two left, the first has 0.625


def test_sampling_follows_the_temperature():
    # Logits 0 and 1 at temperature 0.5 are odds of e^2: p = 0.8808. Binomial sd at n = 2000: 0.0072.
    request = Request(0, (1,), 1, frozenset(), temperature=0.5, seed=7)
    job = Job(request, lambda token: None)
    share = Counter(choose(job, torch.tensor([0.0, 1.0])) for _ in range(2000))[1] / 2000
    assert share == pytest.approx(0.8808, abs=4 * 0.0072)


# --- the protocol ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (chat("Hi", model="other"), 404, "'other' does not exist; this server has 'served'"),
        (chat("Hi", max_tokens=600), 400, "600 to generate exceed the context of 512"),
        (chat("x" * 600), 400, "exceed the context"),
        (chat("Hi", frequency_penalty=1), 400, "frequency_penalty"),
        (chat("Hi", temperature=-1), 400, "temperature"),
        (chat("Hi", top_p=0), 400, "top_p"),
        (chat("Hi", n=2), 400, "n:"),
        (chat("Hi", messages=[]), 400, "messages"),
        ({"prompt": [1, 99_999]}, 400, "beyond the vocabulary"),
        ({"prompt": ""}, 400, "prompt"),
    ],
)
def test_bad_requests_get_an_openai_error_that_names_the_field(url, request_, code, message):
    (row,) = ask(url, [request_], extra_body={key: request_[key] for key in request_ if key == "model"})
    assert (row["status"], row["http_code"]) == ("http_error", code)
    assert message in row["error"]


def test_token_ids_and_logprobs_come_only_when_asked_for(url):
    (row,) = ask(url, [chat("Hi")], logprobs=False, extra_body={})
    assert (row["evidence"], row["token_ids"], row["token_logprobs"]) == ("E2", None, None)
    (row,) = ask(url, [chat("Hi")], extra_body={})
    assert row["token_ids"] is None and len(row["token_logprobs"]) == 24


def test_models_version_and_health(url):
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == NAME
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "running": 0}
    assert httpx.get(f"{url}/version").json()["transformers"]


def test_the_version_is_that_of_the_start_whatever_becomes_of_the_checkout_since(url, monkeypatch):
    before = httpx.get(f"{url}/version").json()
    monkeypatch.setattr("assay.embedded.server.versions", lambda: {"tree": "edited since"})
    assert httpx.get(f"{url}/version").json() == before


def test_a_client_that_leaves_frees_its_place_in_the_batch(url):
    body = chat("Hi", model=NAME, stream=True, max_tokens=400)
    with httpx.stream("POST", url + ROUTES["chat"], json=body) as response:
        next(response.iter_bytes())
    deadline = time.monotonic() + 5
    while httpx.get(f"{url}/health").json()["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert httpx.get(f"{url}/health").json()["running"] == 0


class Broken(Hooks):
    def stepped(self, cache, row, job):
        raise ValueError("out of cells")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dying_engine_tells_everyone_and_is_no_longer_healthy(folder):
    with served(folder, Broken()) as address:
        (whole,) = ask(address, [chat("Hi")])
        (later,) = ask(address, [chat("Hi")], stream=True)
        health = httpx.get(f"{address}/health")
    assert whole["status"] == "http_error" and "out of cells" in whole["error"]
    assert later["status"] == "http_error" and health.status_code == 503
    with served(folder, Broken()) as address:
        (streamed,) = ask(address, [chat("Hi")], stream=True)
    assert streamed["status"] == "stream_error" and "out of cells" in streamed["error"]


def test_characters_that_span_tokens_are_never_cut(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)  # one token per byte
    detokenizer = Detokenizer(Hooks(), tokenizer)
    ids = tokenizer.encode("a🌞é")
    assert len(ids) == 1 + 4 + 2
    pieces = [detokenizer.push(Token(token, None)).text for token in ids]
    assert pieces == ["a", "", "", "", "🌞", "", "é"]
    half = Detokenizer(Hooks(), tokenizer)
    assert half.push(Token(ids[1], "length")).text == "\ufffd"  # the end of the answer waits for nothing


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model={tiny}", "--fault=rope_thetta=5"], "unknown fault 'rope_thetta'; known: attention_scale, "),
        (["--model={tiny}", "--fault=rope_theta"], "needs a value: rope_theta=float (found 'rope_theta')"),
        (["--model={tiny}", "--fault=rope_theta=nan"], "needs a value"),
        (["--model={tiny}", "--fault=http_500=x"], "needs a value: http_500=int"),
        (["--model={tiny}", "--fault=greedy=1"], "fault 'greedy' takes no value"),
        (["--model={tiny}", "--fault=dropped_layer=4"], "needs a layer from 0 to 3 (found 4)"),
        (["--model=/nowhere"], "--model /nowhere: no config.json there"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_status_2(folder, monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["assay.embedded", *[word.format(tiny=folder) for word in words]])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        command.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_within_seconds_even_while_it_generates(folder, number):
    port = unused_port()
    words = [sys.executable, "-m", "assay.embedded", f"--model={folder}", f"--port={port}", f"--served-name={NAME}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "workflow"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                assert process.poll() is None
                time.sleep(0.1)
        body = chat("Hi", model=NAME, stream=True, max_tokens=400)
        with httpx.stream("POST", url + ROUTES["chat"], json=body, timeout=60) as response:
            next(response.iter_bytes())
            process.send_signal(number)
            _, errors = process.communicate(timeout=15)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in errors


# --- the real model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_real_model_is_served_as_transformers_generates_it(fetched):
    folder = fetched("smollm2_135m") / "smollm2_135m"
    texts = ["What is the capital of France?", "Write a haiku about rain 🌧️.", "def fib(n):", "用一句话介绍你自己。"]
    requests = [chat(text, max_tokens=32) for text in texts]
    with served(folder) as address:
        rows = ask(address, requests, concurrency=4, stream=True)
    for row, (prompt, output, _) in zip(rows, generate(folder, requests), strict=True):
        assert (row["evidence"], row["prompt_token_ids"], row["token_ids"]) == ("E0", prompt, output)
