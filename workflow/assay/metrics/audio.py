"""Metrics of audio: level, damage, spectrum, seams, and two waveforms or speakers against each other.

Samples are floats of full scale 1 (FS), [samples] or [channels, samples], finite and at least one; `rate` is in Hz.
Channels are pooled by power and never mixed, because antiphase channels mix to silence; only `downmix` mixes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import fft, ndimage, signal

Samples = npt.NDArray[np.floating[Any]]
Floats = npt.NDArray[np.float64]

FULL_SCALE_INT16 = 32767 / 32768  # FS: the largest value that 16 bits hold
LEVEL_FRAME_S = 0.02
SPECTRUM_FRAME_S = 0.06
SILENCE_DBFS = -50.0  # absolute, so that zeros appended to a clip move nothing else
POWER_FLOOR = 1e-10  # -100 dB, below the rounding noise of 16 bits in one bin

# "Real speech" below: 568 recordings that Debian packages (asterisk-core-sounds-en-g722 1.6.1-1, all but its ten of
# silence, and pocketsphinx-testdata 0.8+5prealpha+1-15), 26 minutes, as measured with this module.
SPEECH_LEAST_S = 0.1
NOISE_FLATNESS = (
    0.7  # white noise: above 0.75 from a tenth of a second on; real speech: up to 0.4 (one of monkeys: 0.58)
)

CLICK = 40.0  # click scores of real speech, plosives included, end at 25
CLICK_FLOOR = 1e-4  # FS: residuals of a few 16-bit steps are no click
GAP_LEAST_S = 0.005
GAP_LEVEL = 1.5 / 32768  # FS: zeros, give or take one 16-bit step
CUT_LEVEL = 0.01  # FS: sound that ends in zeros from here was cut, not faded
ENVELOPE_LAG_S = 0.25

_FLAT = 1e-3  # dB^2 a frame: an envelope that varies less is constant, and its correlation rounding noise
_LPC_ORDER = 16
_LPC_FRAME_S = 0.03
_LPC_NOISE = 1e-9  # of the frame's power: keeps the prediction of a pure tone solvable
_SEAM_REACH_S = 0.0005


# --- number formats ----------------------------------------------------------------------------------------------


def int16_to_float(samples: npt.NDArray[np.int16]) -> npt.NDArray[np.float32]:
    """Full scale is 32768, so that -32768 is -1 and nothing lies outside [-1, 1)."""
    return samples.astype(np.float32) / np.float32(32768)


def float_to_int16(samples: Samples) -> npt.NDArray[np.int16]:
    """Nearest 16-bit step; what lies outside is clipped, never wrapped."""
    return np.clip(np.rint(np.asarray(samples, np.float64) * 32768), -32768, 32767).astype(np.int16)


# --- level and damage --------------------------------------------------------------------------------------------


def dbfs(amplitude: npt.ArrayLike) -> Floats:
    """20 log10 of amplitudes [FS]; -inf for 0. A full-scale sine has an RMS of -3.01 dBFS."""
    with np.errstate(divide="ignore"):
        return np.asarray(20 * np.log10(np.asarray(amplitude, np.float64)))


def rms(samples: Samples) -> float:
    """Root mean square over all channels [FS], DC included."""
    return math.sqrt(float(np.mean(np.square(samples, dtype=np.float64))))


def dc_offset(samples: Samples) -> float:
    """The channel mean farthest from 0 [FS, signed]."""
    means = np.atleast_1d(np.mean(samples, axis=-1, dtype=np.float64))
    return float(means[np.argmax(np.abs(means))])


def ac_rms(samples: Samples) -> float:
    """RMS without each channel's mean [FS]: a constant is loud by `rms` and silent by this."""
    return math.sqrt(float(np.mean(np.square(_centred(samples)))))


def _centred(samples: Samples) -> Floats:
    wide = np.asarray(samples, np.float64)
    return wide - wide.mean(axis=-1, keepdims=True)


def peak(samples: Samples) -> float:
    """Largest magnitude [FS]; above 1 only float formats and lossy codecs can go."""
    return float(np.abs(samples).max())


