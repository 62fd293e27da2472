"""Stage `score`: stored outputs and judged tokens become one long table of item scores, for every arm alike.

Served passes, floor arms, the judge's own run and the planted controls go through the very same code. Run options
(arms, sets, dtype) are read from the serve plan that the run recorded; only scoring options come from today's
configuration. Tokens are streamed one row group at a time, so memory does not grow with the length of the answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from assay import store
from assay.metrics import text as metrics
from assay.provenance import provenance
from assay.records import JUDGE, SCORES, Evidence, Flag, ResponseStatus
from assay.samples.lock import load_set
from assay.tokens import TokenBlock, split_blocks
from assay.verdicts.planted import CONTROLS, Control

log = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
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
class Arm:
    """One arm to score: where its responses and judged tokens are, and whether only its text may be used."""

    name: str
    label: str  # the name it carries in the scores: its own, or that of the control planted on it
    responses: list[Path]
    tokens: list[Path]
    control: Control | None = None


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


@dataclass
class Rows:
    """Score rows of one metric, as columns. `nan` says what a NaN among the values means."""

    metric: str
    unit: str
    direction: int
    item_ids: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    aux: list[dict[str, float]] = field(default_factory=list)
    nan: Flag = Flag.UNDEFINED


def score(
    items_paths: list[Path],
    served: list[tuple[Path, Path]],
    references: list[tuple[Path, Path]],
    tokenizer_path: Path,
    options: Mapping[str, Any],
    scores_path: Path,
    floor_path: Path,
) -> None:
    """Score one config and write its `scores` and `floor` tables.

    Args:
        items_paths: `items` tables of the sample sets.
        served: (responses, tokens) of each server instance, instance 0 first.
        references: (responses, tokens) of each sample set and reference arm.
        tokenizer_path: the reference's tokenizer.json, which says what text some ids are.
        options: scoring options (`assay.config.TextGates`).
        scores_path, floor_path: Parquet files to write.
    """
    items = read_items(items_paths)
    plan = store.run_options([responses for responses, _ in served])
    lossy = _only_text(served)
    unlike = _lossy_items(references, items) if lossy else frozenset()
    reference = _read_reference(references, lossy, Tokenizer.from_file(str(tokenizer_path)), unlike)
    inputs = [*items_paths, *(path for pair in served + references for path in pair)]
    origin = provenance("score", inputs, {"run": plan, "scoring": dict(options)})
    floor_arms = set(plan["reference"]["arms"]) - {JUDGE}
    with (
        store.table_writer(scores_path, "scores", origin) as scores,
        store.table_writer(floor_path, "floor", origin) as floor,
    ):
        for arm in _arms(plan, served, references):
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


def _only_text(served: list[tuple[Path, Path]]) -> bool:
    """Whether some answer is known by its text alone: then the floor goes through text as well."""
    return any(
        row["evidence"] == Evidence.E2
        for responses, _ in served
        for row in store.read_rows(responses, "responses", ["evidence"])
    )


def _arms(
    plan: Mapping[str, Any], served: list[tuple[Path, Path]], references: list[tuple[Path, Path]]
) -> Iterator[Arm]:
    for number, passes in enumerate(plan["instances"]):
        for item in passes:
            name = f"served_{number}_{item['name']}"
            yield Arm(name, name, [served[number][0]], [served[number][1]])
    for name in plan["reference"]["arms"]:
        files = [pair for pair in references if pair[0].stem == name]
        arm = Arm(name, name, [pair[0] for pair in files], [pair[1] for pair in files])
        yield arm
        if name == JUDGE:
            yield from (
                Arm(name, f"control_{control.name}", arm.responses, arm.tokens, control) for control in CONTROLS
            )


def _lossy_items(references: list[tuple[Path, Path]], items: Mapping[str, Item]) -> frozenset[str]:
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


def _read_reference(
    references: list[tuple[Path, Path]], lossy: bool, tokenizer: Tokenizer, unlike: frozenset[str]
) -> Reference:
    prompt_ids: dict[str, list[int]] = {}
    token_ids: dict[str, np.ndarray] = {}
    options: dict[str, Any] = {}
    for responses, tokens in references:
        if responses.stem != JUDGE:
            continue
        options = store.read_provenance(responses)["options"]
        for row in store.read_rows(responses, "responses", ["item_id", "prompt_token_ids"]):
            prompt_ids[row["item_id"]] = row["prompt_token_ids"]
        for block in _blocks(tokens, JUDGE, lossy):
            token_ids |= dict(zip(block.item_ids, block.split(block.token_id), strict=True))
    return Reference(prompt_ids, token_ids, frozenset(options["eos_ids"]), options["bos_id"], tokenizer, unlike)


def _blocks(path: Path, arm: str, lossy: bool) -> Iterator[TokenBlock]:
    for table in store.iter_tables(path, "tokens"):
        yield from split_blocks(table, arm, lossy)


def _score_arm(
    arm: Arm,
    plan: Mapping[str, Any],
    items: Mapping[str, Item],
    reference: Reference,
    lossy: bool,
    options: Mapping[str, Any],
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Score tables of one arm, and its positive margins for the floor, in bounded pieces."""
    mutate_tokens = arm.control.tokens if arm.control else None
    judged: dict[str, int] = {}  # item -> tokens
    for path in arm.tokens:
        for block in _blocks(path, arm.name, lossy):
            chosen = mutate_tokens(block) if mutate_tokens else block
            judged |= dict(zip(chosen.item_ids, np.diff(chosen.offsets).tolist(), strict=True))
            chosen = chosen.take(np.array([key not in reference.lossy for key in chosen.item_ids], dtype=bool))
            yield (
                _table(plan["config"], arm.label, items, _token_rows(chosen, items, reference, options["clip_nat"])),
                _floor_table(chosen, arm.label, items),
            )
    responses = _read_responses(arm)
    if arm.control and arm.control.responses:
        responses = arm.control.responses(responses)
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
    yield _table(plan["config"], arm.label, items, rows), store.table_from_rows("floor", [])


