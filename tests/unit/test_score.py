"""Scoring: every planned item has its scores, failures count as the worst case, controls look like served arms."""

import json
from itertools import chain

import numpy as np
import pytest
from sets import item, write_locked_set
from tokenizers import Tokenizer, models, pre_tokenizers

from assay import store
from assay.config import TextGates
from assay.score import score
from assay.scoring.rows import Files
from assay.tokens import ID_COLUMNS, split_ids

EOS, BOS = 1, 0
WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "d": 5}
OPTIONS = TextGates().model_dump(mode="json")
PLAN = {
    "config": "toy",
    "modality": "text",
    "instances": [[{"name": "alone", "concurrency": 1}]],
    "client": {"logprobs": True},
    "reference": {"arms": ["judge", "float32-batch"]},
}


def response(item_id, arm, ids, **more):
    text = " ".join(word for index in ids for word, value in WORDS.items() if value == index and index > 1)
    base = {
        "item_id": item_id,
        "set_id": "set",
        "arm": arm,
        "status": "ok",
        "finish_reason": "stop" if ids[-1] == EOS else "length",
        "evidence": "E0",
        "attempts": 1,
        "prompt_tokens": 3,
        "output_tokens": len(ids),
        "text": text,
        "prompt_token_ids": [BOS, 2, 3],
        "token_ids": ids,
    }
    return base | more


def tokens(item_id, arm, ids, margins, path="ids", served=None):
    """Judged tokens: the judge's best has logprob -0.1, the served one trails by `margins`."""
    rows = []
    for pos, (token, margin) in enumerate(zip(ids, margins, strict=True)):
        lp = np.float32(-0.1 - margin)
        rows.append(
            {
                "item_id": item_id,
                "set_id": "set",
                "arm": arm,
                "path": path,
                "pos": pos,
                "token_id": token,
                "is_special": token == EOS,
                "lp_served": None if served is None else served[pos],
                "lp_judge": lp,
                "lp_judge_max": np.float32(-0.1),
                "judge_rank": 1 if margin == 0 else 2,
                "entropy": 0.5,
                "variance": 0.25,
                "lp_asked": lp,
                "in_support": True,
                "judge_top_ids": [2, 3],
                "judge_top_lp": [-0.1, -2.1],
                "served_top_lp": None if served is None else [-0.1, -2.1],
                "served_top_lp_judge": None if served is None else [-0.1, -2.1],
            }
        )
    return rows


class Toy:
    """One config with a judge, one floor arm and one served pass over some items."""

    def __init__(self, path):
        self.path = path
        self.items = []
        self.responses, self.judged = ({"outputs": {}, "reference": {}} for _ in range(2))

    def plan_item(self, item_id, expected=None, temperature=0, max_tokens=4):
        request = {"prompt": item_id, "max_tokens": max_tokens, "temperature": temperature}
        self.items.append(item(item_id, request, expected=expected))

    def arm(self, name, responses, judged):
        folder = "outputs" if name.startswith("served") else "reference"
        options = PLAN if name.startswith("served") else {"eos_ids": [EOS], "bos_id": BOS}
        path = self.path / folder / f"{name}.parquet"
        store.write_table(path, "responses", store.table_from_rows("responses", responses), {"options": options})
        self.responses[folder][name] = path
        self.judged[folder][name] = judged

    def same(self, name, margins=None):
        """An arm that answers like the judge."""
        served = name.startswith("served")
        rows, judged = [], []
        for entry in self.items:
            ids = [2, 3, EOS]
            rows.append(response(entry["item_id"], name, ids))
            given = (margins or {}).get(entry["item_id"], [0.0, 0.0, 0.0])
            judged += tokens(
                entry["item_id"], name, ids, given, served=[-0.1] * 3 if served or name == "judge" else None
            )
        self.arm(name, rows, judged)

    def files(self, folder):
        """Responses of each arm, and the judged tokens of all of them."""
        path = self.path / f"judged-{folder}.parquet"
        rows = chain.from_iterable(self.judged[folder].values())
        store.write_table(path, "tokens", store.table_from_rows("tokens", rows), {"options": {}})
        return Files([*self.responses[folder].values()], [path])

    def score(self):
        set_path = self.path / "set.parquet"
        write_locked_set(set_path, self.items)
        tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<s>", "</s>"])
        tokenizer.save(str(self.path / "tokenizer.json"))
        scores, floor = self.path / "scores.parquet", self.path / "floor.parquet"
        score([set_path], self.files("outputs"), self.files("reference"), self.path, OPTIONS, scores, floor)
        rows = store.read_rows(scores, "scores")
        keyed = {(row["arm"], row["item_id"], row["metric"]): row for row in rows}
        assert len(keyed) == len(rows), "a score was written twice"
        return keyed, store.read_rows(floor, "floor")


