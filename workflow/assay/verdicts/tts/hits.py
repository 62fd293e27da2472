"""Gates that count items: damaged, lost, cut, garbled, or other than the reference's samples.

An item is a hit where the served audio has what no arm of the reference has, so that a text which Whisper never
understands, or a voice that clicks by itself, is nobody's fault. Floor arms are counted alike, each against the others.

A model that says the same each time has no hits by chance: one that comes again on the other instance fails, as does
any while the other instance has no data. Of other models, test C decides against the floor arms' own hits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from assay.config import TtsGates
from assay.metrics import stats
from assay.records import JUDGE
from assay.verdicts.drafts import Draft, caveat, first_of, make_gate, make_test, p_text
from assay.verdicts.model import Confirm, Diagnosis, Threshold
from assay.verdicts.scoretable import Floats, Mask
from assay.verdicts.tts.trial import SpeechTrial, not_asked

RAISED_DB = 6.0  # of the floor's own noise: twice its amplitude


@dataclass(frozen=True)
class Hits:
    """Hits of one arm. `kinds` says what they are: kind -> items."""

    kinds: dict[str, Mask]
    eligible: Mask  # items that could be one
    severity: Floats  # to show the worst first

    @property
    def mask(self) -> Mask:
        return np.logical_or.reduce(list(self.kinds.values())) & self.eligible


@dataclass(frozen=True)
class HitSpec:
    """A gate that counts hits."""

    id: str
    metric: str
    statistic: str
    hits: Callable[[SpeechTrial, str], Hits]
    limit: Callable[[SpeechTrial], Threshold]


def hit_gate(trial: SpeechTrial, spec: HitSpec) -> Draft:
    """Count the hits of the trial's arm, and decide as the module says."""
    if not trial.asked(trial.arm, spec.metric):
        return not_asked(trial, spec.id, spec.metric, spec.statistic, "count", "this pass has nothing of the kind")
    found = spec.hits(trial, trial.arm)
    hits, n = found.mask, int(found.eligible.sum())
    floor = [spec.hits(trial, arm) for arm in trial.references(trial.arm) if arm != JUDGE]
    k_floor, n_floor = (
        sum(int(m.sum()) for m in masks) for masks in ([f.mask for f in floor], [f.eligible for f in floor])
    )
    k = int(hits.sum())

    def exceedance(arm: str) -> float | None:
        served = spec.hits(trial, arm)
        if not n_floor or not served.eligible.any():
            return None
        return stats.conditional_exceedance(int(served.mask.sum()), int(served.eligible.sum()), k_floor, n_floor)

    p = exceedance(trial.arm)
    other = trial.confirm if trial.confirm and trial.has_data(trial.confirm, spec.metric) else None
    again = hits & spec.hits(trial, other).mask if other else np.zeros_like(hits)
    powerless = not trial.repeats and (n_floor == 0 or _least_p(n, n_floor) >= trial.options.alpha_soft)
    if powerless and trial.too_few() is None:
        why = f"{n} items are too few to tell from chance"
        return not_asked(trial, spec.id, spec.metric, spec.statistic, "count", why)
    alone = k - int(again.sum()) if other else 0
    caveats = []
    if alone:
        why = f"{alone} items on {trial.arm} and not on {other}: {_named(found, hits & ~again)}"
        caveats.append(caveat("not_reproduced", spec.id, why))
    elif k and not trial.repeats:
        why = f"{k} of {n} items, {k_floor} of {n_floor} on the floor arms: {_named(found, hits)}"
        caveats.append(caveat("small_but_real", spec.id, why))
    return Draft(
        p=p,
        effect=k > 0,
        hard=trial.repeats and bool(again.any() or (k > 0 and other is None)),
        blocked=first_of(trial.too_few(), None if n else "no item to judge"),
        retest=exceedance,
        gate=make_gate(
            spec.id,
            trial,
            metric=spec.metric,
            statistic=spec.statistic,
            value=k,
            unit="count",
            threshold=spec.limit(trial),
            floor=trial.floor.summary(trial.floor_values(spec.metric), f"{k_floor} hits of {n_floor} item-arms"),
            test=make_test(
                trial,
                "C" if k else "B",
                p=p,
                n=n,
                ci_low=0.0 if n else None,
                ci_high=stats.clopper_pearson(k, n).high if n else None,
                ci_level=0.95 if n else None,
            ),
            confirm=Confirm(
                performed=other is not None,
                arm=trial.confirm,
                reproduced_items=[trial.table.items[i] for i in np.flatnonzero(again)],
            )
            if k
            else None,
            worst=trial.worst(
                np.where(hits, np.maximum(np.nan_to_num(found.severity, nan=1.0, posinf=1e9), 1e-9), 0.0)
            ),
            diagnosis=[Diagnosis(hint=hint) for hint in _hints(found)],
            caveats=caveats,
            detail=f"{k} of {n} items" + (f": {_named(found, hits)}" if k else "") + f"; {k_floor} of {n_floor} on the "
            f"floor arms" + p_text(p if k else None),
        ),
    )


