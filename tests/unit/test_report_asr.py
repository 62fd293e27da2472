"""The page on transcripts: what was sent can be heard, and every word that is wrong is seen."""

import numpy as np
import pytest
from reports import CLOSE, LOST, RATE, RIGHT, WRONG, write_transcripts

from assay.gate import read_verdict
from assay.metrics.speech import Edit
from assay.report import sound
from assay.report.items import Standing
from assay.report.page import read_case, render, write_report

ANSWERS = {"right": RIGHT, "wrong": WRONG, "close": CLOSE, "lost": LOST}


def tone(hertz):
    return 0.3 * np.sin(2 * np.pi * hertz * np.arange(RATE) / RATE).astype(np.float32)[np.newaxis]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    clips = {key: tone(200 * (k + 1)) for k, key in enumerate(ANSWERS)}
    return write_transcripts(tmp_path_factory.mktemp("run"), ANSWERS, clips)


@pytest.fixture(scope="module")
def listing(run):
    from assay.report.asr import asr_items

    return asr_items(read_case(read_verdict(run.verdict), run))


@pytest.fixture(scope="module")
def items(listing):
    return {item.item_id: item for item in listing.items}


def test_items_stand_as_they_were_judged_worst_first(listing):
    assert [(item.item_id, item.worst.standing) for item in listing.items] == [
        ("lost", Standing.UNANSWERED),
        ("wrong", Standing.WRONG),
        ("close", Standing.CLOSE),
        ("right", Standing.SAME),
    ]


def test_words_that_are_wrong_are_told_from_those_that_are_right(items):
    served, reference = items["wrong"].view.served, items["wrong"].view.reference
    assert [(place.edit, place.reference) for place in served.places][:2] == [
        (Edit.EQUAL, "red"),
        (Edit.SUBSTITUTE, "green"),
    ]
    assert (reference.errors, reference.words) == (0, 3)
    assert served.errors >= 2 and items["lost"].view.served is None


def test_the_score_is_edits_a_word_against_the_references_transcript(items):
    assert items["wrong"].worst.score == pytest.approx(items["wrong"].view.served.errors / 3)
    assert items["right"].worst.score == 0 and items["lost"].worst.score is None


def test_each_item_has_its_audio_until_the_page_is_full(run, listing, monkeypatch):
    assert listing.refused_audio == 0 and all(item.view.audio.source for item in listing.items)
    monkeypatch.setattr(sound, "MOST_BYTES", 0)
    verdict = read_verdict(run.verdict)
    page = render(verdict, run)
    assert page.count("<audio") == 0 and page.count('<svg class="waveform"') == 4
    assert "4 audio files of later items are not on this page" in page


def test_the_page_has_a_player_and_an_alignment_for_each_item(run):
    write_report(run.verdict, run.report)
    page = run.report.read_text()
    assert page.count('<audio controls preload="none" src="data:audio/flac;base64,') == 4
    assert "<del>green</del><ins>cyan</ins>" in page
    assert "Transcripts are the reference&#39;s" in page
