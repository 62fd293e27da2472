"""docs/gates.md names the gates, options and controls that there are, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from assay.config import AsrGates, MarginGates, TextGates
from assay.verdicts.asr.suite import ASR
from assay.verdicts.margins.checks import MARGIN_CHECKS
from assay.verdicts.text.suite import TEXT as SUITE

TEXT = (Path(__file__).parents[2] / "docs/gates.md").read_text()


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first column is headed so."""
    (body,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


def as_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def faults(text: str) -> list[str]:
    """What the document says that the code does not, or leaves out."""
    common, of_transcripts = text.split("\n## Transcripts\n")
    text_controls = {control.name for control in SUITE.controls}
    pairs = {
        "gates of transcripts in the table": (
            [row[0] for row in rows(text, "gate of transcripts")],
            [name for name in ASR.gates if name not in MARGIN_CHECKS],
        ),
        "gates of transcripts explained": (
            re.findall(r"^\*\*(G-\w+)\.\*\*", of_transcripts, re.MULTILINE),
            [name for name in ASR.gates if name not in MARGIN_CHECKS],
        ),
        "options of transcripts": (
            [(row[0].strip("`"), row[1]) for row in rows(text, "option of transcripts")],
            [
                (name, as_text(value))
                for name, value in AsrGates().model_dump().items()
                if name not in MarginGates.model_fields
            ],
        ),
        "controls of transcripts": (
            [(row[0].strip("`"), tuple(row[2].split(", "))) for row in rows(text, "control of transcripts")],
            [(control.name, control.gates) for control in ASR.controls if control.name not in text_controls],
        ),
        "gates in the table": ([row[0] for row in rows(text, "gate")], list(SUITE.checks)),
        "gates explained": (re.findall(r"^\*\*(G-\w+)\.\*\*", common, re.MULTILINE), list(SUITE.checks)),
        "options": (
            [(row[0].strip("`"), row[1]) for row in rows(text, "option")],
            [(name, as_text(value)) for name, value in TextGates().model_dump().items()],
        ),
        "controls": (
            [(row[0].strip("`"), tuple(row[2].split(", "))) for row in rows(text, "control")],
            [(control.name, control.gates) for control in SUITE.controls],
        ),
    }
    return [f"{what}: {said} where the code has {known}" for what, (said, known) in pairs.items() if said != known]


def test_the_document_agrees_with_the_code():
    assert faults(TEXT) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("| G-trend | mean", "| G-trends | mean", "gates in the table"),
        ("| G-wer | rise", "| G-werr | rise", "gates of transcripts in the table"),
        ("**G-silence.**", "**silence.**", "gates of transcripts explained"),
        ("| `wer_margin` | 0.005 |", "| `wer_margin` | 0.01 |", "options of transcripts"),
        ("| G-transcript, G-wer |", "| G-transcript |", "controls of transcripts"),
        ("**G-KL.**", "**KL.**", "gates explained"),
        ("| `kappa` | 2.0 |", "| `kappa` | 2.5 |", "options"),
        ("bfloat16 0.002", "bfloat16 0.001", "options"),
        ("| G-hard, G-soft, G-mean |", "| G-hard, G-soft |", "controls"),
    ],
)
def test_a_document_that_drifts_is_found(old, new, what):
    (fault,) = faults(TEXT.replace(old, new))
    assert fault.startswith(what)
