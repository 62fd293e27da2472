"""The gates of token margins, as a suite takes them. They need greedy items, and floor arms must pass them too."""

from __future__ import annotations

from assay.verdicts.margins.exceedance import hard_gate, soft_gate
from assay.verdicts.margins.floor import SOFT, MarginTrial
from assay.verdicts.margins.shift import KL, LOGPROB, MEAN, shift_gate, trend_gate
from assay.verdicts.suite import Check, GateJudge

_GATES: dict[str, GateJudge[MarginTrial]] = {
    "G-hard": hard_gate,
    SOFT: soft_gate,
    "G-mean": lambda trial: shift_gate(trial, MEAN),
    "G-trend": trend_gate,
    "G-logprob": lambda trial: shift_gate(trial, LOGPROB),
    "G-KL": lambda trial: shift_gate(trial, KL),
}

MARGIN_CHECKS: dict[str, Check[MarginTrial]] = {
    name: Check(judge, needs="margin_max", on_floor=True) for name, judge in _GATES.items()
}