@pytest.fixture
def toy(tmp_path):
    made = Toy(tmp_path)
    for name in ("x", "y", "z"):
        made.plan_item(name)
    return made


def test_scores_of_an_arm_are_those_of_its_tokens(toy):
    toy.same("judge")
    toy.same("float32-batch")
    toy.same("served_0_alone", {"y": [0.0, 0.75, 0.0]})
    scores, _ = toy.score()
    worst = scores["served_0_alone", "y", "margin_max"]
    assert worst["value"] == pytest.approx(0.75, abs=1e-6)
    assert dict(worst["aux"])["pos"] == 1
    # clip 0.5: (0 + 0.5 + 0) / 3
    assert scores["served_0_alone", "y", "margin_mean"]["value"] == pytest.approx(0.5 / 3)
    assert scores["served_0_alone", "x", "margin_max"]["value"] == 0
    assert scores["served_0_alone", "x", "exact"]["value"] == 1
    # served logprob -0.1 where the judge has -0.1, -0.85, -0.1: rms = 0.75 / sqrt(3)
    assert scores["served_0_alone", "y", "logprob_rms"]["value"] == pytest.approx(0.75 / 3**0.5, abs=1e-6)
    assert scores["served_0_alone", "x", "kl_mean"]["value"] == pytest.approx(0, abs=1e-9)


def test_a_failed_item_and_an_absent_one_count_as_the_worst_case(toy):
    toy.same("judge")
    toy.same("float32-batch")
    rows = [response("x", "served_0_alone", [2, 3, EOS]), response("y", "served_0_alone", [2], status="http_error")]
    toy.arm("served_0_alone", rows, tokens("x", "served_0_alone", [2, 3, EOS], [0, 0, 0], served=[-0.1] * 3))
    scores, _ = toy.score()
    for name in ("y", "z"):
        assert scores["served_0_alone", name, "answered"]["value"] == 0
        for metric in ("margin_max", "margin_mean", "logprob_rms", "kl_mean", "exact"):
            row = scores["served_0_alone", name, metric]
            assert (row["value"], row["flag"]) == (None, "missing_as_worst")
    assert scores["served_0_alone", "x", "answered"]["value"] == 1


def test_the_floor_holds_every_positive_margin_of_floor_arms_alone(toy):
    toy.same("judge", {"x": [0.3, 0, 0]})
    toy.same("float32-batch", {"x": [0.1, 0, 0.2], "z": [0, 0.4, 0]})
    toy.same("served_0_alone", {"x": [9, 9, 9]})
    _, floor = toy.score()
    assert [(row["item_id"], row["arm"], round(row["value"], 4)) for row in floor] == [
        ("x", "float32-batch", 0.1),
        ("x", "float32-batch", 0.2),
        ("z", "float32-batch", 0.4),
    ]


