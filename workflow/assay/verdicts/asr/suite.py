"""The suite of transcripts: token margins, structure, words, and silence."""

from __future__ import annotations

from assay.config import AsrGates
from assay.verdicts.asr.planted import CONTROLS
from assay.verdicts.asr.structure import AsrTrial, structure_gate
from assay.verdicts.asr.words import silence_gate, transcript_gate, word_error_gate
from assay.verdicts.margins.checks import MARGIN_CHECKS
from assay.verdicts.margins.exceedance import item_claim
from assay.verdicts.margins.floor import cut_floor, judge_problems
from assay.verdicts.suite import Check, Suite

# A transcription's logprobs are of whatever the server's decoder left to choose from: they are not compared.
_MARGINS = {name: check for name, check in MARGIN_CHECKS.items() if name not in ("G-logprob", "G-KL")}

ASR = Suite(
    options=AsrGates,
    trial=AsrTrial,
    cut_floor=cut_floor,
    gates={
        "G-struct": Check(structure_gate),
        **_MARGINS,
        "G-transcript": Check(transcript_gate, needs="edit_rate", on_floor=True),
        "G-wer": Check(word_error_gate, needs="wer_errors", on_floor=True),
        "G-silence": Check(silence_gate, needs="silence_words", on_floor=True),
    },
    controls=CONTROLS,
    counts={"spoken": "wer_errors", "silent": "silence_words"},
    claim=item_claim,
    judge_problems=judge_problems,
)
