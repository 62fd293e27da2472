"""G-struct: what must hold for every transcript, without statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assay.config import AsrGates
from assay.records import JUDGE
from assay.verdicts.drafts import Draft, make_gate
from assay.verdicts.evidence import nonfinite
from assay.verdicts.margins.floor import MarginTrial
from assay.verdicts.model import Threshold, WorstItem
from assay.verdicts.scoretable import Floats, Mask
from assay.verdicts.trial import SHOWN_ITEMS

LEAST_COVERED = 0.5  # share of what the reference's segments cover


@dataclass(frozen=True)
class AsrTrial(MarginTrial):
    """A trial of an arm that transcribes."""

    options: AsrGates

    def reference(self, metric: str) -> Floats:
        """The largest score of the judge and the floor arms: what this model itself does on an item."""
        columns = [self.table.values(arm, metric) for arm in (JUDGE, *self.floor.effective)]
        return np.asarray(np.fmax.reduce(columns))


def structure_gate(trial: AsrTrial) -> Draft:
    """G-struct: what must hold for every answered item, without statistics.

    No decoder token in the text; the text is that of the tokens and of the segments, and the tokens lie in windows of
    this audio; the language is the one that was asked for; finite scores. Where somebody speaks the transcript is not
    empty, does not loop, and lacks no run of words at its start or end. Segments end after they start, do not run
    backwards, lie on the clip, and do not stop half-way. What the model itself does wrong on an item (the judge or a
    floor arm) is no fault of the server's, so the last two sentences are against the reference's worst: empty, or
    looping, or short of words only where no reference arm is, or by more than the options allow beyond it.
    """
    table, arm = trial.table, trial.arm
    answered, broken = ~trial.failed(arm), breaches(trial)
    bad = np.logical_or.reduce(list(broken.values()))
    named, timed = (int(np.isfinite(table.values(arm, name)).sum()) for name in ("language_ok", "timing_faults"))
    found = [f"{name} ({int(mask.sum())})" for name, mask in broken.items() if mask.any()]
    return Draft(
        hard=bool(bad.any()),
        gate=make_gate(
            "G-struct",
            trial,
            metric="structure",
            severity="hard",
            statistic="items that break the contract",
            value=int(bad.sum()),
            unit="count",
            threshold=Threshold(value=0, source="absolute", detail="no item may break the contract"),
            worst=[WorstItem(item_id=table.items[i], value=1) for i in np.flatnonzero(bad)[:SHOWN_ITEMS]],
            detail="; ".join(found)
            if found
            else f"{int(answered.sum())} transcripts in order; {named} of them name a language, {timed} have times",
        ),
    )


def breaches(trial: AsrTrial) -> dict[str, Mask]:
    """What a transcript can break of the contract (see `structure_gate`) -> the items that do."""
    table, arm, options = trial.table, trial.arm, trial.options
    answered = ~trial.failed(arm)

    def beyond(metric: str, allowed: float) -> Floats:
        return np.asarray(table.values(arm, metric) - np.nan_to_num(trial.reference(metric)) - allowed)

    covered, ours = (table.aux(name, "timing_faults", "covered") for name in (arm, JUDGE))
    broken = {
        "decoder tokens in the text": table.values(arm, "leaked_tokens") > 0,
        "the text is not that of the tokens": table.values(arm, "text_ok") == 0,
        "the text is not that of the segments": table.values(arm, "segments_ok") == 0,
        "the tokens lie in no window of the audio": table.values(arm, "ids_ok") == 0,
        "not the language that was asked for": table.values(arm, "language_ok") == 0,
        "non-finite score": nonfinite(table, arm),
        "empty though somebody speaks": beyond("empty", 0) > 0,
        "the text loops": beyond("repeats", options.repeats) > 0,
        "words missing at the end": beyond("tail_missing", options.missing_words) >= 0,
        "words missing at the start": beyond("head_missing", options.missing_words) >= 0,
        "segments out of order or off the clip": beyond("timing_faults", 0) > 0,
        "segments stop half-way": table.has("wer_errors") & (covered < LEAST_COVERED * ours),
    }
    return {name: mask & answered for name, mask in broken.items()}