def _least_p(n: int, n_floor: int) -> float:
    """The p-value if every item were a hit and none of the floor's."""
    return stats.conditional_exceedance(n, n, 0, n_floor)


def _named(found: Hits, within: Mask) -> str:
    counts = {kind: int((mask & within).sum()) for kind, mask in found.kinds.items()}
    return ", ".join(f"{kind} ({count})" for kind, count in counts.items() if count)


def _hints(found: Hits) -> list[str]:
    if len(found.kinds) == 1:
        return []
    return [kind for kind, mask in found.kinds.items() if (mask & found.eligible).any()]


# --- damage ------------------------------------------------------------------------------------------------------


def damage(trial: SpeechTrial, arm: str) -> Hits:
    """What is wrong with each audio by its own numbers: beyond an absolute limit and beyond the reference's own."""
    limits: TtsGates = trial.options
    value = {name: trial.table.values(arm, name) for name in _MEASURED}
    reference = {name: trial.reference_values(arm, name) for name in _MEASURED}
    low = {name: np.fmin.reduce(values) for name, values in reference.items()}
    high = {name: np.fmax.reduce(values) for name, values in reference.items()}
    sound_s, duration_s = (trial.reference_median(arm, name) for name in ("sound_s", "duration_s"))
    failed = trial.worst_if_failed(arm, "duration_s", np.inf) == np.inf
    least, most = limits.level_dbfs
    quiet, loud = np.fmin(least, low["level_dbfs"]), np.fmax(most, high["level_dbfs"])
    level, band = value["level_dbfs"], value["bandwidth_hz"]
    kinds = {
        "no audio": failed,
        "more than twice as long": value["duration_s"] > limits.length_ratio * duration_s,
        "less than half as long": value["duration_s"] < duration_s / limits.length_ratio,
        "no speech": (value["has_speech"] == 0) & (low["has_speech"] == 1),
        "silent or too quiet": level < quiet,
        "too loud": level > loud,
        "another level than the reference's": (level < low["level_dbfs"] - limits.level_db)
        | (level > high["level_dbfs"] + limits.level_db),
        "DC offset": np.abs(value["dc"]) > np.fmax(limits.dc_fs, np.fmax(np.abs(low["dc"]), np.abs(high["dc"]))),
        "clipped": value["clip_fraction"] > np.fmax(limits.clip_fraction, high["clip_fraction"]),
        "long silence at the start": value["lead_s"] > np.fmax(limits.lead_s, high["lead_s"]),
        "long silence at the end": value["trail_s"] > np.fmax(limits.trail_s, high["trail_s"]),
        "less sound than half the reference's": value["sound_s"] < limits.sound_ratio * sound_s,
        "more silence than the reference's": value["silence_fraction"]
        > high["silence_fraction"] + limits.silence_excess,
        "another bandwidth than the reference's": (band < (1 - limits.bandwidth_ratio) * low["bandwidth_hz"])
        | (band > (1 + limits.bandwidth_ratio) * high["bandwidth_hz"]),
        "repeats itself": (value["repeat"] > limits.repeat) & (value["repeat"] > high["repeat"] + limits.repeat_excess),
        "gaps": value["gaps"] > high["gaps"],
        "clicks": value["clicks"] > high["clicks"],
    }
    eligible = (~np.isnan(value["duration_s"]) | failed) & ~np.isnan(duration_s)
    return Hits(kinds, eligible, np.sum([mask.astype(float) for mask in kinds.values()], axis=0))


