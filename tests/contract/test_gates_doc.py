"""The documents of the gates name the gates, options and controls that there are, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from assay.config import MarginGates
from assay.verdicts.margins.checks import MARGIN_CHECKS
from assay.verdicts.suites import SUITES

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTS = {"text": "gates.md", "asr": "gates.md", "tts": "speech_gates.md"}


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first column is headed so."""
    (body,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]


def as_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number}" for key, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def document(modality: str) -> str:
    """The document of a modality's gates."""
    return (DOCS / DOCUMENTS[modality]).read_text()


def faults(text: str, modality: str = "text") -> list[str]:
    """What the document says that the code does not, or leaves out."""
    if modality == "asr":
        return _drifted(_of_transcripts(text))
    suite = SUITES[modality]
    common = text.split("\n## Transcripts\n")[0]
    pairs = {
        "gates in the table": ([row[0] for row in rows(text, "gate")], list(suite.checks)),
        "gates explained": (re.findall(r"^\*\*(G-\w+)\.\*\*", common, re.MULTILINE), list(suite.checks)),
        "options": (
            [(row[0].strip("`"), row[1]) for row in rows(text, "option")],
            [(name, as_text(value)) for name, value in suite.options().model_dump().items()],
        ),
        "controls": (
            [(row[0].strip("`"), tuple(row[2].split(", "))) for row in rows(text, "control")],
            [(control.name, control.gates) for control in suite.controls],
        ),
    }
    return _drifted(pairs)


def _of_transcripts(text: str) -> dict[str, tuple[list, list]]:
    """What the section on transcripts says beside what their suite has besides text's."""
    suite, text_controls = SUITES["asr"], {control.name for control in SUITES["text"].controls}
    gates = [name for name in suite.gates if name not in MARGIN_CHECKS]
    section = text.split("\n## Transcripts\n")[1]
    return {
        "gates of transcripts in the table": ([row[0] for row in rows(text, "gate of transcripts")], gates),
        "gates of transcripts explained": (re.findall(r"^\*\*(G-\w+)\.\*\*", section, re.MULTILINE), gates),
        "options of transcripts": (
            [(row[0].strip("`"), row[1]) for row in rows(text, "option of transcripts")],
            [
                (name, as_text(value))
                for name, value in suite.options().model_dump().items()
                if name not in MarginGates.model_fields
            ],
        ),
        "controls of transcripts": (
            [(row[0].strip("`"), tuple(row[2].split(", "))) for row in rows(text, "control of transcripts")],
            [(control.name, control.gates) for control in suite.controls if control.name not in text_controls],
        ),
    }


def _drifted(pairs: dict[str, tuple[list, list]]) -> list[str]:
    return [f"{what}: {said} where the code has {known}" for what, (said, known) in pairs.items() if said != known]


@pytest.mark.parametrize("modality", DOCUMENTS)
def test_the_document_agrees_with_the_code(modality):
    assert faults(document(modality), modality) == []


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
    drifted = document("text").replace(old, new)
    (fault,) = [*faults(drifted), *faults(drifted, "asr")]
    assert fault.startswith(what)
