"""What must hold for every audio, without statistics: the contract, one header, and nobody else's words."""

from __future__ import annotations

import numpy as np

from assay.verdicts.drafts import Draft
from assay.verdicts.scoretable import Mask
from assay.verdicts.tts.trial import SpeechTrial, flat

FULL_SCALE = 1.0  # FS


def contract_gate(trial: SpeechTrial) -> Draft:
    """G-contract: audio that can be decoded, as the model makes it.

    Rate and channels are those of the reference's own audio; samples are numbers within full scale (lossy codecs and
    floats may exceed it); a header whose rate was changed and whose byte rate was not is one that was patched.
    """
    known = int((~np.isnan(trial.table.values(trial.arm, "decoded"))).sum())
    return flat(
        trial,
        "G-contract",
        "decoded",
        "items that break the contract",
        breaches(trial),
        f"{known} answers are whole files of the model's rate and channels",
    )


def breaches(trial: SpeechTrial) -> dict[str, Mask]:
    """What an answer can break of the contract (see `contract_gate`) -> the items that do."""
    table, arm = trial.table, trial.arm
    return {
        "cannot be decoded": table.values(arm, "decoded") == 0,
        "another sample rate than the model's": _unlike(trial, "rate"),
        "another number of channels than the model's": _unlike(trial, "channels"),
        "samples beyond full scale": table.values(arm, "peak") > FULL_SCALE,
        "a header whose byte rate contradicts it": table.values(arm, "byte_rate_agrees") == 0,
    }


def _unlike(trial: SpeechTrial, metric: str) -> Mask:
    """Items in which an arm differs from every reference arm."""
    values = trial.table.values(trial.arm, metric)
    references = trial.reference_values(trial.arm, metric)
    return ~np.isnan(values) & ~np.isnan(references).all(axis=0) & (values != references).all(axis=0)


def header_gate(trial: SpeechTrial) -> Draft:
    """G-header: as many file headers as the answer's format has: one, or none in raw samples. More are played as noise.

    What is right is what the reference's own audio has, unless the answer is raw samples, which have none.
    """
    fine = "no answer has a header too many"
    return flat(trial, "G-header", "headers", "items with a header too many", extra_headers(trial), fine)


def extra_headers(trial: SpeechTrial) -> dict[str, Mask]:
    """Which header is too many -> the items that have one."""
    table, arm = trial.table, trial.arm
    headers, wanted = table.values(arm, "headers"), table.aux(arm, "headers", "wanted")
    return {
        "more than one header": headers > np.maximum(wanted, 1),
        "a header among raw samples": (wanted == 0) & (headers > 0),
    }


def bleed_gate(trial: SpeechTrial) -> Draft:
    """G-bleed: an answer in which another item's text is heard, that its own does not say and no reference arm does.

    At least the share `bleed` of the other's runs of four words; one is enough to fail, because chance makes none.
    """
    share = trial.table.values(trial.arm, "bleed")
    return flat(
        trial,
        "G-bleed",
        "bleed",
        "items in which another item's text is heard",
        bled(trial),
        f"{int((~np.isnan(share)).sum())} answers say nothing of other items",
    )


def bled(trial: SpeechTrial) -> dict[str, Mask]:
    """Items in which another's text is heard, and in no reference arm."""
    innocent = ~(trial.reference_values(trial.arm, "bleed") > 0).any(axis=0)
    return {"another item's text is heard": (trial.table.values(trial.arm, "bleed") > 0) & innocent}
