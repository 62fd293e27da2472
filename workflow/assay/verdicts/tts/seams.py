"""G-seams: whether the places where a streamed answer's chunks meet can be heard."""

from __future__ import annotations

import numpy as np
from scipy import stats as distributions

from assay.verdicts.drafts import Draft, make_gate, make_test, p_text
from assay.verdicts.model import Threshold
from assay.verdicts.tts.trial import SpeechTrial, not_asked

# Of 2757 places in real speech 5.3 % click as loud as the loudest twentieth of their clip (metrics.audio.seam_ranks);
# of as many seams at which 23 ms were dropped, 71 %.
BY_CHANCE = 0.06
STATISTIC = "share of chunk seams that click"


def seam_gate(trial: SpeechTrial) -> Draft:
    """G-seams: more clicks at chunk seams than at other places of the same audio, or a chunk that repeats the last.

    A seam clicks if at most a twentieth of its clip's places are as loud (metric `seam_clicks`). Binomial test against
    the rate of places without a seam, and an effect of at least `seam_share`. A chunk that begins with what went
    before, sample by sample, fails at once.
    """
    if not trial.asked(trial.arm, "seam_clicks"):
        return not_asked(trial, "G-seams", "seam_clicks", STATISTIC, "fraction", "this pass has no chunk seams")
    options = trial.options

    def counts(arm: str) -> tuple[int, int]:
        clicks, seams = trial.table.values(arm, "seam_clicks"), trial.table.aux(arm, "seam_clicks", "seams")
        return int(np.nansum(clicks)), int(np.nansum(seams[~np.isnan(clicks)]))

    def p_of(arm: str) -> float | None:
        k, n = counts(arm)
        return float(distributions.binom.sf(k - 1, n, BY_CHANCE)) if n else None

    k, n = counts(trial.arm)
    p = p_of(trial.arm)
    share = k / n if n else None
    repeated = trial.table.values(trial.arm, "seam_repeat") >= options.seam_repeat
    few = BY_CHANCE**n >= options.alpha_soft
    detail = f"{k} of {n} seams click" + p_text(p)
    if repeated.any():
        detail += f"; {int(repeated.sum())} items repeat at a seam what went before it"
    return Draft(
        p=p,
        effect=share is not None and share > options.seam_share,
        hard=bool(repeated.any()),
        blocked=f"{n} seams are too few" if few else None,
        retest=p_of,
        gate=make_gate(
            "G-seams",
            trial,
            metric="seam_clicks",
            statistic=STATISTIC,
            value=share,
            unit="fraction",
            threshold=Threshold(
                value=options.seam_share, source="absolute", detail=f"chance gives {BY_CHANCE:g} (real speech)"
            ),
            test=make_test(trial, "binomial", p=p, n=n),
            worst=trial.worst(np.where(repeated, 1.0, trial.table.values(trial.arm, "seam_clicks"))),
            detail=detail,
        ),
    )
