"""Gates on a mean: word errors, length, voice, what load and streaming add. Test N: its bound is inside a margin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from assay.config import TtsGates
from assay.metrics import stats
from assay.records import JUDGE
from assay.verdicts.drafts import Draft, caveat, first_of, make_gate, make_test, p_text
from assay.verdicts.model import Threshold
from assay.verdicts.scoretable import Floats
from assay.verdicts.tts.hits import word_counts
from assay.verdicts.tts.trial import SpeechTrial, flat, not_asked

NO_AUDIO = 0.5  # length over the reference's that an answer without audio counts as


@dataclass(frozen=True)
class Paired:
    """Item by item, how much worse an arm is: `excess`, NaN where unknown; `sizes` (words) for a pooled rate."""

    excess: Floats
    sizes: Floats | None = None

    def known(self) -> Paired:
        """Without the items of which nothing is known."""
        keep = ~np.isnan(self.excess)
        return Paired(self.excess[keep], None if self.sizes is None else self.sizes[keep])

    def shift(self, seed: int) -> stats.Shift:
        """The mean shift, or that of the pooled rate, with its bounds."""
        if self.sizes is None:
            return stats.paired_shift(self.excess, seed)
        return stats.pooled_shift(self.excess, self.sizes, seed)

    def p(self, margin: float, options: TtsGates) -> float:
        """p-value of a shift up to the margin, by flipping the signs of what each item is beyond it."""
        allowed = margin * (1.0 if self.sizes is None else self.sizes)
        beyond = np.stack([self.excess - allowed, np.zeros(len(self.excess))], axis=1)
        return stats.label_permutation(beyond, options.permutations, options.seed).p

    def reversed(self) -> Paired:
        """The other side."""
        return Paired(-self.excess, self.sizes)


@dataclass(frozen=True)
class ShiftSpec:
    """A gate on a paired shift; `two_sided`: less is as bad as more."""

    id: str
    metric: str
    statistic: str
    pairs: Callable[[SpeechTrial, str], Paired]
    margin: Callable[[TtsGates], float]
    unit: str
    two_sided: bool = False
    context: Callable[[SpeechTrial], str] = lambda trial: ""


def shift_gate(trial: SpeechTrial, spec: ShiftSpec) -> Draft:
    """Is the shift inside the margin (pass), surely beyond it (fail), or can't it be told (inconclusive)?"""
    if not trial.asked(trial.arm, spec.metric):
        return not_asked(trial, spec.id, spec.metric, spec.statistic, spec.unit, "this pass has nothing of the kind")
    options, margin = trial.options, spec.margin(trial.options)
    everything = spec.pairs(trial, trial.arm)
    paired = everything.known()
    if not len(paired.excess) or (paired.sizes is not None and not paired.sizes.sum()):
        return not_asked(trial, spec.id, spec.metric, spec.statistic, spec.unit, "no item to compare")
    shift = paired.shift(options.seed)
    low, high = shift.low, shift.high
    effect = low > margin or (spec.two_sided and high < -margin)
    inside = high < margin and (not spec.two_sided or low > -margin)

    def p_of(arm: str) -> float | None:
        found = spec.pairs(trial, arm).known()
        if not len(found.excess):
            return None
        p = found.p(margin, options)
        return min(1.0, 2 * min(p, found.reversed().p(margin, options))) if spec.two_sided else p

    p = p_of(trial.arm)
    found = (
        f"{spec.statistic} {shift.point:+.3g} {spec.unit} (95 % bounds {low:+.3g} to {high:+.3g}, margin {margin:g})"
    )
    caveats = []
    if inside and (low > 0 or (spec.two_sided and high < 0)):
        caveats.append(caveat("small_but_real", spec.id, found))
    return Draft(
        p=p,
        effect=effect,
        blocked=first_of(trial.too_few(), None if inside else "its bounds are not inside the margin"),
        retest=p_of,
        gate=make_gate(
            spec.id,
            trial,
            metric=spec.metric,
            statistic=spec.statistic,
            value=shift.point,
            unit=spec.unit,
            threshold=Threshold(value=margin, source="absolute", detail="margin of non-inferiority"),
            floor=trial.floor.summary(trial.floor_values(spec.metric), "values of items"),
            test=make_test(
                trial,
                "N",
                p=p,
                n=len(paired.excess),
                ci_low=_finite(low),
                ci_high=_finite(high),
                ci_level=shift.confidence,
            ),
            worst=trial.worst(np.abs(everything.excess) if spec.two_sided else everything.excess),
            caveats=caveats,
            detail=f"{spec.context(trial)}{found}, {len(paired.excess)} items{p_text(p)}",
        ),
    )


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