_MEASURED = (
    *("duration_s", "has_speech", "level_dbfs", "dc", "clip_fraction", "lead_s", "trail_s", "sound_s"),
    *("silence_fraction", "bandwidth_hz", "repeat", "gaps", "clicks"),
)


DAMAGE = HitSpec(
    "G-damage",
    "duration_s",
    "items whose audio is damaged",
    damage,
    lambda trial: Threshold(
        value=0, source="absolute", detail="options level_dbfs to repeat, each widened to the reference's own"
    ),
)


# --- words -------------------------------------------------------------------------------------------------------


def error_rates(trial: SpeechTrial, arm: str) -> Floats:
    """Word error rate of each item; a failed one has lost every word, and anything heard for no words is infinite."""
    words = word_counts(trial)
    errors = trial.worst_if_failed(arm, "wer_errors", words)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(words > 0, errors / words, np.where(errors > 0, np.inf, errors * 0))


def word_counts(trial: SpeechTrial) -> Floats:
    """Words of each item's text, as normalised."""
    return trial.table.aux(JUDGE, "wer_errors", "words")


def _only_here(trial: SpeechTrial, arm: str, kind: str, rate: Callable[[str], Floats], limit: float) -> Hits:
    own, references = rate(arm), np.stack([rate(name) for name in trial.references(arm)])
    known = ~np.isnan(own) & ~np.isnan(references).all(axis=0)
    return Hits({kind: (own > limit) & ~(references > limit).any(axis=0)}, known, own)


def lost_words(trial: SpeechTrial, arm: str) -> Hits:
    """More than half of the words wrong."""
    limit = trial.options.catastrophe
    return _only_here(trial, arm, "not understood", lambda name: error_rates(trial, name), limit)


CATASTROPHE = HitSpec(
    "G-catastrophe",
    "wer_errors",
    "items of which most words are lost",
    lost_words,
    lambda trial: Threshold(
        value=trial.options.catastrophe,
        source="absolute",
        unit="fraction",
        detail="word error rate of an item that counts as lost",
    ),
)


def cut_ends(trial: SpeechTrial, arm: str) -> Hits:
    """More words missing at the ends than any reference arm lacks."""

    def missing(name: str, end: str) -> Floats:
        counts = trial.table.aux(name, "end_deletions", end)
        failed = trial.worst_if_failed(name, "end_deletions", np.inf) == np.inf
        return np.where(failed, word_counts(trial), counts)

    kinds, worst = {}, np.zeros(len(trial.table.items))
    known = np.ones(len(trial.table.items), bool)
    for end, kind in (("tail", "last words missing"), ("head", "first words missing")):
        own = missing(arm, end)
        most = np.fmax.reduce(np.stack([missing(name, end) for name in trial.references(arm)]))
        kinds[kind] = own > most
        known &= ~np.isnan(own) & ~np.isnan(most)
        worst = np.fmax(worst, own - most)
    return Hits(kinds, known, worst)


ENDS = HitSpec(
    "G-ends",
    "end_deletions",
    "items that lack words at their ends",
    cut_ends,
    lambda trial: Threshold(value=0, source="floor", detail="words missing that every reference arm says"),
)


