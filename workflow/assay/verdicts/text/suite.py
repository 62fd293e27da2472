"""The suite of text: token margins, structure, needles, and the distribution of sampled tokens."""

from __future__ import annotations

from assay.config import TextGates
from assay.verdicts.margins.checks import MARGIN_CHECKS
from assay.verdicts.margins.exceedance import item_claim
from assay.verdicts.margins.floor import cut_floor, judge_problems
from assay.verdicts.suite import Check, Suite
from assay.verdicts.text.needles import needle_gate, too_few_needles
from assay.verdicts.text.planted import CONTROLS
from assay.verdicts.text.sampled import support_gate, surprisal_gate
from assay.verdicts.text.structure import TextTrial, structure_gate

TEXT = Suite(
    options=TextGates,
    trial=TextTrial,
    cut_floor=cut_floor,
    gates={
        "G-struct": Check(structure_gate),
        **MARGIN_CHECKS,
        "G-needle": Check(needle_gate, needs="needle", powerless=too_few_needles),
        "G-surprisal": Check(surprisal_gate, needs="surprisal"),
        "G-support": Check(support_gate, needs="surprisal"),
    },
    controls=CONTROLS,
    counts={"greedy": "margin_max", "sampled": "surprisal", "needles": "needle"},
    claim=item_claim,
    judge_problems=judge_problems,
)
