"""Sample sets: picks that nothing reshuffles, exact lengths, locks that catch every change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sample_sources import make_resources
from sets import item, write_locked_set

from assay.canonical import sha256_json
from assay.config import read_yaml
from assay.errors import ConfigError, SampleError, StoreError
from assay.samples.build import build_set, write_lock
from assay.samples.corpora import functions, messages, questions
from assay.samples.lock import item_sha256, load_set, modality_of, read_lock, verify_set
from assay.samples.ranking import Candidate, pick
from assay.samples.recipe import read_recipe
from assay.samples.sizing import Sizer
from assay.store import read_table, write_table

SETS = Path(__file__).parents[2] / "samplesets"
RECIPE = {
    "description": "a small set",
    "modality": "text",
    "seed": 7,
    "tokenizer": "model",
    "sources": ["lm_eval", "django", "more_itertools"],
    "parts": [
        {
            "name": "chat",
            "kind": "chat",
            "count": 6,
            "max_tokens": 8,
            "styles": ["open", "choice", "dialogue", "system"],
        },
        {
            "name": "warm",
            "kind": "chat",
            "count": 2,
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.9,
            "styles": ["problem"],
        },
        {"name": "code", "kind": "code", "count": 3, "max_tokens": 8, "styles": ["explain", "complete", "write"]},
        {"name": "many", "kind": "multilingual", "count": 2, "max_tokens": 8, "languages": ["ja", "ar"]},
        {"name": "emoji", "kind": "emoji", "count": 1, "max_tokens": 8},
        {"name": "ragged", "kind": "ragged", "count": 4, "max_tokens": 8, "lengths": [1, 8, 9, 64]},
        {"name": "long", "kind": "long", "count": 2, "max_tokens": 8, "tokens": 1000},
        {
            "name": "needle",
            "kind": "needle",
            "max_tokens": 8,
            "lengths": [900, 1300],
            "depths": [0, 0.5, 1],
            "seeds": [1],
        },
    ],
}


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_resources(tmp_path_factory.mktemp("resources"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of recipes: `small`, and `tiny` which is a subset of it."""
    folder = tmp_path / "samplesets"
    folder.mkdir()
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    subset = {"description": "a subset", "subset_of": "small", "counts": {"chat": 3, "ragged": 2}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(subset))
    return folder


@pytest.fixture
def built(folder: Path, resources: Path, tmp_path: Path) -> list[dict[str, Any]]:
    write_lock("small", folder, resources)
    lock = build_set("small", tmp_path / "small.parquet", folder, resources)
    return list(verify_set(tmp_path / "small.parquet", lock))


# --- picks --------------------------------------------------------------------------------------------------------


def candidate(key: str, stratum: str = "") -> Candidate:
    return Candidate(key, "chat", {"prompt": key}, "test", stratum)


KEYS = st.lists(st.text("abcdefgh", min_size=1, max_size=4), unique=True, min_size=6, max_size=20)


@given(keys=KEYS, data=st.data())
def test_the_order_of_candidates_does_not_matter(keys: list[str], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(keys))
    assert pick(map(candidate, keys), 5, 1, "p") == pick(map(candidate, shuffled), 5, 1, "p")


@given(keys=KEYS, place=st.integers(0, 20))
def test_an_added_candidate_displaces_at_most_one_pick_and_reshuffles_nothing(keys: list[str], place: int) -> None:
    before = pick(map(candidate, keys), 5, 1, "p")
    after = pick(map(candidate, [*keys[:place], "NEW", *keys[place:]]), 5, 1, "p")
    kept = [item for item in after if item.key != "NEW"]
    assert kept == before[: len(kept)]
    assert len(before) - len(kept) <= 1


@given(keys=KEYS, count=st.integers(1, 5))
def test_a_smaller_count_takes_a_prefix_of_a_larger(keys: list[str], count: int) -> None:
    candidates = [candidate(key, stratum) for key in keys for stratum in ("one", "two")]
    assert pick(candidates, count, 1, "p") == pick(candidates, 6, 1, "p")[:count]


def test_strata_take_turns_in_the_order_given() -> None:
    candidates = [candidate(f"{stratum}{number}", stratum) for stratum in "ba" for number in range(5)]
    assert [item.stratum for item in pick(candidates, 5, 1, "p")] == ["b", "a", "b", "a", "b"]


def test_another_seed_or_part_picks_otherwise() -> None:
    candidates = [candidate(str(number)) for number in range(100)]
    picks = [pick(candidates, 10, seed, part) for seed, part in [(1, "p"), (2, "p"), (1, "q")]]
    assert picks[0] != picks[1]
    assert picks[0] != picks[2]


