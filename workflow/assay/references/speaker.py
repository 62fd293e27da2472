"""The network that tells speakers apart: Resemblyzer's (https://github.com/resemble-ai/Resemblyzer, 0.1.4).

A voice is the direction of a vector that a small LSTM, trained to tell speakers apart (GE2E, arXiv:1710.10467), makes
of 1.6 s of mel spectrogram; of longer audio it is the mean over overlapping stretches, of shorter audio what the sound
gives with silence behind it. Two things are other than in the package. All audio gets one level, where the package only
makes quiet audio louder: 6 dB would cost 0.05 of cosine, and levels are the business of G-damage. And no pause is
shortened, which the package does by WebRTC's detector of voice: pauses are the reference's too, and that they are there
changes an embedding by 0.02 at most (3 clips).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize
from transformers.audio_utils import mel_filter_bank

from assay.errors import SourceError
from assay.metrics.audio import rms
from assay.references.whisper import RATE, listenable

WEIGHTS = "resemblyzer/pretrained.pt"  # in its source
WINDOW, HOP = 400, 160  # samples of the spectrogram's frames: 25 ms, every 10 ms
MELS = 40
UNITS, LAYERS = 256, 3
STRETCH = 160  # frames that the network takes at a time: 1.6 s
STEP = 77  # frames from the start of one stretch to that of the next: 1.3 stretches a second
COVERED = 0.75  # of the last stretch that must be sound, unless it is the only one
LEVEL_DBFS = -30.0  # RMS that all audio is brought to
BATCH = 64  # stretches at a time

Embedding = npt.NDArray[np.float32]


class SpeakerEncoder:
    """Tells speakers apart; on the CPU, where it takes less than a hundredth of the time that the sound lasts."""

    def __init__(self, directory: Path) -> None:
        """Load the network of a source. Raises SourceError where the source holds none."""
        path = directory / WEIGHTS
        if not path.is_file():
            raise SourceError(
                f"{directory} holds no {WEIGHTS}; let the family's `speaker_encoder` name a source that does"
            )
        state = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
        self._lstm = torch.nn.LSTM(MELS, UNITS, LAYERS, batch_first=True)
        self._linear = torch.nn.Linear(UNITS, UNITS)
        for name, module in (("lstm.", self._lstm), ("linear.", self._linear)):
            module.load_state_dict({key.removeprefix(name): it for key, it in state.items() if key.startswith(name)})
        filters = mel_filter_bank(WINDOW // 2 + 1, MELS, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
        self._filters = torch.from_numpy(filters).float()  # [bins, mels]
        self._hann = torch.hann_window(WINDOW)

    @torch.inference_mode()
    def embed(self, samples: npt.NDArray[np.floating[Any]], rate: int) -> Embedding | None:
        """Whose voice it is: float32 [256] of length 1, no number negative; None where the network hears nothing.

        Args:
            samples: [channels, samples], full scale 1.
            rate: in Hz.
        """
        sound = listenable(samples, rate)
        if not sound.any():
            return None
        starts = stretches(len(sound))
        sound *= np.float32(10 ** (LEVEL_DBFS / 20) / rms(sound))
        mel = self._mel(np.pad(sound, (0, max(0, (starts[-1] + STRETCH) * HOP - len(sound)))))
        parts = torch.stack([mel[start : start + STRETCH] for start in starts])
        mean = torch.cat([self._voices(part) for part in parts.split(BATCH)]).mean(dim=0)
        return normalize(mean, dim=0).numpy() if mean.any() else None

    def _mel(self, sound: npt.NDArray[np.float32]) -> torch.Tensor:
        """[frames, mels]: power, not its logarithm."""
        spectrum = torch.stft(
            torch.from_numpy(sound), WINDOW, HOP, window=self._hann, pad_mode="constant", return_complex=True
        )
        return spectrum.abs().square().T @ self._filters

    def _voices(self, mel: torch.Tensor) -> torch.Tensor:
        """[stretches, units] of [stretches, frames, mels]."""
        _, (hidden, _) = self._lstm(mel)
        return normalize(torch.relu(self._linear(hidden[-1])), dim=1)


def stretches(samples: int) -> list[int]:
    """Frames at which the stretches of so many samples start."""
    frames = samples // HOP + 1
    starts = list(range(0, max(1, frames - STRETCH + STEP + 1), STEP))
    covered = (samples - starts[-1] * HOP) / (STRETCH * HOP)
    return starts if len(starts) == 1 or covered >= COVERED else starts[:-1]
