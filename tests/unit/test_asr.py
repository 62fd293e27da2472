"""Transcripts: each gate's planted fault turns it red, its clean twin stays green, and nothing is dropped."""

import numpy as np
import pytest
from transcripts import FLOORS, LENGTH, OPTIONS, SILENT, SPOKEN, STAMP, WORDS, Toy, said, spoken, text_of

from assay import store
from assay.metrics import speech
from assay.records import Status
from assay.verdicts.asr.suite import ASR

MARGIN_GATES = ["G-hard", "G-soft", "G-mean", "G-trend"]


@pytest.fixture
def toy(tmp_path):
    return Toy(tmp_path)


def retold(row, ids, **more):
    """The answer with other words, and without tokens that would contradict them."""
    text = text_of(ids)
    return row | {"text": text, "token_ids": None, "segments": [{"start": 0.0, "end": 9.0, "text": text}]} | more


def failing(gates):
    return {name for name, gate in gates.items() if gate.status is Status.FAIL}


def test_a_right_server_passes_every_gate_and_its_controls_behave(toy):
    verdict = toy.verdict()
    assert verdict.verdict is Status.PASS, verdict.reason
    assert {gate.id for gate in verdict.gates} == {"G-coverage", *ASR.gates}
    assert {control.got for control in verdict.controls.positive} == {Status.FAIL}
    assert {control.gate for control in verdict.controls.positive} == set(ASR.checks)
    assert len(verdict.controls.negative) == len(FLOORS) * (len(MARGIN_GATES) + 3)
    assert {control.got for control in verdict.controls.negative} <= {Status.PASS, Status.INCONCLUSIVE}
    assert verdict.samples.model_extra == {"spoken": SPOKEN, "silent": SILENT}
    assert verdict.claim and (verdict.claim.bad, verdict.claim.n) == (0, SPOKEN)


# --- G-struct -----------------------------------------------------------------------------------------------------


def only(number, change):
    """A fault on one item."""
    return lambda row, place: change(row, said(place)) if place == number else row


def segmented(row, *times):
    """The answer with these segments, the first of which says it all."""
    texts = [row["text"], *[""] * (len(times) - 1)]
    return row | {
        "segments": [
            {"start": start, "end": end, "text": text} for (start, end), text in zip(times, texts, strict=True)
        ]
    }


STRUCTURE = {
    "empty though somebody speaks": lambda row, ids: retold(row, [], segments=[]),
    "the text loops": lambda row, ids: retold(row, ids + ids[-3:] * 9),
    "words missing at the end": lambda row, ids: retold(row, ids[:-5]),
    "words missing at the start": lambda row, ids: retold(row, ids[5:]),
    "decoder tokens in the text": lambda row, ids: row | {"text": f"<|en|> {row['text']}", "token_ids": None},
    "not the language that was asked for": lambda row, ids: row | {"language": "de"},
    "the text is not that of the tokens": lambda row, ids: row | {"text": text_of(ids[::-1])},
    "the tokens lie in no window of the audio": lambda row, ids: row | {"token_ids": [*row["token_ids"], STAMP + 2]},
    "segments out of order or off the clip": lambda row, ids: segmented(row, (5, 6), (0, 1), (6, 9)),
    "segments stop half-way": lambda row, ids: segmented(row, (0, 4)),
    "the text is not that of the segments": lambda row, ids: (
        row | {"segments": [{"start": 0.0, "end": 9.0, "text": text_of(ids[:6])}]}
    ),
}


@pytest.mark.parametrize("what", STRUCTURE)
def test_a_breach_of_structure_fails_on_one_item_and_is_named(toy, what):
    gate = toy.gates(only(5, STRUCTURE[what]))["G-struct"]
    assert gate.status is Status.FAIL
    assert f"{what} (1)" in gate.detail
    assert [item.item_id for item in gate.worst_items] == ["item-05"]


@pytest.mark.parametrize(
    "times", [[(2, 1)], [(-1, 2)], [(0, 12)]], ids=["ends before it starts", "before the clip", "after the clip"]
)
def test_a_segment_that_is_no_part_of_the_clip_breaks_the_structure(toy, times):
    gate = toy.gates(only(5, lambda row, ids: segmented(row, *times, (3, 9))))["G-struct"]
    assert "segments out of order or off the clip (1)" in gate.detail


