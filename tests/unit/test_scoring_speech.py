"""From responses to a verdict on speech: real audio through judging, scoring and gates; the controls among it."""

import numpy as np
import pytest
from speech_run import ALONE, LOAD, OTHER, PLAN, SpeechRun
from spoken import RATE, speech
from talk import DETERMINISTIC

from assay import store
from assay.media.audio import resample
from assay.records import Status
from assay.scoring.tts import SILENT_DBFS, Normalisers, Twins, heard_scores, twins_of, waveform_score
from assay.verdicts.tts.planted import CONTROLS
from assay.verdicts.tts.suite import TTS

NORMALISERS = Normalisers.of(DETERMINISTIC)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return SpeechRun(tmp_path_factory.mktemp("clean")).verdict()


def test_a_server_that_sends_the_references_own_samples_passes(clean):
    assert clean.verdict is Status.PASS, clean.reason
    assert (clean.claim.bad, clean.claim.n) == (0, 20)
    assert (clean.samples.spoken, clean.samples.long) == (20, 1)


def test_every_control_is_caught_by_its_gate(clean):
    got = {(control.fault, control.gate): control.got for control in clean.controls.positive}
    assert got == {(control.name, gate): Status.FAIL for control in CONTROLS for gate in control.gates}


def test_every_gate_has_a_control(clean):
    assert {gate.id for gate in clean.gates} == {gate for control in CONTROLS for gate in control.gates}
    assert set(TTS.checks) == {gate.id for gate in clean.gates}


def failing(verdict):
    return {gate.id for gate in verdict.gates if gate.status is Status.FAIL}


def test_one_answer_that_cannot_be_read_fails_with_its_reason(tmp_path):
    run = SpeechRun(tmp_path)
    row = run.arms[ALONE]["item-04"]
    row["audio"] = {"bytes": row["audio"]["bytes"][:-100], "path": "speech.wav"}
    verdict = run.verdict()
    assert verdict.verdict is Status.FAIL
    assert {"G-coverage", "G-contract"} <= failing(verdict)


def test_a_stream_that_drops_its_chunks_ends_fails_by_count_and_by_sound_while_the_words_are_there(tmp_path):
    run = SpeechRun(tmp_path)
    for key, clip in run.clips.items():
        parts = np.split(clip, range(12_000, clip.shape[-1], 12_000), axis=1)
        run.serve(key, np.concatenate([part[:, :-552] for part in parts[:-1]] + parts[-1:], axis=1), [LOAD, OTHER])
        for arm in (LOAD, OTHER):
            sizes = [2 * (part.shape[-1] - 552) for part in parts[:-1]] + [2 * parts[-1].shape[-1]]
            run.arms[arm][key]["chunk_bytes"] = [44, *sizes]
    assert {"G-stream", "G-seams", "G-waveform"} <= failing(run.verdict())


def test_silence_in_place_of_one_word_fails(tmp_path):
    run = SpeechRun(tmp_path)
    run.serve("item-01", np.zeros((1, RATE // 5)))
    assert {"G-damage", "G-catastrophe", "G-ends"} <= failing(run.verdict())


def test_another_speaker_saying_all_the_words_fails(tmp_path):
    run = SpeechRun(tmp_path)
    for key, clip in run.clips.items():
        run.serve(key, resample(clip, RATE, RATE * 4 // 5))  # pitch and formants a quarter higher
    assert "G-speaker" in failing(run.verdict())


def test_what_a_verdict_rests_on_names_both_normalisers(tmp_path):
    found = store.read_provenance(SpeechRun(tmp_path).score())["options"]["normalisers"]
    assert {key: one["name"] for key, one in found.items()} == {"pinned": "whisper_english", "basic": "whisper_basic"}
    assert all(len(one["sha256"]) == 64 and one["version"] for one in found.values())


def test_scores_are_written_a_few_items_at_a_time_with_all_their_arms(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "ITEMS_PER_ROW_GROUP", 8)
    tables = list(store.iter_tables(SpeechRun(tmp_path).score(), "scores", ["item_id", "arm"]))
    assert [len(table["item_id"].unique()) for table in tables] == [8, 8, 4]
    assert {len(table["arm"].unique()) for table in tables} == {6 + len(CONTROLS)}


def test_an_item_of_which_no_arm_has_anything_is_the_worst_case_in_each(tmp_path):
    run = SpeechRun(tmp_path)
    for arm in run.arms.values():
        del arm["item-03"]
    rows = [row for row in store.read_rows(run.score(), "scores") if row["item_id"] == "item-03"]
    assert {row["arm"] for row in rows if row["metric"] == "wer_errors" and row["flag"] == "missing_as_worst"} == {
        *run.arms,
        *(f"control_{control.name}" for control in CONTROLS),
    }


# --- parts -------------------------------------------------------------------------------------------------------


def test_twins_are_the_first_whole_pass_and_the_one_with_fewer_requests():
    assert twins_of(PLAN) == {ALONE: Twins(), LOAD: Twins(whole=ALONE, alone=ALONE), OTHER: Twins()}


def test_an_arm_that_streams_everything_has_no_whole_twin():
    plan = PLAN | {"client": {"stream": True}, "instances": [[{"name": "a", "concurrency": 1}]]}
    assert twins_of(plan) == {"served_0_a": Twins()}


def test_errors_are_counted_by_both_normalisers():
    asked, heard = NORMALISERS("Mr. Smith has twenty-one keys."), NORMALISERS("Mister Smith has 21 keys.")
    found = heard_scores(asked, heard)
    assert found["wer_errors"].value == 0
    assert found["wer_errors_other"].value > 0


def test_words_missing_at_both_ends_are_told_apart():
    found = heard_scores(NORMALISERS("one apple and nine pears"), NORMALISERS("apple and nine"))
    assert (found["end_deletions"].value, found["end_deletions"].aux) == (2, {"head": 1, "tail": 1})


def test_a_text_of_which_nothing_is_heard_misses_each_word_once():
    assert heard_scores(NORMALISERS("apple and pears"), NORMALISERS(""))["end_deletions"].value == 3


def test_equal_samples_differ_by_nothing_and_others_by_their_difference():
    clip = speech("alpha")
    assert waveform_score(clip, clip.copy(), RATE).value == SILENT_DBFS
    found = waveform_score(clip, np.float32(0.9) * clip, RATE)
    assert found.aux["snr_db"] == pytest.approx(20, abs=0.01)
    late = waveform_score(clip, np.pad(clip, ((0, 0), (3, 0))), RATE)
    assert (late.aux["lag"], late.aux["more"]) == (3, 3)


def test_other_channels_are_the_worst_case():
    clip = speech("alpha")
    assert waveform_score(clip, np.concatenate([clip, clip]), RATE).value == np.inf