def test_planted_controls_change_what_they_say_and_nothing_is_planted_on_served_arms(toy):
    for name in ("judge", "float32-batch", "served_0_alone"):
        toy.same(name)
    scores, _ = toy.score()
    arms = {arm for arm, _, _ in scores}
    assert {"control_second_best", "control_unanswered", "control_extra_prompt_token"} <= arms
    assert [scores["control_unanswered", name, "answered"]["value"] for name in "xyz"].count(0) == 1
    assert not scores["control_extra_prompt_token", "x", "prompt_equal"]["value"]
    assert scores["judge", "x", "prompt_equal"]["value"] == 1
    assert scores["judge", "x", "margin_max"]["value"] == 0


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        ({"prompt_token_ids": [BOS, 2, 3, 3]}, "prompt_equal"),
        ({"prompt_token_ids": [BOS, BOS, 2, 3]}, "bos_ok"),
        ({"prompt_token_ids": None, "prompt_tokens": 4}, "prompt_equal"),
        ({"finish_reason": "length"}, "finish_ok"),
        ({"text": "A B"}, "text_ok"),
        ({"text": "a"}, "text_ok"),
        ({"output_tokens": 4}, "usage_ok"),
    ],
)
def test_each_breach_of_structure_is_seen_and_its_clean_twin_is_not(toy, change, metric):
    toy.same("judge")
    toy.same("float32-batch")
    rows = [response(name, "served_0_alone", [2, 3, EOS]) for name in ("x", "y", "z")]
    rows[0] |= change
    judged = [
        row for name in "xyz" for row in tokens(name, "served_0_alone", [2, 3, EOS], [0, 0, 0], served=[-0.1] * 3)
    ]
    toy.arm("served_0_alone", rows, judged)
    scores, _ = toy.score()
    assert scores["served_0_alone", "x", metric]["value"] == 0
    assert scores["served_0_alone", "y", metric]["value"] == 1


def test_tokens_after_the_end_of_sequence_are_counted(toy):
    toy.same("judge")
    toy.same("float32-batch")
    ids = [2, EOS, 3, 4]
    rows = [response(name, "served_0_alone", ids) for name in "xyz"]
    judged = [row for name in "xyz" for row in tokens(name, "served_0_alone", ids, [0] * 4, served=[-0.1] * 4)]
    toy.arm("served_0_alone", rows, judged)
    scores, _ = toy.score()
    assert scores["served_0_alone", "x", "tokens_after_eos"]["value"] == 2


def test_needles_are_right_only_as_a_number_of_their_own(tmp_path):
    toy = Toy(tmp_path)
    for name in ("right", "wrong"):
        toy.plan_item(name, expected="48213")
    for arm in ("judge", "float32-batch", "served_0_alone"):
        rows = [
            response("right", arm, [2, 3, EOS], text="It is 48,213."),
            response("wrong", arm, [2, 3, EOS], text="It is 482130."),
        ]
        judged = [row for name in ("right", "wrong") for row in tokens(name, arm, [2, 3, EOS], [0, 0, 0])]
        toy.arm(arm, rows, judged)
    scores, _ = toy.score()
    assert scores["served_0_alone", "right", "needle"]["value"] == 1
    assert scores["served_0_alone", "wrong", "needle"]["value"] == 0
    assert scores["control_wrong_number", "right", "needle"]["value"] == 0


def test_text_evidence_sends_the_floor_through_text_as_well(toy):
    toy.same("judge")
    rows = [response(name, "float32-batch", [2, 3, EOS]) for name in "xyz"]
    judged = [row for name in "xyz" for row in tokens(name, "float32-batch", [2, 3, EOS], [0, 0, 0])]
    judged += tokens("x", "float32-batch", [2, 3], [0.25, 0], path="text")
    toy.arm("float32-batch", rows, judged)
    served = [response(name, "served_0_alone", [2, 3, EOS], evidence="E2", token_ids=None) for name in "xyz"]
    by_text = [row for name in "xy" for row in tokens(name, "served_0_alone", [2, 3, EOS], [0, 0, 0], path="text")]
    toy.arm("served_0_alone", served, by_text)
    scores, _ = toy.score()
    assert scores["float32-batch", "x", "margin_max"]["value"] == pytest.approx(0.25, abs=1e-6)
    assert scores["float32-batch", "y", "margin_max"]["value"] == 0
    assert scores["served_0_alone", "x", "evidence"]["value"] == 2
    # z answered, but its text did not survive encoding and decoding: it was not judged and proves no more than E3
    assert scores["served_0_alone", "z", "evidence"]["value"] == 3
    assert scores["served_0_alone", "z", "margin_max"]["flag"] == "undefined"