@pytest.mark.parametrize(
    "change",
    [
        lambda row, ids: retold(row, ids[:-4]),
        lambda row, ids: retold(row, ids[4:]),
        lambda row, ids: row | {"language": "English"},
        lambda row, ids: row | {"language": "en-US"},
        lambda row, ids: row | {"language": None, "segments": None},
        lambda row, ids: segmented(row, (0, 4), (4, 10.9)),
        lambda row, ids: row | {"segments": [{"start": 0.0, "end": 9.0, "text": f" {WORDS[token]}"} for token in ids]},
    ],
    ids=[
        "four words short",
        "four words late",
        "a language by name",
        "a language with its region",
        "no language or times",
        "into the silence behind",
        "a segment a word, spaced otherwise",
    ],
)
def test_what_is_no_breach_of_structure_stays_green(toy, change):
    assert toy.gates(only(5, change))["G-struct"].status is Status.PASS


def test_of_what_no_answer_names_the_structure_claims_nothing(toy):
    gate = toy.gates(lambda row, _: row | {"language": None, "segments": None})["G-struct"]
    assert gate.detail == f"{SPOKEN + SILENT} transcripts in order; 0 of them name a language, 0 have times"


@pytest.mark.parametrize("what", ["the text loops", "words missing at the end", "empty though somebody speaks"])
def test_what_the_model_itself_does_is_no_fault_of_the_server(toy, what):
    spoil = only(5, STRUCTURE[what])
    assert toy.gates(spoil, spoil)["G-struct"].status is Status.PASS


# --- G-transcript ---------------------------------------------------------------------------------------------------


def swapped(row, place):
    """Every item answers with its neighbour's words."""
    return retold(row, said((place + 1) % SPOKEN)) if spoken(place) else row


def test_another_items_transcript_fails(toy):
    gates = toy.gates(swapped)
    assert {"G-transcript", "G-wer"} <= failing(gates)
    assert gates["G-transcript"].value == SPOKEN


def test_one_transcript_that_is_another_fails_by_name(toy):
    gate = toy.gates(only(7, lambda row, ids: retold(row, ids[::-1])))["G-transcript"]
    assert gate.status is Status.FAIL
    assert gate.confirm and gate.confirm.reproduced_items == ["item-07"]
    assert f"{SPOKEN - 1} of {SPOKEN} transcripts equal" in gate.detail


def test_a_few_other_words_are_left_to_the_word_error_rate(toy):
    # 3 of 12 words: 0.25 edits a word, below 0.3
    gate = toy.gates(only(7, lambda row, ids: retold(row, [*ids[:-3], *ids[-1:-4:-1]])))["G-transcript"]
    assert gate.status is Status.PASS


def test_a_near_tie_explains_another_transcript(toy):
    spoil = only(7, lambda row, ids: row | {"text": text_of(ids[::-1])})
    toy.margins["served_0_alone"][7, 2] = 0.015  # below tau_hard = 2 x 0.01
    assert toy.gates(spoil)["G-transcript"].value == 0
    toy.margins["served_0_alone"][7, 2] = 0.03
    assert toy.gates(spoil)["G-transcript"].value == 1


# --- G-wer ----------------------------------------------------------------------------------------------------------


def with_errors(count):
    """So many items with one word wrong."""
    return lambda row, place: retold(row, [*said(place)[:-1], said(place)[0]]) if place < count else row


def hard_of_hearing(row, place):
    """A reference that gets a word of every item wrong, whatever its tokens."""
    return row | {"text": text_of([*said(place)[:-1], said(place)[0]])} if spoken(place) else row


def test_a_rise_of_the_word_error_rate_beyond_the_margin_fails(toy):
    # 24 of 288 words: 8.3 points, the same in every item
    gate = toy.gates(with_errors(SPOKEN))["G-wer"]
    assert gate.status is Status.FAIL
    assert gate.value == pytest.approx(1 / LENGTH)
    assert gate.test and gate.test.n == SPOKEN