def test_equal_requests_are_picked_once() -> None:
    twins = [Candidate(key, "chat", {"prompt": "same"}, "test") for key in ("x", "y")]
    assert len(pick(twins, 2, 1, "p")) == 1
    assert pick(twins, 2, 1, "p") == pick(twins[::-1], 2, 1, "p")


# --- what is built ------------------------------------------------------------------------------------------------


def test_every_item_is_a_canonical_request_with_a_prompt_that_is_not_empty(built: list[dict[str, Any]]) -> None:
    assert len(built) == 26  # 6 + 2 + 3 + 2 + 1 + 4 + 2 + 2 x 3 x 1
    for row in built:
        request = json.loads(row["request"])
        prompts = [request["prompt"]] if "prompt" in request else [turn["content"] for turn in request["messages"]]
        assert all(prompt.strip() for prompt in prompts)
        assert request["max_tokens"] == 8
        prompt = {key: request[key] for key in ("prompt", "messages") if key in request}
        assert row["prompt_sha256"] == sha256_json(prompt)


def test_only_sampled_items_carry_top_p_and_a_seed_of_their_own(built: list[dict[str, Any]]) -> None:
    requests = {row["item_id"]: json.loads(row["request"]) for row in built}
    warm = {name: request for name, request in requests.items() if name.startswith("warm-")}
    assert all((request["temperature"], request["top_p"]) == (0.7, 0.9) for request in warm.values())
    assert len({request["seed"] for request in warm.values()}) == len(warm) == 2
    greedy = [request for name, request in requests.items() if name not in warm]
    assert all(request["temperature"] == 0 and not {"seed", "top_p"} & request.keys() for request in greedy)


def test_ragged_prompts_have_exactly_the_length_asked(built: list[dict[str, Any]], resources: Path) -> None:
    sizer = Sizer(resources / "model")
    rows = [row for row in built if row["item_id"].startswith("ragged-")]
    assert [row["prompt_tokens_ref"] for row in rows] == [1, 8, 9, 64]
    assert [len(sizer.ids(json.loads(row["request"])["prompt"])) for row in rows] == [1, 8, 9, 64]


def test_long_prompts_come_close_to_their_limit_and_never_over_it(built: list[dict[str, Any]]) -> None:
    lengths = [row["prompt_tokens_ref"] for row in built if row["item_id"].startswith("long-")]
    assert len(lengths) == 2
    assert all(900 <= length <= 1000 for length in lengths)


def test_other_scripts_are_really_there(built: list[dict[str, Any]]) -> None:
    text = {row["item_id"]: row["request"] for row in built}
    assert any("\u3040" <= char <= "\u30ff" for name, it in text.items() if name.startswith("many-ja") for char in it)
    assert any("\u0600" <= char <= "\u06ff" for name, it in text.items() if name.startswith("many-ar") for char in it)
    assert any(char >= "\U0001f300" for name, it in text.items() if name.startswith("emoji-") for char in it)


def test_a_needle_is_at_its_depth_with_one_distractor_and_an_exact_answer(built: list[dict[str, Any]]) -> None:
    rows = [row for row in built if row["kind"] == "needle"]
    assert len(rows) == 6
    for row in rows:
        length, depth = (float(tag.partition(":")[2]) for tag in row["tags"][1:])
        text = json.loads(row["request"])["messages"][0]["content"]
        facts = [
            line
            for line in text.replace("\n", " ").split(". ")
            if "special magic number for" in line and " is " in line
        ]
        codes = [fact.rpartition(" ")[2].rstrip(".") for fact in facts if "What is" not in fact]
        assert row["expected"].isdecimal()
        assert len(row["expected"]) in (5, 6)
        assert codes.count(row["expected"]) == 1
        assert len(codes) == 2
        assert len(codes[0]) == len(codes[1])
        assert text.count(row["expected"]) == 1
        assert 0.8 * length <= row["prompt_tokens_ref"] <= length
        haystack = text.partition("\n\n")[0]
        assert haystack.index(row["expected"]) / len(haystack) == pytest.approx(depth, abs=0.1)


def test_a_subset_holds_the_same_items_as_the_set_it_is_of(
    built: list[dict[str, Any]], folder: Path, resources: Path, tmp_path: Path
) -> None:
    write_lock("tiny", folder, resources)
    lock = build_set("tiny", tmp_path / "tiny.parquet", folder, resources)
    whole = {row["item_id"]: row["request"] for row in built}
    part = {row["item_id"]: row["request"] for row in verify_set(tmp_path / "tiny.parquet", lock)}
    assert len(part) == 5
    assert part.items() <= whole.items()