def clip_fraction(samples: Samples) -> float:
    """Share of samples at or beyond 16-bit full scale [fraction]."""
    return float(np.mean(np.abs(samples) >= FULL_SCALE_INT16))


def downmix(samples: Samples) -> Floats:
    """Mean over channels, in float64: [channels, samples] -> [samples]."""
    return np.asarray(np.mean(np.atleast_2d(samples), axis=0, dtype=np.float64))


def downmix_loss_db(samples: Samples) -> float:
    """Power that mixing to mono loses [dB, >= 0]: 0 for equal channels, 3 for unrelated ones, inf for antiphase."""
    power = rms(samples) ** 2
    return _db_ratio(power, rms(downmix(samples)) ** 2) if power else 0.0


# --- activity ----------------------------------------------------------------------------------------------------


def frame_levels(samples: Samples, rate: int) -> Floats:
    """AC level [dBFS] of consecutive frames of `LEVEL_FRAME_S`; the last one may be shorter."""
    power = np.atleast_2d(np.square(_centred(samples))).mean(axis=0)
    starts = np.arange(0, len(power), max(1, round(rate * LEVEL_FRAME_S)))
    return dbfs(np.sqrt(np.add.reduceat(power, starts) / np.diff(starts, append=len(power))))


@dataclass(frozen=True)
class Activity:
    """Which frames of a clip are louder than silence: a detector of sound, which can't tell speech from music."""

    active: npt.NDArray[np.bool_]  # [frames]
    frame_s: float = LEVEL_FRAME_S

    @property
    def silence_fraction(self) -> float:
        """Share of silent frames [fraction]."""
        return float(1 - self.active.mean())

    @property
    def sound_s(self) -> float:
        """Sound in all [s]."""
        return float(self.active.sum() * self.frame_s)

    @property
    def lead_s(self) -> float:
        """Silence before the first sound [s]; all of a silent clip."""
        return self._until_sound(self.active)

    @property
    def trail_s(self) -> float:
        """Silence after the last sound [s]; all of a silent clip."""
        return self._until_sound(self.active[::-1])

    def _until_sound(self, active: npt.NDArray[np.bool_]) -> float:
        return float((np.argmax(active) if active.any() else len(active)) * self.frame_s)


def activity(levels: npt.ArrayLike, threshold_dbfs: float = SILENCE_DBFS) -> Activity:
    """Frames [dBFS, as of `frame_levels`] at or above an absolute threshold."""
    return Activity(np.asarray(levels, np.float64) >= threshold_dbfs)


def has_speech(samples: Samples, rate: int) -> bool:
    """Whether a clip is worth a transcription: some sound, and not plain noise.

    A clip that is not counts as silent, because Whisper invents words for silence (transformers issue 24512).
    """
    sound = activity(frame_levels(samples, rate)).sound_s
    return sound >= SPEECH_LEAST_S and spectral_flatness(spectrogram(samples, rate)) < NOISE_FLATNESS


# --- spectrum ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spectrogram:
    """Power [FS^2] of half-overlapping Hann frames, mean over channels, each frame without its mean."""

    frequencies: Floats  # [bins], Hz
    power: Floats  # [frames, bins]


