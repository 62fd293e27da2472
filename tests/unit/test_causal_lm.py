"""The reference: benign changes are benign, and teacher forcing gives the numbers that generating gave."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.references.arms import ArmSettings, arm_settings
from assay.references.causal_lm import CausalLM, Prompt, Sampling, batches


@pytest.fixture(scope="module")
def tiny():
    """A random two-layer Llama in float32; weights scaled so that its choices are not all ties."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def lm(model, settings=None, eos=()):
    made = object.__new__(CausalLM)
    made.settings = settings or ArmSettings("float32")
    made.model = model
    made.eos_ids = frozenset(eos or {96})
    return made


def prompts(lengths, max_tokens=12, sampling=None):
    generator = np.random.default_rng(1)
    return [
        Prompt(f"item{n}", generator.integers(0, 95, n).tolist(), max_tokens, sampling or Sampling()) for n in lengths
    ]


def generate(model, wanted):
    return {done.item_id: done for done in model.generate(wanted)}


def test_greedy_generation_is_transformers_own(tiny):
    for prompt in prompts([1, 7, 20]):
        expected = tiny.generate(
            torch.tensor([prompt.ids]), max_new_tokens=12, do_sample=False, eos_token_id=96, pad_token_id=0
        )[0, len(prompt.ids) :]
        assert generate(lm(tiny), [prompt])[prompt.item_id].token_ids == expected.tolist()


@pytest.mark.parametrize(
    "settings",
    [ArmSettings("float32", batch=16), ArmSettings("float32", batch=1), ArmSettings("float32", prefill_chunk=4)],
)
def test_batching_padding_and_chunking_change_nothing_but_rounding(tiny, settings):
    wanted = prompts([1, 2, 3, 9, 17, 33])
    base, other = generate(lm(tiny), wanted), generate(lm(tiny, settings), wanted)
    for key in base:
        assert base[key].token_ids == other[key].token_ids
        np.testing.assert_allclose(base[key].logprobs, other[key].logprobs, atol=1e-4)


def test_everything_is_computed_where_the_model_is(tiny):
    wanted = prompts([2, 9]) + prompts([5], sampling=Sampling(1.0, 0.9, 20, seed=3))
    model = lm(tiny, ArmSettings("float32", prefill_chunk=4))

    def everything():
        done = generate(model, wanted)
        return [*done.values(), *(model.force(one, [1, 2, 3], np.array([[4], [5], [6]])) for one in wanted)]

    expected = everything()
    with torch.device("meta"):  # a tensor that is made without saying where has no values
        found = everything()
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_equal(one, other)


def test_forcing_the_generated_tokens_gives_their_logprobs_and_zero_margins(tiny):
    model = lm(tiny)
    for prompt in prompts([3, 18]):
        done = generate(model, [prompt])[prompt.item_id]
        forced = model.force(prompt, done.token_ids, np.array(done.top_ids))
        np.testing.assert_allclose(forced.lp_judge, done.logprobs, atol=1e-4)
        np.testing.assert_allclose(forced.at, done.top_logprobs, atol=1e-4)
        np.testing.assert_allclose(forced.lp_judge_max, forced.lp_judge, atol=1e-6)
        assert (forced.judge_rank == 1).all()


def test_a_wrong_token_shows_its_margin_and_rank(tiny):
    model = lm(tiny)
    (prompt,) = prompts([5])
    done = generate(model, [prompt])[prompt.item_id]
    ids = [*done.token_ids]
    ids[4] = done.top_ids[4][2]
    forced = model.force(prompt, ids)
    assert forced.judge_rank[4] == 3
    margin = forced.lp_judge_max[4] - forced.lp_judge[4]
    assert math.isclose(margin, done.top_logprobs[4][0] - done.top_logprobs[4][2], abs_tol=1e-4)


def test_generation_stops_at_eos_and_says_so(tiny):
    (prompt,) = prompts([5])
    free = generate(lm(tiny), [prompt])[prompt.item_id]
    stop = free.token_ids[3]
    done = generate(lm(tiny, eos={stop}), [prompt])[prompt.item_id]
    assert done.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (done.finish_reason, free.finish_reason) == ("stop", "length")


