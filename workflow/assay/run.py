"""The files of one run, found from where its verdict lies, and the rows of theirs that a person is shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from assay import store
from assay.errors import StoreError
from assay.records import JUDGE
from assay.samples.lock import load_set

Row = dict[str, Any]

TOKEN_COLUMNS = [
    *("item_id", "arm", "path", "pos", "token_id", "lp_judge", "lp_judge_max", "judge_rank"),
    *("judge_top_ids", "judge_top_lp"),
]


@dataclass(frozen=True)
class Run:
    """The files of one run, found from where its verdict lies."""

    results: Path
    config: str

    @property
    def verdict(self) -> Path:
        return self.results / "verdicts" / f"{self.config}.json"

    @property
    def report(self) -> Path:
        return self.results / "reports" / f"{self.config}.html"

    def current_report(self) -> Path | None:
        """The page on this verdict; None where none was made, or only of a verdict before it."""
        made = self.report.exists() and self.report.stat().st_mtime >= self.verdict.stat().st_mtime
        return self.report if made else None

    @property
    def scores(self) -> Path:
        return self.results / "scores" / f"{self.config}.parquet"

    @property
    def floor(self) -> Path:
        return self.results / "floors" / f"{self.config}.parquet"

    @property
    def judged(self) -> Path:
        """What was judged of all served arms."""
        return self.results / "judged" / f"{self.config}.parquet"

    def outputs(self, arm: str) -> Path:
        """The responses of a served arm (`served_<instance>_<pass>`), among those of its instance."""
        return self.results / "outputs" / self.config / f"{arm.split('_')[1]}.parquet"

    def plan(self, arm: str) -> dict[str, Any]:
        """The serve plan, as the outputs of a served arm recorded it."""
        plan: dict[str, Any] = store.read_provenance(self.outputs(arm))["options"]
        return plan

    def reference(self, plan: Mapping[str, Any]) -> list[Path]:
        """What the judge itself answered, one file a set."""
        folder = self.results / "reference" / plan["reference"]["model"]
        return [folder / name / f"{JUDGE}.parquet" for name in plan["sets"]]

    def judged_reference(self, plan: Mapping[str, Any]) -> list[Path]:
        """What was judged of the judge's own answers and of the floor arms', one file a set."""
        folder = self.results / "judged/reference" / plan["reference"]["model"]
        return [folder / name / f"{plan['reference']['floor']}.parquet" for name in plan["sets"]]

    def items(self, plan: Mapping[str, Any]) -> Iterator[Row]:
        """The planned items, with `request` as an object."""
        for name in plan["sets"]:
            for row in load_set(self.results.parent / "samplesets" / f"{name}.parquet"):
                yield {**row, "request": json.loads(row["request"])}

    def tokenizer(self, plan: Mapping[str, Any]) -> Tokenizer:
        """The reference's tokenizer.

        Raises:
            StoreError: its weights were not fetched, or are gone.
        """
        path = self.results.parent / plan["reference"]["directory"] / "tokenizer.json"
        if not path.is_file():
            raise StoreError(f"{path} is not here; fetch the reference's weights to see text")
        return Tokenizer.from_file(str(path))


def run_of(path: str | Path) -> Run:
    """The run that a verdict file belongs to."""
    path = Path(path).resolve()
    return Run(path.parent.parent, path.stem)


def response_rows(paths: Iterable[Path], wanted: Mapping[str, str]) -> dict[str, Row]:
    """Item -> its response in the arm `wanted[item]`, of items that have one."""
    return {row["item_id"]: row for row in _rows(paths, "responses", wanted, None)}


def token_rows(paths: Iterable[Path], wanted: Mapping[str, str]) -> dict[str, list[Row]]:
    """Item -> its judged tokens in the arm `wanted[item]`, in order, of every path that was judged."""
    found: dict[str, list[Row]] = {}
    for row in _rows(paths, "tokens", wanted, TOKEN_COLUMNS):
        found.setdefault(row["item_id"], []).append(row)
    return found


def transcript_rows(paths: Iterable[Path], wanted: Mapping[str, str]) -> dict[str, Row]:
    """Item -> what was measured and heard of its audio in the arm `wanted[item]`."""
    return {row["item_id"]: row for row in _rows(paths, "transcripts", wanted, None)}


def _rows(paths: Iterable[Path], name: str, wanted: Mapping[str, str], columns: list[str] | None) -> Iterator[Row]:
    arms = pa.array(sorted(set(wanted.values())), pa.string())
    for path in dict.fromkeys(paths):
        for table in store.iter_tables(path, name, columns):
            kept = table.filter(pc.is_in(pc.cast(table["arm"], pa.string()), value_set=arms))
            yield from (row for row in kept.to_pylist() if wanted.get(row["item_id"]) == row["arm"])


def prompt_text(request: Mapping[str, Any]) -> str:
    """What a request asks: its prompt, or the last message."""
    return str(request.get("prompt") or request["messages"][-1]["content"])
