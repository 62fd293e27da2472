"""Recordings: only transcripts that can be scored against, and files that decode to what they should be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from speech_sources import make_recordings, tune

from assay.errors import ConfigError, SampleError
from assay.samples.recordings import RATE, Recording, all_recordings, decode

NAMES = ("asterisk_sounds", "asterisk_sounds_text", "pocketsphinx_testdata")


def read(root: Path) -> dict[str, Recording]:
    return {item.key: item for item in all_recordings({name: root / name for name in NAMES})}


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recordings(tmp_path_factory.mktemp("resources"))


def test_prompts_and_readings_are_read_with_text_speaker_and_length(resources: Path) -> None:
    found = read(resources)
    assert list(found) == sorted(found)
    dial, day, card = found["vm-dial"], found["digits-day-1"], found["cards-001"]
    assert (dial.text, dial.speaker, dial.seconds) == ("Press 1 to go on, or 2 to end.", "prompts", 3.0)
    assert (day.text, day.origin) == ("Monday", "asterisk_sounds:digits/day-1")
    assert (card.text, card.speaker, card.seconds) == ("ten of clubs", "cards", 1.1)


def test_a_recording_without_speech_has_an_empty_text(resources: Path) -> None:
    assert {key for key, item in read(resources).items() if not item.text} == {"beep", "silence-2"}


@pytest.mark.parametrize(
    "key", ["vm-intro", "vm-star", "digits-h-40", "librivox-0920", "no-transcript", "never-recorded", "; a comment"]
)
def test_what_cannot_be_scored_is_left_out(key: str, resources: Path) -> None:
    """A remark in the transcript, a mark that is spoken as a word, a slip of the pen, or one of the two missing."""
    assert key not in read(resources)


def test_of_equal_files_the_first_stays(resources: Path, tmp_path: Path) -> None:
    shutil.copytree(resources, tmp_path / "copy")
    folder = tmp_path / "copy/asterisk_sounds/usr/share/asterisk/sounds/en_US_f_Allison"
    shutil.copy(folder / "time.g722", folder / "goodbye.g722")
    assert read(resources).keys() - read(tmp_path / "copy").keys() == {"time"}


def test_g722_decodes_to_its_length_and_its_sound(resources: Path) -> None:
    samples = decode(read(resources)["vm-dial"])
    assert (samples.dtype, samples.shape) == (np.int16, (3 * RATE,))
    # The codec keeps the waveform, later by its filters' 22 samples.
    original = tune("vm-dial", 3.0)[:-22].astype(float)
    assert np.corrcoef(samples[22:].astype(float), original)[0, 1] > 0.95


def test_wav_decodes_to_the_samples_in_it(resources: Path) -> None:
    assert np.array_equal(decode(read(resources)["librivox-0880"]), tune("0880", 3.0))


def test_a_file_that_is_not_as_long_as_it_should_be_is_named(resources: Path) -> None:
    recording = read(resources)["vm-dial"]
    with pytest.raises(
        SampleError, match=r"vm-dial\.g722 decodes to 48000 samples of 1 channels at 16000 Hz; expected"
    ):
        decode(replace(recording, seconds=3.5))


@pytest.mark.parametrize("name", NAMES)
def test_a_source_that_is_missing_is_named(name: str, resources: Path, tmp_path: Path) -> None:
    shutil.copytree(resources, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / name)
    with pytest.raises(SampleError, match=rf"{name}.* does not exist; fetch"):
        read(tmp_path / "copy")
    with pytest.raises(ConfigError, match=f"unknown source of the recipe '{name}'"):
        all_recordings({other: resources / other for other in NAMES if other != name})


@pytest.mark.model
def test_every_real_recording_decodes_and_speaks_at_a_human_pace(fetched: Callable[..., Path]) -> None:
    resources = fetched(*NAMES)
    found = read(resources)
    assert len(found) > 500
    for item in found.values():
        samples = decode(item)
        assert len(samples) == pytest.approx(item.seconds * RATE, abs=1)
        if len(item.text) > 12:  # letters and "H.323" are said slowly
            assert 5 < len(item.text) / item.seconds < 25, item  # characters a second
    assert {key for key, item in found.items() if item.seconds > 30} == {
        "demo-congrats",
        "demo-instruct",
        "priv-callee-options",
    }