# --- judged tokens -> rows ---------------------------------------------------------------------------------------


def _token_rows(block: TokenBlock, items: Mapping[str, Item], reference: Reference, clip: float) -> list[Rows]:
    """Scores that come from the judged tokens of some items."""
    greedy = np.array([items[key].greedy for key in block.item_ids], dtype=bool)
    return [
        *_greedy_rows(block.take(greedy), reference, clip),
        *_sampled_rows(block.take(~greedy)),
    ]


def _greedy_rows(block: TokenBlock, reference: Reference, clip: float) -> list[Rows]:
    if not block.item_ids:
        return []
    counts = np.diff(block.offsets)
    margins = metrics.greedy_margin(block.lp_judge_max, block.lp_judge)
    position = metrics.ragged_argmax(margins, block.offsets)
    trend = metrics.margin_trend(margins, block.offsets, clip)
    divergences = [
        metrics.first_divergence(ids.tolist(), reference.token_ids[key].tolist())
        for key, ids in zip(block.item_ids, block.split(block.token_id), strict=True)
    ]
    first = np.array([np.nan if at is None else at for at in divergences], dtype=np.float64)
    rows = [
        _rows(block, "margin_max", "nat", -1, metrics.ragged_max(margins, block.offsets), pos=position),
        _rows(block, "margin_mean", "nat", -1, metrics.clipped_mean(margins, block.offsets, clip), n=counts),
        _rows(block, "margin_trend", "nat", -1, trend.difference, late=trend.late, early=trend.early, n=counts),
        _rows(block, "exact", "bool", 1, np.isnan(first).astype(float)),
        _rows(block, "first_divergence", "token", 0, first),
    ]
    if block.lp_served is not None:
        rows.append(_logprob_rows(block, block.lp_served))
    if block.served_top_lp is not None and block.served_top_lp_judge is not None:
        rows.append(_kl_rows(block, block.served_top_lp, block.served_top_lp_judge))
    return rows


def _logprob_rows(block: TokenBlock, lp_served: np.ndarray) -> Rows:
    delta = lp_served - block.lp_judge
    aux = {
        "n": np.diff(block.offsets),
        "mean": metrics.ragged_mean(delta, block.offsets),
        "max_abs": metrics.ragged_max(np.abs(delta), block.offsets),
    }
    if block.served_top_lp is not None and block.served_top_lp_judge is not None:
        aux["served_mass"] = metrics.ragged_mean(np.exp(block.served_top_lp).sum(1), block.offsets)
        aux["judge_mass"] = metrics.ragged_mean(np.exp(block.served_top_lp_judge).sum(1), block.offsets)
    return _rows(block, "logprob_rms", "nat", -1, metrics.ragged_rms(delta, block.offsets), **aux)


def _kl_rows(block: TokenBlock, served: np.ndarray, judge: np.ndarray) -> Rows:
    divergence = metrics.kl_topk(judge, served)
    same_top = (served.argmax(1) == judge.argmax(1)).astype(float)
    return _rows(
        block,
        "kl_mean",
        "nat",
        -1,
        metrics.ragged_mean(divergence, block.offsets),
        n=np.diff(block.offsets),
        max=metrics.ragged_max(divergence, block.offsets),
        same_top=metrics.ragged_mean(same_top, block.offsets),
    )


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
        _rows(block, "surprisal", "nat", 0, metrics.ragged_sum(excess, block.offsets), variance=variance, n=counts),
        _rows(block, "support_outside", "count", -1, outside, n=counts),
    ]