def test_the_asked_distribution_applies_temperature_then_top_k_then_top_p():
    # p = .5 .3 .2; at T=.5 squares: .25 .09 .04 / .38 = .6579 .2368 .1053
    raw = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    np.testing.assert_allclose(Sampling(0.5).logprobs(raw).exp(), [[0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]], rtol=1e-5)
    # top-k 2 keeps .5 and .3 -> 5/8, 3/8
    np.testing.assert_allclose(Sampling(1.0, top_k=2).logprobs(raw).exp(), [[0.625, 0.375, 0]], rtol=1e-5)
    # top-p .6: .5 < .6, so the token that crosses (.3) is kept -> 5/8, 3/8; top-p .49: .5 alone reaches it
    np.testing.assert_allclose(Sampling(1.0, top_p=0.6).logprobs(raw).exp(), [[0.625, 0.375, 0]], rtol=1e-5)
    np.testing.assert_allclose(Sampling(1.0, top_p=0.49).logprobs(raw).exp(), [[1, 0, 0]], rtol=1e-5)
    assert Sampling(0).logprobs(raw) is raw


def test_entropy_and_variance_are_those_of_the_asked_distribution(tiny):
    model = lm(tiny)
    (prompt,) = prompts([6], sampling=Sampling(0.7, top_p=0.9, seed=3))
    done = generate(model, [prompt])[prompt.item_id]
    forced = model.force(prompt, done.token_ids)
    assert forced.in_support.all()
    logits = tiny(torch.tensor([[*prompt.ids, *done.token_ids]])).logits[0, len(prompt.ids) - 1 : -1]
    p = prompt.sampling.logprobs(torch.log_softmax(logits.float(), -1)).exp().double().detach().numpy()
    surprisal = -np.log(np.where(p > 0, p, 1))
    np.testing.assert_allclose(forced.entropy, (p * surprisal).sum(-1), atol=1e-4)
    np.testing.assert_allclose(forced.variance, (p * surprisal**2).sum(-1) - (p * surprisal).sum(-1) ** 2, atol=1e-3)


def test_the_same_seed_samples_the_same_whatever_the_batch(tiny):
    wanted = prompts([4, 4, 9, 12], sampling=Sampling(1.0, seed=5))
    alone, batched = generate(lm(tiny, ArmSettings("float32", batch=1)), wanted), generate(lm(tiny), wanted)
    assert {key: done.token_ids for key, done in alone.items()} == {
        key: done.token_ids for key, done in batched.items()
    }


def test_each_floor_arm_differs_from_the_base_of_its_dtype_in_one_field():
    base = ArmSettings("bfloat16")
    for change in ("batch", "attention", "chunked", "matmul"):
        arm = arm_settings(f"bfloat16-{change}", {"dtype": "float32"})
        differing = [name for name in base.__dataclass_fields__ if getattr(base, name) != getattr(arm, name)]
        assert len(differing) == 1, change
    assert arm_settings("judge", {"dtype": "float32"}) == ArmSettings("float32")


def test_batches_hold_like_lengths_and_every_prompt_once():
    made = [
        Prompt(f"{n}-{i}", [0] * n, 1, Sampling()) for n, i in [(995, 0), (40, 0), (40, 1), (44, 0), (1000, 0), (1, 0)]
    ]
    found = list(batches(made, 4))
    assert [[len(prompt.ids) for prompt in batch] for batch in found] == [[1, 40, 40, 44], [995, 1000]]
    assert max(len(batch) for batch in batches(made * 9, 8)) == 8


@pytest.fixture
def bytewise():
    """A tokenizer of single bytes, as text falls into where no merge fits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = object.__new__(CausalLM)
    made.tokenizer, made.eos_ids = PreTrainedTokenizerFast(tokenizer_object=raw), frozenset({999})
    return made


def test_text_is_encoded_again_with_the_eos_that_a_stop_implies(bytewise):
    ids = bytewise.retokenise("né", "length")
    assert bytewise.tokenizer.decode(ids) == "né"
    assert bytewise.retokenise("né", "stop") == [*ids, 999]


def test_a_character_cut_by_the_token_limit_is_left_out_and_one_lost_inside_proves_nothing(bytewise):
    assert bytewise.retokenise("n�", "length") == bytewise.retokenise("n", "length")
    assert bytewise.retokenise("n�x", "length") is None
    assert bytewise.retokenise("n�", "stop") is None