def test_one_more_error_does_not_decide(toy):
    gate = toy.gates(with_errors(1))["G-wer"]
    assert gate.status is Status.INCONCLUSIVE
    assert gate.value == pytest.approx(1 / (SPOKEN * LENGTH))
    assert "more items would tell" in gate.detail


def test_the_models_own_errors_are_no_rise(toy):
    gate = toy.gates(with_errors(SPOKEN), hard_of_hearing)["G-wer"]
    assert gate.status is Status.PASS
    assert "8.33 %" in gate.detail
    assert gate.value == 0


def test_fewer_errors_than_the_reference_pass(toy):
    gate = toy.gates(lambda row, _: row, hard_of_hearing)["G-wer"]
    assert gate.status is Status.PASS
    assert gate.value == pytest.approx(-1 / LENGTH)


@pytest.mark.parametrize("lost", [{"status": "http_error"}, None])
def test_a_failed_or_missing_answer_lacks_all_its_words(toy, lost):
    if lost:
        gates = toy.gates(only(3, lambda row, ids: row | lost | {"text": None, "token_ids": None}))
    else:
        table = toy.scores()
        for (arm, _), column in table._columns.items():
            if arm.startswith("served"):
                column.values[3], column.states[3] = np.nan, 0
        floor = ASR.cut_floor(table, toy.floor(), FLOORS, "float32", OPTIONS)
        found = ASR.evaluate(table, floor, {0: ["served_0_alone"]}, "float32", OPTIONS)
        gates = {gate.id: gate for gate in found}
    assert gates["G-coverage"].status is Status.FAIL
    assert gates["G-wer"].value == pytest.approx(LENGTH / (SPOKEN * LENGTH))
    assert gates["G-wer"].test.n == SPOKEN
    assert gates["G-hard"].value == gates["G-transcript"].value == 1


# --- G-silence ------------------------------------------------------------------------------------------------------


def inventing(count):
    """So many words in each clip in which nobody speaks, 10 s long."""
    return lambda row, place: row if spoken(place) else retold(row, [0] * count)


def test_words_where_nobody_speaks_fail(toy):
    gates = toy.gates(inventing(2))  # 12 a minute, 10 allowed
    assert failing(gates) == {"G-silence"}
    assert gates["G-silence"].value == pytest.approx(12)


def test_as_many_words_as_the_model_itself_invents_pass(toy):
    assert failing(toy.gates(inventing(2), inventing(2))) == set()
    assert failing(toy.gates(inventing(1))) == set()  # 6 a minute


def babbling(*counts):
    """One clip in which everybody hears 40 words, and so many in each of the other two."""
    return lambda row, place: row if spoken(place) else retold(row, [0] * (40, *counts)[place - SPOKEN])


@pytest.mark.parametrize(
    ("counts", "failed"), [((1, 2), set()), ((3, 2), {"G-silence"})], ids=["9 a minute", "15 a minute"]
)
def test_a_clip_that_the_model_fills_with_words_hides_none_in_the_others(toy, counts, failed):
    gates = toy.gates(babbling(*counts), babbling(0, 0))  # over all clips, 10 a minute at most
    assert failing(gates) == failed
    assert "2 of them where the reference says nothing (20 s), the reference 0" in gates["G-silence"].detail
    worst = {item.item_id: item.value for item in gates["G-silence"].worst_items}
    assert worst == {"item-25": 6 * counts[0], "item-26": 6 * counts[1]}


def test_a_short_phrase_in_little_silence_does_not_decide(toy):
    gate = toy.gates(babbling(4, 0), babbling(0, 0))["G-silence"]  # 12 a minute
    assert gate.status is Status.INCONCLUSIVE
    assert "fewer than 5 words: more clips without speech would tell" in gate.detail


def test_words_that_one_instance_alone_invents_leave_it_open(toy):
    spoil, clean = babbling(3, 2), babbling(0, 0)
    gates = toy.gates(lambda row, place: (spoil if row["arm"].startswith("served_0") else clean)(row, place), clean)
    assert gates["G-silence"].status is Status.INCONCLUSIVE
    assert "the instances differ" in gates["G-silence"].detail


