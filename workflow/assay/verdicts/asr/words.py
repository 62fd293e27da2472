"""Words of transcripts: G-transcript against the judge's, G-wer against what is said, G-silence where nobody speaks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from assay.metrics import stats
from assay.records import JUDGE, Status
from assay.verdicts.asr.structure import AsrTrial
from assay.verdicts.drafts import Draft, caveat, first_of, make_gate, make_test, noninferiority, p_text
from assay.verdicts.model import Confirm, GateTest, Threshold
from assay.verdicts.scoretable import Floats, Mask


def transcript_gate(trial: AsrTrial) -> Draft:
    """G-transcript: transcripts that differ from the judge's by more than a few words, and no near tie explains it.

    Edits over the words of the judge's transcript, above the larger of `edit_rate` and `edit_ratio` times the floor's
    largest. An item is explained when its tokens diverge at a margin above 0 and up to tau_hard: from there on another
    transcript is as good. One without any margin said other words than its tokens. A fail if the same item stands out
    on the other instance, or if that has no data; else test C decides.
    """
    floor = trial.floor_values("edit_rate")
    known = floor[np.isfinite(floor)]
    largest, limit = _edit_limit(trial)

    def exceedance(arm: str) -> float | None:
        if not trial.has_data(arm, "edit_rate") or not len(known):
            return None
        return stats.conditional_exceedance(int(unlike(trial, arm).sum()), n, int((known > limit).sum()), len(known))

    rates = trial.scores(trial.arm, "edit_rate")
    hits, n = unlike(trial, trial.arm), int((~np.isnan(rates)).sum())
    confirmable = trial.confirm is not None and trial.has_data(trial.confirm, "edit_rate")
    others = unlike(trial, trial.confirm) if trial.confirm and confirmable else None
    reproduced = hits & others if others is not None else np.zeros_like(hits)
    alone = int(hits.sum() - reproduced.sum()) if others is not None else 0
    why = f"{alone} transcripts stand out on {trial.arm} and not on {trial.confirm}"
    u, equal = int(hits.sum()), int((rates == 0).sum())
    p = exceedance(trial.arm)
    return Draft(
        p=p,
        effect=u > 0,
        hard=bool(reproduced.any() or (u > 0 and others is None)),
        blocked=first_of(trial.too_few_arms(), None if n else "no items"),
        retest=exceedance,
        gate=make_gate(
            "G-transcript",
            trial,
            metric="edit_rate",
            severity="hard",
            statistic="transcripts unlike the judge's without a near tie",
            value=u,
            unit="count",
            threshold=Threshold(
                value=limit,
                source="floor" if limit > trial.options.edit_rate else "absolute",
                kappa=trial.options.edit_ratio,
                unit="edits/word",
                detail=f"edits per word: the larger of {trial.options.edit_rate:g} and {trial.options.edit_ratio:g} x "
                f"the floor's largest ({largest:.3g})",
            ),
            floor=trial.floor.summary(floor, "edits per word of each item and arm"),
            test=make_test(trial, "C", p=p, n=n),
            confirm=Confirm(
                performed=others is not None,
                arm=trial.confirm,
                reproduced_items=[trial.table.items[i] for i in np.flatnonzero(reproduced)],
            )
            if u
            else None,
            worst=trial.worst(np.where(hits, rates, 0.0)),
            caveats=[caveat("not_reproduced", "G-transcript", why)] if alone else [],
            detail=f"{equal} of {n} transcripts equal the judge's, {u} differ in more than {limit:.3g} edits a word"
            + p_text(p),
        ),
    )


def unlike(trial: AsrTrial, arm: str) -> Mask:
    """Items whose transcript is unlike the judge's without a near tie (see `transcript_gate`)."""
    margins = trial.table.values(arm, "margin_max")
    explained = (margins > 0) & (margins <= trial.floor.tau_hard)
    return np.asarray((trial.scores(arm, "edit_rate") > _edit_limit(trial)[1]) & ~explained)


