"""A small finished run on disk, made by the real stages from token ids and margins: what reports are tested on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sets import item, write_locked_set
from tokenizers import Tokenizer, models, pre_tokenizers

from assay import store
from assay.config import AsrGates, GateOptions, TextGates
from assay.media.audio import encode_wav
from assay.records import JUDGE
from assay.run import Run
from assay.score import score
from assay.scoring.rows import Files
from assay.verdicts.decide import RunFacts, judge_run
from assay.verdicts.model import Cleanup, ConfigInfo, Instance, Startup, Tool, Verdict
from assay.verdicts.scoretable import floor_values
from assay.verdicts.verify import read_scores

BOS, EOS = 0, 1
WORDS = ["<s>", "</s>", "red", "green", "blue", "cyan", "<b>bold</b>", "pink"]
IDEAL = [2, 3, 4, EOS]  # what the reference answers to everything
SERVED = "served_0_load"
RATE = 16_000  # of clips
FLOOR = {"float32-batch": 1e-6, "float32-attention": 2e-6}  # arm -> its logprob error [nat]
HOSTILE = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


@dataclass(frozen=True)
class Answer:
    """What is served for one item: token ids, and how far each trails the judge's choice [nat]."""

    ids: tuple[int, ...] = tuple(IDEAL)
    margins: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    error: str | None = None  # why there is no answer


RIGHT = Answer()
WRONG = Answer((2, 5, 6, EOS), (0.0, 3.0, 0.25, 0.0))
CLOSE = Answer((2, 5, 4, EOS), (0.0, 0.00005, 0.0, 0.0))  # below the resolution of float32, 0.0001 nat
LOST = Answer(error="HTTP 500")


def write_run(folder: Path, answers: dict[str, Answer], requests: dict[str, dict[str, Any]] | None = None) -> Run:
    """A run of one pass over items `answers`, whose prompt is the item's name unless `requests` has another."""
    rows = [_item(key, (requests or {}).get(key, {"prompt": key})) for key in answers]
    return _write(folder, rows, answers, "text", TextGates(permutations=1999))


def write_transcripts(folder: Path, answers: dict[str, Answer], clips: dict[str, np.ndarray]) -> Run:
    """The same of transcriptions: in every clip (float32 [1, samples] of `RATE`) somebody says what `IDEAL` means."""
    rows = [_clip(key, clips[key]) for key in answers]
    return _write(folder, rows, answers, "asr", AsrGates(permutations=1999))


def _write(
    folder: Path, rows: list[dict[str, Any]], answers: dict[str, Answer], modality: str, options: GateOptions
) -> Run:
    run = Run(folder / "results", "toy")
    set_path = folder / "samplesets/set.parquet"
    set_path.parent.mkdir(parents=True)
    write_locked_set(set_path, rows)
    tokenizer = _tokenizer(folder / "resources/model/tokenizer.json")
    plan = {
        "config": run.config,
        "modality": modality,
        "instances": [[{"name": "load", "concurrency": 16}]],
        "client": {"logprobs": True},
        "sets": ["set"],
        "reference": {
            "floor": "float32-batch-attention",
            "arms": [JUDGE, *FLOOR],
            "model": "model",
            "directory": "resources/model",
        },
    }
    judged = _tokens_of(SERVED, answers)
    served = Files([_respond(run.outputs(SERVED), SERVED, answers, tokenizer, plan)], [_judge(run.judged, judged)])
    reference = {"eos_ids": [EOS], "bos_id": BOS, "end_id": len(WORDS)}
    ideal = dict.fromkeys(answers, RIGHT)
    arms = {JUDGE: 0.0, **FLOOR}
    folder_of = run.results / "reference/model/set"
    references = Files(
        [_respond(folder_of / f"{arm}.parquet", arm, ideal, tokenizer, reference) for arm in arms],
        [_judge(path, [row for arm, error in arms.items() for row in _tokens_of(arm, ideal, error)])
         for path in run.judged_reference(plan)],
    )  # fmt: skip
    score([set_path], served, references, folder / "resources/model", options.model_dump(mode="json"),
          run.scores, run.floor)  # fmt: skip
    write_verdict(run, _decide(run, sorted(answers), answers, modality, options))
    return run


def write_verdict(run: Run, verdict: Verdict) -> None:
    store.write_json(run.verdict, verdict.model_dump(mode="json"))


