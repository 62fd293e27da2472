"""Scores of text. Tokens are streamed by row group, so memory does not grow with the length of the answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from assay import store
from assay.metrics import text as metrics
from assay.provenance import provenance
from assay.records import JUDGE, Evidence, ResponseStatus
from assay.samples.lock import load_set
from assay.scoring.margins import block_rows, floor_table, margin_rows, read_blocks, unjudged_margins
from assay.scoring.rows import Arm, Files, Rows, arms_of, read_responses, score_table
from assay.tokens import TokenBlock, split_blocks
from assay.verdicts.margins.planted import TokenControl
from assay.verdicts.text.planted import CONTROLS

log = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
COLUMNS = [
    *("item_id", "arm", "status", "finish_reason", "evidence", "prompt_tokens", "output_tokens", "text"),
    *("prompt_token_ids", "token_ids"),
]
LEVELS = {Evidence.E0: 0, Evidence.E1: 1, Evidence.E2: 2, Evidence.E3: 3, Evidence.NONE: 4}


@dataclass(frozen=True)
class Item:
    """What the scores need to know of a planned item."""

    item_id: str
    set_id: str
    max_tokens: int
    greedy: bool
    expected: str | None


@dataclass(frozen=True)
class Reference:
    """The judge's own greedy run: what served items are compared with.

    `lossy`: greedy items that some reference arm answers with ids that its own text does not encode to. A margin of
    re-encoded text says nothing about a server there, so no arm has one.
    """

    prompt_ids: dict[str, list[int]]
    token_ids: dict[str, np.ndarray]
    eos_ids: frozenset[int]
    bos_id: int | None
    tokenizer: Tokenizer
    lossy: frozenset[str]

    def text(self, ids: list[int]) -> str:
        """Text of `ids` as servers show it: without special tokens, and without a character cut off at the end."""
        return str(self.tokenizer.decode(ids)).rstrip(REPLACEMENT)


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
        served: (responses, tokens) of each server instance, instance 0 first.
        references: (responses, tokens) of each sample set and reference arm.
        model_dir: the reference's files; its tokenizer.json says what text some ids are.
        options: scoring options (`assay.config.TextGates`).
        scores_path, floor_path: Parquet files to write.
    """
    items = read_items(items_paths)
    plan = store.run_options([responses for responses, _ in served])
    lossy = _only_text(served)
    unlike = _lossy_items(references, items) if lossy else frozenset()
    reference = _read_reference(references, lossy, Tokenizer.from_file(str(model_dir / "tokenizer.json")), unlike)
    inputs = [*items_paths, *(path for pair in served + references for path in pair)]
    origin = provenance("score", inputs, {"run": plan, "scoring": dict(options)})
    floor_arms = set(plan["reference"]["arms"]) - {JUDGE}
    with (
        store.table_writer(scores_path, "scores", origin) as scores,
        store.table_writer(floor_path, "floor", origin) as floor,
    ):
        for arm in arms_of(plan, served, references, CONTROLS):
            is_floor = arm.name in floor_arms
            log.info("scoring %s", arm.label)
            for table, margins in _score_arm(arm, plan, items, reference, lossy, options):
                scores.write(table)
                if is_floor:
                    floor.write(margins)


def read_items(paths: Iterable[Path]) -> dict[str, Item]:
    """Planned items of some sample sets, by id."""
    items = {}
    for path in paths:
        for row in load_set(path):
            request = json.loads(row["request"])
            items[row["item_id"]] = Item(
                row["item_id"], row["set_id"], request["max_tokens"], request["temperature"] == 0, row["expected"]
            )
    return items


def _only_text(served: Files) -> bool:
    """Whether some answer is known by its text alone: then the floor goes through text as well."""
    return any(
        row["evidence"] == Evidence.E2
        for responses, _ in served
        for row in store.read_rows(responses, "responses", ["evidence"])
    )


def _lossy_items(references: Files, items: Mapping[str, Item]) -> frozenset[str]:
    found: set[str] = set()
    for responses, tokens in references:
        for table in store.iter_tables(tokens, "tokens"):
            sampled, encoded = (
                {
                    key: ids.tolist()
                    for block in split_blocks(table, responses.stem, lossy=by_text)
                    for key, ids in zip(block.item_ids, block.split(block.token_id), strict=True)
                }
                for by_text in (False, True)
            )
            # A character that the token limit cut is gone from the text: what is left is as good as it was.
            found |= {key for key, ids in encoded.items() if ids != sampled[key][: len(ids)]}
    return frozenset(key for key in found if items[key].greedy)


