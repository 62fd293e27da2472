"""Measure kappa and the clip on the real model: what healthy arms of the same code do, and how often each limit errs.

    python benchmarks/calibrate.py --set text_smoke > docs/calibration.md

Reads judged floors (make them with `snakemake --cores 8 results/judged/reference/MODEL/SET/FLOOR.parquet`).
Every arm is taken in turn as if it were the server, the others as its floor, over random subsets of items.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from assay import store
from assay.metrics.text import clipped_mean, greedy_margin
from assay.tokens import split_blocks

KAPPAS = (1.0, 1.5, 2.0, 3.0)
CLIPS = (0.1, 0.25, 0.5, 1.0)
SUBSETS = 2000
CHANGES = ("batch", "attention", "chunked", "matmul")


def main(
    name: Annotated[str, typer.Option("--set")] = "text_smoke",
    model: str = "smollm2_135m",
    items: Annotated[list[int], typer.Option()] = [16, 32],  # noqa: B006
    seed: int = 1,
) -> None:
    """Print the calibration page."""
    print(f"# Calibration on {model}, {name}\n")
    print("Written by `python benchmarks/calibrate.py`; do not edit. Margins and logprobs in nat, per token.\n")
    for dtype in ("float32", "bfloat16"):
        path = Path("results/judged/reference", model, name, "-".join([dtype, *CHANGES]) + ".parquet")
        arms = {change: _read(path, f"{dtype}-{change}") for change in CHANGES}
        print(f"## {dtype}\n")
        _spread(arms)
        _kappa(arms, items, np.random.default_rng(seed))
        _clip(arms, items, np.random.default_rng(seed))


def _read(path: Path, arm: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(margins, logprob differences) of every item, by item id."""
    found = {}
    for table in store.iter_tables(path, "tokens"):
        for block in split_blocks(table, arm, lossy=False):
            margins = greedy_margin(block.lp_judge_max, block.lp_judge)
            deltas = np.abs(block.lp_served - block.lp_judge)
            found |= dict(zip(block.item_ids, zip(block.split(margins), block.split(deltas), strict=True), strict=True))
    return [found[key] for key in sorted(found)]


def _spread(arms: dict[str, list]) -> None:
    print(
        "| arm | items | tokens | not the judge's choice | margin q99 | max | abs logprob difference mean | q99 | max |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for change, items in arms.items():
        margins, deltas = (np.concatenate([item[part] for item in items]) for part in (0, 1))
        q99 = np.quantile(margins, 0.99, method="higher"), np.quantile(deltas, 0.99, method="higher")
        print(
            f"| {change} | {len(items)} | {len(margins)} | {(margins > 0).mean():.2%} | {q99[0]:.3g} | "
            f"{margins.max():.3g} | {deltas.mean():.3g} | {q99[1]:.3g} | {deltas.max():.3g} |"
        )
    same = [
        f"{a} = {b}"
        for a, b in itertools.combinations(arms, 2)
        if all(np.array_equal(x[1], y[1]) for x, y in zip(arms[a], arms[b], strict=True))
    ]
    print(f"\nArms with the very same logprobs: {', '.join(same) or 'none'}.\n")


def _trials(arms: dict[str, list], n: int, rng: np.random.Generator):
    """(served items, floor arms' items) for every arm left out in turn, over random subsets of n items."""
    total = len(next(iter(arms.values())))
    for _ in range(SUBSETS):
        chosen = rng.choice(total, min(n, total), replace=False)
        served = rng.choice(list(arms))
        yield (
            [arms[served][i] for i in chosen],
            [[arm[i] for i in chosen] for name, arm in arms.items() if name != served],
        )


def _kappa(arms: dict[str, list], sizes: list[int], rng: np.random.Generator) -> None:
    print("How often a healthy arm has an item above kappa x the floor, cut from margins alone, and as Assay cuts it")
    print("(the larger of margins and logprob differences):\n")
    print(
        "| n | J | "
        + " | ".join(f"margins, {kappa:g}" for kappa in KAPPAS)
        + " | "
        + " | ".join(f"Assay, {kappa:g}" for kappa in KAPPAS)
        + " |"
    )
    print("|" + "---|" * (2 + 2 * len(KAPPAS)))
    for n, count in itertools.product(sizes, (2, 3)):
        misses = np.zeros((2, len(KAPPAS)))
        for served, floor in _trials(arms, n, rng):
            worst = max(item[0].max() for item in served)
            margin = max(item[0].max() for arm in floor[:count] for item in arm)
            delta = max(item[1].max() for arm in floor[:count] for item in arm)
            for row, limit in enumerate((margin, max(margin, delta))):
                misses[row] += [worst > kappa * limit and worst > 0 for kappa in KAPPAS]
        rates = misses / SUBSETS
        print(f"| {n} | {count} | " + " | ".join(f"{rate:.3f}" for rate in rates.ravel()) + " |")
    print()


def _clip(arms: dict[str, list], sizes: list[int], rng: np.random.Generator) -> None:
    print(
        "Ratio of the clipped mean margin of a healthy arm to that of its floor (J = 3): 95th percentile, and how often"
    )
    print("it exceeds 2:\n")
    print("| n | " + " | ".join(f"clip {clip:g}" for clip in CLIPS) + " |")
    print("|" + "---|" * (1 + len(CLIPS)))
    for n in sizes:
        ratios: dict[float, list[float]] = {clip: [] for clip in CLIPS}
        for served, floor in _trials(arms, n, rng):
            for clip in CLIPS:
                below = np.mean([_mean(arm, clip) for arm in floor])
                ratios[clip].append(_mean(served, clip) / below if below else np.nan)
        cells = [
            "no margin at all"
            if np.isnan(values).all()
            else f"{np.nanquantile(values, 0.95):.2f} ({np.mean(np.array(values) > 2):.3f})"
            for values in ratios.values()
        ]
        print(f"| {n} | " + " | ".join(cells) + " |")
    print()


def _mean(items: list, clip: float) -> float:
    margins = np.concatenate([item[0] for item in items])
    offsets = np.concatenate([[0], np.cumsum([len(item[0]) for item in items])])
    return float(clipped_mean(margins, offsets, clip).mean())


if __name__ == "__main__":
    typer.run(main)