# --- margins --------------------------------------------------------------------------------------------------------


def test_a_wrong_token_fails_the_margin_gates_and_no_other(toy):
    for arm in ("served_0_alone", "served_0_load", "served_1_load"):
        toy.margins[arm][:, 5] = 2.0
    assert {"G-hard", "G-soft", "G-mean"} <= failing(toy.gates()) <= set(MARGIN_GATES)


def by_text(row):
    """The same words without their tokens."""
    return row | {"token_ids": None, "evidence": "E2"}


def test_of_a_server_that_tells_tokens_a_text_alone_stays_unjudged_and_is_named(toy):
    gates = toy.gates(lambda row, place: by_text(row) if place == 3 else row)
    undecided = {name for name, gate in gates.items() if gate.status is Status.INCONCLUSIVE}
    assert undecided == set(MARGIN_GATES)
    for name in undecided:
        assert "1 responses, first item-03, have no token ids" in gates[name].detail
    assert gates["G-hard"].threshold.value == pytest.approx(0.02, rel=1e-3)  # 2 x 0.01, as without it
    assert not gates["G-hard"].caveats


def test_a_text_alone_hides_no_wrong_token_of_another_item(toy):
    for arm in ("served_0_alone", "served_0_load", "served_1_load"):
        toy.margins[arm][7, 5] = 0.4  # below 2 x 0.25, the limit of texts
    gate = toy.gates(lambda row, place: by_text(row) if place == 3 else row)["G-hard"]
    assert (gate.status, gate.confirm.reproduced_items) == (Status.FAIL, ["item-07"])


def test_a_server_that_answers_nothing_is_not_judged_by_text(toy):
    gates = toy.gates(
        lambda row, place: row | {"status": "http_error", "evidence": "none", "text": None, "token_ids": None}
    )
    assert {"G-coverage", "G-hard", "G-transcript", "G-wer", "G-silence"} <= failing(gates)
    assert gates["G-hard"].threshold.value == pytest.approx(0.02, rel=1e-3)


def test_a_server_of_text_alone_is_judged_by_text_as_its_floor_is(toy):
    gate = toy.gates(lambda row, place: by_text(row) if spoken(place) else row)["G-hard"]
    assert (gate.status, gate.threshold.value) == (Status.PASS_WITH_CAVEAT, pytest.approx(0.5, rel=1e-3))
    assert [entry.code for entry in gate.caveats] == ["retokenised"]


# --- scores ---------------------------------------------------------------------------------------------------------


def test_both_normalisers_are_scored_and_named_with_version_and_hash(toy):
    table = toy.scores(only(0, lambda row, ids: retold(row, ids) | {"text": f"{text_of(ids)}, um"}))
    errors = {name: table.values("served_0_alone", name)[0] for name in ("wer_errors", "wer_errors_other")}
    assert errors == {"wer_errors": 0, "wer_errors_other": 1}  # the English normaliser drops fillers
    named = store.read_provenance(toy.path / "scores.parquet")["options"]["normalisers"]
    assert [entry["name"] for entry in named] == ["whisper_english", "whisper_basic"]
    assert [entry["sha256"] for entry in named] == [speech.normaliser(entry["name"]).sha256 for entry in named]


def test_every_planned_item_has_its_rows_in_every_arm(toy):
    table = toy.scores(only(3, lambda row, ids: row | {"status": "timeout", "text": None, "token_ids": None}))
    for arm in ("judge", *FLOORS, "served_0_alone", "control_cut_off"):
        assert (table.states(arm, "answered") != 0).all()
        for metric in ("wer_errors", "edit_rate", "margin_max"):
            assert (table.states(arm, metric)[:SPOKEN] != 0).all(), (arm, metric)
        assert (table.states(arm, "silence_words")[SPOKEN:] != 0).all()


def test_words_of_the_toy_are_left_alone_by_both_normalisers():
    for name in ("whisper_english", "whisper_basic"):
        assert [speech.normaliser(name).call(word) for word in WORDS] == WORDS
