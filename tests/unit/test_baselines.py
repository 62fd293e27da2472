"""What other rules say: blind where they are known to be, and not where they see."""

import pytest

from assay.baselines import speech_rules, transcription_rules

TEXTS = {f"item-{number}": f"the {word} number {number} stands by the door" for number, word in enumerate(
    ["apple", "pear", "plum", "grape", "melon", "lemon", "peach", "cherry", "fig", "date"])}  # fmt: skip


def heard(changes=None, length=1.0):
    """Transcripts as the reference's, but for what is changed: item -> text, or None for an answer that failed."""
    texts = TEXTS | (changes or {})
    return [
        {
            "item_id": item,
            "text": text,
            "duration_s": None if text is None else length * 3.0,
            "status": "ok" if text is not None else "http_error",
        }
        for item, text in texts.items()
    ]


def said(served):
    return {rule.rule: rule.passes for rule in speech_rules(TEXTS, served, heard())}


def test_the_references_own_speech_passes_by_every_rule():
    assert said(heard()) == {"mean WER": True, "length": True, "seed-tts-eval": True}


def test_failed_answers_are_left_out_by_all_of_them():
    assert set(said(heard({"item-0": None, "item-1": None})).values()) == {True}


def test_silence_as_long_as_the_speech_passes_by_length():
    assert said(heard(dict.fromkeys(TEXTS, ""))) == {"mean WER": False, "length": True, "seed-tts-eval": False}


def test_speech_said_twice_fails_by_length_and_passes_by_words_if_they_are_heard_once():
    assert said(heard(length=2.0)) == {"mean WER": True, "length": False, "seed-tts-eval": True}


def test_one_runaway_answer_swings_the_mean():
    assert said(heard({"item-0": "apple " * 50}))["mean WER"] is False


def test_nothing_that_can_be_read_gives_no_rule_anything_to_say():
    assert set(said(heard(dict.fromkeys(TEXTS))).values()) == {None}


@pytest.mark.parametrize(("changes", "passes"), [({"item-0": None}, True), (dict.fromkeys(TEXTS, "wrong"), False)])
def test_transcripts_are_judged_by_their_mean_over_the_answers_that_came(changes, passes):
    (rule,) = transcription_rules(TEXTS, heard(changes), heard())
    assert rule.passes is passes