# --- the gates ---------------------------------------------------------------------------------------------------


def _word_errors(trial: SpeechTrial, arm: str, metric: str = "wer_errors") -> Paired:
    words = word_counts(trial)
    errors = trial.worst_if_failed(arm, metric, words)
    return Paired(errors - trial.reference_median(arm, metric), words)


def _rates(trial: SpeechTrial) -> str:
    """Both normalisers' rates of the arm and of the reference."""
    said = []
    for metric in ("wer_errors", "wer_errors_other"):
        words = trial.table.aux(JUDGE, metric, "words")
        own = trial.worst_if_failed(trial.arm, metric, words)
        reference = trial.reference_median(trial.arm, metric)
        known = ~np.isnan(own) & ~np.isnan(reference)
        total = words[known].sum()
        if total:
            said.append(f"{own[known].sum() / total:.2%} against {reference[known].sum() / total:.2%}")
    return f"WER {said[0]} of the reference (by the other normaliser {said[1]}); " if len(said) > 1 else ""


WER = ShiftSpec(
    "G-wer",
    "wer_errors",
    "word error rate above the reference's",
    _word_errors,
    lambda options: options.wer_margin,
    "fraction",
    context=_rates,
)


def _under_load(trial: SpeechTrial, arm: str) -> Paired:
    words = word_counts(trial)
    return Paired(trial.worst_if_failed(arm, "load_errors", words), words)


LOAD = ShiftSpec(
    "G-load",
    "load_errors",
    "word error rate under load above that alone",
    _under_load,
    lambda options: options.wer_margin,
    "fraction",
)


def _log_lengths(trial: SpeechTrial, arm: str) -> Paired:
    return _log_ratio(trial.worst_if_failed(arm, "duration_s", 0.0), trial.reference_median(arm, "duration_s"))


def _log_ratio(served: Floats, other: Floats) -> Paired:
    """ln of one length over another; an answer without audio counts as half as long."""
    ratio = np.where(served > 0, served, NO_AUDIO * other) / other
    return Paired(np.log(ratio))


DURATION = ShiftSpec(
    "G-duration",
    "duration_s",
    "mean ln of the length over the reference's",
    _log_lengths,
    lambda options: options.duration_margin,
    "ln",
    two_sided=True,
)


def _unlike(trial: SpeechTrial, arm: str) -> Paired:
    """Likeness that is lost against the floor's; an answer in which nobody speaks has none."""
    similarity = trial.worst_if_failed(arm, "speaker_similarity", 0.0)
    return Paired(trial.reference_median(arm, "speaker_similarity") - similarity)


SPEAKER = ShiftSpec(
    "G-speaker",
    "speaker_similarity",
    "mean likeness to the reference's voice below the floor's",
    _unlike,
    lambda options: options.speaker_margin,
    "cosine",
)


def speaker_gate(trial: SpeechTrial) -> Draft:
    """G-speaker: the voice is as like the reference's as that of its floor arms is."""
    if not trial.table.has(SPEAKER.metric).any():
        why = "not measured: the family names no `speaker_encoder`, or the reference says nothing"
        return not_asked(trial, SPEAKER.id, SPEAKER.metric, SPEAKER.statistic, SPEAKER.unit, why)
    return shift_gate(trial, SPEAKER)


def _stream_lengths(trial: SpeechTrial, arm: str) -> Paired:
    whole = trial.table.aux(arm, "stream_samples", "whole")
    return _log_ratio(whole + trial.worst_if_failed(arm, "stream_samples", -whole), whole)


STREAM = ShiftSpec(
    "G-stream",
    "stream_samples",
    "mean ln of the length streamed over that unstreamed",
    _stream_lengths,
    lambda options: options.stream_margin,
    "ln",
    two_sided=True,
)


def stream_gate(trial: SpeechTrial) -> Draft:
    """G-stream: a streamed answer is as long as the same one unstreamed: to the sample, if the model repeats itself."""
    if not trial.options.deterministic or not trial.asked(trial.arm, STREAM.metric):
        return shift_gate(trial, STREAM)
    more = trial.worst_if_failed(trial.arm, STREAM.metric, np.inf)
    statistic = "items whose streamed samples are not as many as unstreamed"
    broken = {"samples missing in the stream": more < 0, "samples too many in the stream": more > 0}
    fine = f"{int((~np.isnan(more)).sum())} streamed answers have as many samples as unstreamed"
    return flat(trial, STREAM.id, STREAM.metric, statistic, broken, fine)
