"""G-struct: what must hold for every answer of text, without statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assay.config import TextGates
from assay.metrics import text
from assay.verdicts.drafts import Draft, caveat, make_gate
from assay.verdicts.evidence import nonfinite
from assay.verdicts.margins.floor import MarginTrial
from assay.verdicts.model import Diagnosis, Threshold, WorstItem
from assay.verdicts.scoretable import Mask
from assay.verdicts.trial import SHOWN_ITEMS

PROMPT = "the prompt differs"  # the one breach that an answer without content can show as well


@dataclass(frozen=True)
class TextTrial(MarginTrial):
    """A trial of an arm that answers in text."""

    options: TextGates


def structure_gate(trial: TextTrial) -> Draft:
    """G-struct: what must hold for every answered item (for its prompt: for every counted one), without statistics.

    The prompt has the judge's tokens (ids, else their count); one BOS where the tokenizer adds one; no id outside the
    vocabulary; nothing after EOS; a finish reason that fits the length; text and usage that fit the tokens; finite
    scores; lengths like the reference's. Text alone is held to the tokens it encodes to, with the tolerance that a cut
    character and encoding again call for. Two length rules: (1) an item whose every token is the judge's choice, and
    whose length differs by more than the tolerance (one token, by ids) and the allowed ratio was cut short or ran on;
    (2) the ratio of total lengths is inside the allowed range, unless every item outside it is explained by a near-tie
    divergence (a margin above 0 and up to tau_hard).
    """
    table, arm = trial.table, trial.arm
    answered, broken = ~trial.failed(arm), breaches(trial)
    bad = np.logical_or.reduce(list(broken.values()))
    found = [f"{name} ({int(mask.sum())})" for name, mask in broken.items() if mask.any()]
    unchecked = int((answered & np.isnan(table.values(arm, "prompt_equal"))).sum())
    caveats = []
    if unchecked:
        why = f"{unchecked} of {int(answered.sum())} responses report neither prompt ids nor a prompt token count"
        caveats.append(caveat("prompt_unchecked", "G-struct", why))
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
            diagnosis=_prompt_hints(trial, broken[PROMPT]),
            caveats=caveats,
            detail="; ".join(found) if found else f"{int(answered.sum())} items keep prompt, end and length",
        ),
    )


def breaches(trial: TextTrial) -> dict[str, Mask]:
    """What an answer can break of the contract (see `structure_gate`) -> the items that do."""
    table, arm = trial.table, trial.arm
    answered = ~trial.failed(arm)
    broken = {
        PROMPT: table.values(arm, "prompt_equal") == 0,
        "not exactly one BOS": table.values(arm, "bos_ok") == 0,
        "token ids outside the vocabulary": table.values(arm, "ids_ok") == 0,
        "tokens after the end of sequence": table.values(arm, "tokens_after_eos") > 0,
        "finish reason does not fit the length": table.values(arm, "finish_ok") == 0,
        "the text is not that of the tokens": table.values(arm, "text_ok") == 0,
        "the usage count is not that of the tokens": table.values(arm, "usage_ok") == 0,
        "non-finite score": nonfinite(table, arm),
        "length differs without a near tie": _length_outliers(trial),
    }
    return {name: mask & (answered | (name == PROMPT)) for name, mask in broken.items()}


def _length_outliers(trial: TextTrial) -> Mask:
    table, arm = trial.table, trial.arm
    low, high = trial.options.length_ratio
    served, reference = table.values(arm, "output_tokens"), table.aux(arm, "output_tokens", "ref")
    margins = table.values(arm, "margin_max")
    known = np.isfinite(served) & np.isfinite(reference) & (reference > 0) & np.isfinite(margins)
    tolerance = table.aux(arm, "output_tokens", "tolerance")
    outlier = known & ((served < low * reference - tolerance) | (served > high * reference + tolerance))
    cut = outlier & (margins == 0)
    unexplained = outlier & ~((margins > 0) & (margins <= trial.floor.tau_hard))
    if known.any() and not low <= text.length_ratio(served[known], reference[known]) <= high:
        return unexplained
    return cut


def _prompt_hints(trial: TextTrial, differs: Mask) -> list[Diagnosis]:
    if not differs.any():
        return []
    index = int(np.flatnonzero(differs)[0])
    item = trial.table.items[index]
    served, reference = (trial.table.aux(trial.arm, "prompt_equal", key)[index] for key in ("served", "ref"))
    if np.isfinite(served) and np.isfinite(reference) and served != reference:
        hint = (
            f"chat template or BOS differs: server counted {int(served)} prompt tokens where the reference has "
            f"{int(reference)} ({item})"
        )
        return [Diagnosis(hint=hint, gain=float(served - reference))]
    return [Diagnosis(hint=f"prompt ids differ at equal count: template text or special tokens ({item})")]