def _edit_limit(trial: AsrTrial) -> tuple[float, float]:
    """The floor's largest edits per word, and how many stand out."""
    floor = trial.floor_values("edit_rate")
    known = floor[np.isfinite(floor)]
    largest = float(known.max()) if len(known) else 0.0
    return largest, max(trial.options.edit_rate, trial.options.edit_ratio * largest)


def word_error_gate(trial: AsrTrial) -> Draft:
    """G-wer: is the corpus word error rate higher than the reference's by more than `wer_margin` (test N)?

    Errors of all items over words of all items, against what is said; the reference's errors of an item are the median
    of the floor arms'. One-sided 95 % bounds by BCa bootstrap over items. A failed item lacks all its words. Above the
    margin: FAIL, if the other instance does not contradict; across it: INCONCLUSIVE; below it, and surely worse: the
    caveat `small_but_real`. Never the mean of the items' own rates: one short item would outweigh a long one.
    """
    table, margin = trial.table, trial.options.wer_margin
    words = table.aux(JUDGE, "wer_errors", "words")
    floor = trial.floor_values("wer_errors")

    def errors(arm: str) -> Floats:
        values = trial.scores(arm, "wer_errors")
        return np.where(np.isinf(values), words, values)

    def shift(arm: str) -> stats.Shift | None:
        served = errors(arm)
        use = np.isfinite(served) & np.isfinite(words) & np.isfinite(floor).all(axis=1) if floor.size else np.zeros(0)
        if not use.any() or not words[use].sum():
            return None
        excess = served[use] - np.median(floor[use], axis=1)
        if not excess.any():
            return stats.Shift(0.0, 0.0, 0.0, 0.95, "bca")
        return stats.pooled_shift(excess, words[use], trial.options.seed)

    found, served = shift(trial.arm), errors(trial.arm)
    planned = np.isfinite(words) & np.isfinite(served)
    total = float(words[planned].sum())
    rate = float(served[planned].sum()) / total if total else None
    status = noninferiority(found.low, found.high, margin) if found else None
    confirm = shift(trial.confirm) if trial.confirm and trial.has_data(trial.confirm, "wer_errors") else None
    contradicted = confirm is not None and confirm.high < margin
    few = trial.too_few_arms()
    fails = status is Status.FAIL
    caveats = []
    if status is Status.PASS_WITH_CAVEAT and found:
        why = f"the word error rate is higher by {_points(found.point)}, surely by {_points(found.low)}"
        caveats.append(caveat("small_but_real", "G-wer", why))
    bounds = f" (between {_points(found.low)} and {_points(found.high)})" if found else ""
    detail = (
        f"corpus word error rate {100 * rate:.3g} %, {_points(found.point)} above the reference's{bounds}, allowed "
        f"{_points(margin)}"
        if found and rate is not None
        else "no words to count errors of"
    )
    return Draft(
        hard=fails and not contradicted and not few,
        blocked=first_of(
            few,
            None if found else "no words",
            f"the bounds lie on both sides of {_points(margin)}: more items would tell"
            if status is Status.INCONCLUSIVE
            else None,
            f"worse on {trial.arm}, not on {trial.confirm}: the instances differ" if fails and contradicted else None,
        ),
        gate=make_gate(
            "G-wer",
            trial,
            metric="wer_errors",
            statistic="corpus word error rate above the reference's",
            value=found.point if found else None,
            unit="fraction",
            threshold=Threshold(value=margin, source="absolute", detail="largest rise that does not matter"),
            floor=trial.floor.summary(floor, "word errors of each item and arm"),
            test=GateTest(
                name="N",
                alpha=1 - (found.confidence if found else 0.95),
                ci_low=_finite(found.low) if found else None,
                ci_high=_finite(found.high) if found else None,
                ci_level=found.confidence if found else None,
                n=int(planned.sum()),
                seed=trial.options.seed,
            ),
            worst=trial.worst(served - (np.median(floor, axis=1) if floor.size else 0)),
            caveats=caveats,
            detail=detail,
        ),
    )


