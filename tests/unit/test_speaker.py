"""The network that tells speakers apart: the package's own numbers, and what it makes of short, long and loud audio."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from spoken import RATE, TEXTS, speech

from assay.embedded.tts.faults import Pitch
from assay.errors import SourceError
from assay.metrics.audio import speaker_similarity
from assay.references.speaker import LAYERS, MELS, UNITS, WEIGHTS, SpeakerEncoder, stretches

# What Resemblyzer 0.1.4 (with librosa 0.11.0 and torch 2.13.0) makes of tests/data/speech, each clip resampled to
# 16 kHz and brought to -30 dBFS before: `VoiceEncoder().embed_utterance(samples)`.
MEASURED = json.loads((Path(__file__).parents[1] / "data/speaker_embeddings.json").read_text())


def network(folder, bias=0.0):
    """A source that holds a network which learned nothing."""
    torch.manual_seed(0)
    lstm, linear = torch.nn.LSTM(MELS, UNITS, LAYERS), torch.nn.Linear(UNITS, UNITS)
    torch.nn.init.constant_(linear.bias, bias)
    state = {f"lstm.{key}": value for key, value in lstm.state_dict().items()}
    state |= {f"linear.{key}": value for key, value in linear.state_dict().items()}
    path = folder / WEIGHTS
    path.parent.mkdir()
    torch.save({"model_state": state | {"similarity_bias": torch.zeros(1)}}, path)
    return SpeakerEncoder(folder)


@pytest.mark.parametrize(
    ("samples", "starts"),
    [
        (1, [0]),  # shorter than a stretch of 25600 samples: one, with silence behind it
        (25_600, [0]),
        (77 * 160 + 25_600, [0, 77]),  # the second one is full, a third would be half full
        (77 * 160 + 19_200, [0, 77]),  # three quarters of it
        (77 * 160 + 19_199, [0]),
        (16_000 * 10, [77 * number for number in range(12)]),  # the twelfth from 8.47 s on: 0.96 full; a next one: 0.47
    ],
)
def test_audio_is_cut_into_stretches_and_the_last_one_must_be_three_quarters_sound(samples, starts):
    assert stretches(samples) == starts


def test_an_embedding_is_a_direction_without_negative_parts(tmp_path):
    found = network(tmp_path).embed(speech("word"), RATE)
    assert (found.shape, found.dtype, found.min() >= 0) == ((UNITS,), np.float32, True)
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def test_sound_that_excites_no_unit_is_nobodys(tmp_path):
    assert network(tmp_path, bias=-100.0).embed(speech("word"), RATE) is None


def test_channels_that_cancel_each_other_are_nobodys(tmp_path):
    assert network(tmp_path).embed(np.concatenate([speech("word"), -speech("word")]), RATE) is None


def test_a_source_without_the_network_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"holds no resemblyzer/pretrained\.pt; let the family's `speaker_encoder`"):
        SpeakerEncoder(tmp_path)


# --- the real network ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resemblyzer(fetched: Callable[..., Path]) -> SpeakerEncoder:
    return SpeakerEncoder(fetched("resemblyzer") / "resemblyzer")


def pitched(samples, ratio):
    """As the embedded server plants it."""
    fault = Pitch(ratio)
    fault.model(types.SimpleNamespace(rate=RATE))
    return fault.sound(samples[0], None).astype(np.float32)[None]


@pytest.mark.model
@pytest.mark.parametrize("batch", [64, 2])  # alpha and bravo are three stretches long, word is less than one
@pytest.mark.parametrize("name", TEXTS)
def test_the_embedding_is_the_packages_own(resemblyzer, monkeypatch, name, batch):
    monkeypatch.setattr("assay.references.speaker.BATCH", batch)
    found = resemblyzer.embed(speech(name), RATE)
    np.testing.assert_allclose(found, MEASURED[name], atol=1e-5)  # 2e-7 where this was written


@pytest.mark.model
@pytest.mark.parametrize("name", TEXTS)
def test_another_speaker_is_told_from_another_level_even_in_one_word(resemblyzer, name):
    own = resemblyzer.embed(speech(name), RATE)
    quiet = resemblyzer.embed(speech(name) / 4, RATE)
    other = resemblyzer.embed(pitched(speech(name), 1.3), RATE)
    assert speaker_similarity(own, quiet) > 0.999
    assert speaker_similarity(own, other) < 0.9
