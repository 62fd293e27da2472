"""Transcripts for a person: the worst first, each word where it belongs."""

import io
import shutil

import pytest
from rich.console import Console
from transcripts import OPTIONS, PLAN, SERVED, SPOKEN, Toy, said, text_of

from assay.explain_asr import aligned, transcript_panel, worst_transcripts
from assay.metrics.speech import align_words


def shown(thing):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(thing)
    return console.export_text()


def test_an_alignment_marks_wrong_missing_and_invented_words():
    places = align_words("one two three", "one too three four").places
    assert shown(aligned(places)).strip() == "one ⟨too→two⟩ three +four+"
    assert shown(aligned(align_words("one two three", "one three").places)).strip() == "one -two- three"
    assert shown(aligned(())).strip() == "nothing"


@pytest.fixture
def worst(tmp_path):
    def find(spoil, count=5):
        toy = Toy(tmp_path)
        toy.scores(spoil)
        for file, folder in (("set.parquet", "samplesets"), ("set.lock.json", "samplesets")):
            (tmp_path / folder).mkdir(exist_ok=True)
            shutil.copy(tmp_path / file, tmp_path / folder)
        judge = tmp_path / "results/reference/whisper/set"
        judge.mkdir(parents=True)
        shutil.copy(tmp_path / "responses/judge.parquet", judge)
        outputs = {arm: tmp_path / f"responses/{number}.parquet" for number, arms in SERVED.items() for arm in arms}
        plan = PLAN | {"sets": ["set"], "reference": {"model": "whisper"}}
        return list(worst_transcripts(tmp_path, tmp_path / "scores.parquet", outputs, plan, OPTIONS, count))

    return find


def test_the_items_with_most_errors_come_first_and_right_ones_not_at_all(worst):
    def spoil(row, place):
        lost = {4: 2, 9: 6, 11: 1}.get(place, 0)
        if place == 13:
            return row | {"status": "timeout", "text": None, "token_ids": None}
        return row | {"text": text_of(said(place)[lost:]), "token_ids": None} if lost else row

    found = worst(spoil)
    assert [(heard.item_id, heard.excess) for heard in found] == [
        ("item-13", 12),
        ("item-09", 6),
        ("item-04", 2),
        ("item-11", 1),
    ]
    text = shown(transcript_panel(found[1]))
    assert "[WER 0 %: 0 sub, 0 del, 0 ins]" in text and "[WER 50 %: 0 sub, 6 del, 0 ins]" in text
    assert "6 edits between served and reference (12 words)" in text
    assert "no answer" in shown(transcript_panel(found[0]))


def test_invented_words_are_counted_where_there_is_no_rate(worst):
    found = worst(lambda row, place: row if place < SPOKEN else row | {"text": "thank you"})
    assert found[0].excess == 2
    assert "[2 words invented]" in shown(transcript_panel(found[0]))


def test_tokens_that_could_not_be_judged_are_shown_though_the_words_are_right(worst):
    found = worst(lambda row, place: row | {"token_ids": [*row["token_ids"], 0]} if place == 5 else row)
    assert [heard.item_id for heard in found] == ["item-05"]
    assert "no token could be judged: the worst margin" in shown(transcript_panel(found[0]))


def test_no_more_are_shown_than_asked_for(worst):
    assert len(worst(lambda row, place: row | {"text": "other words"}, count=3)) == 3