FEW_WORDS = 5  # fewer are one short phrase: a near tie between silence and speech makes it on a right engine too


@dataclass(frozen=True)
class Pool:
    """Clips in which nobody speaks, taken together; `clips`: their places, `seconds`: how long each is."""

    trial: AsrTrial
    name: str
    clips: Mask
    seconds: Floats

    @property
    def minutes(self) -> float:
        """How long they are together."""
        return float(self.seconds[self.clips].sum()) / 60

    def rate(self, arm: str) -> float:
        """Words a minute of an arm."""
        words = self.trial.scores(arm, "silence_words") * self.seconds / 60
        return float(words[self.clips].sum()) / self.minutes

    @property
    def base(self) -> float:
        """The largest rate of the judge and the floor arms."""
        return max(self.rate(arm) for arm in (JUDGE, *self.trial.floor.effective))

    @property
    def limit(self) -> float:
        """The largest rate that passes."""
        return self.base + self.trial.options.silence_words

    @property
    def invented(self) -> float:
        """Words beyond the reference's."""
        return (self.rate(self.trial.arm) - self.base) * self.minutes

    @property
    def detail(self) -> str:
        """What was heard in them, in words."""
        size = f"{int(self.clips.sum())} {self.name} ({60 * self.minutes:.0f} s)"
        return f"{self.rate(self.trial.arm):.3g} words a minute in {size}, the reference {self.base:.3g}"


def silence_gate(trial: AsrTrial) -> Draft:
    """G-silence: words a minute where nobody speaks, beyond what the reference itself invents there.

    All words over all minutes, against the largest rate of the judge and the floor arms plus `silence_words`; and the
    same over the clips in which no arm of the reference says a word, because one clip that it fills with words would
    hide what a server invents in all the others. Told is the pool that is furthest above its limit. Such clips have no
    word error rate: there is nothing to be right about. Above a limit: FAIL, unless the other instance stays below it,
    or it is by fewer than `FEW_WORDS` words (INCONCLUSIVE).
    """
    seconds, invented = trial.table.aux(JUDGE, "silence_words", "seconds"), trial.reference("silence_words")
    silent = np.isfinite(seconds)
    pools = [
        Pool(trial, "clips without speech", silent, seconds),
        Pool(trial, "of them where the reference says nothing", silent & (invented == 0), seconds),
    ]
    pools = [pool for pool in pools if pool.clips.any()]
    over = [pool for pool in pools if pool.rate(trial.arm) > pool.limit]
    told = max(pools, key=lambda pool: pool.rate(trial.arm) - pool.limit)
    confirmable = trial.confirm is not None and trial.has_data(trial.confirm, "silence_words")
    contradicted = (
        trial.confirm is not None and confirmable and all(pool.rate(trial.confirm) <= pool.limit for pool in over)
    )
    few = over and max(pool.invented for pool in over) < FEW_WORDS
    return Draft(
        hard=bool(over) and not contradicted and not few,
        blocked=first_of(
            f"fewer than {FEW_WORDS} words: more clips without speech would tell" if few else None,
            f"above the limit on {trial.arm}, not on {trial.confirm}: the instances differ" if over else None,
        ),
        gate=make_gate(
            "G-silence",
            trial,
            metric="silence_words",
            statistic="words a minute where nobody speaks",
            value=_finite(told.rate(trial.arm)),
            unit="words/min",
            threshold=Threshold(
                value=told.limit,
                source="floor",
                detail=f"the reference's {told.base:.3g} plus {trial.options.silence_words:g}",
            ),
            floor=trial.floor.summary(trial.floor_values("silence_words"), "words a minute of each item and arm"),
            worst=trial.worst(trial.scores(trial.arm, "silence_words") - invented),
            detail="; ".join(pool.detail for pool in pools),
        ),
    )


def _points(fraction: float) -> str:
    return f"{100 * fraction:+.2f} points"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
