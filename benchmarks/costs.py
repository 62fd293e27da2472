"""What a run cost: seconds and peak memory by stage, the share outside engine and model, and scoring throughput.

    python benchmarks/costs.py stages [--config NAME]
    python benchmarks/costs.py scoring [--items 100 --items 10000 --items 100000]

`stages` reads Snakemake's benchmark files of the last run in this directory. `scoring` builds synthetic judged tables
and scores them, each size in a process of its own, so that peak memory is that size's alone.
"""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from assay import store
from assay.canonical import canonical_json, sha256_json, sha256_lines
from assay.config import TextGates
from assay.records import SCHEMAS
from assay.samples.lock import Lock, lock_path
from assay.score import score as score_config
from assay.scoring.rows import Files

app = typer.Typer(add_completion=False, help=__doc__)
console = Console()
MODEL_STAGES = {"reference", "judge", "judge_reference"}
TOKENS_PER_ITEM = 48
ARMS = ["judge", "float32-batch", "float32-attention"]


@app.command()
def stages(config: Annotated[str, typer.Option()] = "smollm2_135m", folder: Path = Path("benchmarks")) -> None:
    """Seconds and peak memory of every stage of one config."""
    table = Table("stage", "jobs", "seconds", "peak MB", "of it engine or model, s")
    total = outside = 0.0
    for stage in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = [path for path in stage.rglob("*.tsv") if _belongs(path.relative_to(stage), config)]
        rows = [next(csv.DictReader(path.open(), delimiter="\t")) for path in files]
        if not rows:
            continue
        seconds = sum(float(row["s"]) for row in rows)
        memory = [float(row["max_rss"]) for row in rows if row["max_rss"] not in ("-", "NA")]
        inside = seconds if stage.name in MODEL_STAGES else _engine_seconds(config) if stage.name == "generate" else 0.0
        total, outside = total + seconds, outside + seconds - inside
        peak = f"{max(memory):.0f}" if memory else "unknown"
        table.add_row(stage.name, str(len(rows)), f"{seconds:.1f}", peak, f"{inside:.1f}")
    table.add_row("sum", "", f"{total:.1f}", "", f"{total - outside:.1f}")
    console.print(table)
    if total:
        console.print(f"outside engine and model: {outside:.1f} s of {total:.1f} s ({outside / total:.1%})")


def _belongs(path: Path, config: str) -> bool:
    """Whether a benchmark file is of this config, or of something that all configs share."""
    other = path.parts[0].removesuffix(".tsv")
    return other == config or not Path("results/verdicts", f"{other}.json").exists()


def _engine_seconds(config: str) -> float:
    """Seconds of every instance from its start to its last answer."""
    seconds = 0.0
    for identity in Path("results/outputs", config).glob("*.identity.json"):
        rows = store.read_rows(
            identity.with_name(identity.name.replace(".identity.json", ".parquet")),
            "responses",
            ["t_start_utc", "latency_ms"],
        )
        sent = [row for row in rows if row["latency_ms"] is not None]
        first = min(row["t_start_utc"] for row in sent)
        last = max(row["t_start_utc"].timestamp() + row["latency_ms"] / 1000 for row in sent)
        seconds += json.loads(identity.read_text())["startup"]["seconds"] + last - first.timestamp()
    return seconds


@app.command()
def scoring(items: Annotated[list[int], typer.Option()] = [100, 10_000, 100_000]) -> None:  # noqa: B006
    """Items and tokens scored per second, and peak memory, at several sizes."""
    table = Table("items", "arms", "seconds", "items/s", "tokens/s", "peak MB")
    for count in items:
        done = subprocess.run(
            [sys.executable, __file__, "one", str(count)], stdout=subprocess.PIPE, text=True, check=True
        )
        seconds, peak = json.loads(done.stdout)
        arms = len(ARMS) + 1
        table.add_row(
            f"{count}",
            f"{arms} + controls",
            f"{seconds:.1f}",
            f"{count * arms / seconds:.0f}",
            f"{count * arms * TOKENS_PER_ITEM / seconds:.0f}",
            f"{peak:.0f}",
        )
    console.print(table)


