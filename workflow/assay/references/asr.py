"""What Whisper transcribes of a sample set, as the judge or as one floor arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay import store
from assay.canonical import sha256_text
from assay.progress import progress
from assay.provenance import provenance
from assay.records import Evidence, ResponseStatus
from assay.references.arms import arm_settings
from assay.references.whisper import Transcript, Whisper, clip_of
from assay.samples.lock import load_set
from assay.sources.manifest import MANIFEST, verify_weights


def reference(
    model_dir: Path, items_path: Path, arm: str, options: Mapping[str, Any], output: Path, gpus: int = 0
) -> None:
    """Transcribe every item of a sample set by one reference arm and write a `responses` table.

    Args:
        model_dir: weights and tokenizer in transformers layout, checked against their source's manifest.
        items_path: `items` table of one sample set.
        arm: `judge` or `<dtype>-<change>`.
        options: `dtype` of the arm called `judge`, and `padding` of all arms.
        output: Parquet file to write.
        gpus: devices that this process sees, leased for it; 0: it computes on the CPU.
    """
    weights_sha256 = verify_weights(model_dir)
    settings = arm_settings(arm, options)
    items = {row["item_id"]: row for row in load_set(items_path)}
    model = Whisper(model_dir, settings, gpus)
    rows = []
    with progress(f"{arm}: items transcribed", len(items)) as advance:
        for done in model.generate(map(clip_of, items.values())):
            rows.append(_row(done, items[done.item_id], arm))
            advance()
    measured = {"arm": arm, "settings": asdict(settings), "weights_sha256": weights_sha256}
    record = provenance("reference", [model_dir / MANIFEST, items_path], measured | {"end_id": model.vocabulary.end})
    store.write_table(output, "responses", store.table_from_rows("responses", rows), record)


def _row(done: Transcript, item: Mapping[str, Any], arm: str) -> dict[str, Any]:
    return {
        "item_id": done.item_id,
        "set_id": item["set_id"],
        "arm": arm,
        "status": ResponseStatus.OK,
        "evidence": Evidence.E1,
        "attempts": 1,
        "output_tokens": len(done.token_ids),
        "text": done.text,
        "token_ids": done.token_ids,
        "token_logprobs": done.logprobs,
        "language": done.language,
        "segments": [{"start": segment.start_s, "end": segment.end_s, "text": text} for segment, text in done.segments],
        "output_sha256": sha256_text(done.text),
    }
