"""A verdict follows from its scores bit for bit, or the difference is named."""

import numpy as np
import pytest
from synthetic import TOOL, World

from assay import store
from assay.errors import StoreError
from assay.verdicts.decide import judge_run
from assay.verdicts.model import ConfigInfo, parse_verdict
from assay.verdicts.verify import verify


@pytest.fixture
def written(tmp_path):
    world = World(needles=4)
    world.control("noise", "G-logprob", noise=0.5)
    world.arms["served_0_load"].fail(2)
    return write(tmp_path, world, failures={("served_0_load", "item-000002"): "HTTP 500"}, retried=1)


def write(folder, world, **facts):
    store.write_table(folder / "scores.parquet", "scores", store.sort_table("scores", world.scores()), {})
    store.write_table(folder / "floor.parquet", "floor", world.floor(), {})
    verdict = judge_run(world.table(), world.margins(), world.facts(**facts), TOOL)
    store.write_json(folder / "verdict.json", verdict.model_dump(mode="json"))
    return folder


def check(folder, **changes):
    verdict = parse_verdict(store.read_json(folder / "verdict.json") | changes, "verdict.json")
    return verify(verdict, folder / "scores.parquet", folder / "floor.parquet")


def test_an_untouched_verdict_is_recomputed_bit_for_bit(written):
    assert check(written) == []


def test_a_tag_that_was_run_is_recorded_and_its_caveat_recomputed(tmp_path):
    world = World()
    folder = write(
        tmp_path, world, config=ConfigInfo(name="x", modality="text", dtype=world.dtype, image_by_tag="org/engine:v1")
    )
    assert check(folder) == []
    assert [entry.path for entry in check(folder, caveats=[])] == ["caveats"]


def test_a_changed_reason_is_found(written):
    assert [entry.path for entry in check(written, reason="all is well")] == ["reason"]


def test_changed_options_are_found_with_all_that_follows(written):
    options = store.read_json(written / "verdict.json")["options"] | {"kappa": 9.0}
    paths = {entry.path.split("[")[0] for entry in check(written, options=options)}
    assert {"options_sha256", "gates"} <= paths


def test_changed_scores_are_found(written):
    world = World(needles=4, seed=1)
    store.write_table(written / "scores.parquet", "scores", world.scores(), {})
    assert check(written)


def test_changed_floor_margins_are_found(written):
    floor = store.read_table(written / "floor.parquet", "floor")
    halved = floor.set_column(4, floor.schema.field(4), [np.array(floor["value"]) / 2])
    store.write_table(written / "floor.parquet", "floor", halved, {})
    assert any("threshold" in entry.path for entry in check(written))


def test_an_item_dropped_from_the_scores_is_found(written):
    scores = store.read_table(written / "scores.parquet", "scores")
    kept = scores.filter([item != "item-000007" for item in scores["item_id"].to_pylist()])
    store.write_table(written / "scores.parquet", "scores", kept, {})
    assert [entry.path for entry in check(written)] == ["samples.items_sha256"]


def test_scores_with_a_row_twice_are_refused(written):
    scores = store.read_table(written / "scores.parquet", "scores")
    import pyarrow as pa

    store.write_table(written / "scores.parquet", "scores", pa.concat_tables([scores, scores.slice(0, 1)]), {})
    with pytest.raises(StoreError, match="a row twice"):
        check(written)
