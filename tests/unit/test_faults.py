"""Each planted fault changes what it says it changes, and the documented list is the list."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from served import served
from test_embedded import TEXTS, ask, chat

from assay.config import Fault, parse, read_yaml
from assay.embedded.faults import FAULTS, plant

REQUESTS = [chat(text, max_tokens=24) for text in TEXTS[:6]]
SAMPLED = [chat(text, temperature=0.6, top_p=0.5, seed=seed) for seed in (1, 2) for text in TEXTS[:4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("tiny"))


def answers(folder, fault=None, requests=REQUESTS, concurrency=1):
    with served(folder, fault) as url:
        return ask(url, requests, concurrency, stream=True)


@pytest.fixture(scope="module")
def clean(folder):
    return answers(folder)


@pytest.fixture(scope="module")
def clean_load(folder):
    return answers(folder, concurrency=8)


@pytest.fixture(scope="module")
def clean_sampled(folder):
    return answers(folder, requests=SAMPLED)


def changed(rows, clean):
    """Names of what differs in any row: prompt, ids, logprobs (of equal ids), text, finish, status, tokens (count)."""
    names = set()
    for row, right in zip(rows, clean, strict=True):
        parts = {
            "prompt": "prompt_token_ids", "ids": "token_ids", "text": "text", "finish": "finish_reason",
            "status": "status", "tokens": "output_tokens",
        }  # fmt: skip
        names |= {name for name, key in parts.items() if row[key] != right[key]}
        pairs = zip(row["token_logprobs"] or [], right["token_logprobs"] or [], strict=False)
        if row["token_ids"] == right["token_ids"] and any(abs(one - other) > 1e-4 for one, other in pairs):
            names.add("logprobs")
    return names


def test_the_clean_twin_changes_nothing_alone_or_under_load(folder, clean, clean_load):
    assert changed(answers(folder), clean) == set()
    assert changed(clean_load, clean) == set()


@pytest.mark.parametrize(
    "fault",
    [
        "rope_theta=500000", "rms_eps=1", "rms_eps_one_layer=1", "attention_scale=30", "dropped_layer=1",
        "weight_noise=0.05", "weights_int4", "weights_int8", "weights_fp8", "decode_position=1", "kv_int4",
        "kv_int8", "kv_block_zeroed=16", "temperature_floor=0.5", "repetition_penalty=1.1", "second_best=0.05",
    ],
)  # fmt: skip
def test_computation_faults_change_tokens_and_leave_the_prompt(folder, clean, fault):
    found = changed(answers(folder, fault), clean)
    assert "ids" in found and not found & {"prompt", "status", "tokens", "finish"}


@pytest.mark.parametrize("fault", ["missing_bos=1", "double_bos=1", "template_inst", "no_system",
                                   "no_generation_prompt", "template_stripped"])  # fmt: skip
def test_prompt_faults_change_the_prompt_ids(folder, clean, fault):
    assert {"prompt", "ids"} <= changed(answers(folder, fault), clean)


def test_bos_faults_change_one_token(folder, clean):
    for fault, expected in [("double_bos=1", lambda ids: [1, *ids]), ("missing_bos=1", lambda ids: ids[1:])]:
        for row, right in zip(answers(folder, fault), clean, strict=True):
            assert row["prompt_token_ids"] == expected(right["prompt_token_ids"])


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("logprobs_shifted", {"logprobs"}),
        ("logprobs_temperature=0.7", {"logprobs"}),
        ("lower_case", {"text"}),
        ("split_utf8", {"text"}),
        ("chunk_lost=4", {"ids", "text"}),
        ("chunk_duplicated=4", {"ids", "text"}),
        ("last_token_dropped", {"ids", "text"}),
    ],
)
def test_answer_faults_change_that_and_nothing_else(folder, clean, fault, expected):
    assert changed(answers(folder, fault), clean) == expected


def test_lost_and_doubled_chunks_and_last_tokens_are_where_they_should_be(folder, clean):
    ids = clean[0]["token_ids"]
    assert answers(folder, "chunk_lost=4")[0]["token_ids"] == ids[:4] + ids[5:]
    assert answers(folder, "chunk_duplicated=4")[0]["token_ids"] == [*ids[:5], *ids[4:]]
    assert answers(folder, "last_token_dropped")[0]["token_ids"] == ids[:-1]


def test_length_faults_are_off_by_one(folder, clean):
    assert {len(row["token_ids"]) for row in answers(folder, "max_tokens_off=1")} == {25}
    assert {len(row["token_ids"]) for row in answers(folder, "max_tokens_off=-1")} == {23}


def test_stop_ignored_goes_on_after_the_end_of_turn(tmp_path, folder, clean):
    model = tiny.build(tmp_path, eos=(2, clean[0]["token_ids"][4]))
    assert answers(model)[0]["finish_reason"] == "stop"
    (row, *_) = answers(model, "stop_ignored")
    assert (row["token_ids"], row["finish_reason"]) == (clean[0]["token_ids"], "length")


def test_one_request_fails_with_http_500_and_nan_logprobs_reach_the_client(folder, clean):
    rows = answers(folder, "http_500=3")
    assert [row["status"] for row in rows] == ["ok"] * 3 + ["http_error"] + ["ok"] * 2
    assert {row["status"] for row in answers(folder, "logprobs_nan=2")} == {"nonfinite"}


@pytest.mark.parametrize("fault", ["unmasked_padding", "swapped"])
def test_batch_faults_show_under_load_only(folder, clean, clean_load, fault):
    assert changed(answers(folder, fault), clean) == set()
    assert "ids" in changed(answers(folder, fault, concurrency=8), clean_load)


def test_swapped_answers_belong_to_other_requests_and_all_arrive(folder):
    requests = [chat(text, max_tokens=8 + 6 * number) for number, text in enumerate(TEXTS)]
    right = [row["token_ids"] for row in answers(folder, requests=requests)]
    rows = answers(folder, "swapped", requests, concurrency=8)
    found = [row["token_ids"] for row in rows]
    assert {row["status"] for row in rows} == {"ok"}
    assert found != right and sorted(found) == sorted(right)


def test_foreign_cache_blocks_strike_some_requests_and_the_same_ones_in_every_run(folder, clean):
    struck = [[row["token_ids"] != right["token_ids"] for row, right in zip(rows, clean, strict=True)]
              for rows in (answers(folder, "kv_foreign=2"), answers(folder, "kv_foreign=2"))]  # fmt: skip
    assert struck[0] == struck[1] and 0 < sum(struck[0]) < len(REQUESTS)


@pytest.mark.parametrize("fault", ["temperature_ignored", "greedy", "top_p_ignored", "seed_ignored", "seed_constant=5"])
def test_sampling_faults_change_samples_and_leave_greedy_alone(folder, clean, clean_sampled, fault):
    assert changed(answers(folder, fault), clean) == set()
    assert "ids" in changed(answers(folder, fault, SAMPLED), clean_sampled)


def test_seed_faults_do_what_they_say(folder):
    one, other = answers(folder, "seed_constant=5", [chat("Hi", temperature=1.0, seed=seed) for seed in (1, 2)])
    assert one["token_ids"] == other["token_ids"]
    one, other = answers(folder, "seed_ignored", [chat("Hi", temperature=1.0, seed=1)] * 2)
    assert one["token_ids"] != other["token_ids"]


def test_the_configured_faults_are_the_ones_the_server_has():
    content = read_yaml(Path(__file__).parents[2] / "config" / "faults.yaml")
    every = [parse(Fault, value, f"faults.yaml: {name}") for name, value in content.items()]
    configured = [entry for entry in every if entry.modality == "text"]
    for entry in configured:
        plant(entry.argument)  # raises on an unknown name or a wrong value
        assert entry.benign or entry.gates or entry.note, "a fault that no gate catches says why"
        assert not (entry.benign and entry.gates), "a benign change fails no gate"
    assert {entry.argument.partition("=")[0] for entry in configured} == set(FAULTS)
