"""Hours of speech judged per minute, stage by stage, and the peak memory of each: does it grow with the set?

    python benchmarks/speech.py cost [--hours 0.1 --hours 1 --hours 10] \
        [--whisper resources/whisper_base --speaker resources/resemblyzer --heard 5]

Real speech, repeated at slightly other levels until a set is as long as asked for, is what a server and three reference
arms answered. Each stage reads what the one before it wrote, in a process of its own, so that peak memory is its own.
`measure` is stage `judge` without its two networks, which are timed on `--heard` minutes: their cost is that of the
minutes. The faults that are planted in each run are part of it: twelve more answers to each item.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import cycle, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from assay import store
from assay.canonical import canonical_json, sha256_lines
from assay.config import TtsGates
from assay.judging.rows import BATCH, write_by_item
from assay.judging.tts import COLUMNS, Heard, Listener, judge_rows
from assay.media.audio import Container, decode, encode_wav
from assay.metrics.audio import Samples
from assay.records import JUDGE
from assay.references.arms import arm_settings
from assay.references.speaker import SpeakerEncoder
from assay.references.whisper import Whisper, listenable
from assay.samples.lock import Lock, item_sha256, lock_path
from assay.score import score
from assay.scoring.rows import Files
from assay.verdicts.decide import RunFacts, judge_run
from assay.verdicts.model import Cleanup, ConfigInfo, Instance, Startup, Tool
from assay.verdicts.scoretable import ScoreTable
from assay.verdicts.tts.planted import CHUNK_S, CONTROLS, Word

app = typer.Typer(add_completion=False, help=__doc__)
console = Console()
CLIPS = Path(__file__).parents[1] / "tests/data/speech"
TEXTS = {
    "alpha": "The meeting starts at nine, so please bring the keys.",
    "bravo": "Seven ships left the harbour before the storm came in.",
}
FLOORS = ["float32-threads2", "float32-threads3"]
SERVED = "served_0_alone"
ARMS = [JUDGE, *FLOORS, SERVED]
OPTIONS = TtsGates(deterministic=True)
PLAN = {
    "config": "synthetic",
    "modality": "tts",
    "instances": [[{"name": "alone", "concurrency": 1, "stream": True}]],
    "client": {"stream": False, "sample_rate": None},
    "sets": ["set"],
    "reference": {"arms": [JUDGE, *FLOORS]},
}


@app.command()
def cost(
    hours: Annotated[list[float], typer.Option(help="of speech in the set; every arm answers it")] = [0.1, 1.0, 10.0],  # noqa: B006
    whisper: Annotated[Path | None, typer.Option(help="folder of Whisper's weights")] = None,
    speaker: Annotated[Path | None, typer.Option(help="folder of the speaker encoder's weights")] = None,
    heard: Annotated[float, typer.Option(help="minutes that either network hears")] = 5.0,
    scratch: Annotated[Path | None, typer.Option(help="where the audio lies meanwhile")] = None,
) -> None:
    """Time every stage at every size; each size is told as soon as it is done."""
    networks = {"transcribe": whisper, "embed": speaker}
    heard_by = [(name, ["hear", name, str(path), str(heard)]) for name, path in networks.items() if path]
    if heard_by:
        _tell(f"{heard:g} minutes heard", heard / 60, heard_by)
    for size in hours:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            stages = [(name, ["stage", name, folder, str(size)]) for name in STAGES]
            _tell(f"A set of {size:g} hours", size * len(ARMS), stages)


def _tell(title: str, audio_h: float, commands: list[tuple[str, list[str]]]) -> None:
    table = Table("stage", "hours of audio", "seconds", "hours of audio a minute", "peak MB", title=title)
    for name, command in commands:
        seconds, peak = _in_a_process(*command)
        table.add_row(
            name, f"{audio_h:.2g}", f"{float(f'{seconds:.3g}'):g}", f"{60 * audio_h / seconds:.3g}", f"{peak:.0f}"
        )
    console.print(table)


def _in_a_process(*arguments: str) -> tuple[float, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


@app.command(hidden=True)
def stage(name: str, folder: Path, hours: float) -> None:
    """Run one stage; print seconds and peak MB."""
    started = time.perf_counter()
    STAGES[name](folder, hours)
    _print_cost(started)


@app.command(hidden=True)
def hear(network: str, model: Path, minutes: float) -> None:
    """Have a network hear so many minutes, without the loading; print seconds and peak MB."""
    listen = _transcriber(model) if network == "transcribe" else SpeakerEncoder(model).embed
    started = time.perf_counter()
    for _, samples, rate in speech(minutes / 60):
        listen(samples, rate)
    _print_cost(started)


def _transcriber(model: Path) -> Callable[[Samples, int], Any]:
    whisper = Whisper(model, arm_settings(JUDGE, {"dtype": "float32"}))
    return lambda samples, rate: whisper.transcribe(listenable(samples, rate), "en")


def _print_cost(started: float) -> None:
    seconds = time.perf_counter() - started
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


# --- a run ---------------------------------------------------------------------------------------------------------


def speech(hours: float) -> Iterator[tuple[str, Samples, int]]:
    """Text, samples [channels, samples] and rate [Hz] of clips of so many hours together, no two the same."""
    clips = [(text, decode((CLIPS / f"{name}.flac").read_bytes(), Container.FLAC)) for name, text in TEXTS.items()]
    left = hours * 3600
    for number, (text, audio) in enumerate(cycle(clips)):
        if left <= 0:
            return
        left -= audio.duration_s
        yield text, audio.samples * np.float32(1 - 0.2 * (number % 9973) / 9973), audio.rate


def _make(folder: Path, hours: float) -> None:
    """The set, and what each arm answered to it."""
    items = []
    numbered = enumerate(speech(hours))
    with (
        store.table_writer(_served(folder), "responses", {"options": PLAN}) as served,
        store.table_writer(_reference(folder), "responses", {"options": PLAN}) as reference,
    ):
        while group := list(islice(numbered, BATCH)):
            answers = [_answer(f"item{number:07d}", samples, rate) for number, (_, samples, rate) in group]
            items += [_item(f"item{number:07d}", text) for number, (text, _, _) in group]
            streamed = [answer | {"arm": SERVED} for answer in answers]
            served.write(store.table_from_rows("responses", streamed))
            whole = [
                answer | {"arm": arm, "chunk_bytes": None} for answer in answers for arm in sorted([JUDGE, *FLOORS])
            ]
            reference.write(store.table_from_rows("responses", whole))
    path = folder / "set.parquet"
    store.write_table(path, "items", store.table_from_rows("items", items), {})
    digests = {row["item_id"]: item_sha256(row) for row in store.read_rows(path, "items")}
    lock = Lock("set", "", {}, {}, digests, sha256_lines(digests.values()))
    store.write_json(lock_path("set", folder), asdict(lock))


def _answer(name: str, samples: Samples, rate: int) -> dict[str, Any]:
    content = encode_wav(samples, rate)
    length = round(2 * CHUNK_S * rate)
    chunks = [44, *[length] * ((len(content) - 44) // length), (len(content) - 44) % length]
    audio = {"bytes": content, "path": "speech.wav"}
    key = {"item_id": name, "set_id": "set", "status": "ok", "evidence": "E3", "attempts": 1}
    return key | {"audio": audio, "chunk_bytes": chunks}


def _item(name: str, text: str) -> dict[str, Any]:
    return {
        "item_id": name,
        "set_id": "set",
        "modality": "tts",
        "kind": "speech",
        "tags": [],
        "expected": text,
        "request": canonical_json({"input": text}),
        "prompt_sha256": "",
        "source": "synthetic",
    }


def _measure(folder: Path, hours: float) -> None:
    """Stage `judge` by a recogniser that knows what is said by how long it is."""
    known = {samples.shape[-1]: (text, samples.shape[-1] / rate) for text, samples, rate in speech(0.01)}

    def knowing(samples: Samples, rate: int, timed: bool) -> Heard:
        text, seconds = known.get(samples.shape[-1], ("", 0.0))
        words = text.split()
        times = np.linspace(0, seconds, len(words) + 1)
        spans = zip(words, times, times[1:], strict=False)
        return Heard(text, tuple(Word(*span) for span in spans) if timed else None, 0.01)

    for responses, transcripts in ((_served(folder), "served"), (_reference(folder), "reference")):
        with store.table_writer(folder / f"{transcripts}.transcripts.parquet", "transcripts", {}) as writer:
            rows = store.merge_rows([responses], "responses", COLUMNS, BATCH)
            judged = groupby(judge_rows(rows, Listener(knowing)), itemgetter("item_id"))
            write_by_item(writer, "transcripts", (group for _, group in judged))


def _score(folder: Path, hours: float) -> None:
    served = Files([_served(folder)], [folder / "served.transcripts.parquet"])
    references = Files([_reference(folder)], [folder / "reference.transcripts.parquet"])
    options = OPTIONS.model_dump(mode="json")
    score([folder / "set.parquet"], served, references, folder, options, _scores(folder), folder / "floor.parquet")


def _decide(folder: Path, hours: float) -> None:
    names = store.read_table(folder / "set.parquet", "items", ["item_id"])["item_id"].to_pylist()
    table = ScoreTable.from_tables(store.iter_tables(_scores(folder), "scores"), names)
    instance = Instance(
        instance=0,
        arms=[SERVED],
        startup=Startup(ready=True),
        cleanup=Cleanup(stopped_by="SIGINT", clean=True, port_free=True),
    )
    facts = RunFacts(
        config=ConfigInfo(name="synthetic", family="synthetic", modality="tts"),
        dtype="float32",
        instances=(instance,),
        floor_arms=tuple(FLOORS),
        controls=tuple((control.name, gate) for control in CONTROLS for gate in control.gates),
        options=OPTIONS,
    )
    judge_run(table, {}, facts, Tool(version="0"))


def _served(folder: Path) -> Path:
    return folder / "0.parquet"


def _reference(folder: Path) -> Path:
    return folder / "reference.parquet"


def _scores(folder: Path) -> Path:
    return folder / "scores.parquet"


STAGES = {"make": _make, "measure": _measure, "score": _score, "verdict": _decide}


if __name__ == "__main__":
    app()
