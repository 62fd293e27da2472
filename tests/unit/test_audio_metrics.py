"""Audio metrics: hand calculations, and each planted fault beside its clean twin, with the numbers blind to it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import tone, voice

from assay.metrics import audio

RATE = 24_000
VOICE = voice()
CLEAN = audio.profile(VOICE, RATE)


def noise(samples, level=0.1, seed=0):
    return level * np.random.default_rng(seed).standard_normal(samples)


def lowpass(samples, hertz):
    spectrum = np.fft.rfft(samples)
    spectrum[np.fft.rfftfreq(len(samples), 1 / RATE) > hertz] = 0
    return np.fft.irfft(spectrum, len(samples))


# --- number formats ----------------------------------------------------------------------------------------------


def test_sixteen_bits_survive_the_way_through_floats():
    every = np.arange(-32768, 32768).astype(np.int16)
    assert np.array_equal(audio.float_to_int16(audio.int16_to_float(every)), every)


def test_floats_beyond_full_scale_are_clipped_and_never_wrap():
    assert audio.float_to_int16(np.array([1.0, 2.0, -2.0, 0.5])).tolist() == [32767, 32767, -32768, 16384]


# --- level and damage --------------------------------------------------------------------------------------------


def test_levels_pool_channels_by_power():
    # left: rms 1, right: silent: sqrt(1/2)
    assert audio.rms(np.array([[1.0, -1.0], [0.0, 0.0]])) == pytest.approx(math.sqrt(0.5))
    assert audio.dc_offset(np.array([[0.1, 0.1], [-0.3, -0.3]])) == pytest.approx(-0.3)
    assert audio.peak(np.array([[0.1, -0.7], [0.2, 0.3]])) == 0.7


def test_integers_do_not_overflow_on_the_way_to_a_level():
    assert audio.rms(np.full(8, 32767, np.int16)) == 32767.0
    assert audio.downmix(np.full((2, 4), 30_000, np.int16)).tolist() == [30_000.0] * 4


def test_mixing_loses_nothing_of_equal_channels_half_of_unrelated_ones_and_all_of_antiphase():
    left, right = noise(100_000), noise(100_000, seed=1)
    assert audio.downmix_loss_db(np.stack([left, left])) == pytest.approx(0.0, abs=1e-9)
    assert audio.downmix_loss_db(np.stack([left, right])) == pytest.approx(3.01, abs=0.1)
    assert audio.downmix_loss_db(np.stack([left, -left])) == math.inf
    assert audio.downmix_loss_db(np.zeros((2, 8))) == 0.0
    assert audio.downmix_loss_db(left) == 0.0


# --- activity ----------------------------------------------------------------------------------------------------


def test_frames_last_as_long_at_any_rate():
    assert len(audio.frame_levels(np.ones(24_000), 24_000)) == len(audio.frame_levels(np.ones(16_000), 16_000)) == 50
    assert len(audio.frame_levels(np.ones(481), 24_000)) == 2


def test_silence_is_measured_where_it_stands():
    rate = 16_000
    clip = np.concatenate([np.zeros(8_000), tone(440, seconds=1, rate=rate), np.zeros(4_000)])
    found = audio.activity(audio.frame_levels(clip, rate))
    # 0.5 s, 1 s, 0.25 s; a frame of 20 ms straddles the end of the tone
    assert (found.lead_s, found.trail_s, found.sound_s) == pytest.approx((0.5, 0.24, 1.0), abs=0.021)
    assert found.silence_fraction == pytest.approx(0.75 / 1.75, abs=0.015)


def test_a_silent_clip_is_lead_and_trail_throughout():
    found = audio.activity(audio.frame_levels(np.zeros(RATE), RATE))
    assert (found.silence_fraction, found.lead_s, found.trail_s, found.sound_s) == (1.0, 1.0, 1.0, 0.0)


def test_zeros_appended_make_no_sound_silent_and_no_silence_sound():
    before = audio.activity(audio.frame_levels(VOICE, RATE))
    after = audio.activity(audio.frame_levels(np.concatenate([VOICE, np.zeros(RATE * 60, np.float32)]), RATE))
    assert after.sound_s == pytest.approx(before.sound_s, abs=0.041)


@pytest.mark.parametrize(
    ("clip", "speech"),
    [
        (VOICE, True),
        (voice(1.0), True),
        (VOICE * 0.1, True),
        (np.zeros(RATE), False),
        (np.full(RATE, 0.2), False),  # a constant
        (noise(RATE), False),
        (noise(RATE, 1e-4), False),
        (lowpass(noise(RATE), 4000), False),  # as from a line at 8 kHz
        (np.concatenate([np.zeros(RATE), tone(440, seconds=0.05)]), False),  # too short to be a word
    ],
    ids=["voice", "short", "quiet", "silence", "constant", "noise", "hiss", "line noise", "blip"],
)
def test_only_what_may_be_speech_is_worth_a_transcription(clip, speech):
    assert audio.has_speech(clip, RATE) is speech


# --- spectrum ----------------------------------------------------------------------------------------------------


def test_a_tone_is_found_at_its_frequency_with_its_power():
    spectrum = audio.spectrogram(tone(1000, 1.0), RATE)
    assert audio.centroid_hz(spectrum) == pytest.approx(1000, abs=1e-6)
    assert audio.bandwidth_hz(spectrum) == pytest.approx(1000, abs=20)
    # Amplitude 1 at its own bin: a quarter of the amplitude's square on each side of the spectrum
    assert spectrum.power.mean(axis=0).max() == pytest.approx(0.25, rel=1e-6)


def test_bins_of_a_spectrum_are_as_wide_at_any_rate():
    for rate in (16_000, 24_000, 48_000):
        assert audio.spectrogram(tone(1000, rate=rate), rate).frequencies[1] == pytest.approx(1 / 0.06)


def test_a_spectrum_does_not_mix_antiphase_channels_away():
    mono = tone(1000)
    both = audio.spectrogram(np.stack([mono, -mono]), RATE)
    np.testing.assert_allclose(both.power, audio.spectrogram(mono, RATE).power, atol=1e-15)


def test_a_spectrum_of_silence_has_no_centre():
    spectrum = audio.spectrogram(np.zeros(100), RATE)
    assert audio.centroid_hz(spectrum) is None and audio.bandwidth_hz(spectrum) is None
    assert audio.spectral_flatness(spectrum) == 0.0


@pytest.mark.parametrize("samples", [1, 2, 3, 100])
def test_clips_shorter_than_a_frame_are_measured_all_the_same(samples):
    assert audio.profile(np.linspace(0.1, 0.2, samples), RATE).peak > 0


def test_flatness_tells_noise_from_voice():
    assert audio.spectral_flatness(audio.spectrogram(noise(RATE * 4), RATE)) > 0.9
    assert CLEAN.flatness < 0.4


# --- damage: every fault of the table moves its number and leaves others as they were ---------------------------


def with_gaps(samples):
    damaged = samples.copy()
    for start in range(RATE // 2, len(samples) - RATE // 4, RATE // 2):
        damaged[start : start + RATE // 20] = 0
    return damaged


def byte_swapped(samples):
    return audio.int16_to_float(audio.float_to_int16(samples).byteswap())


def resampled(samples, ratio):
    return np.interp(np.arange(0, len(samples) - 1, ratio), np.arange(len(samples)), samples)


BRIGHT = VOICE + lowpass(noise(len(VOICE), 0.02), 9000) * (np.abs(VOICE) > 0.01)
FAULTS = {  # fault: (clean, damaged, numbers that move and by how much at least, numbers blind to it)
    "truncated": (VOICE, VOICE[: round(0.7 * len(VOICE))], {"duration_s": 1.1}, ("ac_rms_dbfs", "clip_fraction")),
    "silence": (VOICE, np.zeros_like(VOICE), {"ac_rms_dbfs": 90, "sound_s": 2}, ("duration_s",)),
    "dc": (VOICE, VOICE + 0.2, {"dc": 0.19}, ("ac_rms_dbfs", "sound_s", "duration_s")),
    "clipped": (VOICE, np.clip(8 * VOICE, -1, 1), {"clip_fraction": 0.03, "ac_rms_dbfs": 10}, ("duration_s",)),
    "speed": (VOICE, resampled(VOICE, 1.1), {"duration_s": 0.36, "centroid_hz": 40}, ("ac_rms_dbfs",)),
    "doubled": (VOICE, np.concatenate([VOICE, VOICE]), {"duration_s": 4, "repeat": 0.25}, ("ac_rms_dbfs",)),
    "looped": (VOICE, np.tile(VOICE[RATE : RATE * 3 // 2], 8), {"repeat": 0.2}, ("duration_s", "clip_fraction")),
    "noise": (VOICE, noise(len(VOICE), audio.rms(VOICE)), {"flatness": 0.7, "centroid_hz": 3000}, ("duration_s",)),
    "byte order": (VOICE, byte_swapped(VOICE), {"flatness": 0.2, "centroid_hz": 2000}, ("duration_s",)),
    "gaps": (VOICE, with_gaps(VOICE), {"gaps": 3, "silence_fraction": 0.03}, ("duration_s", "clip_fraction")),
    "low-passed": (BRIGHT, lowpass(BRIGHT, 4000), {"bandwidth_hz": 1000}, ("duration_s", "sound_s")),
    "antiphase": (np.stack([VOICE, VOICE]), np.stack([VOICE, -VOICE]), {"downmix_loss_db": 100}, ("ac_rms_dbfs",)),
}  # fmt: skip


@pytest.mark.parametrize(("clean", "damaged", "moves", "blind"), FAULTS.values(), ids=FAULTS)
def test_a_fault_moves_its_numbers_and_no_others(clean, damaged, moves, blind):
    before, after = ({**vars(p), "repeat": p.repeat.correlation} for p in map(profile, (clean, damaged)))
    for number, least in moves.items():
        assert abs(after[number] - before[number]) >= least, number
    for number in blind:
        assert after[number] == pytest.approx(before[number], rel=0.1, abs=1e-6), number


def profile(samples):
    return audio.profile(samples, RATE)


def test_a_clean_voice_has_no_damage():
    assert (CLEAN.gaps, CLEAN.clicks, CLEAN.clip_fraction, CLEAN.downmix_loss_db) == (0, 0, 0.0, 0.0)
    assert -45 < CLEAN.ac_rms_dbfs < -6 and abs(CLEAN.dc) < 0.001
    assert CLEAN.lead_s < 0.3 and CLEAN.trail_s < 0.6 and CLEAN.repeat.correlation < 0.75


@pytest.mark.parametrize(("label", "ratio"), [(16_000, 1.5), (22_050, 24 / 22.05), (48_000, 0.5)])
def test_a_wrong_rate_stretches_time_and_shifts_the_spectrum(label, ratio):
    wrong = audio.profile(VOICE, label)
    assert wrong.duration_s == pytest.approx(CLEAN.duration_s * ratio)
    assert wrong.centroid_hz == pytest.approx(CLEAN.centroid_hz / ratio, rel=0.03)
    assert audio.log_ratio(wrong.duration_s, CLEAN.duration_s) == pytest.approx(math.log(ratio))


def test_a_repeated_envelope_is_found_at_its_lag():
    doubled = audio.envelope_repeat(np.concatenate([VOICE, VOICE]), RATE)
    assert doubled.correlation > 0.95 and doubled.lag_s == pytest.approx(4.0, abs=0.03)
    assert audio.envelope_repeat(VOICE[:2400], RATE) == audio.Repeat(0.0, 0.0)
    assert audio.envelope_repeat(np.zeros(RATE), RATE).correlation == 0.0


# --- clicks, gaps and seams --------------------------------------------------------------------------------------


def chunked(samples, size=RATE // 2, drop=0, again=0):
    """Chunks of `size` joined again, `drop` samples lost at the end of each or `again` repeated; and the seams."""
    parts = [samples[max(0, start - again) : start + size] for start in range(0, len(samples), size)]
    parts = [part[: len(part) - drop] for part in parts[:-1]] + parts[-1:]
    return np.concatenate(parts), np.cumsum([len(part) for part in parts])[:-1].tolist()


def test_samples_dropped_from_a_tone_click_at_every_seam():
    # B1: 555 samples lost every 24 000 of 10 s
    sine = tone(440, seconds=10)
    cut, seams = chunked(sine, RATE, drop=555)
    assert audio.clicks(audio.click_score(sine, RATE), RATE) == []
    found = audio.clicks(audio.click_score(cut, RATE), RATE)
    assert len(found) == len(seams) == 9
    assert np.abs(np.array(found) - seams).max() <= 2
    assert len(sine) - len(cut) == 9 * 555


def test_a_click_anywhere_in_a_voice_is_found():
    damaged = VOICE.copy()
    damaged[50_000] += 0.3
    assert audio.clicks(audio.click_score(VOICE, RATE), RATE) == []
    (at,) = audio.clicks(audio.click_score(damaged, RATE), RATE)
    assert abs(at - 50_000) <= 16


def test_clicks_are_counted_apart_from_five_milliseconds_on():
    score = np.zeros(RATE)
    score[[1000, 1100, 1300, 9000]] = (50.0, 60.0, 45.0, 39.0)  # the first and second 4 ms apart, the last too low
    assert audio.clicks(score, RATE) == [1100, 1300]


def test_a_click_on_one_channel_is_found():
    damaged = np.stack([VOICE, VOICE])
    damaged[1, 50_000] += 0.3
    assert len(audio.clicks(audio.click_score(damaged, RATE), RATE)) == 1


def test_seams_of_a_voice_rank_high_where_samples_were_dropped_and_anywhere_where_not():
    clips = [voice(6, seed=seed) for seed in range(4)]
    clean, cut = [], []
    for clip in clips:
        _, seams = chunked(clip)
        clean += audio.seam_ranks(audio.click_score(clip, RATE), RATE, seams).tolist()
        damaged, seams = chunked(clip, drop=555)
        cut += audio.seam_ranks(audio.click_score(damaged, RATE), RATE, seams).tolist()
    assert len(clean) == len(cut) == 44
    assert sum(rank <= 0.05 for rank in cut) >= 22
    assert sum(rank <= 0.05 for rank in clean) <= 6  # 2.2 expected; P(more than 6) = 0.6 %


def test_seam_ranks_count_the_places_that_score_as_high():
    score = np.zeros(RATE)
    score[[3000, 9000, 15_000]] = (5.0, 9.0, 7.0)
    # places of 25 samples; one place (at 9000) scores higher than the seam, one is the seam's own
    places = (RATE - 12 + 24) // 25
    (rank,) = audio.seam_ranks(score, RATE, [15_000])
    assert rank == pytest.approx(2 / places, rel=0.01)
    assert audio.seam_ranks(score, RATE, [20_000]).tolist() == [1.0]
    assert audio.seam_ranks(score, RATE, []).tolist() == []


def test_a_pause_is_no_gap_and_neither_are_the_ends():
    loud = tone(440, seconds=0.5)
    fade = np.concatenate([loud * np.linspace(1, 0, len(loud)), np.zeros(4800), loud * np.linspace(0, 1, len(loud))])
    cut = np.concatenate([loud, np.zeros(1200), loud])
    assert audio.gaps(fade, RATE) == []
    assert audio.gaps(np.concatenate([np.zeros(1200), loud, np.zeros(1200)]), RATE) == []
    (gap,) = audio.gaps(cut, RATE)
    assert (gap.start, gap.stop) == pytest.approx((12_000, 13_200), abs=1)
    assert audio.gaps(np.concatenate([loud, np.zeros(60), loud]), RATE) == []  # 2.5 ms
    assert audio.gaps(np.stack([cut, np.concatenate([loud, loud, loud])[: len(cut)]]), RATE) == []  # one channel sounds


@pytest.mark.parametrize("seconds", [0.06, 0.1, 0.4])
def test_a_chunk_that_begins_with_the_end_of_the_last_is_found_with_its_length(seconds):
    again = round(seconds * RATE)
    repeated, seams = chunked(VOICE, RATE, again=again)
    found = [audio.repeat_at(repeated, RATE, seam) for seam in seams]
    assert all(one.correlation > 0.999 for one in found)
    assert [one.lag_s for one in found] == pytest.approx([seconds] * 3, abs=1e-4)
    _, seams = chunked(VOICE, RATE)
    assert all(audio.repeat_at(VOICE, RATE, seam).correlation < 0.95 for seam in seams)


def test_a_stream_that_sends_all_so_far_again_is_longer_and_repeats():
    # B2: chunks c1, c1 c2, c1 c2 c3: 1 + 2 + 3 chunks in place of 3
    ends = [18_000, 36_000, 54_000]
    cumulative = np.concatenate([VOICE[:end] for end in ends])
    assert audio.log_ratio(len(cumulative), ends[-1]) == pytest.approx(math.log(2))
    found = audio.repeat_at(cumulative, RATE, 18_000)
    assert found.correlation == pytest.approx(1.0) and found.lag_s == 0.75


def test_an_envelope_correlation_is_that_of_the_frames_shared():
    levels = np.maximum(audio.frame_levels(VOICE, RATE), -50.0)
    by_hand = [np.corrcoef(levels[lag:], levels[:-lag])[0, 1] for lag in range(13, len(levels) * 2 // 3)]
    found = audio.envelope_repeat(VOICE, RATE)
    assert found.correlation == pytest.approx(max(by_hand))
    assert found.lag_s == pytest.approx((13 + int(np.argmax(by_hand))) * 0.02)


def test_no_repeat_fits_beside_a_seam_near_the_end():
    assert audio.repeat_at(VOICE, RATE, 100) == audio.repeat_at(VOICE, RATE, len(VOICE) - 100) == audio.Repeat(0.0, 0.0)
    assert audio.repeat_at(np.zeros(RATE), RATE, RATE // 2).correlation == 0.0


def test_a_pause_that_hums_repeats_itself_and_nobody_hears_a_seam_in_it():
    hum = np.rint(tone(100, amplitude=30)) / 32768  # -64 dBFS
    assert audio.repeat_at(hum, RATE, RATE // 2).correlation == 0.0
    assert audio.repeat_at(30 * hum, RATE, RATE // 2).correlation > 0.999


# --- waveform against waveform -----------------------------------------------------------------------------------


def test_equal_waveforms_differ_in_nothing():
    assert audio.difference(VOICE, VOICE, RATE) == audio.Difference(0, math.inf, math.inf, math.inf, 0.0)


@pytest.mark.parametrize("late", [-480, -1, 0, 7, 2400])
def test_a_delay_is_found_with_its_sign_and_taken_out(late):
    shifted = np.pad(VOICE, (late, 0)) if late >= 0 else VOICE[-late:]
    found = audio.difference(VOICE, shifted, RATE)
    assert found.lag_samples == late
    assert found.snr_db == math.inf


def test_polarity_and_gain_show_in_snr_and_not_in_level():
    assert audio.snr_db(VOICE, -VOICE) == pytest.approx(-6.02, abs=0.01)  # the difference is twice the signal
    assert audio.si_sdr_db(VOICE, 0.5 * VOICE) > 100
    assert audio.snr_db(VOICE, 0.5 * VOICE) == pytest.approx(6.02, abs=0.01)


def test_psnr_is_against_full_scale():
    # an error of 0.01 everywhere: -20 log10(0.01)
    assert audio.psnr_db(np.zeros(8), np.full(8, 0.01)) == pytest.approx(40.0)


def test_silence_has_no_si_sdr_and_gives_none():
    silent = np.zeros(8)
    sound = tone(440, seconds=0.1)[:8]
    assert audio.si_sdr_db(silent, sound) is None
    assert audio.si_sdr_db(sound, silent) == -math.inf
    assert audio.snr_db(silent, sound) == -math.inf


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.001, 0.2))
def test_every_distance_grows_with_noise(seed, level):
    hiss = np.random.default_rng(seed).standard_normal(len(VOICE))
    less, more = (audio.difference(VOICE, VOICE + scale * hiss, RATE) for scale in (level, 2 * level))
    assert less.snr_db > more.snr_db and less.psnr_db > more.psnr_db
    assert less.si_sdr_db > more.si_sdr_db and less.lsd_db < more.lsd_db


def test_log_spectral_distance_is_taken_frame_by_frame():
    # frames 10 dB and 0 dB apart: mean of 10 and 0; over all bins at once it would be sqrt(50)
    assert audio.log_spectral_distance([[1, 1], [1, 1]], [[10, 10], [1, 1]]) == pytest.approx(5.0)
    assert audio.log_spectral_distance([0.0, 1.0], [0.0, 1.0]) == 0.0


def test_shapes_that_differ_are_refused():
    for function in (audio.snr_db, audio.psnr_db, audio.si_sdr_db, audio.log_spectral_distance):
        with pytest.raises(ValueError, match="align them first"):
            function(np.ones(4), np.ones(5))
    with pytest.raises(ValueError, match="channels"):
        audio.lag(np.ones((2, 8)), np.ones(8))


def test_channels_swapped_show_in_the_waveform():
    stereo = np.stack([VOICE, np.roll(VOICE, RATE)])
    assert audio.difference(stereo, stereo, RATE).snr_db == math.inf
    assert audio.difference(stereo, stereo[::-1], RATE).snr_db < 5
