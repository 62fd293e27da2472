"""Whose weights a result was made with is part of it, from the reference to the verdict."""

import pytest
import tiny
from sets import item, write_locked_set

from assay.canonical import sha256_file, sha256_weights
from assay.config import load, read_yaml
from assay.engines.plan import complete_plan, serve_plan
from assay.judge import judge
from assay.reference import reference
from assay.store import read_provenance, write_json
from assay.verdict import _config_info

MANIFEST = {"files": {"model.safetensors": {"sha256": "aa", "bytes": 1}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Manifest, and the tables that the reference and the judge make of one item with a tiny model."""
    folder = tmp_path_factory.mktemp("weights")
    model = tiny.build(folder / "model")
    write_json(model / "manifest.json", MANIFEST)
    write_locked_set(folder / "set.parquet", [item("a", {"prompt": "Hi", "max_tokens": 2, "temperature": 0})])
    reference(model, folder / "set.parquet", "judge", "float32", folder / "responses.parquet")
    judge(model, "float32", [folder / "set.parquet"], folder / "responses.parquet", folder / "tokens.parquet")
    return model / "manifest.json", folder / "responses.parquet", folder / "tokens.parquet"


def test_reference_and_judge_name_the_manifest_and_the_digest_of_their_weights(made):
    manifest, *tables = made
    for table in tables:
        record = read_provenance(table)
        assert record["inputs"][str(manifest)] == sha256_file(manifest)
        assert record["options"]["weights_sha256"] == sha256_weights(MANIFEST)


def test_the_digest_follows_the_files_and_no_other_word_of_the_manifest():
    assert sha256_weights(MANIFEST | {"licence": "x"}) == sha256_weights(MANIFEST)
    changed = {"files": {"model.safetensors": {"sha256": "ab", "bytes": 1}}}
    renamed = {"files": {"other.safetensors": {"sha256": "aa", "bytes": 1}}}
    assert len({sha256_weights(manifest) for manifest in (MANIFEST, changed, renamed)}) == 3


def test_a_verdict_names_the_weights_that_were_served_and_those_that_judged(made, pytestconfig):
    folder = pytestconfig.rootpath / "config"
    served = {"files": {"model.gguf": {"sha256": "bb", "bytes": 1}}}
    plan = complete_plan(serve_plan(load(read_yaml(folder / "config.yaml"), folder), "smollm2_135m_cyllama"), served)
    info = _config_info(plan, read_provenance(made[2])["options"])
    assert (info.weights_sha256, info.judge_weights_sha256) == (sha256_weights(served), sha256_weights(MANIFEST))
