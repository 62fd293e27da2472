"""Transcript metrics: hand calculations, and each planted fault beside its clean twin."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from assay.metrics import speech
from assay.metrics.speech import Aligned, Edit, Edits, Segment, Timing

FOX = "the quick brown fox jumps over the lazy dog"
words = st.lists(st.sampled_from("abcd"), max_size=12).map(" ".join)


def edits(reference, hypothesis):
    return speech.align_words(reference, hypothesis).edits


# --- normalisers -------------------------------------------------------------------------------------------------


def test_a_normaliser_is_pinned_by_name_version_and_content():
    found = [speech.normaliser(name) for name in ("whisper_english", "whisper_basic", "whisper_basic_letters", "nfc")]
    assert [one.name for one in found] == ["whisper_english", "whisper_basic", "whisper_basic_letters", "nfc"]
    assert len({one.sha256 for one in found}) == 4
    assert all(len(one.sha256) == len(hashlib.sha256().hexdigest()) and one.version for one in found)


def test_both_normalisers_give_a_number_of_their_own():
    # English writes "twenty-four" as 24: equal. Basic compares the words as they are: 2 substituted by 1.
    rates = {}
    for name in ("whisper_english", "whisper_basic"):
        call = speech.normaliser(name).call
        rates[name] = edits(call("I am twenty-four."), call("i am 24")).rate
    assert rates == {"whisper_english": 0.0, "whisper_basic": 0.5}


def test_another_spelling_table_is_another_normaliser(monkeypatch):
    before = speech.normaliser("whisper_english").sha256
    monkeypatch.setattr(speech.english.EnglishSpellingNormalizer, "__init__", lambda self: setattr(self, "mapping", {}))
    speech.normaliser.cache_clear()
    after = speech.normaliser("whisper_english").sha256
    speech.normaliser.cache_clear()
    assert before != after


def test_marks_are_kept_for_indic_scripts():
    namaste = "\u0928\u092e\u0938\u094d\u0924\u0947"
    assert speech.normaliser("whisper_basic_marks").call(namaste) == namaste
    assert speech.normaliser("whisper_basic").call(namaste) != namaste


def test_an_unknown_normaliser_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'whisper'.*whisper_english"):
        speech.normaliser("whisper")


# --- alignment and error rates -----------------------------------------------------------------------------------


def test_an_alignment_names_what_became_of_each_word():
    assert speech.align_words("a b c", "a x c d").places == (
        Aligned(Edit.EQUAL, "a", "a"),
        Aligned(Edit.SUBSTITUTE, "b", "x"),
        Aligned(Edit.EQUAL, "c", "c"),
        Aligned(Edit.INSERT, None, "d"),
    )
    assert speech.align_words("a b", "b").places[0] == Aligned(Edit.DELETE, "a", None)


@settings(max_examples=100, deadline=None)
@given(words, words)
def test_an_alignment_spells_both_texts_at_the_smallest_distance(reference, hypothesis):
    alignment = speech.align_words(reference, hypothesis)
    assert " ".join(p.reference for p in alignment.places if p.reference is not None) == reference
    assert " ".join(p.hypothesis for p in alignment.places if p.hypothesis is not None) == hypothesis
    counts = alignment.edits
    assert counts.errors == Levenshtein.distance(reference.split(), hypothesis.split())
    assert (counts.words, counts.heard) == (len(reference.split()), len(hypothesis.split()))


def test_any_white_space_separates_words():
    assert edits("a b  c", " a\tb\nc\u00a0") == Edits(hits=3)


def test_rates_are_unknown_where_nothing_was_said_and_full_where_nothing_was_heard():
    silent, unheard, both = edits("", "you"), edits("you", ""), edits("", "")
    assert (silent.rate, silent.mer, silent.wil, silent.errors) == (None, 1.0, None, 1)
    assert (unheard.rate, unheard.mer, unheard.wil) == (1.0, 1.0, 1.0)
    assert (both.rate, both.mer, both.wil, both.errors) == (None, None, None, 0)


def test_a_corpus_rate_weighs_words_and_keeps_empty_references_as_insertions():
    # 1 of 1 wrong, 0 of 9 wrong, 2 heard against nothing: 3 errors / 10 words; by items (1 + 0) / 2
    items = [edits("a", "b"), edits(FOX, FOX), edits("", "thank you")]
    assert speech.pool(items).rate == 0.3
    assert speech.macro_rate(items) == 0.5
    assert speech.pool([]) == Edits()
    assert speech.macro_rate([edits("", "x")]) is None


def test_a_missing_or_empty_hypothesis_is_all_deletions_and_keeps_its_place():
    aligned = speech.align_all({"1": "a b", "2": "c d", "3": "e"}, {"1": "a b", "2": None})
    assert {item: one.edits for item, one in aligned.items()} == {
        "1": Edits(hits=2),
        "2": Edits(deletions=2),
        "3": Edits(deletions=1),
    }
    # Left out, the rate would be 0; it is 3 / 5.
    assert speech.pool(one.edits for one in aligned.values()).rate == 0.6


def test_hypotheses_join_by_item_and_not_by_position():
    aligned = speech.align_all({"1": "a", "2": "b"}, {"2": "b", "1": "a"})
    assert speech.pool(one.edits for one in aligned.values()).errors == 0
    with pytest.raises(ValueError, match="without a reference: 3"):
        speech.align_all({"1": "a"}, {"3": "a"})


def test_one_runaway_item_moves_the_macro_mean():
    # B15: 40 insertions in one of 101 rows. Macro: (40 / 9) / 101 = 4.4 %.
    items = [edits(FOX, FOX)] * 100 + [edits(FOX, f"{FOX} {'no ' * 40}")]
    assert speech.macro_rate(items) == pytest.approx(40 / 9 / 101)


# --- structure ---------------------------------------------------------------------------------------------------


def test_a_garbled_stretch_stands_out_of_its_window():
    reference = [str(n) for n in range(100)]
    heard = [*reference[:40], *"abcdefghij", *reference[50:]]
    alignment = speech.align_words(" ".join(reference), " ".join(heard))
    rates = speech.windowed_rate(alignment, 20)
    assert len(rates) == 81
    assert rates.max() == 0.5  # 10 of 20, while the whole text has 10 of 100
    assert rates[30:41].tolist() == [0.5] * 11 and rates[20] == 0.0


def test_windows_count_insertions_where_they_stand():
    # b before a counts with a, as x and y after it do: 3 errors at a, none at c
    assert speech.windowed_rate(speech.align_words("a c", "b a x y c"), 1).tolist() == [3.0, 0.0]
    assert speech.windowed_rate(speech.align_words("a b", "a x"), 20).tolist() == [0.5]
    assert len(speech.windowed_rate(speech.align_words("", "a"), 20)) == 0


@pytest.mark.parametrize(
    ("hypothesis", "missing"),
    [
        (FOX, 0),
        ("the quick brown fox jumps over the lazy", 1),  # B6: one word short
        ("the quick brown fox", 5),
        ("the quick brown fox jum", 4),  # a garbled word before the cut does not hide it
        ("the quick brown fox jumps over the lazy cat", 0),
        ("quick brown fox jumps over the lazy dog", 0),  # missing at the start
        ("", 9),
    ],
)
def test_words_missing_at_the_end_are_counted(hypothesis, missing):
    assert speech.tail_deletions(FOX, hypothesis) == missing


@pytest.mark.parametrize(
    ("hypothesis", "missing"), [(FOX, 0), ("brown fox jumps over the lazy dog", 2), ("the quick brown fox", 0)]
)
def test_words_missing_at_the_start_are_counted(hypothesis, missing):
    assert speech.head_deletions(FOX, hypothesis) == missing


@settings(max_examples=100, deadline=None)
@given(words, st.integers(0, 12))
def test_a_cut_text_lacks_at_least_what_was_cut(reference, cut):
    kept = reference.split()[: max(0, len(reference.split()) - cut)]
    assert speech.tail_deletions(reference, " ".join(kept)) >= len(reference.split()) - len(kept)


def test_loops_repeat_their_trigrams_and_prose_does_not():
    assert speech.repeat_fraction(FOX) == 0.0
    assert speech.repeat_fraction("a b") == 0.0
    # a b a b a b: trigrams aba bab aba bab, 2 of 4 distinct
    assert speech.repeat_fraction("a b a b a b") == 0.5


def test_insertions_on_silence_are_counted_by_the_minute():
    assert speech.insertions_per_minute(edits("", "thank you for watching"), 30) == 8.0
    assert speech.insertions_per_minute(edits("", ""), 30) == 0.0
    assert speech.insertions_per_minute(edits("a b c", "a x d e"), 60) == 1.0  # of 3 errors one is invented


def test_decoder_tokens_in_a_text_are_found():
    assert speech.special_tokens("<|en|><|0.00|> hello <|2.40|>") == ["<|en|>", "<|0.00|>", "<|2.40|>"]
    assert speech.special_tokens("a < b | c > d") == []


@pytest.mark.parametrize(
    ("segments", "timing"),
    [
        ([(0, 2), (2, 4), (4.5, 9.5)], Timing(0, 0, 0, 0.95)),
        ([(0, 2), (3, 2.5), (4, 10)], Timing(1, 0, 0, 1.0)),
        ([(0, 2), (5, 7), (3, 4)], Timing(0, 1, 0, 0.7)),
        ([(0, 2), (29, 31)], Timing(0, 0, 1, 3.1)),
        ([(-1, 2), (2, 10)], Timing(0, 0, 1, 1.0)),
        ([(0, 10.04)], Timing(0, 0, 0, 1.004)),  # rounded up by the decoder's step
        ([], Timing(0, 0, 0, 0.0)),
    ],
)
def test_timestamps_run_forward_and_inside_the_clip(segments, timing):
    found = speech.segment_timing([Segment(*times) for times in segments], 10.0)
    assert found == Timing(timing.inverted, timing.backward, timing.outside, pytest.approx(timing.covered))


# --- words of somebody else --------------------------------------------------------------------------------------

TEXTS = {
    "fox": FOX,
    "tide": "the tide went out before the boats came in",
    "rain": "rain fell on the roof all night long",
    "yes": "yes",
    "echo": f"{FOX} and the tide went out before the boats came in",
}


def bleeds(heard, texts, **options):
    """Items in whose transcript another's text is found, in order."""
    index = speech.BleedIndex(texts, **options)
    return [bleed for item, transcript in sorted(heard.items()) if (bleed := index.find(item, transcript))]


