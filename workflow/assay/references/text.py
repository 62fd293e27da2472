"""What a causal language model answers to a sample set, as the judge or as one floor arm."""

from __future__ import annotations

import json
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
from assay.references.causal_lm import CausalLM, Generation, Prompt
from assay.samples.lock import load_set
from assay.sources.manifest import MANIFEST, verify_weights


def reference(
    model_dir: Path, items_path: Path, arm: str, options: Mapping[str, Any], output: Path, gpus: int = 0
) -> None:
    """Generate every item of a sample set with one reference arm and write a `responses` table.

    Args:
        model_dir: weights and tokenizer in transformers layout, checked against their source's manifest.
        items_path: `items` table of one sample set.
        arm: `judge` or `<dtype>-<change>`.
        options: `dtype` of the arm called `judge`.
        output: Parquet file to write.
        gpus: devices that this process sees, leased for it; 0: it computes on the CPU.
    """
    weights_sha256 = verify_weights(model_dir)
    settings = arm_settings(arm, options)
    items = {row["item_id"]: row for row in load_set(items_path)}
    model = CausalLM(model_dir, settings, gpus)
    prompts = {key: model.prompt(key, json.loads(row["request"])) for key, row in items.items()}
    rows = []
    with progress(f"{arm}: items generated", len(items)) as advance:
        for done in model.generate(list(prompts.values())):
            rows.append(
                _row(model, prompts[done.item_id], done) | {"set_id": items[done.item_id]["set_id"], "arm": arm}
            )
            advance()
    special = {"eos_ids": sorted(model.eos_ids), "bos_id": model.tokenizer.bos_token_id}
    recorded = {"arm": arm, "settings": asdict(settings), "weights_sha256": weights_sha256, **special}
    record = provenance("reference", [model_dir / MANIFEST, items_path], recorded)
    store.write_table(output, "responses", store.table_from_rows("responses", rows), record)


def _row(model: CausalLM, prompt: Prompt, done: Generation) -> dict[str, Any]:
    text = model.decode(done.token_ids)
    return {
        "item_id": done.item_id,
        "status": ResponseStatus.OK,
        "finish_reason": done.finish_reason,
        "evidence": Evidence.E0,
        "attempts": 1,
        "prompt_tokens": len(prompt.ids),
        "output_tokens": len(done.token_ids),
        "text": text,
        "prompt_token_ids": prompt.ids,
        "token_ids": done.token_ids,
        "token_logprobs": done.logprobs,
        "top_token_ids": done.top_ids,
        "top_logprobs": done.top_logprobs,
        "output_sha256": sha256_text(text),
    }
