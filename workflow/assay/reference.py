"""Stage `reference`: what the reference itself answers to a sample set, as the judge or as one floor arm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from assay.references import asr, text
from assay.samples.lock import modality_of

Reference = Callable[[Path, Path, str, str, Path], None]

REFERENCES: dict[str, Reference] = {"text": text.reference, "asr": asr.reference}


def reference(model_dir: Path, items_path: Path, arm: str, judge_dtype: str, output: Path) -> None:
    """Answer every item of a sample set by one reference arm and write a `responses` table.

    Args:
        model_dir: the reference's files, checked against their source's manifest.
        items_path: `items` table of one sample set; it says the modality.
        arm: `judge`, or the name of a floor arm (`<dtype>-<change>`).
        judge_dtype: dtype of the arm called `judge`.
        output: Parquet file to write.
    """
    REFERENCES[modality_of([items_path])](model_dir, items_path, arm, judge_dtype, output)
