"""The page on speech: served and reference can be heard side by side, and every word that is lost is seen."""

import numpy as np
import pytest
from speech_run import ALONE, LOAD, OTHER, SpeechRun
from spoken import RATE

from assay.gate import read_verdict
from assay.metrics.speech import Edit
from assay.report.items import Standing
from assay.report.page import read_case, render
from assay.report.tts import tts_items
from assay.run import run_of
from assay.verdicts.tts.planted import CHUNK_S


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    spoken = SpeechRun(tmp_path_factory.mktemp("spoken"))
    spoken.serve("item-01", np.zeros((1, RATE // 5)))  # silence in place of a word
    clip = spoken.clips["item-04"]
    spoken.serve("item-04", clip[:, : clip.shape[-1] * 3 // 4], [LOAD, OTHER])  # streams lose the last words
    broken = spoken.arms[ALONE]["item-07"]
    broken["audio"] = {"bytes": broken["audio"]["bytes"][:-100], "path": "speech.wav"}
    path = spoken.publish()
    return read_verdict(path), run_of(path)


@pytest.fixture(scope="module")
def items(laid_out):
    return {item.item_id: item for item in tts_items(read_case(*laid_out)).items}


def test_items_stand_as_they_were_judged(items):
    assert items["item-07"].worst.standing is Standing.UNANSWERED
    assert items["item-01"].worst.standing is items["item-04"].worst.standing is Standing.WRONG
    others = [item for key, item in items.items() if key not in ("item-01", "item-04", "item-07")]
    assert {item.worst.standing for item in others} == {Standing.SAME} and len(items) == 20


def test_what_is_wrong_is_said_in_words(items):
    assert {"no speech", "silent or too quiet", "not understood"} <= set(items["item-01"].worst.notes)
    assert "last words missing" in items["item-04"].worst.notes


def test_served_and_reference_are_there_to_hear(items):
    served, reference = items["item-04"].view.takes
    assert served.audio.duration_s == pytest.approx(0.75 * reference.audio.duration_s, rel=1e-3)
    assert served.audio.source.startswith("data:audio/flac;base64,")
    assert (served.measures["duration_s"], served.name) == (served.audio.duration_s, "served")


def test_lost_words_are_marked_where_they_were_asked_for(items):
    served, reference = items["item-04"].view.takes
    assert reference.errors == 0 and served.errors > 0
    assert served.places[0].edit is Edit.EQUAL and served.places[-1].edit is Edit.DELETE


def test_audio_that_cannot_be_read_says_why_beside_the_references(items):
    served, reference = items["item-07"].view.takes
    assert served.audio is None and "bytes" in served.fault
    assert reference.audio is not None


def test_chunk_seams_of_a_stream_are_marked(items):
    item = items["item-04"]
    assert item.worst.arm == LOAD
    served, reference = item.view.takes
    gaps = np.diff(served.audio.seams) / 480 * served.audio.duration_s
    assert gaps == pytest.approx(CHUNK_S, abs=1e-3) and reference.audio.seams == ()


def test_the_page_has_two_players_an_item_and_marks_words(laid_out):
    page = render(*laid_out)
    assert page.count("<audio controls") == 2 * 20 - 1
    assert "<del>" in page and "No item is lost" in page and 'class="seam"' in page
