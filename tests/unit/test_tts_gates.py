"""Each gate of speech: its planted fault turns it red, its clean twin stays green."""

import numpy as np
import pytest
from talk import ALL_SERVED, DETERMINISTIC, FLOORS, SAMPLED, Talk, voice

from assay.records import JUDGE, Status
from assay.scoring.tts import Score

BOTH = ["served_0_alone", "served_1_load"]


def failing(found):
    return {name for name, gate in found.items() if gate.status is Status.FAIL}


def statuses(found):
    return {name: gate.status for name, gate in found.items()}


def long_items(talk):
    return [item for item, text in talk.texts.items() if len(text.split()) > 20]


def short_items(talk):
    return [item for item, text in talk.texts.items() if 5 <= len(text.split()) <= 20]


def without_last(row):
    return {"text": " ".join(row["text"].split()[:-1])}


def without_first(row):
    return {"text": " ".join(row["text"].split()[1:])}


def all_wrong(row):
    return {"text": "zebra " * len(row["text"].split())}


def garbled(row):
    words = row["text"].split()
    return {"text": " ".join([*words[:5], *["zebra"] * 15, *words[20:]])}


# --- healthy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [DETERMINISTIC, SAMPLED])
@pytest.mark.parametrize("arm", ALL_SERVED)
def test_a_server_that_says_what_the_reference_says_passes_every_gate_that_concerns_it(options, arm):
    found = Talk(n=40, options=options).gates(arm)
    assert set(statuses(found).values()) <= {Status.PASS, Status.SKIPPED_OPTIONAL}
    skipped = {name for name, status in statuses(found).items() if status is Status.SKIPPED_OPTIONAL}
    expected = {"G-stream", "G-seams"} if arm != "served_0_stream" else set()
    expected |= {"G-load"} if arm != "served_0_load" else set()
    expected |= {"G-waveform"} if "G-waveform" in found and not options.deterministic else set()
    assert skipped == expected


def test_what_whisper_never_understands_in_the_reference_either_is_no_fault():
    talk = Talk()
    talk.change(all_wrong, [JUDGE, *FLOORS, *ALL_SERVED], short_items(talk)[:3])
    assert failing(talk.gates()) == set()


def test_a_voice_that_clicks_and_pauses_by_itself_is_no_fault():
    talk = Talk().change(lambda row: {"clicks": 3, "gaps": 2, "lead_s": 1.4, "dc": 0.02}, [JUDGE, *FLOORS, *ALL_SERVED])
    assert failing(talk.gates()) == set()


# --- every gate --------------------------------------------------------------------------------------------------

CONTRACT = {
    "undecodable": lambda row: {"fault": "truncated", "error": "cut short", "samples": None, "text": None},
    "another rate": lambda row: {"rate": 16_000},
    "two channels": lambda row: {"channels": 2},
    "beyond full scale": lambda row: {"peak": 1.5},
    "patched header": lambda row: {"byte_rate_agrees": False},
}


@pytest.mark.parametrize("fault", CONTRACT)
def test_one_item_that_breaks_the_contract_fails(fault):
    talk = Talk()
    talk.change(CONTRACT[fault], ["served_0_alone"], talk.items[4:5])
    gate = talk.gates()["G-contract"]
    assert (gate.status, gate.value, gate.worst_items[0].item_id) == (Status.FAIL, 1, talk.items[4])


@pytest.mark.parametrize(
    "change",
    [
        lambda row: {"headers": 3},
        lambda row: {"headers": 3, "fault": "concatenated", "samples": None, "text": None},
        lambda row: {"headers": 1, "format": "pcm"},
    ],
)
def test_a_header_too_many_fails(change):
    talk = Talk()
    talk.change(change, ["served_0_alone"], talk.items[:1])
    assert talk.gates()["G-header"].status is Status.FAIL


def test_raw_samples_need_no_header():
    assert Talk().change(lambda row: {"headers": 0, "format": "pcm"}).gates()["G-header"].status is Status.PASS


