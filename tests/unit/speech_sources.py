"""Small stand-ins for the fetched recordings, in the form of the real ones."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import av
import numpy as np

from assay.config import AptSource
from assay.samples.sounds import music, wav
from assay.sources.manifest import make_manifest, write_manifest

RATE = 16_000
PROMPTS = {
    **{f"vm-{number}": (f"Please enter the code of room {name}.", 2.6) for number, name in enumerate("abcdefghij")},
    **{f"digits/{number}": (word, 0.7) for number, word in enumerate(("zero", "two", "three", "four"))},
    "vm-dial": ("Press 1 to go on, or 2 to end.", 3.0),
    "hello": ("Hello.", 0.5),
    "time": ("Time.", 0.6),
    "letters/b": ("b", 0.4),
    "goodbye": ("Good bye.", 0.8),
    "digits/day-1": ("Monday", 0.6),
    "demo-thanks": ("Thank you for trying out Asterisk.", 2.0),
    "demo-instruct": ("This is a long text. " * 20, 31.0),
    "beep": ("[this is a beep]", 0.3),
    "silence/2": ("(2 seconds of silence)", 2.0),
    "vm-intro": ("Speak after the tone. (a tone)", 2.1),
    "vm-star": ("Press * to end this call.", 2.2),
    "digits/h-40": ("fourtieth", 0.5),
}
READINGS = {
    "0880": ("he was not an ill disposed young man", 3.0),
    "0920": ("had he married a more a amiable woman", 3.1),
}


def make_recordings(root: Path, extra: Mapping[str, tuple[str, float]] | None = None) -> Path:
    """`root` with the three sources of recordings under it, as if fetched; `extra` prompts too."""
    prompts = PROMPTS | dict(extra or {})
    folder = root / "asterisk_sounds" / "usr/share/asterisk/sounds/en_US_f_Allison"
    for name, (_, seconds) in prompts.items():
        _g722(folder / f"{name}.g722", tune(name, seconds))
    _g722(folder / "no-transcript.g722", tune("no transcript", 1.0))
    lines = "".join(f"{name}: {text}\n" for name, (text, _) in prompts.items())
    text = root / "asterisk_sounds_text" / "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
    text.parent.mkdir(parents=True)
    text.write_bytes(gzip.compress(f"; a comment: not a prompt\n\n{lines}never-recorded: Never recorded.\n".encode()))
    data = root / "pocketsphinx_testdata" / "usr/share/pocketsphinx/test/data"
    _readings(data / "librivox", "transcription", READINGS)
    _readings(data / "cards", "cards.transcription", {"001": ("ten of clubs ", 1.1)})
    for directory in root.iterdir():
        pin = AptSource(
            kind="apt", package=directory.name.replace("_", "-"), version="1", sha256="0" * 64, files=["*"], licence="x"
        )
        write_manifest(make_manifest(directory.name, pin, directory), directory)
    return root


def tune(name: str, seconds: float) -> np.ndarray:
    """A sound that no other name has."""
    return music(round(seconds * RATE), int.from_bytes(name.encode()[-7:]), RATE)


def _readings(folder: Path, transcript: str, readings: dict[str, tuple[str, float]]) -> None:
    folder.mkdir(parents=True)
    for name, (_, seconds) in readings.items():
        (folder / f"{name}.wav").write_bytes(wav(tune(name, seconds), RATE))
    (folder / transcript).write_text("".join(f"<s> {text} </s> ({name})\n" for name, (text, _) in readings.items()))


def _g722(path: Path, samples: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="g722") as container:
        stream = container.add_stream("g722", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = RATE
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
