"""Stage `verdict`: scores, floor and what is known about the servers become one verdict file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import assay
from assay import store
from assay.config import parse
from assay.gate import read_verdict
from assay.provenance import VERSION, git_state, provenance
from assay.records import JUDGE, ResponseStatus, Status, served_arm
from assay.run import run_of
from assay.samples.lock import load_set
from assay.verdicts.decide import RunFacts, judge_run, undecided_verdict
from assay.verdicts.model import ConfigInfo, Determinism, Instance, Tool, Verdict
from assay.verdicts.scoretable import floor_values
from assay.verdicts.suites import suite_of
from assay.verdicts.verify import Difference, read_scores
from assay.verdicts.verify import verify as verify_verdict


@dataclass(frozen=True)
class RunFiles:
    """The files that a verdict is decided from; all lists but that of the sets have one entry a server instance."""

    sets: list[Path]
    responses: list[Path]
    tokens: Path
    identities: list[Path]
    cleanups: list[Path]
    facts: list[Path]
    scores: Path
    floor: Path


def decide_run(files: RunFiles, options: Mapping[str, Any]) -> Verdict:
    """The verdict on one run.

    Args:
        files: what the run left.
        options: scoring options in effect, those of the modality's gates.
    """
    plan = store.run_options(files.responses)
    items = sorted(row["item_id"] for path in files.sets for row in load_set(path))
    rows = [row for path in files.responses for row in store.read_rows(path, "responses", _COLUMNS)]
    inputs = [
        *files.sets,
        *files.responses,
        files.tokens,
        *files.identities,
        *files.cleanups,
        *files.facts,
        files.scores,
        files.floor,
    ]
    suite = suite_of(plan["modality"])
    scored = store.read_provenance(files.scores)["options"]  # the run's own, and what words were normalised by
    gates = parse(suite.options, dict(options), "gate options")
    facts = RunFacts(
        config=_config_info(plan, store.read_provenance(files.tokens)["options"]),
        dtype=plan["dtype"],
        instances=tuple(
            Instance.measured(store.read_json(identity), store.read_json(cleanup), store.read_json(log), arms)
            for arms, identity, cleanup, log in zip(
                _planned_arms(plan), files.identities, files.cleanups, files.facts, strict=True
            )
        ),
        floor_arms=tuple(arm for arm in plan["reference"]["arms"] if arm != JUDGE),
        controls=tuple((control.name, gate) for control in suite.controls for gate in control.gates),
        options=gates,
        failures={
            (row["arm"], row["item_id"]): f"{row['status']}: {row['error'] or 'no further word'}"
            for row in rows
            if row["status"] != ResponseStatus.OK
        }
        | suite.unread(files.tokens),
        retried=sum(row["status"] == ResponseStatus.OK and row["attempts"] > 1 for row in rows),
        determinism=_determinism(plan, rows, suite.content(files.tokens)),
    )
    return judge_run(
        read_scores(files.scores, items),
        floor_values(store.iter_tables(files.floor, "floor")),
        facts,
        _tool(),
        provenance("verdict", inputs, {**scored, "scoring": gates.model_dump(mode="json")}),
    )


def refuse(plan: Mapping[str, Any]) -> Verdict:
    """The verdict on a config that cannot be judged yet."""
    return undecided_verdict(
        ConfigInfo(name=plan["config"], family=plan["family"]), Status.UNSUPPORTED, plan["unsupported"], _tool()
    )


def failed(config: str, family: str | None, cause: str) -> Verdict:
    """The verdict on a config of which a job failed, so that there is nothing to decide from."""
    return undecided_verdict(ConfigInfo(name=config, family=family), Status.ERROR, cause, _tool())


def verify(path: Path) -> list[Difference]:
    """Fields of a verdict file that its stored scores do not give."""
    run = run_of(path)
    return verify_verdict(read_verdict(path), run.scores, run.floor)


_COLUMNS = ["item_id", "arm", "status", "attempts", "output_sha256", "error"]


def _tool() -> Tool:
    state = git_state(assay.__file__)
    return Tool(version=VERSION, commit=state.commit, dirty=state.dirty)


def _config_info(plan: Mapping[str, Any], judged: Mapping[str, Any]) -> ConfigInfo:
    return ConfigInfo(
        name=plan["config"],
        family=plan["family"],
        arm=plan["arm"],
        modality=plan["modality"],
        model=plan["model"]["name"],
        dtype=plan["dtype"],
        tier=plan["tier"],
        fault=plan["fault"],
        image_by_tag=plan.get("image_by_tag"),
        weights_sha256=plan["model"]["weights_sha256"],
        judge_weights_sha256=judged["weights_sha256"],
        judge_padding=judged.get("settings", {}).get("padding"),
    )


def _determinism(
    plan: Mapping[str, Any], rows: list[dict[str, Any]], content: Mapping[tuple[str, str], str]
) -> Determinism:
    """Share of items whose output is the same bytes (the same `content`, where that is known) in the first and last
    pass of instance 0 (alone and under load), and in the last pass of both instances."""
    outputs: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["output_sha256"]:
            same = content.get((row["arm"], row["item_id"]), row["output_sha256"])
            outputs.setdefault(row["arm"], {})[row["item_id"]] = same
    arms = _planned_arms(plan)

    def identical(a: str, b: str) -> tuple[float | None, int]:
        left, right = outputs.get(a, {}), outputs.get(b, {})
        shared = left.keys() & right.keys() if a != b else set()
        same = sum(left[key] == right[key] for key in shared)
        return (same / len(shared) if shared else None), len(shared)

    under_load, n = identical(arms[0][0], arms[0][-1])
    across, m = identical(arms[0][-1], arms[-1][-1])
    return Determinism(under_load_identical=under_load, cross_instance_identical=across, n=max(n, m))


def _planned_arms(plan: Mapping[str, Any]) -> list[list[str]]:
    """Passes of each instance, as arms of the score table."""
    return [[served_arm(number, item["name"]) for item in passes] for number, passes in enumerate(plan["instances"])]
