"""A plan is written when everything in it is possible: what its arm's client can ask for, too."""

import json

import pytest
from sets import item, write_locked_set
from sites import checkouts, on, pinned

from assay.canonical import sha256_weights
from assay.client.mstar import form
from assay.config import MstarModel
from assay.engines.plan import serve_plan
from assay.errors import ConfigError
from assay.samples.build import build_items
from assay.samples.recipe import read_recipe
from assay.serve_config import serve_config
from assay.store import read_json, write_json

MANIFEST = {"files": {"model.safetensors": {"sha256": "aa", "bytes": 1}}}
USER = {"role": "user", "content": "Hi"}
SAID = {"max_tokens": 3, "temperature": 0}
SINGLE = {"messages": [USER], **SAID}
REFUSED = {
    "system": {"messages": [{"role": "system", "content": "Be brief"}, USER], **SAID},
    "turns": {"messages": [USER, {"role": "assistant", "content": "Hello"}, USER], **SAID},
    "raw": {"prompt": "Once", **SAID},
    "unmapped": {**SINGLE, "top_k": 5},
}


@pytest.fixture
def write(tmp_path):
    """A function that plans qwen3_5_9b_mstar for some requests, and gives what was written."""

    def plan(requests, name="qwen3_5_9b_mstar"):
        output, manifest, items = (tmp_path / file for file in ("plan.json", "manifest.json", "set.parquet"))
        write_json(manifest, MANIFEST)
        write_locked_set(items, [item(key, request) for key, request in requests.items()])
        config = pinned(on("mi300x", trees=checkouts(tmp_path / "trees")))
        serve_config(serve_plan(config, name), manifest, [items] if requests else [], output)
        return read_json(output)

    plan.output = tmp_path / "plan.json"
    return plan


def test_a_plan_whose_items_can_be_asked_for_is_written_with_its_weights(write):
    plan = write({"a": SINGLE, "b": {**SINGLE, "seed": 1, "top_p": 0.9}})
    assert plan["model"]["weights_sha256"] == sha256_weights(MANIFEST)
    assert plan["sets"] == ["text_single_smoke", "needles_smoke"]


@pytest.mark.parametrize("kind", REFUSED)
def test_an_item_that_the_protocol_has_no_words_for_is_refused_before_anything_starts(write, kind):
    message = rf"'qwen3_5_9b_mstar': arm 'mstar' cannot be asked for 1 of 2 items, first '{kind}': .*Set `sets`"
    with pytest.raises(ConfigError, match=message):
        write({"a": SINGLE, kind: REFUSED[kind]})
    assert not write.output.exists()


def test_a_client_that_can_say_more_is_asked_more(write):
    texts = {key: request for key, request in REFUSED.items() if key != "unmapped"}
    assert write({"a": SINGLE, **texts}, "qwen3_5_9b_vllm")["arm"] == "vllm"


def test_an_unsupported_config_is_written_as_it_is(write):
    assert write({}, "qwen3_omni")["unsupported"]


def test_mstar_can_be_asked_for_all_of_the_sets_of_its_config_and_not_of_its_family(fetched):
    resources = fetched("lm_eval", "django", "more_itertools", "smollm2_135m")
    config = on("mi300x")
    model = MstarModel.model_validate(config.arms["mstar"].client.models["qwen3_5_9b"])
    folder = resources.parent / "samplesets"

    def refused(name):
        found = 0
        for row in build_items(name, read_recipe(name, folder), resources):
            try:
                form(model, json.loads(row["request"]))
            except ConfigError:
                found += 1
        return found

    assert [refused(name) for name in config.resolve("qwen3_5_9b_mstar").sets] == [0, 0]
    assert refused("text_smoke")
