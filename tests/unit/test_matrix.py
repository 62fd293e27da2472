"""The fault matrix: one row for every run, and what other rules say of the same outputs."""

import pyarrow.compute as pc
from synthetic import TOOL, World, instance

from assay import store
from assay.config import Fault
from assay.matrix import matrix, render
from assay.records import Status
from assay.verdicts.decide import judge_run
from assay.verdicts.model import ConfigInfo

FAULTS = {
    "loud": Fault(description="noise", argument="noise=1", gates=["G-hard"], note="why | how"),
    "rerun": Fault(description="again", argument="rerun", gates=[], benign=True),
}
N = 32
ARM = "served_0_load"


def write_run(folder, name, world, change=None):
    """A run of one instance whose answers are the reference's but for what `change` does to their rows."""
    items = world.items
    planned = {"sets": ["s"], "reference": {"model": "m"}}
    judge = [
        {
            "item_id": key,
            "set_id": "s",
            "arm": "judge",
            "status": "ok",
            "evidence": "E0",
            "attempts": 1,
            "text": "one two three",
            "token_ids": [1, 2, 3],
            "top_token_ids": [[1, 7], [2, 7], [3, 7]],
        }
        for key in items
    ]
    served = [row | {"arm": ARM} for row in judge]
    for row in served:
        (change or (lambda row: None))(row)
    scores = store.sort_table("scores", world.scores())
    store.write_table(folder / f"scores/{name}.parquet", "scores", scores, {})
    table = store.table_from_rows("responses", served)
    store.write_table(folder / f"outputs/{name}/0.parquet", "responses", table, {"options": planned})
    path = folder / "reference/m/s/judge.parquet"
    store.write_table(path, "responses", store.table_from_rows("responses", judge), {})
    facts = world.facts(config=ConfigInfo(name=name, modality="text"), instances=(instance(0, [ARM]),))
    verdict = judge_run(world.table(), world.margins(), facts, TOOL)
    store.write_json(folder / f"verdicts/{name}.json", verdict.model_dump(mode="json"))
    return folder / f"verdicts/{name}.json"


def passing(row):
    return [said.passes for said in row.others]


def value(row):
    return [said.value for said in row.others]


def test_a_clean_run_passes_by_every_rule(tmp_path):
    (row,) = matrix([write_run(tmp_path, "x", World())], FAULTS)
    assert (row.fault, row.benign, row.caught, row.failed) == (None, True, False, ())
    assert (row.n, passing(row), value(row)) == (N, [True, True, True], ["32/32", "", "1.000"])


def test_other_rules_judge_the_outputs_themselves(tmp_path):
    def second_choice(row):  # at the last position, in the judge's top two, which is close enough for that rule
        if row["item_id"] == "item-000000":
            row |= {"token_ids": [1, 2, 7], "text": "one two four", "top_token_ids": [[1, 7], [2, 7], [7, 3]]}

    (row,) = matrix([write_run(tmp_path, "x", World(), second_choice)], FAULTS)
    # ROUGE-L of one item: 2 of 3 words in common, precision = recall = F = 2/3.
    assert (passing(row), value(row)) == ([False, True, True], ["31/32", "", f"{(N - 1 + 2 / 3) / N:.3f}"])

    def far(row):
        if row["item_id"] == "item-000000":
            row |= {"token_ids": [1, 2, 9], "top_token_ids": [[1, 7], [2, 7], [9, 8]]}

    (row,) = matrix([write_run(tmp_path, "x", World(), far)], FAULTS)
    assert (passing(row)[:2], value(row)[0]) == ([False, False], "31/32")


def test_a_lost_answer_is_not_left_out_of_the_other_rules(tmp_path):
    def lose(row):
        if row["item_id"] == "item-000000":
            row |= {"status": "http_error", "text": None, "token_ids": None, "top_token_ids": None}

    (row,) = matrix([write_run(tmp_path, "x", World(), lose)], FAULTS)
    assert (row.n, passing(row)[:2], value(row)) == (N, [False, False], ["31/32", "", f"{(N - 1) / N:.3f}"])


def test_sampled_items_count_and_other_rules_have_nothing_to_say_of_them(tmp_path):
    path = write_run(tmp_path, "x", World())
    scores = store.read_table(tmp_path / "scores/x.parquet", "scores")
    greedy = pc.and_(pc.equal(scores["arm"], "judge"), pc.equal(scores["metric"], "margin_max"))
    store.write_table(tmp_path / "scores/x.parquet", "scores", scores.filter(pc.invert(greedy)), {})
    (row,) = matrix([path], FAULTS)
    assert (row.n, passing(row)) == (N, [None, None, None])
    assert f"| x | {N} | {row.verdict} | – | – | – | – | – |  |" in render([row], "x")


def test_a_server_of_text_alone_is_compared_by_text(tmp_path):
    def text_only(row):
        row |= {"token_ids": None, "top_token_ids": None}

    (row,) = matrix([write_run(tmp_path, "x", World(), text_only)], FAULTS)
    assert (passing(row)[:2], value(row)[0]) == ([True, None], "32/32")


def test_the_page_counts_faults_caught_and_false_alarms_apart(tmp_path):
    loud, quiet, alarm = World(), World(), World()
    for world in (loud, alarm):
        world.serve(noise=1.0)
    rows = matrix(
        [
            write_run(tmp_path, "x", quiet),
            write_run(tmp_path, "x+loud", loud),
            write_run(tmp_path, "x+rerun", alarm),
        ],
        FAULTS,
    )
    assert [row.verdict for row in rows] == [Status.PASS_WITH_CAVEAT, Status.FAIL, Status.FAIL]
    page = render(rows, "Faults of x")
    assert "**1 of 1 planted faults caught; 1 false FAIL in 2 benign runs.**" in page
    (line,) = [line for line in page.splitlines() if line.startswith("| x+loud ")]
    assert line.count(" | ") == 8 and "why \\| how" in line and "G-hard" in line
