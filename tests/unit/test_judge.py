"""What of a response is judged: ids of the vocabulary, as sampled or as the text encodes; and that it is once."""

import pytest
import tiny
from sets import item, write_locked_set
from transformers import LlamaConfig, LlamaForCausalLM

from assay import store
from assay.config import LocalSource
from assay.judge import judge
from assay.judging.text import sequences_of
from assay.reference import reference
from assay.references.causal_lm import CausalLM
from assay.sources.manifest import make_manifest, write_manifest

VOCABULARY = 97


@pytest.fixture(scope="module")
def model():
    made = object.__new__(CausalLM)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    made.model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    return made


def row(ids, top_ids):
    return {
        "arm": "served_0_alone",
        "status": "ok",
        "evidence": "E0",
        "finish_reason": "stop",
        "token_ids": ids,
        "token_logprobs": [-0.1] * len(ids),
        "top_token_ids": top_ids,
        "top_logprobs": [[-0.1, -2.1]] * len(ids),
    }


def test_ids_of_the_vocabulary_are_judged_with_their_top_k(model):
    (found,) = sequences_of(row([0, VOCABULARY - 1], [[0, 1], [96, 2]]), model)
    assert found.ids == (0, 96)
    assert found.top_ids.tolist() == [[0, 1], [96, 2]]


@pytest.mark.parametrize("outside", [VOCABULARY, -1, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_not_judged(model, outside):
    assert sequences_of(row([0, outside], [[0, 1], [96, 2]]), model) == []


@pytest.mark.parametrize("outside", [VOCABULARY, -1])
def test_top_k_with_an_id_outside_the_vocabulary_is_left_out(model, outside):
    (found,) = sequences_of(row([0, 96], [[0, 1], [96, outside]]), model)
    assert (found.ids, found.top_ids, found.top_logprobs) == ((0, 96), None, None)


# --- several arms ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """A tiny model, three items, and what the judge and a floor arm answer to them: the same."""
    folder = tmp_path_factory.mktemp("arms")
    weights = tiny.build(folder / "model")
    pin = LocalSource(kind="local", path="$NOWHERE", files={"config.json": "0" * 64}, licence="none")
    write_manifest(make_manifest("tiny", pin, weights), weights)
    request = {"max_tokens": 3, "temperature": 0}
    write_locked_set(folder / "set.parquet", [item(key, {"prompt": f"{key}!", **request}) for key in "abc"])
    for arm in ("judge", "float32-batch"):
        reference(weights, folder / "set.parquet", arm, {"dtype": "float32"}, folder / f"{arm}.parquet")
    return folder


@pytest.fixture
def forced(monkeypatch):
    """The sequences that the model is asked for."""
    asked, force = [], CausalLM.force
    monkeypatch.setattr(
        CausalLM, "force", lambda self, prompt, ids, *rest: asked.append(ids) or force(self, prompt, ids, *rest)
    )
    return asked


def judged(folder, *arms):
    output = folder / f"judged-{'-'.join(arms)}.parquet"
    judge(
        folder / "model",
        {"dtype": "float32"},
        [folder / "set.parquet"],
        [folder / f"{arm}.parquet" for arm in arms],
        output,
    )
    return output


def test_what_several_arms_answer_alike_is_forced_once_and_each_has_the_rows_that_it_would_have_alone(answered, forced):
    alone = judged(answered, "judge"), judged(answered, "float32-batch")
    once = len(forced) // 2
    both = judged(answered, "judge", "float32-batch")
    assert len(forced) == 3 * once
    rows = sorted(
        (row for path in alone for row in store.read_rows(path, "tokens")),
        key=lambda row: [row[key] for key in store.SORT_KEYS["tokens"]],
    )
    assert store.read_rows(both, "tokens") == rows


def test_an_answer_unlike_the_others_is_forced_for_itself(answered, forced):
    rows = store.read_rows(answered / "float32-batch.parquet", "responses")
    rows[1]["token_ids"][0] += 1
    made = store.read_provenance(answered / "float32-batch.parquet")
    table = store.table_from_rows("responses", rows)
    store.write_table(answered / "float32-other.parquet", "responses", table, made)
    judged(answered, "judge", "float32-batch")
    alike = len(forced)
    judged(answered, "judge", "float32-other")
    assert len(forced) - alike == alike + 1
    assert tuple(rows[1]["token_ids"]) in forced[alike:]


def test_a_row_group_holds_whole_items_with_all_their_arms(answered, monkeypatch):
    monkeypatch.setattr(store, "ITEMS_PER_ROW_GROUP", 2)
    groups = store.iter_tables(judged(answered, "judge", "float32-batch"), "tokens")
    found = [{(row["item_id"], row["arm"]) for row in table.to_pylist()} for table in groups]
    assert found == [{(key, arm) for key in keys for arm in ("judge", "float32-batch")} for keys in ("ab", "c")]
