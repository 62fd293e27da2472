"""Audio of a report, opened from its file: it plays, and nothing is loaded for it."""

import time

import numpy as np
import pytest
from reports import RATE, RIGHT, WRONG, write_transcripts
from selenium.webdriver.common.by import By

from assay.report.page import write_report

SECONDS = 2


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    clip = 0.2 * np.sin(2 * np.pi * 440 * np.arange(SECONDS * RATE) / RATE).astype(np.float32)[np.newaxis]
    run = write_transcripts(
        tmp_path_factory.mktemp("run"), {"right": RIGHT, "wrong": WRONG}, {"right": clip, "wrong": clip}
    )
    write_report(run.verdict, run.report)
    return run.report


def test_audio_plays(browser, page):
    browser.open(page, "#item-wrong")
    audio = browser.driver.find_element(By.CSS_SELECTOR, "#item-wrong audio")
    assert audio.is_displayed()
    browser.script("arguments[0].muted = true; arguments[0].play()", audio)
    deadline = time.monotonic() + 10
    while browser.script("return arguments[0].currentTime", audio) < 0.2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 0.2 <= browser.script("return arguments[0].currentTime", audio) <= SECONDS
    assert browser.script("return arguments[0].duration", audio) == pytest.approx(SECONDS, abs=0.05)
    assert browser.script("return arguments[0].error", audio) is None
    assert browser.console() == [] and browser.requests() == [page.resolve().as_uri()]


def test_the_spectrogram_is_shown(browser, page):
    browser.open(page, "#item-right")
    picture = browser.driver.find_element(By.CSS_SELECTOR, "#item-right .spectrogram")
    assert browser.script("return arguments[0].naturalHeight", picture) == 96
    assert picture.size["height"] > 50
