"""Stage `judge`: what the judge says of every output that was served, or that a reference arm gave.

Nothing is decided here and nothing is subtracted: the table holds raw numbers of judge and server, so that a changed
metric never needs the model again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from assay.judging import asr, text, tts
from assay.samples.lock import modality_of

Judge = Callable[[Path, str, list[Path], Path, Path, int], None]

JUDGES: dict[str, Judge] = {"text": text.judge, "asr": asr.judge, "tts": tts.judge}


def judge(
    model_dir: Path, dtype: str, items_paths: list[Path], responses_path: Path, output: Path, gpus: int = 0
) -> None:
    """Judge a `responses` table and write the judged table of its modality (speech: `transcripts`, else `tokens`).

    Args:
        model_dir: the judge's files, checked against their source's manifest.
        dtype: precision of the judge.
        items_paths: `items` tables of the sample sets the responses answer; they say the modality.
        responses_path: `responses` table of a server instance or of a reference arm.
        output: Parquet file to write.
        gpus: devices that this process sees, leased for it; 0: it computes on the CPU.
    """
    JUDGES[modality_of(items_paths)](model_dir, dtype, items_paths, responses_path, output, gpus)
