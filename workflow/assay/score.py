"""Stage `score`: stored outputs and what was judged of them become one long table of item scores, for every arm alike.

Served passes, floor arms, the judge's own run and the planted controls go through the very same code. Run options
(arms, sets, dtype, modality) are read from the serve plan that the run recorded; only scoring options come from today's
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from assay import store
from assay.scoring import asr, text, tts
from assay.scoring.rows import Files

Scorer = Callable[[list[Path], Files, Files, Path, Mapping[str, Any], Path, Path], None]

SCORERS: dict[str, Scorer] = {"text": text.score, "asr": asr.score, "tts": tts.score}


def score(
    items_paths: list[Path],
    served: Files,
    references: Files,
    model_dir: Path,
    options: Mapping[str, Any],
    scores_path: Path,
    floor_path: Path,
) -> None:
    """Score one config and write its `scores` and `floor` tables.

    Args:
        items_paths: `items` tables of the sample sets.
        served: what each server instance answered, and what was judged of it.
        references: what the reference answered, by sample set and arm, and what was judged of it.
        model_dir: the model that judged.
        options: scoring options, those of the modality's gates.
        scores_path, floor_path: Parquet files to write.
    """
    modality = store.run_options(served.responses)["modality"]
    SCORERS[modality](items_paths, served, references, model_dir, options, scores_path, floor_path)
