"""What changed between two runs, largest first."""

import numpy as np
from synthetic import TOOL, World

from assay import store
from assay.diff import Change, diff
from assay.verdicts.decide import judge_run


def write(folder, world):
    """A run's verdict and scores, laid out as the workflow does."""
    store.write_table(folder / "scores/x.parquet", "scores", store.sort_table("scores", world.scores()), {})
    verdict = judge_run(world.table(), world.margins(), world.facts(), TOOL)
    store.write_json(folder / "verdicts/x.json", verdict.model_dump(mode="json"))
    return folder / "verdicts/x.json"


def test_a_run_does_not_differ_from_itself(tmp_path):
    path = write(tmp_path, World())
    assert diff(path, path) == ([], [])


def test_item_changes_are_sorted_by_size_with_absent_values_first(tmp_path):
    before, after = World(), World()
    for world, flag in ((before, "nonfinite"), (after, "missing_as_worst")):
        world.arms["served_0_load"].undefine("kl_mean", slice(0, 16), flag)  # no value on either side
    after.arms["served_0_load"].undefine("kl_mean", 16)
    before.arms["served_0_load"].values["margin_max"][:] = 0.0
    after.arms["served_0_load"].values["margin_max"][:] = 1.0 + np.arange(32)
    _, changes = diff(write(tmp_path / "a", before), write(tmp_path / "b", after))
    assert changes[0] == Change("item-000000 0_load kl_mean", "nonfinite", "missing_as_worst")
    assert [change.after for change in changes[16:]] == ["undefined", *(str(size) for size in range(32, 0, -1))]
