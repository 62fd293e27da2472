"""Transcripts are judged by a Whisper that fills up the last window as their engine says it does, and by no other."""

import numpy as np
import pytest
import tiny_whisper
from sets import item, write_locked_set
from transcripts import FLOORS, OPTIONS, PLAN, SERVED

from assay import store
from assay.config import LocalSource
from assay.judge import judge
from assay.media.audio import encode_wav
from assay.records import Status
from assay.reference import reference
from assay.score import score
from assay.scoring.rows import Files
from assay.sources.manifest import make_manifest, write_manifest
from assay.verdict import _config_info
from assay.verdicts.asr.suite import ASR
from assay.verdicts.scoretable import ScoreTable, floor_values

PADDINGS = ["audio", "features"]
RATE = 16_000
KEYS = [f"item-{number:02d}" for number in range(10)]
REFERENCE = ["judge", *FLOORS]


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """A tiny Whisper, clips of one second to ten, and what references of both paddings hear in them."""
    folder = tmp_path_factory.mktemp("padding")
    model = tiny_whisper.build(folder / "model", seed=0)
    pin = LocalSource(kind="local", path="$NOWHERE", files={"config.json": "0" * 64}, licence="none")
    write_manifest(make_manifest("tiny", pin, model), model)
    rows = []
    for number, key in enumerate(KEYS):
        noise = np.random.default_rng(number).normal(0, 0.1, RATE * (1 + number)).astype(np.float32)
        audio = {"bytes": encode_wav(noise, RATE), "path": "a.wav"}
        request = {"file": "a.wav", "language": "en", "temperature": 0}
        rows.append(item(key, request, expected="a b", kind="transcription") | {"modality": "asr", "audio": audio})
    write_locked_set(folder / "set.parquet", rows)
    for padding in PADDINGS:
        for arm in REFERENCE:
            output = folder / padding / f"{arm}.parquet"
            reference(model, folder / "set.parquet", arm, {"dtype": "float32", "padding": padding}, output)
    return folder


def served(folder, padding):
    """Responses of a server that pads so: the judge's own, under the names of its passes."""
    rows = store.read_rows(folder / padding / "judge.parquet", "responses")
    paths = []
    for number, arms in SERVED.items():
        answers = store.table_from_rows("responses", [row | {"arm": arm} for arm in arms for row in rows])
        paths.append(folder / f"served-{number}-{padding}.parquet")
        store.write_table(paths[-1], "responses", answers, {"options": PLAN})
    return paths


def judged(folder, padding, responses, name):
    path = folder / f"judged-{name}-{padding}.parquet"
    judge(folder / "model", {"dtype": "float32", "padding": padding}, [folder / "set.parquet"], responses, path)
    return path


def gates(folder, engine, declared):
    """Gates of a server that pads as `engine`, where its arm says `declared`."""
    answers = served(folder, engine)
    references = [folder / declared / f"{arm}.parquet" for arm in REFERENCE]
    paths = folder / "scores.parquet", folder / "floor.parquet"
    score(
        [folder / "set.parquet"],
        Files(answers, [judged(folder, declared, answers, f"served-{engine}")]),
        Files(references, [judged(folder, declared, references, "reference")]),
        folder / "model",
        OPTIONS.model_dump(mode="json"),
        *paths,
    )
    table = ScoreTable.from_tables(store.iter_tables(paths[0], "scores"), KEYS)
    floor = ASR.cut_floor(table, floor_values(store.iter_tables(paths[1], "floor")), FLOORS, "float32", OPTIONS)
    found = ASR.evaluate(table, floor, SERVED, "float32", OPTIONS)
    return {gate.id: gate for gate in found if gate.arm == "served_0_alone"}


@pytest.mark.parametrize("padding", PADDINGS)
def test_an_engine_that_pads_as_its_arm_says_differs_in_nothing(heard, padding):
    found = gates(heard, padding, padding)
    assert found["G-hard"].status is Status.PASS
    assert found["G-hard"].value == found["G-mean"].value == 0


@pytest.mark.parametrize(("engine", "declared"), [PADDINGS, PADDINGS[::-1]])
def test_an_engine_that_pads_otherwise_than_its_arm_says_fails(heard, engine, declared):
    assert gates(heard, engine, declared)["G-hard"].status is Status.FAIL


@pytest.mark.parametrize("padding", PADDINGS)
def test_the_padding_is_in_the_records_of_reference_and_judge_and_in_the_verdict(heard, padding):
    table = judged(heard, padding, [heard / padding / f"{arm}.parquet" for arm in REFERENCE], "reference")
    options = [store.read_provenance(path)["options"] for path in (table, heard / padding / "float32-batch.parquet")]
    assert [found["settings"]["padding"] for found in options] == [padding, padding]
    plan = dict.fromkeys(("config", "family", "arm", "dtype", "tier", "fault")) | {"config": "x", "modality": "asr"}
    plan["model"] = {"name": "tiny", "weights_sha256": None}
    assert _config_info(plan, options[0]).judge_padding == padding