def test_adding_a_question_to_the_source_changes_at_most_one_item(
    built: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    extra = make_resources(tmp_path / "more", extra_question=True)
    after = write_lock("small", folder, extra).items
    before = {row["item_id"]: item_sha256(row) for row in built}
    short = [name for name in before if name.startswith(("chat-open", "chat-choice", "chat-system"))]
    assert sum(after.get(name) != before[name] for name in short) <= 3  # one a style
    assert all(after[name] == before[name] for name in before if name.startswith(("warm", "code", "many", "emoji")))


# --- locks --------------------------------------------------------------------------------------------------------


def test_a_set_is_built_again_to_the_same_hash(built: list[dict[str, Any]], folder: Path, resources: Path) -> None:
    lock = read_lock("small", folder)
    assert write_lock("small", folder, resources) == lock
    assert lock.items == {row["item_id"]: item_sha256(row) for row in built}
    assert lock.sources["django"]["version"] == "1"


def test_a_tampered_parquet_is_refused_by_the_first_item_that_differs(
    built: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    path, lock = tmp_path / "small.parquet", read_lock("small", folder)
    table = read_table(path, "items")
    rows = table.to_pylist()
    rows[3]["request"] = rows[3]["request"].replace("8", "9")
    changed = type(table).from_pylist(rows, schema=table.schema)
    for bad, problem in [
        (changed, f"item {rows[3]['item_id']} differs"),
        (table.slice(1), f"item {rows[0]['item_id']} is missing"),
        (
            type(table).from_pylist([*rows[4:], {**rows[0], "item_id": "added"}], schema=table.schema),
            "item added is not",
        ),
    ]:
        write_table(path, "items", bad, {})
        with pytest.raises(SampleError, match=problem):
            list(verify_set(path, lock))
    write_table(path, "items", type(table).from_pylist([*table.to_pylist(), table.to_pylist()[0]], table.schema), {})
    with pytest.raises(SampleError, match="holds an item twice"):
        list(verify_set(path, lock))


def test_a_set_is_loaded_by_the_lock_beside_it(folder: Path, resources: Path, tmp_path: Path) -> None:
    write_lock("tiny", folder, resources)
    build_set("tiny", folder / "tiny.parquet", folder, resources)
    assert len(list(load_set(folder / "tiny.parquet"))) == 5
    shutil.move(folder / "tiny.parquet", tmp_path / "tiny.parquet")
    with pytest.raises(SampleError, match="has no lock"):
        load_set(tmp_path / "tiny.parquet")


def test_a_truncated_parquet_is_refused(built: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StoreError, match="remove it and run again"):
        list(verify_set(path, read_lock("small", folder)))


def test_a_set_that_is_not_what_its_lock_says_is_not_written(folder: Path, resources: Path, tmp_path: Path) -> None:
    write_lock("small", folder, resources)
    path = folder / "small.lock.json"
    lock = json.loads(path.read_text())
    first = min(lock["items"])
    path.write_text(json.dumps({**lock, "items": {**lock["items"], first: "0" * 64}}))
    with pytest.raises(SampleError, match=f"item {first} differs"):
        build_set("small", tmp_path / "out.parquet", folder, resources)
    assert not (tmp_path / "out.parquet").exists()


def test_a_changed_recipe_source_or_tokenizer_needs_a_new_lock(folder: Path, resources: Path, tmp_path: Path) -> None:
    write_lock("small", folder, resources)
    other = shutil.copytree(resources, tmp_path / "other")

    def refused(message: str) -> None:
        with pytest.raises(SampleError, match=message):
            build_set("small", tmp_path / "out.parquet", folder, other)

    edit(other / "django" / "manifest.json", lambda it: it["pin"].update(version="2"))
    refused("source 'django' has another pin")
    shutil.copy(resources / "django" / "manifest.json", other / "django" / "manifest.json")
    edit(other / "model" / "manifest.json", lambda it: it["files"]["tokenizer.json"].update(sha256="0" * 64))
    refused("the tokenizer is not the locked one")
    (folder / "small.yaml").write_text(yaml.safe_dump({**RECIPE, "seed": 8}))
    refused("the recipe of sample set 'small' has changed since its lock")
    (folder / "small.lock.json").unlink()
    refused("has no lock")


def edit(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_damaged_lock_is_refused(folder: Path) -> None:
    (folder / "small.lock.json").write_text("{}")
    with pytest.raises(SampleError, match="is not a lock"):
        read_lock("small", folder)


# --- recipes ------------------------------------------------------------------------------------------------------


def test_a_recipe_that_asks_for_too_much_is_refused(folder: Path, resources: Path) -> None:
    recipe = {**RECIPE, "parts": [{**RECIPE["parts"][0], "count": 10_000}]}  # type: ignore[index]
    (folder / "small.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SampleError, match="part 'chat' wants 10000 items, can make"):
        write_lock("small", folder, resources)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sed": 1}, "unknown key 'sed'"),
        ({"parts": [{"name": "a", "kind": "poem", "count": 1, "max_tokens": 1}]}, "'poem'"),
        ({"parts": [*RECIPE["parts"][:1], *RECIPE["parts"][:1]]}, "a part is named twice"),  # type: ignore[index]
    ],
)
def test_a_wrong_recipe_is_refused_by_file_and_key(change: dict[str, Any], message: str, folder: Path) -> None:
    (folder / "small.yaml").write_text(yaml.safe_dump({**RECIPE, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_recipe("small", folder)
    assert "small.yaml" in str(caught.value)


def test_a_subset_cannot_ask_for_more_than_there_is_nor_for_an_unknown_part(folder: Path) -> None:
    def subset(counts: dict[str, int]) -> None:
        content = {"description": "too much", "subset_of": "small", "counts": counts}
        (folder / "tiny.yaml").write_text(yaml.safe_dump(content))

    subset({"chat": 7})
    with pytest.raises(SampleError, match=r"counts.chat is 7; 'small' can give 1 to 6"):
        read_recipe("tiny", folder)
    subset({"chta": 1})
    with pytest.raises(ConfigError, match=r"unknown part in .*tiny.yaml 'chta': did you mean chat"):
        read_recipe("tiny", folder)
    with pytest.raises(ConfigError, match="cannot read"):
        read_recipe("none", folder)


def test_a_source_that_is_not_fetched_is_named(folder: Path, resources: Path, tmp_path: Path) -> None:
    for missing in ("lm_eval", "django", "more_itertools", "model"):
        other = shutil.copytree(resources, tmp_path / missing)
        shutil.rmtree(other / missing)
        with pytest.raises(SampleError, match=missing):
            write_lock("small", folder, other)


# --- corpora ------------------------------------------------------------------------------------------------------


def test_worked_questions_are_read_whole_and_unsuitable_subjects_left_out(resources: Path) -> None:
    found = questions(resources / "lm_eval")
    first = next(item for item in found if item.key == "astronomy-1")
    assert first.stem == "What is the name of star number 1, and who found it?"
    assert first.options == "(A) One (B) Two (C) Three (D) Four"
    assert first.answer.startswith("Star number 1 was seen")
    assert "human_sexuality" not in {item.subject for item in found}


def test_only_whole_sentences_of_a_catalogue_are_read(resources: Path) -> None:
    assert [item.text for item in messages(resources / "django", "ja")] == [
        "これは最初の文です。",
        "これは二番目の文です。続きもあります。",
    ]


def test_functions_are_read_with_their_head_and_summary(resources: Path) -> None:
    first = functions(resources / "more_itertools")[0]
    assert first.summary == "Return item number 0 of a thing."
    assert first.head.endswith('"""')
    assert first.source.startswith(first.head)


# --- the committed sets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(SETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_committed_set_has_a_lock_of_its_own_recipe(path: Path) -> None:
    lock, recipe = read_lock(path.stem, SETS), read_recipe(path.stem, SETS)
    assert lock.set == path.stem
    assert lock.recipe_sha256 == sha256_json(recipe.model_dump(mode="json"))
    assert len(lock.items) == sum(part.count for part in recipe.parts)
    pins = read_yaml(SETS.parent / "config" / "sources.yaml")
    assert {name: pin["sha256"] for name, pin in lock.sources.items()} == {
        name: pins[name]["sha256"] for name in recipe.sources
    }
    if recipe.modality == "text":
        assert lock.tokenizer["sha256"] == pins[recipe.tokenizer]["sha256"]["tokenizer.json"]
    else:
        assert lock.tokenizer == {}


def test_the_text_sets_are_nested() -> None:
    smoke, standard, release = (read_lock(f"text_{tier}", SETS).items for tier in ("smoke", "standard", "release"))
    assert (len(smoke), len(standard), len(release)) == (32, 100, 300)
    assert smoke.keys() < standard.keys() < release.keys()


@pytest.mark.model
def test_the_committed_smoke_set_is_what_the_sources_make(tmp_path: Path, fetched: Callable[..., Path]) -> None:
    resources = fetched(*read_recipe("text_smoke", SETS).sources, "smollm2_135m")
    build_set("text_smoke", tmp_path / "text_smoke.parquet", SETS, resources)


def test_the_modality_of_sample_sets_is_one_or_refused(tmp_path):
    request = {"prompt": "x", "max_tokens": 1, "temperature": 0}
    for name, modality in (("first", "text"), ("second", "text"), ("third", "asr")):
        write_locked_set(tmp_path / f"{name}.parquet", [item(name, request) | {"modality": modality}])
    first, second, third = (tmp_path / f"{name}.parquet" for name in ("first", "second", "third"))
    assert (modality_of([first, second]), modality_of([third])) == ("text", "asr")
    with pytest.raises(SampleError, match="items of one modality are needed, not of asr and text"):
        modality_of([first, third])