def _decide(run: Run, items: list[str], answers: dict[str, Answer], modality: str, options: GateOptions) -> Verdict:
    facts = RunFacts(
        config=ConfigInfo(name=run.config, family="toys", arm="toy-engine", modality=modality, model="Toy",
                          dtype="float32", tier="smoke"),
        dtype="float32",
        instances=(
            Instance(
                instance=0,
                arms=[SERVED],
                startup=Startup(ready=True, seconds=2.5),
                cleanup=Cleanup(stopped_by="SIGINT", clean=True, port_free=True),
                identity={"start": {"version": "1.2.3", "argv": ["toy-engine", HOSTILE]}, "end": None},
            ),
        ),
        floor_arms=tuple(FLOOR),
        controls=(),
        options=options,
        failures={(SERVED, key): answer.error for key, answer in answers.items() if answer.error},
    )  # fmt: skip
    values = floor_values(store.iter_tables(run.floor, "floor"))
    return judge_run(read_scores(run.scores, items), values, facts, Tool(version="0"), {"rule": "verdict"})


def _item(key: str, request: dict[str, Any]) -> dict[str, Any]:
    kind = "completion" if "prompt" in request else "chat"
    return item(key, {"max_tokens": 4, "temperature": 0, **request}, kind=kind)


def _clip(key: str, samples: np.ndarray) -> dict[str, Any]:
    row = item(key, {"file": f"{key}.wav", "language": "en", "temperature": 0}, expected="red green blue")
    audio = {"bytes": encode_wav(samples, RATE), "path": f"{key}.wav"}
    return {**row, "modality": "asr", "kind": "transcription", "tags": ["plain"], "audio": audio}


def _tokenizer(path: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    path.parent.mkdir(parents=True)
    tokenizer.save(str(path))
    return tokenizer


def _respond(path: Path, arm: str, answers: dict[str, Answer], tokenizer: Tokenizer, options: dict[str, Any]) -> Path:
    rows = [_response(key, arm, answer, tokenizer) for key, answer in answers.items()]
    store.write_table(path, "responses", store.table_from_rows("responses", rows), {"options": options})
    return path


def _judge(path: Path, rows: list[dict[str, Any]]) -> Path:
    store.write_table(path, "tokens", store.table_from_rows("tokens", rows), {"options": {}})
    return path


def _tokens_of(arm: str, answers: dict[str, Answer], error: float = 0.0) -> list[dict[str, Any]]:
    return [row for key, answer in answers.items() if not answer.error for row in _tokens(key, arm, answer, error)]


def _response(key: str, arm: str, answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    base = {"item_id": key, "set_id": "set", "arm": arm, "attempts": 1}
    if answer.error:
        return {**base, "status": "http_error", "evidence": "none", "error": answer.error}
    ids = list(answer.ids)
    return {
        **base,
        "status": "ok",
        "finish_reason": "stop",
        "evidence": "E0",
        "prompt_tokens": 3,
        "output_tokens": len(ids),
        "text": tokenizer.decode(ids),
        "prompt_token_ids": [BOS, 2, 3],
        "token_ids": ids,
        "segments": [{"start": 0.0, "end": 0.9, "text": tokenizer.decode(ids)}],  # of a transcript
    }


def _tokens(key: str, arm: str, answer: Answer, error: float) -> list[dict[str, Any]]:
    """Judged tokens: the judge's choice has the logprob -0.1, the served token trails by its margin."""
    rows = []
    for pos, (token, margin) in enumerate(zip(answer.ids, answer.margins, strict=True)):
        best = IDEAL[pos] if margin else token
        others = [other for other in range(2, len(WORDS)) if other not in (best, token)]
        top = [best, *([token] if margin else []), *others]
        logprobs = [-0.1, *([-0.1 - margin] if margin else []), *(-5.0 - k for k in range(len(others)))]
        rows.append(
            {
                "item_id": key,
                "set_id": "set",
                "arm": arm,
                "path": "ids",
                "pos": pos,
                "token_id": token,
                "is_special": token == EOS,
                "lp_served": np.float32(-0.1 - margin + error),
                "lp_judge": np.float32(-0.1 - margin),
                "lp_judge_max": np.float32(-0.1),
                "judge_rank": 2 if margin else 1,
                "entropy": 0.5,
                "variance": 0.25,
                "lp_asked": np.float32(-0.1 - margin),
                "in_support": True,
                "judge_top_ids": top[:5],
                "judge_top_lp": logprobs[:5],
                "served_top_lp": [-0.1 + error, -2.1],
                "served_top_lp_judge": [-0.1, -2.1],
            }
        )
    return rows
