"""A config that transcribes, with invented transcripts: a judge, two floor arms, and three served passes to spoil."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sets import item, write_locked_set
from tokenizers import Tokenizer, models, pre_tokenizers

from assay import store
from assay.config import AsrGates
from assay.media.audio import encode_wav
from assay.score import score
from assay.scoring.rows import Files
from assay.verdicts.asr.suite import ASR
from assay.verdicts.decide import RunFacts, judge_run
from assay.verdicts.model import Cleanup, ConfigInfo, Gate, Instance, Startup, Tool, Verdict
from assay.verdicts.scoretable import ScoreTable, floor_values

WORDS = [
    f"{first}{second}" for first in ("ba", "ke", "li", "mo", "nu") for second in ("dan", "fel", "gor", "hin", "jup")
]
END, STAMP = len(WORDS), len(WORDS) + 1
SPOKEN, SILENT, LENGTH, RATE = 24, 3, 12, 1_000
FLOORS = ["float32-batch", "float32-attention"]
SERVED = {0: ["served_0_alone", "served_0_load"], 1: ["served_1_load"]}
SERVED_ARMS = [arm for arms in SERVED.values() for arm in arms]
OPTIONS = AsrGates(permutations=4999)
PLAN = {
    "config": "toy",
    "modality": "asr",
    "instances": [[{"name": "alone"}, {"name": "load"}], [{"name": "load"}]],
    "client": {"logprobs": False},
    "reference": {"arms": ["judge", *FLOORS]},
}
Row = dict[str, Any]
Spoil = Callable[[Row, int], Row]  # (response, number of its item) -> response


def said(number: int) -> list[int]:
    """The words of item `number`, unlike those of any other."""
    return np.random.default_rng(number).permutation(len(WORDS))[:LENGTH].tolist()


def text_of(ids: list[int]) -> str:
    return " ".join(WORDS[token] for token in ids)


def spoken(number: int) -> bool:
    return number < SPOKEN


class Toy:
    """The files of one run; `serve` makes them, `gates` and `verdict` read them."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.keys = [f"item-{number:02d}" for number in range(SPOKEN + SILENT)]
        self.margins = {arm: np.zeros((SPOKEN, LENGTH + 2)) for arm in (*FLOORS, *SERVED[0], *SERVED[1])}
        for place, arm in enumerate(FLOORS):  # a near tie each, so that the floor is one
            self.margins[arm][place, 3] = 0.01
        self.text_margin = 0.25  # of the fifth word of every text that is forced without its timestamps
        tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token=WORDS[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(path / "tokenizer.json"))
        wav = encode_wav(np.zeros(10 * RATE, np.float32), RATE)
        request = {"file": "a.wav", "language": "en", "temperature": 0}
        rows = [
            item(key, request, expected=text_of(said(number)) if spoken(number) else "", kind="transcription")
            | {"modality": "asr", "audio": {"bytes": wav, "path": "a.wav"}}
            for number, key in enumerate(self.keys)
        ]
        write_locked_set(path / "set.parquet", rows)

    def response(self, number: int, arm: str) -> Row:
        ids = said(number) if spoken(number) else []
        return {
            "item_id": self.keys[number],
            "set_id": "set",
            "arm": arm,
            "status": "ok",
            "evidence": "E1" if ids else "E2",
            "attempts": 1,
            "text": text_of(ids),
            "token_ids": [STAMP, *ids, STAMP + 1] if ids else None,
            "language": "en",
            "segments": [{"start": 0.0, "end": 9.0, "text": text_of(ids)}] if ids else [],
        }

    def judged(self, row: Row, clean: Row, margins: np.ndarray) -> list[Row]:
        """What the judge writes of a response to spoken words, as `judging.asr.transcripts_of` says."""
        found = []
        if row["status"] == "ok" and row["token_ids"] == clean["token_ids"]:
            found += self.tokens(row, "ids", row["token_ids"], margins)
        by_text = row["evidence"] == "E2" or row["arm"] not in SERVED_ARMS
        if row["status"] == "ok" and by_text and row["text"] == clean["text"]:
            bare = np.where(np.arange(LENGTH + 1) == 4, self.text_margin, margins[1:])
            found += self.tokens(row, "text", [*clean["token_ids"][1:-1], END], bare)
        return found

    def tokens(self, row: Row, path: str, token_ids: list[int], margins: np.ndarray) -> list[Row]:
        return [
            {
                **{key: row[key] for key in ("item_id", "set_id", "arm")},
                "path": path,
                "pos": pos,
                "token_id": token,
                "is_special": token >= END,
                "lp_judge": np.float32(-0.1 - margin),
                "lp_judge_max": np.float32(-0.1),
                "judge_rank": 1,
                "entropy": 0.5,
                "variance": 0.25,
                "lp_asked": -0.1,
                "in_support": True,
                "judge_top_ids": [token, 0],
                "judge_top_lp": [-0.1, -2.1],
            }
            for pos, (token, margin) in enumerate(zip(token_ids, margins, strict=True))
        ]

    def write(self, name: str, files: dict[str, list[str]], options: Any, spoil: Spoil) -> Files:
        """Responses in a file each, and the judged tokens of all of them in one called `name`."""
        responses, judged = [], []
        for file, arms in files.items():
            rows, tokens = self.rows(arms, spoil)
            judged += tokens
            responses.append(self.path / "responses" / f"{file}.parquet")
            store.write_table(
                responses[-1], "responses", store.table_from_rows("responses", rows), {"options": options}
            )
        path = self.path / "judged" / f"{name}.parquet"
        store.write_table(path, "tokens", store.table_from_rows("tokens", judged), {"options": options})
        return Files(responses, [path])

    def rows(self, arms: list[str], spoil: Spoil) -> tuple[list[Row], list[Row]]:
        rows, judged = [], []
        for arm in arms:
            for number in range(len(self.keys)):
                clean = self.response(number, arm)
                row = spoil(clean, number)
                rows.append(row)
                if spoken(number):
                    judged += self.judged(row, clean, self.margins.get(arm, np.zeros((SPOKEN, LENGTH + 2)))[number])
        return rows, judged

    def scores(self, spoil: Spoil = lambda row, _: row, reference: Spoil = lambda row, _: row) -> ScoreTable:
        """Scores of a run whose served passes all answer with `spoil`, and whose reference does with `reference`."""
        served = self.write("served", {str(number): arms for number, arms in SERVED.items()}, PLAN, spoil)
        options = {"end_id": END}
        references = self.write("reference", {arm: [arm] for arm in ("judge", *FLOORS)}, options, reference)
        paths = self.path / "scores.parquet", self.path / "floor.parquet"
        score([self.path / "set.parquet"], served, references, self.path, OPTIONS.model_dump(mode="json"), *paths)
        return ScoreTable.from_tables(store.iter_tables(paths[0], "scores"), self.keys)

    def floor(self) -> Any:
        return floor_values(store.iter_tables(self.path / "floor.parquet", "floor"))

    def gates(self, *spoil: Spoil) -> dict[str, Gate]:
        """Gates of the first pass."""
        table = self.scores(*spoil)
        floor = ASR.cut_floor(table, self.floor(), FLOORS, "float32", OPTIONS)
        found = ASR.evaluate(table, floor, SERVED, "float32", OPTIONS)
        return {gate.id: gate for gate in found if gate.arm == "served_0_alone"}

    def verdict(self, *spoil: Spoil) -> Verdict:
        """The whole verdict, controls included."""
        table = self.scores(*spoil)
        instances = [
            Instance(
                instance=number,
                arms=arms,
                startup=Startup(ready=True, seconds=1.0),
                cleanup=Cleanup(stopped_by="SIGINT", clean=True, port_free=True),
            )
            for number, arms in SERVED.items()
        ]
        facts = RunFacts(
            config=ConfigInfo(name="toy", dtype="float32", tier="smoke", modality="asr"),
            dtype="float32",
            instances=tuple(instances),
            floor_arms=tuple(FLOORS),
            controls=tuple((control.name, gate) for control in ASR.controls for gate in control.gates),
            options=OPTIONS,
        )
        return judge_run(table, self.floor(), facts, Tool(version="0"))
