"""Stage `reference`: what the reference itself answers to a sample set, as the judge or as one floor arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from assay.references import asr, text, tts
from assay.samples.lock import modality_of

Reference = Callable[[Path, Path, str, Mapping[str, Any], Path, int], None]

REFERENCES: dict[str, Reference] = {"text": text.reference, "asr": asr.reference, "tts": tts.reference}


def reference(
    model_dir: Path, items_path: Path, arm: str, options: Mapping[str, Any], output: Path, gpus: int = 0
) -> None:
    """Answer every item of a sample set by one reference arm and write a `responses` table.

    Args:
        model_dir: the reference's files, checked against their source's manifest.
        items_path: `items` table of one sample set; it says the modality.
        arm: `judge`, or the name of a floor arm (`<dtype>-<change>`).
        options: what the family says of its reference, without weights and floor (`Config.reference_options`).
        output: Parquet file to write.
        gpus: devices that this process sees, leased for it; 0: it computes on the CPU.
    """
    REFERENCES[modality_of([items_path])](model_dir, items_path, arm, options, output, gpus)
