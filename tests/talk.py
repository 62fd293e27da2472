"""A run of a speech model that never happened: transcripts of every arm, to change and to score."""

import copy

import numpy as np

from assay.config import TtsGates
from assay.records import JUDGE
from assay.scoring.rows import score_table
from assay.scoring.tts import EQUAL, Normalisers, Run, Score, Twins, rows_of
from assay.verdicts.scoretable import ScoreTable
from assay.verdicts.tts.suite import TTS
from assay.verdicts.tts.trial import cut_floor

WORDS = """harbour lantern copper meadow engine violet thunder basket window silver candle pepper orchard marble falcon
blanket ticket winter summer garden hammer letter bottle saddle tunnel rocket planet monkey turtle donkey carpet mirror
cotton velvet ribbon butter cheese salmon walnut almond cherry banana potato tomato onion garlic ginger market castle
temple bridge river mountain valley desert island forest prairie"""
SERVED = {0: ["served_0_alone", "served_0_load", "served_0_stream"], 1: ["served_1_load"]}
ALL_SERVED = [arm for arms in SERVED.values() for arm in arms]
FLOORS = ["float32-repeat", "float32-threads"]
TWINS = {
    "served_0_load": Twins(alone="served_0_alone"),
    "served_0_stream": Twins(whole="served_0_alone"),
    "served_0_alone": Twins(),
    "served_1_load": Twins(),
}
DETERMINISTIC = TtsGates(deterministic=True, permutations=20_000)
SAMPLED = TtsGates(permutations=20_000)


def texts_of(n, rng):
    """Texts of 1, 2, ... words; from the sixth on one in four is longer than a window."""
    lengths = [1, 2, 5] + [rng.integers(30, 60) if number % 4 == 0 else rng.integers(5, 16) for number in range(n - 3)]
    return {f"item-{number:03d}": " ".join(rng.choice(WORDS.split(), length)) for number, length in enumerate(lengths)}


def voice(angle):
    """A speaker embedding, so far from the reference's [rad]: its cosine is the likeness."""
    return [np.cos(angle), np.sin(angle)]


def heard(text, rate=24_000, **changes):
    """A row of a `transcripts` table: an audio in which `text` is heard, and nothing is wrong."""
    seconds = 0.6 + 0.4 * len(text.split())
    row = {
        "fault": None,
        "error": None,
        "format": "wav",
        "headers": 1,
        "container": "wav",
        "codec": "PCM_16",
        "rate": rate,
        "channels": 1,
        "samples": round(seconds * rate),
        "samples_declared": round(seconds * rate),
        "byte_rate_agrees": True,
        "duration_s": seconds,
        "pcm_sha256": None,
        "level_dbfs": -26.0,
        "peak": 0.35,
        "dc": 1e-5,
        "clip_fraction": 0.0,
        "silence_fraction": 0.3,
        "lead_s": 0.3,
        "trail_s": 0.4,
        "sound_s": 0.7 * seconds,
        "bandwidth_hz": 9000.0,
        "centroid_hz": 800.0,
        "flatness": 0.1,
        "repeat": 0.5,
        "repeat_lag_s": 1.0,
        "gaps": 0,
        "clicks": 0,
        "seams": None,
        "seam_ranks": None,
        "seam_repeats": None,
        "has_speech": True,
        "text": text,
        "no_speech_prob": 0.01,
        "words": [],
        "speaker_embedding": voice(0.0),
    }
    return row | changes


class Talk:
    """Transcripts of every arm of a run, all as the judge's; change rows, then ask for `gates()`."""

    def __init__(self, n=24, options=DETERMINISTIC, seed=0):
        self.options, self.rng = options, np.random.default_rng(seed)
        self.texts = texts_of(n, self.rng)
        rows = {item: heard(text) for item, text in self.texts.items()}
        self.arms = {arm: copy.deepcopy(rows) for arm in (JUDGE, *FLOORS, *ALL_SERVED)}
        self.noise = {(arm, item): EQUAL for arm in (*FLOORS, *ALL_SERVED) for item in self.texts}
        self.noise |= {("float32-threads", item): Score(-92.0, {"lag": 0, "more": 0}) for item in self.texts}
        if not options.deterministic:
            self.change(self._another_draw, self.arms)
        for row in self.arms["served_0_stream"].values():
            count = row["samples"] // 12_000
            ranks = self.rng.uniform(0.1, 1, count)
            row |= {"seams": list(range(12_000, 12_000 * count + 1, 12_000)), "seam_ranks": list(ranks)}
            row["seam_repeats"] = [0.1] * count

    def _another_draw(self, row):
        """The same text said a little longer or shorter, louder or softer, the voice as it is that day."""
        length, level = self.rng.normal(1, 0.01), self.rng.normal(0, 0.5)
        seconds = length * row["duration_s"]
        return {
            "duration_s": seconds,
            "samples": round(row["rate"] * seconds),
            "level_dbfs": row["level_dbfs"] + level,
            "speaker_embedding": voice(self.rng.normal(0, 0.1)),
        }

    @property
    def items(self):
        return list(self.texts)

    def change(self, change, arms=ALL_SERVED, items=None):
        """Apply `change(row)`, which gives what is new of it, to rows of some arms."""
        for arm in arms:
            for item in items or self.items:
                row = self.arms[arm].get(item)
                if row is not None:
                    row |= change(row)
        return self

    def table(self):
        normalisers = Normalisers.of(self.options)
        run = Run({item: normalisers(text) for item, text in self.texts.items()}, normalisers, self.options, TWINS)
        sets = dict.fromkeys(self.texts, "talk")
        tables = [
            score_table("talk", arm, sets, rows_of({item: self._scores(run, arm, item) for item in self.texts}))
            for arm in self.arms
        ]
        return ScoreTable.from_tables(tables, self.items)

    def _scores(self, run, arm, item):
        rows = {name: answers[item] for name, answers in self.arms.items() if item in answers}
        noise = {name: one for (name, key), one in self.noise.items() if key == item}
        return run.scores(arm, item, rows, noise if self.options.deterministic else {})

    def gates(self, arm="served_0_alone", table=None):
        """Gates of one pass, by id."""
        table = self.table() if table is None else table
        floor = cut_floor(table, {}, FLOORS, "float32", self.options)
        found = TTS.evaluate(table, floor, SERVED, "float32", self.options)
        return {gate.id: gate for gate in found if gate.arm == arm}
