"""The judge's distribution at every token of a text, by teacher forcing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from assay import store
from assay.judging.rows import BATCH, token_rows, write_by_item
from assay.progress import progress
from assay.provenance import provenance
from assay.records import JUDGE, SERVED, Evidence, ResponseStatus
from assay.references.arms import arm_settings
from assay.references.causal_lm import CausalLM, Prompt
from assay.references.forcing import Forced
from assay.samples.lock import load_set
from assay.sources.manifest import MANIFEST, verify_weights

COLUMNS = [
    *("item_id", "arm", "status", "finish_reason", "evidence", "text"),
    *("token_ids", "token_logprobs", "top_token_ids", "top_logprobs"),
]


@dataclass(frozen=True)
class Sequence:
    """One token sequence to force, with what the server said of it."""

    arm: str
    path: str  # "ids" or "text"
    ids: tuple[int, ...]
    logprobs: list[float] | None
    top_ids: np.ndarray | None  # int32 [n, k]
    top_logprobs: np.ndarray | None  # float32 [n, k], nat


def judge(
    model_dir: Path,
    options: Mapping[str, Any],
    items_paths: list[Path],
    responses_paths: list[Path],
    output: Path,
    gpus: int = 0,
) -> None:
    """Teacher-force every served sequence of some `responses` tables, equal ones once, and write a `tokens` table.

    Responses without usable tokens get no rows: failed ones, ids outside the vocabulary, and text that does not survive
    encoding and decoding.

    Args: as of `assay.judge.judge`; `model_dir` holds weights and tokenizer in transformers layout, `options` says the
    `dtype` of the judge.
    """
    weights_sha256 = verify_weights(model_dir)
    items = {row["item_id"]: row for path in items_paths for row in load_set(path)}
    model = CausalLM(model_dir, arm_settings(JUDGE, options), gpus)
    special = np.array(sorted(model.tokenizer.all_special_ids))
    manifest = model_dir / MANIFEST
    measured = {"settings": asdict(model.settings), "weights_sha256": weights_sha256}
    inputs = [manifest, *items_paths, *responses_paths]
    with (
        store.table_writer(output, "tokens", provenance("judge", inputs, measured)) as writer,
        progress("items judged", len(items)) as advance,
    ):

        def judged() -> Iterator[list[dict[str, Any]]]:
            for item_id, responses in store.rows_by_item(responses_paths, "responses", COLUMNS, BATCH):
                prompt = model.prompt(item_id, json.loads(items[item_id]["request"]))
                sequences = [sequence for row in responses for sequence in sequences_of(row, model)]
                set_id = items[item_id]["set_id"]
                forced = _force(model, prompt, sequences)
                yield [row for pair in forced for row in _rows(item_id, set_id, *pair, special)]
                advance()

        write_by_item(writer, "tokens", judged())


def sequences_of(row: dict[str, Any], model: CausalLM) -> list[Sequence]:
    """Token sequences a response gives evidence of: as sampled, and as its text encodes.

    A reference arm's text path is forced too where it differs, because a server of which only text is known is judged
    against a floor that went through the same lossy path.
    """
    if row["status"] != ResponseStatus.OK:
        return []
    found = []
    if row["token_ids"] and model.knows(row["token_ids"]):
        ids = tuple(row["token_ids"])
        found.append(Sequence(row["arm"], "ids", ids, row["token_logprobs"], *_top_k(row, model)))
    served = row["arm"].startswith(SERVED)
    if row["evidence"] == Evidence.E2 or (not served and row["finish_reason"]):
        encoded = model.retokenise(row["text"], row["finish_reason"])
        if encoded and (not found or tuple(encoded) != found[0].ids):
            found.append(Sequence(row["arm"], "text", tuple(encoded), None, None, None))
    return found


def _top_k(row: dict[str, Any], model: CausalLM) -> tuple[np.ndarray | None, np.ndarray | None]:
    """A response's top-k ids and logprobs as rectangles: positions may differ in k when a server appends its choice.

    None where the server reports none, or ids that the vocabulary does not have.
    """
    if not row["top_token_ids"] or not all(map(model.knows, row["top_token_ids"])):
        return None, None
    k = min(map(len, row["top_token_ids"]))
    ids = np.array([top[:k] for top in row["top_token_ids"]], dtype=np.int32)
    return ids, np.array([top[:k] for top in row["top_logprobs"]], dtype=np.float32)


def _force(model: CausalLM, prompt: Prompt, sequences: list[Sequence]) -> list[tuple[Sequence, Forced]]:
    """Force each distinct sequence once, asking for the top-k ids of every arm that served it."""
    groups: dict[tuple[int, ...], list[Sequence]] = defaultdict(list)
    for sequence in sequences:
        groups[sequence.ids].append(sequence)
    results = []
    for ids, members in groups.items():
        wanted = [member.top_ids for member in members if member.top_ids is not None]
        forced = model.force(prompt, ids, np.concatenate(wanted, 1) if wanted else None)
        column = 0
        for member in members:
            if member.top_ids is None:
                results.append((member, forced._replace(at=None)))
                continue
            width = member.top_ids.shape[1]
            assert forced.at is not None
            results.append((member, forced._replace(at=forced.at[:, column : column + width])))
            column += width
    return results


def _rows(item_id: str, set_id: str, sequence: Sequence, forced: Forced, special: np.ndarray) -> list[dict[str, Any]]:
    served: dict[str, Any] = {}
    if sequence.logprobs is not None:
        served["lp_served"] = sequence.logprobs
    if sequence.top_logprobs is not None:
        served |= {"served_top_lp": sequence.top_logprobs, "served_top_lp_judge": forced.at}
    key = {"item_id": item_id, "set_id": set_id, "arm": sequence.arm, "path": sequence.path}
    return token_rows(key, sequence.ids, np.isin(sequence.ids, special), forced, **served)
