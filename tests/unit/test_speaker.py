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
from assay.media.audio import resample
from assay.metrics.audio import speaker_similarity
from assay.references.speaker import BATCH, HOP, LAYERS, MELS, STRETCH, UNITS, WEIGHTS, SpeakerEncoder, stretches

# What Resemblyzer 0.1.4 makes of tests/data/speech (with librosa 0.11.0, on torch 2.13.0), each clip resampled to 16 kHz
# by soxr and brought to -30 dBFS before: `VoiceEncoder().embed_utterance(samples)`.
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


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return network(tmp_path_factory.mktemp("untrained"))


@pytest.mark.parametrize(
    ("samples", "starts"),
    [
        (1, [0]),  # shorter than a stretch of 25600 samples: one, with silence behind it
        (25_600, [0]),
        (25_600 + 77 * 160 * 3 // 4, [0]),  # (samples - 77 * 160) / 25600 is 0.74 of the second stretch: left out
        (25_600 + 77 * 160, [0, 77]),  # the second one is full
        (25_600 + 77 * 160 - 6_400, [0, 77]),  # three quarters of it
        (25_600 + 77 * 160 - 6_401, [0]),
        (16_000 * 10, [77 * number for number in range(12)]),  # the twelfth from 8.47 s on: 0.96 full; a next one: 0.47
    ],
)
def test_audio_is_cut_into_stretches_and_the_last_one_must_be_three_quarters_sound(samples, starts):
    assert stretches(samples) == starts


def test_an_embedding_is_a_direction_without_negative_parts_whatever_the_level(untrained):
    found = untrained.embed(speech("alpha"), RATE)
    assert (found.shape, found.dtype, found.min() >= 0) == ((UNITS,), np.float32, True)
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)
    assert speaker_similarity(found, untrained.embed(speech("alpha") / 8, RATE)) == pytest.approx(1, abs=1e-6)


def test_long_audio_is_the_mean_of_its_stretches(untrained):
    sound = np.tile(speech("alpha"), 20)  # 67.5 s: more stretches than go through the network at a time
    mono = resample(sound, RATE, 16_000)
    starts = stretches(mono.shape[-1])
    assert len(starts) > BATCH
    parts = [untrained.embed(mono[:, start * HOP : (start + STRETCH) * HOP], 16_000) for start in starts]
    # Not to the digit: a stretch by itself has silence at its edges, and a level of its own.
    assert speaker_similarity(untrained.embed(sound, RATE), np.mean(parts, axis=0)) == pytest.approx(1, abs=1e-4)


def test_sound_that_excites_no_unit_is_nobodys(tmp_path):
    assert network(tmp_path, bias=-100.0).embed(speech("word"), RATE) is None


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
@pytest.mark.parametrize("name", TEXTS)
def test_the_embedding_is_the_packages_own(resemblyzer, name):
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
