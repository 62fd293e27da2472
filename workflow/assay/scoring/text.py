"""Scores of text. Tokens are streamed by row group, so memory does not grow with the length of the answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from assay import store
from assay.metrics import text as metrics
from assay.provenance import provenance
from assay.records import JUDGE, Evidence, ResponseStatus
from assay.samples.lock import load_set
from assay.scoring.margins import block_rows, floor_table, margin_rows, read_blocks, read_ids, unjudged_margins
from assay.scoring.rows import Arm, Files, Rows, arms_of, read_responses, score_table
from assay.tokens import TokenBlock
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
        served: responses of each server instance, and their tokens.
        references: responses of each sample set and reference arm, and their tokens.
        model_dir: the reference's files; its tokenizer.json says what text some ids are.
        options: scoring options (`assay.config.TextGates`).
        scores_path, floor_path: Parquet files to write.
    """
    items = read_items(items_paths)
    plan = store.run_options(served.responses)
    lossy = _only_text(served)
    unlike = _lossy_items(references, plan["reference"]["arms"], items) if lossy else frozenset()
    reference = _read_reference(references, lossy, Tokenizer.from_file(str(model_dir / "tokenizer.json")), unlike)
    inputs = [*items_paths, *served.paths, *references.paths]
    origin = provenance("score", inputs, {"run": plan, "scoring": dict(options)})
    floor_arms = set(plan["reference"]["arms"]) - {JUDGE}
    sets = {key: item.set_id for key, item in items.items()}
    with (
        store.table_writer(scores_path, "scores", origin) as scores,
        store.table_writer(floor_path, "floor", origin) as floor,
    ):
        arms = list(arms_of(plan, served, references, CONTROLS))
        judged: dict[str, dict[str, int]] = {arm.label: {} for arm in arms}  # arm -> item -> tokens
        for arm, block in read_blocks(arms, lossy):
            judged[arm.label] |= dict(zip(block.item_ids, np.diff(block.offsets).tolist(), strict=True))
            block = block.take(np.array([key not in reference.lossy for key in block.item_ids], dtype=bool))
            rows = _token_rows(block, items, reference, options["clip_nat"])
            scores.write(score_table(plan["config"], arm.label, sets, rows))
            if arm.name in floor_arms:
                floor.write(floor_table(block.take(_greedy(block, items)), arm.label))
        for arm in arms:
            log.info("scoring %s", arm.label)
            rows = _answer_rows(arm, judged[arm.label], items, reference, bool(plan["client"]["logprobs"]))
            scores.write(score_table(plan["config"], arm.label, sets, rows))


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
        for path in served.responses
        for row in store.read_rows(path, "responses", ["evidence"])
    )


def _lossy_items(references: Files, arms: Iterable[str], items: Mapping[str, Item]) -> frozenset[str]:
    found: set[str] = set()
    for arm in arms:
        sampled, encoded = (read_ids(references.judged, arm, lossy=by_text) for by_text in (False, True))
        # A character that the token limit cut is gone from the text: what is left is as good as it was.
        found |= {key for key, ids in encoded.items() if not np.array_equal(ids, sampled[key][: len(ids)])}
    return frozenset(key for key in found if items[key].greedy)


def _read_reference(references: Files, lossy: bool, tokenizer: Tokenizer, unlike: frozenset[str]) -> Reference:
    prompt_ids: dict[str, list[int]] = {}
    options: dict[str, Any] = {}
    for path in references.of(JUDGE):
        options = store.read_provenance(path)["options"]
        for row in store.read_rows(path, "responses", ["item_id", "prompt_token_ids"]):
            prompt_ids[row["item_id"]] = row["prompt_token_ids"]
    token_ids = read_ids(references.judged, JUDGE, lossy)
    return Reference(prompt_ids, token_ids, frozenset(options["eos_ids"]), options["bos_id"], tokenizer, unlike)


def _answer_rows(
    arm: Arm[TokenControl], judged: Mapping[str, int], items: Mapping[str, Item], reference: Reference, logprobs: bool
) -> list[Rows]:
    """Scores of an arm that come from its responses, and from which items have judged tokens, so many each.

    Args:
        logprobs: whether the server was asked for them.
    """
    responses = read_responses(arm, COLUMNS)
    answered = {key for key, row in responses.items() if row["status"] == ResponseStatus.OK}
    # Ids that could not be judged are not of the vocabulary; text that could not be judged proves no fault.
    textual = {key for key in answered if not responses[key]["token_ids"]}
    unjudged = [key for key in items if key not in judged]
    lossy_items = [key for key in items if key in reference.lossy and key in judged]
    return [
        *_response_rows(responses, items, reference, judged),
        *_unjudged_rows([key for key in unjudged if key not in textual], items, logprobs, np.inf),
        *_unjudged_rows([key for key in unjudged if key in textual] + lossy_items, items, logprobs, np.nan),
        Rows("lossy_text", "bool", 0, lossy_items, [1.0] * len(lossy_items)),
    ]


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
