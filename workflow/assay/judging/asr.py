"""The judge's distribution at every token of a transcript, by teacher forcing, window by window of the audio."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from heapq import merge
from itertools import tee
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from assay import store
from assay.judging.rows import BATCH, token_rows, write_by_item
from assay.progress import progress
from assay.provenance import provenance
from assay.records import JUDGE, SERVED, Evidence, ResponseStatus
from assay.references.arms import arm_settings
from assay.references.forcing import Forced
from assay.references.whisper import WINDOW_FRAMES, Heard, Whisper, clip_of
from assay.references.whisper_tokens import Window
from assay.samples.lock import load_set
from assay.sources.manifest import MANIFEST, verify_weights

COLUMNS = ["item_id", "set_id", "arm", "status", "evidence", "text", "token_ids", "token_logprobs", "segments"]


@dataclass(frozen=True)
class Said:
    """A transcript to force, as windows of the audio."""

    path: str  # "ids" or "text"
    windows: tuple[Window, ...]


def judge(
    model_dir: Path,
    options: Mapping[str, Any],
    items_paths: list[Path],
    responses_paths: list[Path],
    output: Path,
    gpus: int = 0,
) -> None:
    """Teacher-force every transcript of some `responses` tables, equal ones once, and write a `tokens` table.

    Transcripts without usable tokens get no rows: failed and empty ones, tokens that lie in no window of the audio, and
    text that does not survive encoding and decoding or that is longer than one window.

    Args: as of `assay.judge.judge`; `model_dir` holds weights and tokenizer in transformers layout, `options` says the
    `dtype` and the `padding` of the judge.
    """
    weights_sha256 = verify_weights(model_dir)
    count = sum(store.read_table(path, "items", ["item_id"]).num_rows for path in items_paths)
    items, planned = tee(merge(*map(load_set, items_paths), key=itemgetter("item_id")))
    answers = store.rows_by_item(responses_paths, "responses", COLUMNS, BATCH)
    model = Whisper(model_dir, arm_settings(JUDGE, options), gpus)
    measured = {"settings": asdict(model.settings), "weights_sha256": weights_sha256}
    inputs = [model_dir / MANIFEST, *items_paths, *responses_paths]
    with (
        store.table_writer(output, "tokens", provenance("judge", inputs, measured)) as writer,
        progress("items judged", count) as advance,
    ):

        def judged() -> Iterator[list[dict[str, Any]]]:
            found = store.beside(map(itemgetter("item_id"), planned), answers, iter(()))
            for item, responses in zip(items, found, strict=True):
                yield _judge_item(model, Heard(model, clip_of(item)), responses)
                advance()

        write_by_item(writer, "tokens", judged())


def _judge_item(model: Whisper, heard: Heard, responses: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all answers to one item; what several answers share is forced once."""
    language = heard.clip.language or model.language(heard)
    known: dict[Said, tuple[list[int], Forced]] = {}
    rows = []
    for response in responses:
        for said in transcripts_of(response, model, heard):
            if said not in known:
                known[said] = _force(model, heard, language, said)
            tokens, forced = known[said]
            special = np.array(tokens) >= model.vocabulary.end
            key = {"item_id": response["item_id"], "set_id": response["set_id"], "arm": response["arm"]}
            # A server's logprobs are of whatever its decoder left to choose from: only the reference's compare.
            ours = said.path == "ids" and not response["arm"].startswith(SERVED)
            known_lp = {"lp_served": response["token_logprobs"]} if ours else {}
            rows += token_rows(key | {"path": said.path}, tokens, special, forced, **known_lp)
    return rows


def transcripts_of(row: dict[str, Any], model: Whisper, heard: Heard) -> list[Said]:
    """Token sequences that a response gives evidence of: as decoded, with timestamps, and as its text encodes.

    A reference arm's text is forced too, because a server of which only text is known is judged against a floor that
    went through the same lossy path.
    """
    if row["status"] != ResponseStatus.OK:
        return []
    found = []
    if row["token_ids"] and model.knows(row["token_ids"]):
        starts = [segment["start"] for segment in row["segments"] or ()]
        windows = model.windows(heard.clip, row["token_ids"], starts)
        if windows:
            found.append(Said("ids", tuple(windows)))
    served = row["arm"].startswith(SERVED)
    if (row["evidence"] == Evidence.E2 or not served) and row["text"].strip() and heard.clip.frames <= WINDOW_FRAMES:
        encoded = model.retokenise(row["text"])
        if encoded and len(encoded) < model.room:
            found.append(Said("text", (Window(0, tuple(encoded)),)))
    return found


def _force(model: Whisper, heard: Heard, language: str, said: Said) -> tuple[list[int], Forced]:
    """Tokens of all windows in a row, and what the judge says of them."""
    parts = [model.force(heard, language, window, timestamps=said.path == "ids") for window in said.windows]
    tokens = [token for ids, _ in parts for token in ids]
    columns = zip(*(forced[:-1] for _, forced in parts), strict=True)
    return tokens, Forced(*(np.concatenate(column) for column in columns))