@pytest.mark.parametrize("arm", ["judge", "float32-batch"])
def test_items_whose_reference_text_encodes_to_other_ids_have_no_margin_in_any_arm(toy, arm):
    for name in ("judge", "float32-batch"):
        rows = [response(key, name, [2, 3, EOS]) for key in "xyz"]
        judged = [row for key in "xyz" for row in tokens(key, name, [2, 3, EOS], [0, 0, 0])]
        if name == arm:
            judged += tokens("x", name, [4, EOS], [19.0, 0], path="text")  # no start of [2, 3, EOS]
            judged += tokens("y", name, [2, 3], [0, 0], path="text")  # a cut character is gone, no more
        toy.arm(name, rows, judged)
    part = {"evidence": "E2", "token_ids": None, "output_tokens": 9}
    served = [response(name, "served_0_alone", [2, 3, EOS], **(part if name == "x" else {})) for name in "xyz"]
    judged = [row for name in "xyz" for row in tokens(name, "served_0_alone", [2, 3, EOS], [0, 0, 0], path="text")]
    toy.arm("served_0_alone", served, judged)
    scores, floor = toy.score()
    for name in ("judge", "float32-batch", "served_0_alone", "control_second_best"):
        assert scores[name, "x", "margin_max"]["flag"] == "undefined"
        assert scores[name, "y", "margin_max"]["flag"] == "ok"
        assert scores[name, "x", "lossy_text"]["value"] == 1
        assert (name, "y", "lossy_text") not in scores
    assert floor == []
    assert ("served_0_alone", "x", "usage_ok") not in scores, "text that encodes to other ids does not count them"


@pytest.mark.parametrize(("broken", "flag"), [(np.nan, "nonfinite"), (0.0, "ok")])
def test_a_judge_that_gives_nan_is_flagged(toy, broken, flag):
    toy.same("judge")
    toy.same("float32-batch")
    toy.same("served_0_alone", {"x": [0.0, broken, 0.0]})
    scores, _ = toy.score()
    metrics = ("margin_max", "margin_mean", "logprob_rms")
    assert {scores["served_0_alone", "x", name]["flag"] for name in metrics} == {flag}
    assert scores["served_0_alone", "y", "margin_max"]["flag"] == "ok"
    assert scores["served_0_alone", "y", "first_divergence"]["flag"] == "undefined"


def test_an_answer_of_one_token_has_no_trend_and_nothing_is_wrong_with_it(toy):
    for name in ("judge", "float32-batch", "served_0_alone"):
        rows = [response(key, name, [EOS]) for key in "xyz"]
        toy.arm(name, rows, [row for key in "xyz" for row in tokens(key, name, [EOS], [0], served=[-0.1])])
    scores, _ = toy.score()
    assert scores["served_0_alone", "x", "margin_trend"]["flag"] == "undefined"
    assert scores["served_0_alone", "x", "margin_max"]["flag"] == "ok"


def test_an_answer_with_ids_that_cannot_be_judged_is_the_worst_case(toy):
    toy.same("judge")
    toy.same("float32-batch")
    arm = "served_0_alone"
    rows = [response("x", arm, [2, -1, 99999, EOS]), *(response(name, arm, [2, 3, EOS]) for name in "yz")]
    toy.arm(arm, rows, [row for name in "yz" for row in tokens(name, arm, [2, 3, EOS], [0] * 3, served=[-0.1] * 3)])
    scores, _ = toy.score()
    assert scores[arm, "x", "margin_max"]["flag"] == "missing_as_worst"
    assert [scores[arm, name, "ids_ok"]["value"] for name in "xyz"] == [0, 1, 1]
    assert scores[arm, "y", "margin_max"]["value"] == 0


def text_run(path, seen, usage, limit=40):
    """Scores of x, known by text alone: `seen` tokens of text where the judge has `limit`, all its own choice."""
    toy = Toy(path)
    for name in "xyz":
        toy.plan_item(name, max_tokens=limit)
    for arm in ("judge", "float32-batch"):
        rows = [response(name, arm, [2] * limit) for name in "xyz"]
        toy.arm(arm, rows, [row for name in "xyz" for row in tokens(name, arm, [2] * limit, [0] * limit)])
    arm, part = "served_0_alone", {"evidence": "E2", "token_ids": None, "output_tokens": usage}
    rows = [response(name, arm, [2] * seen, **part) for name in "xyz"]
    toy.arm(arm, rows, [row for name in "xyz" for row in tokens(name, arm, [2] * seen, [0] * seen, path="text")])
    return toy.score()[0]