def test_transcripts_of_other_items_are_found_though_the_mean_hardly_moves():
    swapped = TEXTS | {"tide": TEXTS["rain"], "rain": TEXTS["tide"]}
    assert [(bleed.item, bleed.other, bleed.share) for bleed in bleeds(swapped, TEXTS)] == [
        ("rain", "tide", 1.0),
        ("tide", "rain", 1.0),
    ]
    assert bleeds(TEXTS, TEXTS) == []


def test_a_part_of_another_text_and_a_one_word_text_bleed_too():
    heard = TEXTS | {"rain": f"rain fell on the roof {TEXTS['tide']}", "fox": "yes"}
    assert [(bleed.item, bleed.other) for bleed in bleeds(heard, TEXTS)] == [("fox", "yes"), ("rain", "tide")]
    assert bleeds(TEXTS | {"rain": f"yes {TEXTS['rain']}"}, TEXTS) == []


def test_plain_errors_are_no_bleed():
    assert bleeds(TEXTS | {"rain": "rain fell on the road before night", "tide": ""}, TEXTS) == []
    some = TEXTS | {"rain": f"{TEXTS['rain']} out before the boats"}  # 1 of the 6 runs of four words in "tide"
    assert bleeds(some, TEXTS) == []
    assert [bleed.other for bleed in bleeds(some, TEXTS, least=0.1)] == ["tide"]


