"""Stage `judge`: what the judge says of every output that was served, or that the arms of a reference gave.

The arms of a config, or of a floor, are judged together: the model is loaded once, and what they share is judged once.
Nothing is decided here and nothing is subtracted: the table holds raw numbers of judge and server, so that a changed
metric never needs the model again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from assay.judging import asr, text, tts
from assay.samples.lock import modality_of

Judge = Callable[[Path, Mapping[str, Any], list[Path], list[Path], Path, int], None]

JUDGES: dict[str, Judge] = {"text": text.judge, "asr": asr.judge, "tts": tts.judge}


def judge(
    model_dir: Path,
    options: Mapping[str, Any],
    items_paths: list[Path],
    responses_paths: list[Path],
    output: Path,
    gpus: int = 0,
) -> None:
    """Judge `responses` tables and write the judged table of its modality (speech: `transcripts`, else `tokens`).

    Args:
        model_dir: the judge's files, checked against their source's manifest.
        options: what it goes by (`config.judge_options`).
        items_paths: `items` tables of the sample sets the responses answer; they say the modality.
        responses_paths: `responses` tables of a config's instances, or of a floor's reference arms on one sample set.
        output: Parquet file to write; one row group per 64 items.
        gpus: devices that this process sees, leased for it; 0: it computes on the CPU.
    """
    JUDGES[modality_of(items_paths)](model_dir, options, items_paths, responses_paths, output, gpus)
