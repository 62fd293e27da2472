"""A run of a speech model on real audio, from responses in files to a verdict."""

import numpy as np
from sets import item, write_locked_set
from spoken import RATE, response, speech
from synthetic import TOOL
from talk import DETERMINISTIC, WORDS

from assay import store
from assay.judging.tts import Heard, Listener, judge_rows
from assay.media.audio import encode_wav
from assay.metrics.audio import spectrogram
from assay.records import JUDGE
from assay.score import score
from assay.scoring.rows import Files
from assay.verdicts.decide import RunFacts, judge_run
from assay.verdicts.model import Cleanup, ConfigInfo, Instance, Startup
from assay.verdicts.scoretable import ScoreTable
from assay.verdicts.tts.planted import CHUNK_S, CONTROLS, Word

FLOORS = ["float32-graph", "float32-threads"]
ALONE, LOAD, OTHER = "served_0_alone", "served_0_load", "served_1_load"
PLAN = {
    "config": "toy",
    "modality": "tts",
    "instances": [
        [{"name": "alone", "concurrency": 1}, {"name": "load", "concurrency": 16, "stream": True}],
        [{"name": "load", "concurrency": 16, "stream": True}],
    ],
    "client": {"stream": False, "sample_rate": None},
    "sets": ["toy"],
    "reference": {"model": "m", "floor": "float32-graph-threads", "arms": [JUDGE, *FLOORS]},
}
OPTIONS = DETERMINISTIC.model_dump(mode="json")


def spectrum(samples, rate):
    """Stands for the network that tells speakers apart: as pitch and formants move, so does it."""
    return spectrogram(samples, rate).power.mean(axis=0)


class Knowing:
    """Knows every clip by its samples: a word is heard where they are as they were."""

    def __init__(self, clips):
        self.clips = clips  # (samples, words) of each

    def __call__(self, samples, rate, timed):
        heard = max((self._heard(samples, *clip) for clip in self.clips), key=len)
        return Heard(" ".join(word.text for word in heard), tuple(heard), 0.01)

    @staticmethod
    def _heard(samples, clean, words):
        def same(word):
            span = slice(round(word.start_s * RATE), round(word.end_s * RATE))
            return np.array_equal(samples[:, span], clean[:, span])

        return [word for word in words if same(word)]


def spoken_words(text, samples):
    times = np.linspace(0.25, samples.shape[-1] / RATE - 0.3, len(text.split()) + 1)
    return tuple(Word(word, start, end) for word, start, end in zip(text.split(), times, times[1:], strict=False))


class SpeechRun:
    """Twenty texts, of which one is long, said by a voice, the same in every arm until it is changed."""

    def __init__(self, folder):
        self.folder, rng = folder, np.random.default_rng(0)
        alpha, bravo, word = (speech(name) for name in ("alpha", "bravo", "word"))
        long = np.concatenate([alpha, bravo, alpha[:, ::-1], bravo], axis=1)
        clips = [long, word, *(clip * (0.6 + 0.04 * number) for number in range(9) for clip in (alpha, bravo))]
        # What comes out of a file: 16 bits.
        self.clips = {f"item-{number:02d}": np.rint(clip * 32768) / 32768 for number, clip in enumerate(clips)}
        counts = [30, 1, *[8] * 18]
        self.texts = {key: " ".join(rng.choice(WORDS.split(), n)) for key, n in zip(self.clips, counts, strict=True)}
        self.listener = Knowing([(clip, spoken_words(self.texts[key], clip)) for key, clip in self.clips.items()])
        self.arms = {
            arm: {key: self._response(key, arm) for key in self.clips} for arm in (JUDGE, *FLOORS, ALONE, LOAD, OTHER)
        }

    def _response(self, key, arm):
        row = response(key, arm, self.clips[key]) | {"evidence": "E3", "attempts": 1, "set_id": "toy"}
        return row | ({"chunk_bytes": chunks(len(row["audio"]["bytes"]))} if arm in (LOAD, OTHER) else {})

    def serve(self, key, samples, arms=(ALONE, LOAD, OTHER)):
        content = encode_wav(samples, RATE)
        for arm in arms:
            row = self.arms[arm][key]
            row |= {"audio": {"bytes": content, "path": "speech.wav"}}
            row["chunk_bytes"] = chunks(len(content)) if row["chunk_bytes"] else None

    def stage(self, judged, responses):
        """The transcripts of some arms in one file, and their responses in a file for each group (path -> arms)."""
        for path, arms in responses.items():
            rows = [row for arm in arms for row in self.arms[arm].values()]
            store.write_table(path, "responses", store.table_from_rows("responses", rows), {"options": PLAN})
        rows = sorted(
            (row for arms in responses.values() for arm in arms for row in self.arms[arm].values()),
            key=lambda row: row["item_id"],
        )
        transcripts = list(judge_rows(iter(rows), Listener(self.listener, embed=spectrum)))
        store.write_table(judged, "transcripts", store.table_from_rows("transcripts", transcripts), {})
        return Files([*responses], [judged])

    def score(self):
        path = self.folder / "samplesets/toy.parquet"
        write_locked_set(
            path,
            [
                item(key, {"input": text}, "toy", text, "speech") | {"modality": "tts"}
                for key, text in self.texts.items()
            ],
        )
        results = self.folder / "results"
        outputs = results / "outputs/toy"
        served = self.stage(
            results / "judged/toy.parquet", {outputs / "0.parquet": (ALONE, LOAD), outputs / "1.parquet": (OTHER,)}
        )
        references = self.stage(
            results / "judged/reference/m/toy/float32-graph-threads.parquet",
            {results / f"reference/m/toy/{arm}.parquet": (arm,) for arm in (JUDGE, *FLOORS)},
        )
        scores = results / "scores/toy.parquet"
        score([path], served, references, self.folder, OPTIONS, scores, results / "floors/toy.parquet")
        return scores

    def verdict(self):
        table = ScoreTable.from_tables(store.iter_tables(self.score(), "scores"), self.texts)
        arms = [[ALONE, LOAD], [OTHER]]
        facts = RunFacts(
            config=ConfigInfo(name="toy", family="toy", modality="tts"),
            dtype="float32",
            instances=tuple(
                Instance(
                    instance=number,
                    arms=arms[number],
                    startup=Startup(ready=True),
                    cleanup=Cleanup(stopped_by="SIGINT", clean=True, port_free=True),
                )
                for number in range(2)
            ),
            floor_arms=tuple(FLOORS),
            controls=tuple((control.name, gate) for control in CONTROLS for gate in control.gates),
            options=DETERMINISTIC,
        )
        return judge_run(table, {}, facts, TOOL)

    def publish(self):
        """The verdict in its file, beside all that it rests on."""
        path = self.folder / "results/verdicts/toy.json"
        store.write_json(path, self.verdict().model_dump(mode="json"))
        return path


def chunks(size):
    length = round(2 * CHUNK_S * RATE)
    return [44, *[length] * ((size - 44) // length), (size - 44) % length]
