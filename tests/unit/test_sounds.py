"""Sounds: lengths, levels and spectra as said, seeds that matter, and WAV that any reader reads."""

from __future__ import annotations

import hashlib
import io

import av
import numpy as np
import pytest
import soundfile

from assay.samples.sounds import MADE, hum, joined, music, pink, resampled, wav, white

RATE = 16_000
ONE = RATE  # samples of a second


def dbfs(samples: np.ndarray) -> float:
    return 10 * np.log10(np.mean((samples / 32768.0) ** 2))


@pytest.mark.parametrize("name", MADE)
def test_a_sound_is_16_bit_of_the_length_asked_and_does_not_clip(name: str) -> None:
    samples = MADE[name](3 * ONE + 7, 1, RATE)
    assert (samples.dtype, samples.shape) == (np.int16, (3 * ONE + 7,))
    assert np.abs(samples.astype(int)).max() < 32767
    assert samples.any() == (name != "silence")


@pytest.mark.parametrize("name", ["white", "pink", "music"])
def test_the_seed_decides(name: str) -> None:
    first, again, other = (MADE[name](ONE, seed, RATE) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_sounds_are_the_same_on_every_machine() -> None:
    """Hashes found with and without vector instructions (NPY_DISABLE_CPU_FEATURES, SOXR_USE_SIMD)."""
    content = b"".join(MADE[name](ONE, 7, RATE).astype("<i2").tobytes() for name in MADE)
    assert hashlib.sha256(content).hexdigest()[:16] == "8fa1092103beb1e4"
    played = np.concatenate([resampled(music(ONE, 7, RATE), RATE, rate, 1) for rate in (8_000, 44_100, 48_000)])
    assert hashlib.sha256(played.astype("<i2").tobytes()).hexdigest()[:16] == "c08a86f97a1ca6cf"


def test_white_noise_has_its_level_and_pink_noise_loses_three_decibels_an_octave() -> None:
    # Uniform in +-0.05 of full scale: 20 log10(0.05) - 10 log10(3) = -30.8 dBFS
    assert dbfs(white(10 * ONE, 1, RATE)) == pytest.approx(-30.8, abs=0.2)

    def octave(samples: np.ndarray, low: float) -> float:
        power = np.abs(np.fft.rfft(samples)) ** 2
        hertz = np.fft.rfftfreq(len(samples), 1 / RATE)
        return 10 * np.log10(power[(hertz >= low) & (hertz < 2 * low)].sum())

    flat = [octave(pink(60 * ONE, 1, RATE).astype(float), low) for low in (100, 200, 400, 800, 1600)]
    assert max(flat) - min(flat) < 3  # white noise: 12 dB
    assert octave(white(60 * ONE, 1, RATE).astype(float), 1600) - octave(white(60 * ONE, 1, RATE), 100) > 10


def test_hum_is_at_fifty_hertz_and_its_harmonics() -> None:
    power = np.abs(np.fft.rfft(hum(ONE, 1, RATE).astype(float)))
    assert sorted(np.argsort(power)[-3:]) == [50, 100, 150]  # one bin a hertz


def test_resampling_keeps_the_length_in_seconds_and_the_tone() -> None:
    tone = np.rint(8000 * np.sin(2 * np.pi * 440 * np.arange(2 * ONE) / RATE)).astype(np.int16)
    for rate in (8_000, 11_025, 22_050, 44_100, 48_000, 96_000):
        played = resampled(tone, RATE, rate, 1)
        assert len(played) == pytest.approx(2 * rate, abs=1)
        wanted = 8000 * np.sin(2 * np.pi * 440 * np.arange(len(played)) / rate)
        middle = slice(rate // 4, -rate // 4)
        assert np.abs(played - wanted)[middle].max() < 3


def test_a_second_channel_is_the_first_at_half_its_level() -> None:
    samples = music(ONE, 1, RATE)
    both = resampled(samples, RATE, RATE, 2)
    assert both.shape == (ONE, 2)
    assert np.array_equal(both[:, 0], samples)
    assert np.abs(both[:, 1] - samples / 2).max() <= 0.5


def test_pieces_are_joined_with_silence_between_them_only() -> None:
    piece = np.array([1, 2], np.int16)
    assert joined([piece, piece, piece], 3).tolist() == [1, 2, 0, 0, 0, 1, 2, 0, 0, 0, 1, 2]


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (44_100, 2), (96_000, 1)])
def test_other_readers_read_the_wav_that_is_written(rate: int, channels: int) -> None:
    samples = resampled(music(ONE, 1, RATE), RATE, rate, channels)
    content = wav(samples, rate)
    assert len(content) == 44 + 2 * samples.size
    read, found = soundfile.read(io.BytesIO(content), dtype="int16")
    assert found == rate
    assert np.array_equal(read, samples)
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.audio[0]
        assert (stream.rate, stream.channels) == (rate, channels)
        assert sum(frame.samples for frame in container.decode(stream)) == len(samples)
