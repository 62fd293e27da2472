"""The suite of each modality."""

from __future__ import annotations

from typing import Any

from assay.errors import StoreError
from assay.verdicts.asr.suite import ASR
from assay.verdicts.suite import Suite
from assay.verdicts.text.suite import TEXT
from assay.verdicts.tts.suite import TTS

SUITES: dict[str, Suite[Any]] = {"text": TEXT, "asr": ASR, "tts": TTS}


def suite_of(modality: str | None) -> Suite[Any]:
    """The suite of a modality.

    Raises:
        StoreError: there is none.
    """
    if modality not in SUITES:
        raise StoreError(f"outputs of modality '{modality}' cannot be judged; known: {', '.join(SUITES)}")
    return SUITES[modality]
