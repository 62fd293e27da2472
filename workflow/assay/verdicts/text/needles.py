"""G-needle: needles that the judge finds and the server does not."""

from __future__ import annotations

import numpy as np

from assay.config import TextGates
from assay.metrics import stats
from assay.records import JUDGE
from assay.verdicts.drafts import Draft, caveat, make_gate, make_test
from assay.verdicts.margins.floor import MarginTrial
from assay.verdicts.model import Threshold
from assay.verdicts.scoretable import ScoreTable


def needle_gate(trial: MarginTrial) -> Draft:
    """G-needle: needles that the judge finds and the server does not.

    Test M over all needles (lost against won), so that a judge that is lucky on some is no evidence against the server;
    the rate of lost ones and its bound are over needles the judge solves. Significant here and on the other instance it
    fails whatever Holm says: eight needles can give no smaller p than 0.004, which would lose among many gates although
    every needle is gone, and by chance both instances do so once in 4 000 runs. Losses that chance explains are a
    caveat. Margins of needle items count in G-hard, which is the sharper instrument.
    """
    judge = trial.table.values(JUDGE, "needle")
    solved = judge == 1

    def count(arm: str) -> tuple[int, int]:
        found = trial.scores(arm, "needle", worst=0.0)
        return int((solved & (found == 0)).sum()), int(((judge == 0) & (found == 1)).sum())

    def retest(arm: str) -> float | None:
        return stats.mcnemar(*count(arm)) if trial.has_data(arm, "needle") else None

    n, planned = int(solved.sum()), int((~np.isnan(judge)).sum())
    lost, won = count(trial.arm)
    bound = stats.clopper_pearson(lost, n).high if n else None
    caveats = []
    if not n:
        caveats.append(caveat("no_solved_needles", "G-needle", f"the judge solves none of {planned} needles"))
    elif lost:
        caveats.append(caveat("needles_lost", "G-needle", f"{lost} of {n} needles lost"))
    p = stats.mcnemar(lost, won) if n else None
    other = retest(trial.confirm) if trial.confirm else None
    significant = p is not None and p < trial.options.alpha_soft
    reproduced = other is not None and other < trial.options.alpha_confirm
    return Draft(
        p=p,
        effect=lost > 0,
        hard=significant and reproduced,
        blocked=trial.unjudged_why("needle"),
        retest=retest,
        gate=make_gate(
            "G-needle",
            trial,
            metric="needle",
            statistic="needles lost of those the judge solves",
            value=lost,
            unit="count",
            threshold=Threshold(value=None, source="absolute", detail="McNemar against the judge"),
            test=make_test(
                trial, "M", p=p, n=n, ci_low=0.0 if n else None, ci_high=bound, ci_level=0.95 if n else None
            ),
            worst=trial.worst(np.where(solved & (trial.scores(trial.arm, "needle", worst=0.0) == 0), 1.0, 0.0)),
            caveats=caveats,
            detail=f"{lost} of {n} solved needles lost, {won} won (rate of lost at most {bound:.3g})"
            if bound is not None
            else f"the judge solves none of {planned} needles: nothing to lose",
        ),
    )


def too_few_needles(table: ScoreTable, options: TextGates) -> str | None:
    """Why no loss of needles could reach significance, whatever the fault, or None."""
    solved = int((table.values(JUDGE, "needle") == 1).sum())
    if 0.5**solved < options.alpha_soft:
        return None
    return f"the judge solves {solved} needles: losing all of them is not significant"