def test_of_equal_texts_the_first_is_named_and_none_is_heard_in_another():
    twice = TEXTS | {"again": TEXTS["tide"]}
    assert bleeds(twice, twice) == []
    (bleed,) = bleeds({"rain": TEXTS["tide"]}, twice)
    assert bleed.other == "again"


def test_what_the_own_text_says_proves_nothing():
    assert speech.overheard(TEXTS["echo"], TEXTS["echo"], TEXTS["fox"]) is None
    assert speech.overheard("yes", "yes", "yes") is None
    assert speech.overheard("anything", "a", "") is None


def test_a_spoken_instruction_or_voice_prompt_is_overheard():
    instruction = "read the following text in a calm voice"
    assert speech.overheard(f"{instruction} {FOX}", FOX, instruction) == 1.0
    assert speech.overheard(FOX, FOX, instruction) == 0.0
    prompts = TEXTS | {"prompt": instruction}
    (bleed,) = bleeds({"fox": f"read the following text in a calm way {FOX}"}, prompts)
    assert (bleed.other, bleed.share) == ("prompt", 0.8)  # 4 of its 5 runs of four words


# --- what other projects' gates would say ------------------------------------------------------------------------


def test_the_seed_tts_eval_rule_leaves_missing_results_out_and_averages_items():
    references = {"1": "A b.", "2": FOX, "3": "gone entirely"}
    # 1: 'a b' against 'a c': 0.5; 2: 0; 3 has no audio and is left out: 0.25. By words and with 3: 3 / 13.
    heard = {"1": "a, c", "2": FOX, "3": None}
    assert speech.seed_tts_eval_wer(references, heard) == 0.25
    assert speech.seed_tts_eval_wer({"1": "thirty six"}, {"1": "36"}) == 1.0  # no numbers normalised
    assert speech.seed_tts_eval_wer({"1": "a"}, {"1": ""}) == 1.0
    assert speech.seed_tts_eval_wer({"1": "a"}, {}) is None
