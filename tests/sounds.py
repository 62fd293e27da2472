"""Sound that resembles a voice, made from a seed: what tests plant faults of audio in."""

import numpy as np

FORMANTS = ((600, 120, 1.0), (1200, 200, 0.5), (2600, 300, 0.25))  # Hz, Hz, weight


def voice(seconds=4.0, rate=24_000, seed=0):
    """float32 [samples]: syllables of gliding harmonics with fades and pauses, peak 0.5, over faint noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * rate)) / rate
    pitch = 120 * (1 + 0.2 * np.sin(2 * np.pi * 0.6 * t + rng.uniform(0, 6)))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    sound = np.zeros_like(t)
    for k in range(1, 36):
        weight = sum(w * np.exp(-(((k * 120 - f) / b) ** 2)) for f, b, w in FORMANTS) + 0.01
        sound += weight * np.sin(k * phase)
    envelope = np.zeros_like(t)
    at = round(0.15 * rate)
    while at < len(t) - round(0.45 * rate):
        size = round(rng.uniform(0.12, 0.3) * rate)
        envelope[at : at + size] = rng.uniform(0.4, 1) * np.hanning(size)
        at += size + round(rng.choice([0.02, 0.02, 0.15]) * rate)
    sound *= envelope
    return (0.5 * sound / np.abs(sound).max() + 1e-4 * rng.standard_normal(len(t))).astype(np.float32)


def tone(hertz, amplitude=0.5, seconds=1.0, rate=24_000):
    """float64 [samples]: a sine."""
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