@pytest.mark.parametrize(
    ("seen", "usage", "broken"),
    [
        (40, 40, set()),
        (38, 40, set()),  # the limit cut a character: two tokens are gone from the text
        (20, 40, {"usage_ok", "finish_ok"}),  # the count says what the text does not
        (20, 20, {"finish_ok"}),  # stopped at half the limit
    ],
)
def test_a_server_known_by_its_text_is_held_to_the_tokens_of_that_text(tmp_path, seen, usage, broken):
    scores = text_run(tmp_path, seen, usage)
    values = {name: scores["served_0_alone", "x", name]["value"] for name in ("usage_ok", "finish_ok")}
    assert {name for name, value in values.items() if not value} == broken
    assert scores["served_0_alone", "x", "output_tokens"]["value"] == seen


def test_sampled_items_have_surprisal_and_support_and_no_margins(tmp_path):
    toy = Toy(tmp_path)
    toy.plan_item("warm", temperature=1.0)
    for arm in ("judge", "float32-batch", "served_0_alone"):
        judged = tokens("warm", arm, [2, 3, EOS], [0, 0.9, 0])
        judged[1] |= {"in_support": False, "lp_asked": -np.inf}
        toy.arm(arm, [response("warm", arm, [2, 3, EOS])], judged)
    scores, floor = toy.score()
    # tokens 0 and 2 are inside: surprisal 0.1 - entropy 0.5, twice
    row = scores["served_0_alone", "warm", "surprisal"]
    assert row["value"] == pytest.approx(-0.8, abs=1e-6)
    assert dict(row["aux"])["variance"] == pytest.approx(0.5)
    assert scores["served_0_alone", "warm", "support_outside"]["value"] == 1
    assert ("served_0_alone", "warm", "margin_max") not in scores
    assert floor == []
    assert scores["control_always_first", "warm", "support_outside"]["value"] == 0


def test_run_options_come_from_the_run_and_are_recorded(toy):
    for name in ("judge", "float32-batch", "served_0_alone"):
        toy.same(name)
    toy.score()
    recorded = store.read_provenance(toy.path / "scores.parquet")["options"]
    assert recorded["run"] == PLAN
    assert recorded["scoring"] == json.loads(json.dumps(OPTIONS))


def test_an_item_that_was_not_planned_cannot_slip_in(toy):
    for name in ("judge", "float32-batch"):
        toy.same(name)
    toy.plan_item("late")
    toy.same("served_0_alone")
    toy.items.pop()
    with pytest.raises(KeyError, match="late"):
        toy.score()


def test_an_answer_without_content_still_shows_that_its_prompt_was_another(toy):
    toy.same("judge")
    toy.same("float32-batch")
    rows = [response("x", "served_0_alone", [2, 3, EOS])]
    rows += [
        response(
            name, "served_0_alone", [EOS], status="empty", prompt_token_ids=None, prompt_tokens=count, token_ids=None
        )
        for name, count in (("y", 13), ("z", 3))
    ]
    toy.arm("served_0_alone", rows, tokens("x", "served_0_alone", [2, 3, EOS], [0, 0, 0], served=[-0.1] * 3))
    scores, _ = toy.score()
    assert scores["served_0_alone", "y", "prompt_equal"]["value"] == 0
    assert scores["served_0_alone", "z", "prompt_equal"]["value"] == 1
    assert scores["served_0_alone", "y", "answered"]["value"] == 0


@pytest.mark.parametrize("lossy", [True, False])
def test_the_ids_of_each_arm_are_read_apart_and_an_arm_without_tokens_has_none(lossy):
    rows = [*tokens("x", "judge", [2, 3], [0, 0]), *tokens("y", "judge", [4], [0])]
    table = store.table_from_rows("tokens", rows + tokens("x", "float32-batch", [5], [0])).select(ID_COLUMNS)
    arms = ("judge", "float32-batch", "float32-attention")
    found = [{key: ids.tolist() for key, ids in split_ids(table, arm, lossy).items()} for arm in arms]
    assert found == [{"x": [2, 3], "y": [4]}, {"x": [5]}, {}]
