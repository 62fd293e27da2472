"""Whose weights a result was made with is part of it, from the reference to the verdict."""

import os
import shutil
import time
from pathlib import Path

import pytest
import tiny
from sets import item, write_locked_set

from assay.canonical import sha256_file, sha256_weights
from assay.config import LocalSource, load, read_yaml
from assay.engines.plan import complete_plan, serve_plan
from assay.errors import SampleError, SourceError, StoreError
from assay.generate import Outputs, generate
from assay.judge import judge
from assay.reference import reference
from assay.sources import manifest as manifests
from assay.sources.manifest import MANIFEST, STAMP, make_manifest, verify_weights, write_manifest
from assay.store import read_json, read_provenance, write_json
from assay.verdict import _config_info

OTHER = {"files": {"model.safetensors": {"sha256": "aa", "bytes": 1}}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Manifest, and the tables that the reference and the judge make of one item with a tiny model."""
    folder = tmp_path_factory.mktemp("weights")
    model = tiny.build(folder / "model")
    pin = LocalSource(kind="local", path="$NOWHERE", files={"config.json": "0" * 64}, licence="none")
    write_manifest(make_manifest("tiny", pin, model), model)
    write_locked_set(folder / "set.parquet", [item("a", {"prompt": "Hi", "max_tokens": 2, "temperature": 0})])
    reference(model, folder / "set.parquet", "judge", {"dtype": "float32"}, folder / "responses.parquet")
    judge(
        model, {"dtype": "float32"}, [folder / "set.parquet"], [folder / "responses.parquet"], folder / "tokens.parquet"
    )
    return model / MANIFEST, folder / "responses.parquet", folder / "tokens.parquet"


def test_reference_and_judge_name_the_manifest_and_the_digest_of_their_weights(made):
    manifest, *tables = made
    for table in tables:
        record = read_provenance(table)
        assert record["inputs"][str(manifest)] == sha256_file(manifest)
        assert record["options"]["weights_sha256"] == sha256_weights(read_json(manifest))


def test_the_digest_follows_the_files_and_no_other_word_of_the_manifest():
    assert sha256_weights(OTHER | {"licence": "x"}) == sha256_weights(OTHER)
    changed = {"files": {"model.safetensors": {"sha256": "ab", "bytes": 1}}}
    renamed = {"files": {"other.safetensors": {"sha256": "aa", "bytes": 1}}}
    assert len({sha256_weights(manifest) for manifest in (OTHER, changed, renamed)}) == 3


def test_a_verdict_names_the_weights_that_were_served_and_those_that_judged(made, pytestconfig):
    folder = pytestconfig.rootpath / "config"
    served = {"files": {"model.gguf": {"sha256": "bb", "bytes": 1}}}
    plan = complete_plan(serve_plan(load(read_yaml(folder / "config.yaml"), folder), "smollm2_135m_cyllama"), served)
    info = _config_info(plan, read_provenance(made[2])["options"])
    assert (info.weights_sha256, info.judge_weights_sha256) == (
        sha256_weights(served),
        sha256_weights(read_json(made[0])),
    )
    assert info.judge_padding is None  # no audio is heard


def test_weights_that_changed_since_the_fetch_are_neither_judged_with_nor_served(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(made[0].parent, model)
    plan = {"unsupported": None, "model": {"directory": "model", "weights_sha256": sha256_weights(read_json(made[0]))}}
    write_json("plan.json", plan)
    nothing = Path("none.parquet")
    outputs = Outputs(
        *(tmp_path / "out" / name for name in ("r.parquet", "identity.json", "cleanup.json", "log", "devices"))
    )
    with pytest.raises(SampleError, match="none"):  # its clean twin: the weights are right, the sample set is not there
        generate(Path("plan.json"), [nothing], 0, outputs)
    with (model / "config.json").open("a") as file:
        file.write(" ")
    for use in (
        lambda: reference(
            model, made[1].parent / "set.parquet", "judge", {"dtype": "float32"}, tmp_path / "out.parquet"
        ),
        lambda: judge(
            model, {"dtype": "float32"}, [made[1].parent / "set.parquet"], [nothing], tmp_path / "out.parquet"
        ),
        lambda: generate(Path("plan.json"), [nothing], 0, outputs),
    ):
        with pytest.raises(SourceError, match=r"config\.json is not what was fetched"):
            use()
    fetched_anew = make_manifest(
        "tiny", LocalSource(kind="local", path="$X", files={"a": "0" * 64}, licence="x"), model
    )
    write_manifest(fetched_anew, model)
    with pytest.raises(SourceError, match="the plan names"):
        generate(Path("plan.json"), [nothing], 0, outputs)
    assert not (tmp_path / "out").exists()


# --- hashed once ---------------------------------------------------------------------------------------------------


class Store:
    """Fetched weights whose files were written long ago, and how often one of them was hashed."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.hashed = folder, 0
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(f"content of {name}")
        pin = LocalSource(kind="local", path="$NOWHERE", files={"config.json": "0" * 64}, licence="none")
        write_manifest(make_manifest("tiny", pin, folder), folder)
        monkeypatch.setattr(manifests, "sha256_file", self._count)
        monkeypatch.setattr(manifests, "SETTLED_S", -60)  # as if a minute had gone by

    def _count(self, path):
        self.hashed += 1
        return sha256_file(path)

    def verify(self):
        """The digest, and how many files had to be hashed for it."""
        before = self.hashed
        return verify_weights(self.folder), self.hashed - before


@pytest.fixture
def weights(tmp_path, monkeypatch):
    return Store(tmp_path / "weights", monkeypatch)


def test_weights_that_nobody_touched_are_hashed_once(weights):
    name = sha256_weights(read_json(weights.folder / MANIFEST))
    assert [weights.verify() for _ in range(3)] == [(name, 2), (name, 0), (name, 0)]
    (weights.folder / STAMP).unlink()
    assert weights.verify() == (name, 2)


def test_a_change_that_hides_behind_the_old_size_and_time_is_found(weights):
    weights.verify()
    path = weights.folder / "model.safetensors"
    before = path.stat()
    time.sleep(0.02)  # a tick of the file system
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(SourceError, match=r"model\.safetensors is not what was fetched"):
        weights.verify()
    with pytest.raises(SourceError, match=r"model\.safetensors is not what was fetched"):
        weights.verify()


def test_a_file_or_link_in_the_place_of_another_is_found(weights, tmp_path):
    weights.verify()
    path = weights.folder / "model.safetensors"
    before = path.stat()
    other = tmp_path / "other"
    other.write_text("Content of model.safetensors")
    for replace in (lambda: path.write_text("CONTENT OF MODEL.SAFETENSORS"), lambda: path.symlink_to(other)):
        path.unlink()
        replace()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(SourceError, match=r"model\.safetensors is not what was fetched"):
            weights.verify()


def test_files_that_were_touched_but_not_changed_are_hashed_again_and_believed(weights):
    name, _ = weights.verify()
    time.sleep(0.02)
    (weights.folder / "config.json").touch()
    assert [weights.verify() for _ in range(2)] == [(name, 2), (name, 0)]


def test_files_written_a_moment_ago_are_not_believed_yet(weights, monkeypatch):
    monkeypatch.setattr(manifests, "SETTLED_S", 60)
    assert [weights.verify()[1] for _ in range(2)] == [2, 2]
    assert not (weights.folder / STAMP).exists()


def test_another_manifest_or_a_missing_file_needs_more_than_the_stamp(weights):
    weights.verify()
    manifest = read_json(weights.folder / MANIFEST)
    manifest["files"]["config.json"]["sha256"] = "0" * 64
    write_json(weights.folder / MANIFEST, manifest)
    with pytest.raises(SourceError, match=r"config\.json is not what was fetched"):
        weights.verify()
    (weights.folder / "model.safetensors").unlink()
    with pytest.raises(SourceError):
        weights.verify()


def test_a_folder_that_may_only_be_read_is_hashed_each_time(weights, monkeypatch):
    def refuse(*_):
        raise StoreError("read-only file system")

    monkeypatch.setattr(manifests, "write_json", refuse)
    assert [weights.verify()[1] for _ in range(2)] == [2, 2]