def _read_reference(references: Files, lossy: bool, tokenizer: Tokenizer, unlike: frozenset[str]) -> Reference:
    prompt_ids: dict[str, list[int]] = {}
    token_ids: dict[str, np.ndarray] = {}
    options: dict[str, Any] = {}
    for responses, tokens in references:
        if responses.stem != JUDGE:
            continue
        options = store.read_provenance(responses)["options"]
        for row in store.read_rows(responses, "responses", ["item_id", "prompt_token_ids"]):
            prompt_ids[row["item_id"]] = row["prompt_token_ids"]
        for block in read_blocks(tokens, JUDGE, lossy):
            token_ids |= dict(zip(block.item_ids, block.split(block.token_id), strict=True))
    return Reference(prompt_ids, token_ids, frozenset(options["eos_ids"]), options["bos_id"], tokenizer, unlike)


def _score_arm(
    arm: Arm[TokenControl],
    plan: Mapping[str, Any],
    items: Mapping[str, Item],
    reference: Reference,
    lossy: bool,
    options: Mapping[str, Any],
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Score tables of one arm, and its positive margins for the floor, in bounded pieces."""
    sets = {key: item.set_id for key, item in items.items()}
    mutate_tokens = arm.control.tokens if arm.control else None
    judged: dict[str, int] = {}  # item -> tokens
    for path in arm.judged:
        for block in read_blocks(path, arm.name, lossy):
            chosen = mutate_tokens(block) if mutate_tokens else block
            judged |= dict(zip(chosen.item_ids, np.diff(chosen.offsets).tolist(), strict=True))
            chosen = chosen.take(np.array([key not in reference.lossy for key in chosen.item_ids], dtype=bool))
            yield (
                score_table(
                    plan["config"], arm.label, sets, _token_rows(chosen, items, reference, options["clip_nat"])
                ),
                floor_table(chosen.take(_greedy(chosen, items)), arm.label),
            )
    responses = read_responses(arm, COLUMNS)
    answered = {key for key, row in responses.items() if row["status"] == ResponseStatus.OK}
    logprobs = bool(plan["client"]["logprobs"])
    # Ids that could not be judged are not of the vocabulary; text that could not be judged proves no fault.
    textual = {key for key in answered if not responses[key]["token_ids"]}
    unjudged = [key for key in items if key not in judged]
    lossy_items = [key for key in items if key in reference.lossy and key in judged]
    rows = [
        *_response_rows(responses, items, reference, judged),
        *_unjudged_rows([key for key in unjudged if key not in textual], items, logprobs, np.inf),
        *_unjudged_rows([key for key in unjudged if key in textual] + lossy_items, items, logprobs, np.nan),
        Rows("lossy_text", "bool", 0, lossy_items, [1.0] * len(lossy_items)),
    ]
    yield score_table(plan["config"], arm.label, sets, rows), store.table_from_rows("floor", [])


# --- judged tokens -> rows ---------------------------------------------------------------------------------------


def _token_rows(block: TokenBlock, items: Mapping[str, Item], reference: Reference, clip: float) -> list[Rows]:
    """Scores that come from the judged tokens of some items."""
    greedy = _greedy(block, items)
    return [
        *margin_rows(block.take(greedy), reference.token_ids, clip),
        *_sampled_rows(block.take(~greedy)),
    ]


def _greedy(block: TokenBlock, items: Mapping[str, Item]) -> np.ndarray:
    return np.array([items[key].greedy for key in block.item_ids], dtype=bool)


def _sampled_rows(block: TokenBlock) -> list[Rows]:
    """Surprisal and support of sampled items. A token outside the support has no surprisal: it counts there only."""
    if not block.item_ids:
        return []
    inside = block.in_support
    excess = np.where(inside, -np.where(inside, block.lp_asked, 0.0) - block.entropy, 0.0)
    variance = metrics.ragged_sum(np.where(inside, block.variance, 0.0), block.offsets)
    counts = np.diff(block.offsets)
    outside = metrics.ragged_sum((~inside).astype(float), block.offsets)
    return [
        block_rows(
            block, "surprisal", "nat", 0, metrics.ragged_sum(excess, block.offsets), variance=variance, n=counts
        ),
        block_rows(block, "support_outside", "count", -1, outside, n=counts),
    ]


# --- responses -> rows -------------------------------------------------------------------------------------------


def _response_rows(
    responses: Mapping[str, dict[str, Any]], items: Mapping[str, Item], reference: Reference, judged: Mapping[str, int]
) -> list[Rows]:
    """Scores that come from the responses: coverage, evidence, structure, lengths, needles."""
    table = {
        name: Rows(name, unit, direction)
        for name, unit, direction in (
            ("answered", "bool", 1),
            ("evidence", "level", -1),
            ("prompt_equal", "bool", 1),
            ("bos_ok", "bool", 1),
            ("ids_ok", "bool", 1),
            ("tokens_after_eos", "count", -1),
            ("finish_ok", "bool", 1),
            ("text_ok", "bool", 1),
            ("usage_ok", "bool", 1),
            ("output_tokens", "token", 0),
            ("needle", "bool", 1),
        )
    }

    def add(metric: str, key: str, value: float | None, **aux: float) -> None:
        rows = table[metric]
        rows.item_ids.append(key)
        rows.values.append(np.nan if value is None else float(value))
        rows.aux.append(aux)

    for key, item in items.items():
        response = responses.get(key)
        ok = response is not None and response["status"] == ResponseStatus.OK
        add("answered", key, ok)
        if item.expected is not None:
            right = ok and metrics.needle_correct(item.expected, response["text"] or "")  # type: ignore[index]
            add("needle", key, right, prompt_tokens=len(reference.prompt_ids[key]))
        if response is not None:
            _add_prompt(add, key, response, reference)
        if not ok or response is None:
            continue
        level = LEVELS[Evidence(response["evidence"])]
        # Text that does not survive encoding and decoding was not judged: it proves no more than parsed text.
        add("evidence", key, level if key in judged or level != LEVELS[Evidence.E2] else LEVELS[Evidence.E3])
        # Text that encodes to other ids than were sampled does not count them.
        by_text = response["token_ids"] is None
        seen = None if by_text and key in reference.lossy else judged.get(key)
        _add_structure(add, key, item, response, reference, seen)
    return [rows for rows in table.values() if rows.item_ids]


def _add_prompt(add: Callable[..., None], key: str, response: Mapping[str, Any], reference: Reference) -> None:
    """Whether the server read the prompt that the reference reads; known for a failed answer too, if it was counted."""
    expected = reference.prompt_ids[key]
    prompt, count = response["prompt_token_ids"], response["prompt_tokens"]
    if prompt is not None:
        add("prompt_equal", key, prompt == expected, by_ids=1, served=len(prompt), ref=len(expected))
        if reference.bos_id is not None:
            bos = [metrics.leading_bos(ids, reference.bos_id) for ids in (prompt, expected)]
            add("bos_ok", key, bos[0] == bos[1], served=bos[0], ref=bos[1])
    elif count is not None:
        add("prompt_equal", key, count == len(expected), by_ids=0, served=count, ref=len(expected))
    elif response["status"] == ResponseStatus.OK:
        add("prompt_equal", key, None)


def _add_structure(
    add: Callable[..., None],
    key: str,
    item: Item,
    response: Mapping[str, Any],
    reference: Reference,
    seen: int | None,
) -> None:
    """Whether an answer's parts fit one another. `seen`: judged tokens, None where there are none.

    Ids without judged tokens are outside the vocabulary. Where a server returns text alone, its usage count is a claim
    to check; the length is that of the text.
    """
    ids, usage = response["token_ids"], response["output_tokens"]
    counted = seen if ids is None else len(ids)
    length = usage if counted is None else counted
    slack = _slack(seen) if ids is None and seen is not None else 0.0
    if length is not None:
        reference_length = len(reference.token_ids.get(key, ()))
        add("output_tokens", key, length, ref=reference_length, limit=item.max_tokens, tolerance=max(1.0, slack))
    if ids is not None:
        add("ids_ok", key, seen is not None)
        add("tokens_after_eos", key, metrics.tokens_after_eos(ids, reference.eos_ids))
    if ids is not None and seen is not None:
        add("text_ok", key, (response["text"] or "").rstrip(REPLACEMENT) == reference.text(ids))
    if usage is not None and counted is not None:
        add("usage_ok", key, abs(usage - counted) <= slack)
    add("finish_ok", key, _finish_ok(response["finish_reason"], ids, length, item.max_tokens, slack, reference.eos_ids))


def _slack(tokens: int) -> float:
    """Tokens that a text of so many may lack or have beside those sampled.

    A character cut by the token limit takes up to three with it, an end of sequence may or may not be counted, and text
    may encode again to somewhat fewer or more tokens.
    """
    return 3 + 0.1 * tokens


def _finish_ok(
    reason: str | None, ids: list[int] | None, length: int | None, limit: int, slack: float, eos_ids: frozenset[int]
) -> bool | None:
    """Whether the finish reason agrees with the length; None when there is nothing to compare."""
    if reason is None or length is None:
        return None
    if reason == "length":
        return abs(length - limit) <= slack
    ended = ids is None or (bool(ids) and ids[-1] in eos_ids)
    return reason == "stop" and length <= limit + slack and ended


def _unjudged_rows(keys: list[str], items: Mapping[str, Item], logprobs: bool, value: float) -> list[Rows]:
    """Rows of items without judged tokens, for each metric they should have had.

    `value` is infinite (the worst case) for a request without an answer or with ids outside the vocabulary, NaN
    (undefined) for an answer that gives the judge nothing to judge.
    """
    greedy = [key for key in keys if items[key].greedy]
    sampled = [key for key in keys if not items[key].greedy]
    rows = unjudged_margins(greedy, logprobs, value)
    for name, unit, sign in (("surprisal", "nat", 0), ("support_outside", "count", -1)):
        if sampled:
            rows.append(Rows(name, unit, sign, sampled, [value] * len(sampled)))
    return rows