@app.command(hidden=True)
def one(count: int) -> None:
    """Score one synthetic config of `count` items; print seconds and peak MB of the scoring alone."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = _synthetic(Path(folder), count)
        started = time.perf_counter()
        score_config(*arguments, TextGates().model_dump(mode="json"), Path(folder) / "s", Path(folder) / "f")
        seconds = time.perf_counter() - started
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def _synthetic(folder: Path, count: int) -> tuple:
    """Sample set, served arm and reference arms of `count` items, with full evidence."""
    names = [f"item{number:07d}" for number in range(count)]
    request = {"prompt": "x", "max_tokens": TOKENS_PER_ITEM, "temperature": 0}
    rows = [
        {
            "item_id": name,
            "set_id": "set",
            "modality": "text",
            "kind": "completion",
            "tags": [],
            "expected": None,
            "request": canonical_json(request),
            "prompt_tokens_ref": 1,
            "prompt_sha256": "",
            "source": "synthetic",
        }
        for name in names
    ]
    items = folder / "set.parquet"
    store.write_table(items, "items", store.table_from_rows("items", rows), {})
    digests = {row["item_id"]: sha256_json(row) for row in rows}
    lock = Lock("set", "", {}, {}, digests, sha256_lines(digests.values()))
    store.write_json(lock_path("set", folder), asdict(lock))
    plan = {
        "config": "synthetic",
        "modality": "text",
        "instances": [[{"name": "alone", "concurrency": 1}]],
        "client": {"logprobs": True},
        "reference": {"arms": ARMS},
    }
    served = _files(folder / "served", ["served_0_alone"], names, plan)
    references = _files(folder / "reference", ARMS, names, {"eos_ids": [2], "bos_id": 1})
    tokenizer = Tokenizer(WordLevel({"x": 0, "y": 1, "</s>": 2, "z": 3}, unk_token="x"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return [items], served, references, folder


def _files(folder: Path, arms: list[str], names: list[str], options: dict) -> Files:
    """Responses of each arm, and the judged tokens of all of them."""
    tokens = folder / "judged.parquet"
    generators = {arm: np.random.default_rng(len(arm)) for arm in arms}
    with store.table_writer(tokens, "tokens", {"options": options}) as writer:
        for start in range(0, len(names), 64):
            group = names[start : start + 64]
            parts = [_tokens(group, arm, rng) for arm, rng in generators.items()]
            writer.write(store.sort_table("tokens", pa.concat_tables(parts).unify_dictionaries()))
    return Files([_responses(folder / f"{arm}.parquet", arm, names, options) for arm in arms], [tokens])


def _responses(path: Path, arm: str, names: list[str], options: dict) -> Path:
    ids = [3] * (TOKENS_PER_ITEM - 1) + [2]
    common = {"set_id": "set", "arm": arm, "status": "ok", "evidence": "E0", "attempts": 1, "finish_reason": "stop"}
    lengths = {
        "prompt_tokens": 1,
        "output_tokens": TOKENS_PER_ITEM,
        "prompt_token_ids": [1],
        "token_ids": ids,
        "text": "x",
    }
    table = store.table_from_rows("responses", [{"item_id": name, **common, **lengths} for name in names])
    store.write_table(path, "responses", table, {"options": options})
    return path


def _tokens(names: list[str], arm: str, rng: np.random.Generator) -> pa.Table:
    n = len(names) * TOKENS_PER_ITEM
    best = -rng.random(n).astype(np.float32)
    margin = np.where(rng.random(n) < 0.01, rng.random(n) * 0.1, 0).astype(np.float32)
    top = np.sort(-rng.random((n, 20)).astype(np.float32) * 5 - 1, axis=1)[:, ::-1]

    def nested(values: np.ndarray) -> pa.Array:
        offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
        return pa.ListArray.from_arrays(offsets, pa.array(values.ravel()))

    columns = {
        "item_id": np.repeat(names, TOKENS_PER_ITEM),
        "set_id": pa.repeat("set", n).dictionary_encode(),
        "arm": pa.repeat(arm, n).dictionary_encode(),
        "path": pa.repeat("ids", n).dictionary_encode(),
        "pos": np.tile(np.arange(TOKENS_PER_ITEM, dtype=np.int32), len(names)),
        "token_id": np.full(n, 3, np.int32),
        "is_special": np.zeros(n, bool),
        "lp_served": best - margin + rng.normal(0, 1e-5, n).astype(np.float32),
        "lp_judge": best - margin,
        "lp_judge_max": best,
        "judge_rank": np.ones(n, np.int32),
        "entropy": np.ones(n, np.float32),
        "variance": np.ones(n, np.float32),
        "lp_asked": best - margin,
        "in_support": np.ones(n, bool),
        "judge_top_ids": nested(np.tile(np.arange(20, dtype=np.int32), (n, 1))),
        "judge_top_lp": nested(top),
        "served_top_lp": nested(top),
        "served_top_lp_judge": nested(top),
    }
    return pa.table([pa.array(columns[field.name]) for field in SCHEMAS["tokens"]], schema=SCHEMAS["tokens"])


if __name__ == "__main__":
    app()