def _rows(block: TokenBlock, metric: str, unit: str, direction: int, values: np.ndarray, **aux: np.ndarray) -> Rows:
    keys = list(aux)
    columns = [np.asarray(column, dtype=np.float64).tolist() for column in aux.values()]
    extra = [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)] if keys else []
    # Without a divergence, or with a single token, there is no such number; any other NaN is the judge's.
    nan = Flag.UNDEFINED if metric in ("first_divergence", "margin_trend") else Flag.NONFINITE
    return Rows(metric, unit, direction, block.item_ids, values.tolist(), extra, nan)


def _floor_table(block: TokenBlock, arm: str, items: Mapping[str, Item]) -> pa.Table:
    """Every positive margin of a floor arm's greedy items: what tau_soft is cut from."""
    margins = metrics.greedy_margin(block.lp_judge_max, block.lp_judge)
    owners = np.repeat(np.arange(len(block.item_ids)), np.diff(block.offsets))
    return store.table_from_rows(
        "floor",
        [
            {"gate": "G-soft", "metric": "margin", "item_id": block.item_ids[owner], "arm": arm, "value": margin}
            for owner, margin in zip(owners[margins > 0], margins[margins > 0], strict=True)
            if items[block.item_ids[owner]].greedy
        ],
    )


# --- responses -> rows -------------------------------------------------------------------------------------------


def _read_responses(arm: Arm) -> dict[str, dict[str, Any]]:
    columns = [
        *("item_id", "arm", "status", "finish_reason", "evidence", "prompt_tokens", "output_tokens", "text"),
        *("prompt_token_ids", "token_ids"),
    ]
    found = {}
    for path in arm.responses:
        for row in store.read_rows(path, "responses", columns):
            if row["arm"] == arm.name:
                found[row["item_id"]] = row
    return found


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
    wanted = [("margin_max", "nat", -1), ("margin_mean", "nat", -1), ("margin_trend", "nat", -1), ("exact", "bool", 1)]
    if logprobs:
        wanted += [("logprob_rms", "nat", -1), ("kl_mean", "nat", -1)]
    rows = [Rows(name, unit, sign, greedy, [value] * len(greedy)) for name, unit, sign in wanted if greedy]
    for name, unit, sign in (("surprisal", "nat", 0), ("support_outside", "count", -1)):
        if sampled:
            rows.append(Rows(name, unit, sign, sampled, [value] * len(sampled)))
    return rows


# --- rows -> table -----------------------------------------------------------------------------------------------


def _table(config: str, arm: str, items: Mapping[str, Item], parts: Iterable[Rows]) -> pa.Table:
    """Rows as a `scores` table. NaN becomes null (undefined, or not finite where only a broken judge gives it);
    infinity becomes null (counted as the worst case)."""
    tables = [_part(config, arm, items, rows) for rows in parts if rows.item_ids]
    return pa.concat_tables(tables).combine_chunks() if tables else SCORES.empty_table()


def _part(config: str, arm: str, items: Mapping[str, Item], rows: Rows) -> pa.Table:
    values = np.array(rows.values, dtype=np.float64)
    flags = np.full(len(values), Flag.OK.value, dtype=object)
    flags[np.isnan(values)] = rows.nan.value
    flags[np.isinf(values)] = Flag.MISSING_AS_WORST.value
    n = len(values)
    aux = rows.aux or [{}] * n
    columns = {
        "config": pa.repeat(config, n),
        "item_id": rows.item_ids,
        "set_id": [items[key].set_id for key in rows.item_ids],
        "arm": pa.repeat(arm, n),
        "metric": pa.repeat(rows.metric, n),
        "value": pa.array(values, mask=~np.isfinite(values)),
        "flag": flags,
        "unit": pa.repeat(rows.unit, n),
        "direction": pa.repeat(pa.scalar(rows.direction, pa.int8()), n),
        "aux": pa.array(
            [[(k, v) for k, v in entry.items() if np.isfinite(v)] for entry in aux], SCORES.field("aux").type
        ),
    }
    arrays = [_as(columns[column.name], column.type) for column in SCORES]
    return pa.table(arrays, schema=SCORES)


def _as(values: Any, kind: pa.DataType) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    return (
        array.dictionary_encode() if pa.types.is_dictionary(kind) and not pa.types.is_dictionary(array.type) else array
    )