def spectrogram(samples: Samples, rate: int) -> Spectrogram:
    """Frames of `SPECTRUM_FRAME_S`; a clip shorter than one is one frame."""
    channels = np.atleast_2d(samples)
    size = min(max(2, round(rate * SPECTRUM_FRAME_S)), channels.shape[-1])
    window = signal.get_window("hann", size) if size > 2 else np.ones(size)
    power: Any = 0.0
    for channel in channels:
        frames = np.lib.stride_tricks.sliding_window_view(channel, size)[:: max(1, size // 2)].astype(np.float64)
        frames -= frames.mean(axis=1, keepdims=True)
        power = power + np.abs(fft.rfft(frames * window, axis=1)) ** 2
    return Spectrogram(fft.rfftfreq(size, 1 / rate), power / (len(channels) * window.sum() ** 2))


def centroid_hz(spectrum: Spectrogram) -> float | None:
    """Mean frequency weighted by power [Hz]; None for silence. A wrong rate scales it."""
    power = spectrum.power.mean(axis=0)
    return float(power @ spectrum.frequencies / power.sum()) if power.sum() else None


def bandwidth_hz(spectrum: Spectrogram, share: float = 0.99) -> float | None:
    """Frequency below which `share` of the power lies [Hz]; None for silence."""
    cumulative = np.cumsum(spectrum.power.mean(axis=0))
    if not cumulative[-1]:
        return None
    return float(spectrum.frequencies[np.searchsorted(cumulative, share * cumulative[-1])])


def spectral_flatness(spectrum: Spectrogram) -> float:
    """Geometric over arithmetic mean of the average power spectrum [0..1]: white noise near 1, speech near 0.

    Taken over the band that holds 99 % of the power, so that noise from a lower rate is noise still.
    """
    power = spectrum.power.mean(axis=0)[1:]  # without DC, which each frame has lost
    if not power.sum():
        return 0.0
    cumulative = np.cumsum(power)
    band = power[: np.searchsorted(cumulative, 0.99 * cumulative[-1]) + 1]
    return float(np.exp(np.mean(np.log(np.maximum(band, np.finfo(np.float64).tiny)))) / band.mean())


def log_spectral_distance(reference: npt.ArrayLike, estimate: npt.ArrayLike) -> float:
    """Mean over frames of the RMS over bins of 10 log10(reference / estimate) [dB, >= 0] (Gray and Markel 1976).

    Args:
        reference, estimate: powers [FS^2], [bins] or [frames, bins] of one shape; floored at `POWER_FLOOR`.
    """
    _same_shape(reference, estimate)
    first, second = (10 * np.log10(np.maximum(np.asarray(x, np.float64), POWER_FLOOR)) for x in (reference, estimate))
    return float(np.sqrt(np.mean(np.square(first - second), axis=-1)).mean())


# --- duration ----------------------------------------------------------------------------------------------------


def duration_s(samples: int, rate: int) -> float:
    """Seconds that `samples` of one channel last at `rate`."""
    return samples / rate


def log_ratio(served_s: float, reference_s: float) -> float:
    """ln(served / reference): symmetric about 0. Two generations in a row give ln 2 = 0.69."""
    return math.log(served_s / reference_s)


# --- repeats -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeat:
    """How alike a clip and its own shifted copy are (Pearson), at the lag [s] where they are most alike."""

    correlation: float
    lag_s: float


def envelope_repeat(samples: Samples, rate: int, least_lag_s: float = ENVELOPE_LAG_S) -> Repeat:
    """Largest self-correlation of the level envelope, over lags that leave at least a third of the clip to compare.

    Speech generated twice, or looping, repeats its envelope; a clip too short for any lag gives correlation 0.
    """
    envelope = _centred(np.maximum(frame_levels(samples, rate), SILENCE_DBFS))
    first, last = math.ceil(least_lag_s / LEVEL_FRAME_S), len(envelope) * 2 // 3
    if last <= first:
        return Repeat(0.0, 0.0)
    shifts = np.arange(first, last)
    shared = len(envelope) - shifts
    products = signal.correlate(envelope, envelope, method="fft")[len(envelope) - 1 :][shifts]
    sums, squares = (np.concatenate([[0.0], np.cumsum(x)]) for x in (envelope, np.square(envelope)))
    early, late = sums[shared], sums[-1] - sums[shifts]  # of the frames that the two copies share
    spread = (squares[shared] - early**2 / shared) * (squares[-1] - squares[shifts] - late**2 / shared)
    covariance = products - early * late / shared
    flat = spread <= (_FLAT * shared) ** 2
    correlations = np.where(flat, 0.0, covariance / np.sqrt(np.where(flat, 1.0, spread)))
    best = int(np.argmax(correlations))
    return Repeat(float(correlations[best]), float(shifts[best] * LEVEL_FRAME_S))


def repeat_at(samples: Samples, rate: int, seam: int, least_s: float = 0.05, most_s: float = 1.0) -> Repeat:
    """Whether what follows `seam` (index of a sample) repeats what ends there, as chunks that overlap do.

    Returns:
        Correlation of the `lag_s` seconds after the seam with those before it. The lag, `least_s` to `most_s`, is
        where the first `least_s` after the seam are found again before it. Looks at the first channel. Real speech
        reaches 0.994 where a vowel is held, and 0.975 once in a thousand places; a repeated chunk gives 1. Silence
        gives 0: the faint hum that a voice may have in its pauses repeats itself to the sample.
    """
    mono = np.atleast_2d(samples)[0]
    least, most = round(least_s * rate), min(round(most_s * rate), seam, len(mono) - seam)
    if most < least:
        return Repeat(0.0, 0.0)
    before = np.asarray(mono[seam - most : seam], np.float64)
    head = np.asarray(mono[seam : seam + least], np.float64)
    products = signal.correlate(before, head, "valid")  # [most - least + 1]: start of the copy -> match
    energies = np.sqrt(np.maximum(_moving_sum(np.square(before), least), 1e-12))
    shift = most - int(np.argmax(products / energies))
    after = mono[seam : seam + shift]
    if dbfs(ac_rms(after)) < SILENCE_DBFS:
        return Repeat(0.0, 0.0)
    return Repeat(_pearson(after, mono[seam - shift : seam]), shift / rate)


def _moving_sum(values: Floats, width: int) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(sums[width:] - sums[:-width])


def _pearson(a: Samples, b: Samples) -> float:
    x, y = _centred(a), _centred(b)
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else 0.0


# --- clicks, gaps and seams --------------------------------------------------------------------------------------


def click_score(samples: Samples, rate: int) -> Floats:
    """How far each sample is from what the sound around it predicts, in units of the residual of its surroundings.

    Linear prediction of order 16 over 30 ms frames; the residual is divided by its RMS within 20 ms on either side,
    2 ms about the sample itself left out. Of several channels, the worst.

    Returns:
        float64 [samples], >= 0: up to 25 at the glottal pulses and plosives of real speech, hundreds at a cut in a
        steady tone.
    """
    return np.asarray(np.max([_click_score(channel, rate) for channel in np.atleast_2d(samples)], axis=0))


def _click_score(channel: Samples, rate: int) -> Floats:
    residual = _prediction_residual(np.asarray(channel, np.float64), rate)
    wide, narrow = round(rate * 0.04) | 1, round(rate * 0.002) | 1
    power = np.square(residual)
    around = ndimage.uniform_filter1d(power, wide, mode="nearest") * wide
    around -= ndimage.uniform_filter1d(power, narrow, mode="nearest") * narrow
    return np.asarray(np.abs(residual) / (np.sqrt(np.maximum(around, 0.0) / (wide - narrow)) + CLICK_FLOOR))


def _prediction_residual(x: Floats, rate: int) -> Floats:
    """x minus its linear prediction; coefficients by the autocorrelation method, frame by frame, half overlapping."""
    size = max(4 * _LPC_ORDER, round(rate * _LPC_FRAME_S)) // 2 * 2
    hop = size // 2
    blocks = -(-len(x) // hop)
    padded = np.pad(x, (hop // 2, blocks * hop - len(x) + hop))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[::hop][:blocks] * signal.get_window("hann", size)
    correlations = np.stack(
        [np.einsum("bn,bn->b", frames[:, k:], frames[:, : size - k]) for k in range(_LPC_ORDER + 1)], axis=1
    )
    correlations[:, 0] = correlations[:, 0] * (1 + _LPC_NOISE) + _LPC_NOISE
    lags = np.abs(np.subtract.outer(np.arange(_LPC_ORDER), np.arange(_LPC_ORDER)))
    coefficients = np.linalg.solve(correlations[:, lags], correlations[:, 1:, None])[..., 0]
    past = np.pad(x, (_LPC_ORDER, blocks * hop - len(x)))
    predicted = np.zeros((blocks, hop))
    for k in range(_LPC_ORDER):  # the sample k + 1 before
        start = _LPC_ORDER - 1 - k
        predicted += coefficients[:, k, None] * past[start : start + blocks * hop].reshape(blocks, hop)
    residual = x - predicted.ravel()[: len(x)]
    residual[:_LPC_ORDER] = 0  # there is nothing to predict these from
    return np.asarray(residual)


def clicks(score: Floats, rate: int, threshold: float = CLICK) -> list[int]:
    """Samples where a click is, the highest of each group closer than 5 ms together."""
    reach = round(rate * 0.005)
    highest = ndimage.maximum_filter1d(score, 2 * reach + 1, mode="constant")
    return [int(at) for at in np.flatnonzero((score >= threshold) & (score == highest))]


def seam_ranks(score: Floats, rate: int, seams: Sequence[int]) -> Floats:
    """How special each seam's click score is among all places of its clip [fraction, 0 < rank <= 1].

    Args:
        seams: index of the first sample of each chunk but the first.

    Returns:
        float64 [seams]: share of places (the seam counted) that score as high within half a millisecond. Seams that
        nobody can hear have ranks uniform over (0, 1]; small ones are clicks, whatever the voice or the loudness. Of
        2757 places in real speech 5.3 % rank up to 0.05; of as many seams at which 23 ms were dropped, 71 %.
    """
    reach = max(_LPC_ORDER // 2, round(rate * _SEAM_REACH_S))
    width = 2 * reach + 1
    worst = ndimage.maximum_filter1d(score, width, mode="nearest")
    at_seams = np.asarray(seams, np.int64)
    free = np.ones(len(score), bool)
    for seam in seams:
        free[max(0, seam - width) : seam + width] = False
    elsewhere = np.arange(reach, len(score), width)
    ordered = np.sort(worst[elsewhere[free[elsewhere]]])
    above = len(ordered) - np.searchsorted(ordered, worst[at_seams], side="left")
    return np.asarray((1 + above) / (1 + len(ordered)))


@dataclass(frozen=True)
class Gap:
    """Zeros inside a clip that cut into sound: samples `start` up to `stop`."""

    start: int
    stop: int


def gaps(samples: Samples, rate: int, least_s: float = GAP_LEAST_S) -> list[Gap]:
    """Runs of zeros on all channels whose neighbourhood (2 ms on either side) is loud: lost or late chunks.

    A pause between words is no gap: it fades. Zeros at either end of the clip are its lead and trail. A voice that
    gates its pauses has some of its own, so compare with the reference.
    """
    loudest = np.abs(np.atleast_2d(samples)).max(axis=0)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loudest <= GAP_LEVEL, [0]]).astype(np.int8)))
    reach = max(1, round(rate * 0.002))
    return [
        Gap(int(start), int(stop))
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
        if stop - start >= least_s * rate
        and start > 0
        and stop < len(loudest)
        and max(loudest[max(0, start - reach) : start].max(), loudest[stop : stop + reach].max()) >= CUT_LEVEL
    ]


# --- one clip in numbers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """What one clip looks like without a reference."""

    duration_s: float
    ac_rms_dbfs: float  # -inf for silence, constants included
    peak: float  # FS
    dc: float  # FS
    clip_fraction: float
    silence_fraction: float
    lead_s: float
    trail_s: float
    sound_s: float
    bandwidth_hz: float | None  # 99 % of the power; None for silence
    centroid_hz: float | None
    flatness: float
    downmix_loss_db: float
    repeat: Repeat
    gaps: int
    clicks: int


def profile(samples: Samples, rate: int) -> Profile:
    """All of the above, of one clip."""
    sound = activity(frame_levels(samples, rate))
    spectrum = spectrogram(samples, rate)
    return Profile(
        duration_s=duration_s(samples.shape[-1], rate),
        ac_rms_dbfs=float(dbfs(ac_rms(samples))),
        peak=peak(samples),
        dc=dc_offset(samples),
        clip_fraction=clip_fraction(samples),
        silence_fraction=sound.silence_fraction,
        lead_s=sound.lead_s,
        trail_s=sound.trail_s,
        sound_s=sound.sound_s,
        bandwidth_hz=bandwidth_hz(spectrum),
        centroid_hz=centroid_hz(spectrum),
        flatness=spectral_flatness(spectrum),
        downmix_loss_db=downmix_loss_db(samples),
        repeat=envelope_repeat(samples, rate),
        gaps=len(gaps(samples, rate)),
        clicks=len(clicks(click_score(samples, rate), rate)),
    )


# --- waveform against waveform -----------------------------------------------------------------------------------


def lag(reference: Samples, estimate: Samples) -> int:
    """Samples by which `estimate` is late (+) or early (-): where the cross-correlation is largest."""
    first, second = np.atleast_2d(reference), np.atleast_2d(estimate)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} channels cannot be compared")
    products = sum(signal.correlate(b, a, method="fft") for a, b in zip(_centred(first), _centred(second), strict=True))
    return int(signal.correlation_lags(second.shape[-1], first.shape[-1])[np.argmax(products)])


def overlap(reference: Samples, estimate: Samples, late: int) -> tuple[Samples, Samples]:
    """The parts of both that sound together once `estimate`, `late` samples behind, is shifted back."""
    first, second = reference[..., max(0, -late) :], estimate[..., max(0, late) :]
    shared = min(first.shape[-1], second.shape[-1])
    return first[..., :shared], second[..., :shared]


def snr_db(reference: Samples, estimate: Samples) -> float:
    """Power of `reference` over power of the difference [dB]; inf when equal. Sees gain, delay and polarity."""
    _same_shape(reference, estimate)
    return _db_ratio(rms(reference) ** 2, rms(np.subtract(reference, estimate, dtype=np.float64)) ** 2)


def psnr_db(reference: Samples, estimate: Samples) -> float:
    """Full scale over power of the difference [dB]; inf when equal. Unlike SNR, it doesn't depend on loudness."""
    _same_shape(reference, estimate)
    return _db_ratio(1.0, rms(np.subtract(reference, estimate, dtype=np.float64)) ** 2)


def si_sdr_db(reference: Samples, estimate: Samples) -> float | None:
    """Scale-invariant signal-to-distortion ratio [dB] (Le Roux et al. 2019, arXiv:1811.02508); blind to gain.

    inf when proportional, -inf when unrelated or silent; None for a silent reference.
    """
    _same_shape(reference, estimate)
    clean, heard = np.ravel(_centred(reference)), np.ravel(_centred(estimate))
    if not clean.any():
        return None
    target = clean * (heard @ clean / (clean @ clean))
    if not target.any():
        return -math.inf
    return _db_ratio(float(target @ target), float(np.square(heard - target).sum()))


def _db_ratio(power: float, noise: float) -> float:
    """10 log10(power / noise): inf without noise, else -inf without power."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(power / noise) if power else -math.inf


@dataclass(frozen=True)
class Difference:
    """Two waveforms of what should be one, the later shifted back by `lag_samples` before the rest is measured."""

    lag_samples: int  # + when served is late
    snr_db: float
    psnr_db: float
    si_sdr_db: float | None
    lsd_db: float


def difference(reference: Samples, served: Samples, rate: int) -> Difference:
    """Waveform layer of a deterministic model. A length that differs is not seen here: compare counts of samples."""
    late = lag(reference, served)
    first, second = overlap(reference, served, late)
    return Difference(
        lag_samples=late,
        snr_db=snr_db(first, second),
        psnr_db=psnr_db(first, second),
        si_sdr_db=si_sdr_db(first, second),
        lsd_db=log_spectral_distance(spectrogram(first, rate).power, spectrogram(second, rate).power),
    )


def _same_shape(reference: npt.ArrayLike, estimate: npt.ArrayLike) -> None:
    if np.shape(reference) != np.shape(estimate):
        raise ValueError(f"shapes {np.shape(reference)} and {np.shape(estimate)} differ: align them first")


# --- speaker against speaker -------------------------------------------------------------------------------------


def speaker_similarity(reference: npt.ArrayLike, served: npt.ArrayLike) -> float:
    """Cosine of the angle between two speaker embeddings [units] of one network, neither all 0: 1 for the same."""
    one, other = (np.asarray(embedding, np.float64) for embedding in (reference, served))
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