def garbled(trial: SpeechTrial, arm: str) -> Hits:
    """A run of twenty words of which most are wrong, in longer texts."""

    def worst_run(name: str) -> Floats:
        return trial.worst_if_failed(name, "window_wer", 1.0)

    return _only_here(trial, arm, "a stretch is garbled", worst_run, trial.options.window_wer)


WINDOW = HitSpec(
    "G-window",
    "window_wer",
    "long items with a garbled stretch",
    garbled,
    lambda trial: Threshold(
        value=trial.options.window_wer,
        source="absolute",
        unit="fraction",
        detail="word error rate of the worst run of twenty words",
    ),
)


# --- samples -----------------------------------------------------------------------------------------------------


def floor_noise(trial: SpeechTrial, arm: str) -> float:
    """Largest level of the difference that a floor arm has to the judge's samples [dBFS]."""
    floor = [trial.table.values(name, "waveform_noise") for name in trial.references(arm) if name != JUDGE]
    known = np.concatenate([np.empty(0), *floor])
    return float(np.max(known[np.isfinite(known)], initial=-np.inf))


def is_noisy(trial: SpeechTrial, arm: str) -> bool:
    """Whether the floor is too noisy to widen anything: benign changes make other waveforms of the same speech."""
    return floor_noise(trial, arm) > trial.options.waveform_cap_dbfs


def noise_limit(trial: SpeechTrial, arm: str) -> float:
    """Allowed level of the difference [dBFS]: twice the amplitude of the floor's, and at least the resolution."""
    widened = -np.inf if is_noisy(trial, arm) else floor_noise(trial, arm) + RAISED_DB
    return max(trial.options.waveform_dbfs, widened)


def other_samples(trial: SpeechTrial, arm: str) -> Hits:
    """Other samples than the judge's: later, more or fewer, or further apart than twice the floor's difference."""
    table, limit = trial.table, noise_limit(trial, arm)
    noise = trial.worst_if_failed(arm, "waveform_noise", np.inf)
    lag, more = np.abs(table.aux(arm, "waveform_noise", "lag")), np.abs(table.aux(arm, "waveform_noise", "more"))
    floor = [] if is_noisy(trial, arm) else [name for name in trial.references(arm) if name != JUDGE]

    def widest(key: str) -> Floats:
        values = [np.abs(table.aux(name, "waveform_noise", key)) for name in floor]
        return np.nan_to_num(np.fmax.reduce(np.stack(values))) if values else np.zeros(len(table.items))

    kinds = {
        "other samples": noise > limit,
        "shifted": lag > widest("lag"),
        "another number of samples": more > widest("more"),
    }
    return Hits(kinds, ~np.isnan(noise), noise - limit)


WAVEFORM = HitSpec(
    "G-waveform",
    "waveform_noise",
    "items that are not the reference's samples",
    other_samples,
    lambda trial: Threshold(
        value=noise_limit(trial, trial.arm),
        source="floor" if noise_limit(trial, trial.arm) > trial.options.waveform_dbfs else "absolute",
        unit="dBFS",
        detail=f"level of the difference: the floor's largest + {RAISED_DB:g} dB, or the resolution",
    ),
)


def waveform_gate(trial: SpeechTrial) -> Draft:
    """G-waveform: the samples are the reference's, within twice its own spread. For models that repeat themselves.

    Where benign changes already make other waveforms, the floor widens nothing: samples equal but for rounding pass,
    and of others nothing can be told.
    """
    if not trial.options.deterministic:
        why = "the model draws other speech each time: its samples are compared with nothing"
        return not_asked(trial, WAVEFORM.id, WAVEFORM.metric, WAVEFORM.statistic, "count", why)
    draft = hit_gate(trial, WAVEFORM)
    if is_noisy(trial, trial.arm) and draft.effect:
        level = floor_noise(trial, trial.arm)
        return Draft(gate=draft.gate, blocked=f"floor too noisy: benign changes differ by {level:.3g} dBFS")
    return draft