DAMAGE = {
    "no speech": lambda row: {"has_speech": False},
    "silent or too quiet": lambda row: {"level_dbfs": None},
    "too loud": lambda row: {"level_dbfs": -3.0},
    "another level than the reference's": lambda row: {"level_dbfs": -35.0},
    "DC offset": lambda row: {"dc": -0.2},
    "clipped": lambda row: {"clip_fraction": 0.05},
    "long silence at the start": lambda row: {"lead_s": 1.2},
    "long silence at the end": lambda row: {"trail_s": 1.7},
    "less sound than half the reference's": lambda row: {"sound_s": 0.4 * row["sound_s"]},
    "more silence than the reference's": lambda row: {"silence_fraction": 0.5},
    "another bandwidth than the reference's": lambda row: {"bandwidth_hz": 3400.0},
    "repeats itself": lambda row: {"repeat": 0.95},
    "gaps": lambda row: {"gaps": 1},
    "clicks": lambda row: {"clicks": 2},
    "more than twice as long": lambda row: {"duration_s": 2.1 * row["duration_s"]},
    "less than half as long": lambda row: {"duration_s": 0.45 * row["duration_s"]},
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_damage_that_comes_again_fails_and_is_named(fault):
    talk = Talk()
    talk.change(DAMAGE[fault], BOTH, talk.items[4:5])
    gate = talk.gates()["G-damage"]
    assert gate.status is Status.FAIL
    assert gate.diagnosis[0].hint == fault
    assert gate.confirm.reproduced_items == [talk.items[4]]


@pytest.mark.parametrize("fault", DAMAGE)
def test_damage_half_as_large_passes(fault):
    """Half-way from healthy to the limit."""
    inside = {
        "level_dbfs": -22.0 if "loud" in fault else -29.0,
        "dc": -0.005,
        "clip_fraction": 5e-4,
        "lead_s": 0.6,
        "trail_s": 0.9,
        "silence_fraction": 0.37,
        "bandwidth_hz": 8200.0,
        "repeat": 0.65,
    }
    talk = Talk()

    def half(row):
        changed = DAMAGE[fault](row)
        (name,) = changed
        if name in ("sound_s", "duration_s"):
            return {name: (row[name] + changed[name]) / 2}
        return {name: inside[name]} if name in inside else {}

    talk.change(half, BOTH, talk.items[4:5])
    assert talk.gates()["G-damage"].status is Status.PASS


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_speech_a_quarter_slower_or_faster_throughout_fails_by_its_length(ratio):
    talk = Talk().change(lambda row: {"duration_s": ratio * row["duration_s"]})
    assert failing(talk.gates()) == {"G-duration"}


def test_speech_a_twentieth_slower_is_real_and_small():
    gate = Talk().change(lambda row: {"duration_s": 1.05 * row["duration_s"]}).gates()["G-duration"]
    assert (gate.status, [caveat.code for caveat in gate.caveats]) == (Status.PASS_WITH_CAVEAT, ["small_but_real"])


@pytest.mark.parametrize("options", [DETERMINISTIC, SAMPLED])
def test_another_speaker_throughout_fails_by_the_voice(options):
    talk = Talk(n=40, options=options).change(lambda row: {"speaker_embedding": voice(0.7)})  # cosine 0.76
    gate = talk.gates()["G-speaker"]
    assert gate.status is Status.FAIL
    assert gate.value == pytest.approx(1 - np.cos(0.7), abs=0.05 if options is SAMPLED else 1e-9)
    assert "G-speaker" not in failing(Talk(n=40, options=options).gates())


def test_a_voice_a_little_unlike_the_references_is_real_and_small():
    talk = Talk().change(lambda row: {"speaker_embedding": voice(0.2)})  # cosine 0.98
    gate = talk.gates()["G-speaker"]
    assert (gate.status, [it.code for it in gate.caveats]) == (Status.PASS_WITH_CAVEAT, ["small_but_real"])


def test_a_voice_that_the_floor_changes_as_much_is_no_fault():
    talk = Talk().change(lambda row: {"speaker_embedding": voice(0.7)}, [*FLOORS, *ALL_SERVED])
    assert talk.gates()["G-speaker"].status is Status.PASS


@pytest.mark.parametrize("gone", [{"speaker_embedding": []}, {"samples": None, "fault": "empty"}])
def test_an_answer_in_which_nobody_speaks_is_like_no_voice_and_counts(gone):
    talk = Talk().change(lambda row: gone, items=["item-001"])
    gate = talk.gates()["G-speaker"]
    assert (gate.test.n, gate.worst_items[0].item_id, gate.worst_items[0].value) == (24, "item-001", 1)
    assert gate.status is not Status.PASS


def test_without_a_network_that_tells_speakers_apart_the_voice_is_not_measured():
    everywhere = [JUDGE, *FLOORS, *ALL_SERVED]
    gate = Talk().change(lambda row: {"speaker_embedding": None}, everywhere).gates()["G-speaker"]
    assert (gate.status, gate.value, gate.required) == (Status.SKIPPED_OPTIONAL, None, False)
    assert gate.detail == "not measured: the family names no `speaker_encoder`, or the reference says nothing"


def test_wrong_words_all_over_fail_by_their_rate():
    talk = Talk()
    for item in short_items(talk):
        talk.change(lambda row: {"text": " ".join(["zebra", *row["text"].split()[1:-1], "otter"])}, items=[item])
    found = talk.gates()
    assert found["G-wer"].status is Status.FAIL
    assert "by the other normaliser" in found["G-wer"].detail
    assert found["G-catastrophe"].status is Status.PASS


def test_one_word_in_a_long_run_cannot_be_told_from_the_margin():
    talk = Talk()
    talk.change(lambda row: {"text": "zebra " + row["text"]}, items=long_items(talk)[:1])
    assert talk.gates()["G-wer"].status in (Status.PASS, Status.PASS_WITH_CAVEAT, Status.INCONCLUSIVE)
    assert "G-wer" not in failing(talk.gates())


def test_an_item_of_which_most_words_are_lost_fails():
    talk = Talk()
    talk.change(all_wrong, BOTH, short_items(talk)[:1])
    found = talk.gates()
    assert found["G-catastrophe"].status is Status.FAIL
    assert found["G-catastrophe"].worst_items[0].item_id == short_items(talk)[0]


@pytest.mark.parametrize(("cut", "kind"), [(without_last, "last words"), (without_first, "first words")])
def test_a_word_missing_at_either_end_fails(cut, kind):
    talk = Talk()
    talk.change(cut, BOTH, short_items(talk)[:1])
    gate = talk.gates()["G-ends"]
    assert gate.status is Status.FAIL
    assert f"{kind} missing (1)" in gate.detail


def test_a_last_word_misheard_is_not_missing():
    talk = Talk()
    talk.change(lambda row: {"text": without_last(row)["text"] + " zebra"}, BOTH, short_items(talk)[:1])
    assert talk.gates()["G-ends"].status is Status.PASS


def test_a_stretch_that_is_garbled_in_a_long_text_fails_though_the_item_is_mostly_right():
    talk = Talk()
    talk.change(garbled, BOTH, [item for item in long_items(talk) if len(talk.texts[item].split()) > 35][:1])
    found = talk.gates()
    assert found["G-window"].status is Status.FAIL
    assert found["G-catastrophe"].status is Status.PASS


def test_the_words_of_another_item_fail_at_once():
    talk = Talk()
    mine, other = short_items(talk)[:2]
    talk.change(lambda row: {"text": talk.texts[other]}, ["served_0_load"], [mine])
    gate = talk.gates("served_0_load")["G-bleed"]
    assert (gate.status, gate.worst_items[0].item_id) == (Status.FAIL, mine)
    assert talk.gates("served_0_alone")["G-bleed"].status is Status.PASS


def test_words_lost_under_load_alone_fail_the_gate_of_load():
    talk = Talk(n=40)
    talk.change(all_wrong, ["served_0_load"], short_items(talk)[::2])
    assert talk.gates("served_0_load")["G-load"].status is Status.FAIL
    assert "G-load" not in failing(talk.gates("served_0_alone"))


@pytest.mark.parametrize("more", [-552, 1])
def test_a_stream_of_a_deterministic_model_is_as_long_to_the_sample(more):
    talk = Talk()
    talk.change(lambda row: {"samples": row["samples"] + more}, ["served_0_stream"], talk.items[5:6])
    assert talk.gates("served_0_stream")["G-stream"].status is Status.FAIL


def test_a_stream_of_a_sampled_model_may_differ_by_chance_and_not_by_a_chunk():
    talk = Talk(n=60, options=SAMPLED)
    assert talk.gates("served_0_stream")["G-stream"].status is Status.PASS
    talk.change(lambda row: {"samples": 2 * row["samples"]}, ["served_0_stream"])
    assert talk.gates("served_0_stream")["G-stream"].status is Status.FAIL


def test_seams_that_click_fail():
    talk = Talk()
    talk.change(lambda row: {"seam_ranks": [rank / 10 for rank in row["seam_ranks"]]}, ["served_0_stream"])
    gate = talk.gates("served_0_stream")["G-seams"]
    assert gate.status is Status.FAIL
    assert 0.3 < gate.value < 1


def test_seams_that_rank_as_any_place_pass():
    talk = Talk(n=60)
    talk.change(lambda row: {"seam_ranks": list(talk.rng.uniform(0, 1, len(row["seam_ranks"])))}, ["served_0_stream"])
    assert talk.gates("served_0_stream")["G-seams"].status is Status.PASS


def test_a_chunk_sent_twice_fails_at_once():
    talk = Talk()
    talk.change(
        lambda row: {"seam_repeats": [1.0, *row["seam_repeats"][1:]]}, ["served_0_stream"], long_items(talk)[:1]
    )
    assert talk.gates("served_0_stream")["G-seams"].status is Status.FAIL


WAVES = {
    "other samples": Score(-60.0, {"lag": 0, "more": 0}),
    "shifted": Score(-120.0, {"lag": 3, "more": 0}),
    "another number of samples": Score(-120.0, {"lag": 0, "more": -1}),
}


@pytest.mark.parametrize("fault", WAVES)
def test_samples_that_are_not_the_references_fail(fault):
    talk = Talk()
    talk.noise |= {(arm, talk.items[3]): WAVES[fault] for arm in BOTH}
    gate = talk.gates()["G-waveform"]
    assert gate.status is Status.FAIL
    assert [hint.hint for hint in gate.diagnosis] == [fault]


def test_samples_as_near_as_the_floors_own_pass():
    talk = Talk()
    talk.noise |= {(arm, item): Score(-90.0, {"lag": 0, "more": 0}) for arm in BOTH for item in talk.items}
    assert talk.gates()["G-waveform"].status is Status.PASS


def with_a_noisy_floor():
    talk = Talk()
    talk.noise |= {("float32-threads", item): Score(-20.0, {"lag": 0, "more": 0}) for item in talk.items}
    return talk


def test_samples_that_are_the_references_pass_however_noisy_the_floor():
    assert with_a_noisy_floor().gates()["G-waveform"].status is Status.PASS


def test_a_floor_that_is_too_noisy_decides_nothing_about_other_samples():
    talk = with_a_noisy_floor()
    talk.noise |= {(arm, talk.items[3]): WAVES["other samples"] for arm in BOTH}
    gate = talk.gates()["G-waveform"]
    assert gate.status is Status.INCONCLUSIVE
    assert "floor too noisy: benign changes differ by -20 dBFS" in gate.detail


# --- chance ------------------------------------------------------------------------------------------------------


def test_a_fault_of_one_instance_alone_is_a_caveat():
    talk = Talk()
    talk.change(all_wrong, ["served_0_alone"], short_items(talk)[:1])
    gate = talk.gates()["G-catastrophe"]
    assert (gate.status, [it.code for it in gate.caveats]) == (Status.PASS_WITH_CAVEAT, ["not_reproduced"])


def test_one_lost_item_of_a_sampled_model_is_chance_and_a_quarter_of_them_is_not():
    talk = Talk(n=60, options=SAMPLED)
    talk.change(all_wrong, items=short_items(talk)[:1])
    assert talk.gates()["G-catastrophe"].status is Status.PASS_WITH_CAVEAT
    talk.change(all_wrong, items=short_items(talk)[:15])
    assert talk.gates()["G-catastrophe"].status is Status.FAIL


def test_a_sampled_model_whose_floor_loses_as_many_items_passes():
    talk = Talk(n=60, options=SAMPLED)
    items = short_items(talk)
    for arm, start in ((JUDGE, 0), (FLOORS[0], 5), (FLOORS[1], 10), *((arm, 15) for arm in ALL_SERVED)):
        talk.change(all_wrong, [arm], items[start : start + 5])
    assert failing(talk.gates()) == set()


def test_without_a_floor_a_sampled_model_cannot_pass():
    talk = Talk(options=SAMPLED)
    for arm in FLOORS:
        del talk.arms[arm]
    found = talk.gates()
    assert found["G-wer"].status is Status.INCONCLUSIVE
    assert found["G-damage"].status is Status.INCONCLUSIVE


# --- failed requests ---------------------------------------------------------------------------------------------


def lost(talk, item, arms=ALL_SERVED):
    gone = dict.fromkeys(talk.arms[JUDGE][item]) | {"error": "http_error: HTTP 500"}
    return talk.change(lambda row: gone, arms, [item])


def test_a_failed_answer_is_the_worst_case_of_every_gate_that_counts_items():
    talk = Talk()
    found = lost(talk, long_items(talk)[0]).gates()
    assert {"G-coverage", "G-damage", "G-catastrophe", "G-ends", "G-window", "G-waveform"} <= failing(found)


def test_a_failed_answer_costs_all_its_words():
    talk = Talk()
    before = talk.gates()["G-wer"]
    after = lost(talk, long_items(talk)[0]).gates()["G-wer"]
    words = sum(len(text.split()) for text in talk.texts.values())
    assert (before.value, after.test.n) == (0, before.test.n)
    assert after.value == pytest.approx(len(talk.texts[long_items(talk)[0]].split()) / words)


def test_an_answer_without_a_row_is_lost_too():
    talk = Talk()
    for arm in ALL_SERVED:
        del talk.arms[arm][talk.items[4]]
    found = talk.gates()
    assert {"G-coverage", "G-catastrophe"} <= failing(found)
    assert found["G-catastrophe"].test.n == len(talk.items)


def test_a_failed_stream_is_no_stream_that_is_as_long():
    talk = Talk()
    assert lost(talk, talk.items[4], ["served_0_stream"]).gates("served_0_stream")["G-stream"].status is Status.FAIL


def test_failed_streams_of_a_sampled_model_count_as_half_as_long():
    talk = Talk(n=60, options=SAMPLED)
    for item in talk.items[:20]:
        lost(talk, item, ["served_0_stream"])
    gate = talk.gates("served_0_stream")["G-stream"]
    assert (gate.status, gate.test.n) == (Status.FAIL, 60)


def test_scores_of_a_lost_item_are_the_worst_and_not_numbers():
    talk = lost(Talk(), "item-004")
    table = talk.table()
    assert np.isnan(table.values("served_0_alone", "wer_errors")[4])
    assert table.values("served_0_alone", "answered")[4] == 0
