"""What of a response is judged: ids of the vocabulary, as sampled or as the text encodes."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from assay.judging.text import sequences_of
from assay.references.causal_lm import CausalLM

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
