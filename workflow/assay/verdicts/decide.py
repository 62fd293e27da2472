"""Gates, coverage, controls and facts about the servers to one verdict. Precedence is in `decide`, and only there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue
from scipy import stats as distributions

from assay.canonical import sha256_json, sha256_lines, sha256_text
from assay.config import AnyGates, Dtype
from assay.metrics import stats
from assay.records import FailureKind, Status
from assay.verdicts.drafts import settle
from assay.verdicts.evidence import COVERAGE, cover, reference_problems, summarise_evidence
from assay.verdicts.model import (
    Caveat,
    Claim,
    ConfigInfo,
    Controls,
    Coverage,
    Determinism,
    Devices,
    Gate,
    Instance,
    Left,
    NegativeControl,
    PositiveControl,
    Reference,
    Samples,
    Tool,
    Verdict,
    most_telling,
)
from assay.verdicts.scoretable import FloorValues, ScoreTable
from assay.verdicts.suite import Suite
from assay.verdicts.suites import suite_of
from assay.verdicts.trial import Floor

CONTROL_PREFIX = "control_"
KS_CONTROLS = 20  # p-values from which the null self-check is made
KILLED = "SIGKILL"


@dataclass(frozen=True)
class RunFacts:
    """What was planned and what is known about the servers: all that a verdict needs besides scores and floor.

    `controls` pairs a planted fault (arm `control_<fault>` of the scores) with a gate that must fail on it; `failures`
    maps (arm, item_id) to why a response could not be scored; `retried` counts the requests that were answered at the
    second attempt; `problems` are reasons known before scoring why the
    reference or the samples cannot be trusted.
    """

    config: ConfigInfo
    dtype: Dtype
    instances: tuple[Instance, ...]
    floor_arms: tuple[str, ...]
    controls: tuple[tuple[str, str], ...]
    options: AnyGates
    failures: Mapping[tuple[str, str], str] = field(default_factory=dict)
    retried: int = 0
    determinism: Determinism | None = None
    problems: tuple[str, ...] = ()

    @property
    def suite(self) -> Suite[Any]:
        """What its modality is judged by."""
        return suite_of(self.config.modality)

    @property
    def served(self) -> dict[int, list[str]]:
        """Instance -> its arms, of instances that came up."""
        return {entry.instance: entry.arms for entry in self.instances if entry.startup.ready}

    @property
    def all_arms(self) -> list[str]:
        """Every planned pass of every instance."""
        return [arm for entry in self.instances for arm in entry.arms]


@dataclass(frozen=True)
class Decision:
    """Status, the one sentence that says why, and what the reader must know besides."""

    status: Status
    reason: str
    caveats: tuple[Caveat, ...] = ()


def judge_run(
    table: ScoreTable,
    values: FloorValues,
    facts: RunFacts,
    tool: Tool,
    provenance: Mapping[str, JsonValue] | None = None,
) -> Verdict:
    """The verdict on one run.

    Args:
        table: scores of all arms, aligned to the plan.
        values: what the floor is cut from besides (`scoretable.floor_values`).

    Raises:
        StoreError: no suite judges the modality.
    """
    suite, options = facts.suite, facts.options
    floor = suite.cut_floor(table, values, facts.floor_arms, facts.dtype, options)
    coverage = cover(table, facts.all_arms, facts.failures, facts.retried)
    problems = [
        *facts.problems,
        *reference_problems(table, facts.floor_arms, facts.all_arms),
        *suite.judge_problems(table, floor),
    ]
    gates: list[Gate] = []
    controls = Controls()
    if table.items and facts.served:
        gates = suite.evaluate(table, floor, facts.served, facts.dtype, options)
        controls = evaluate_controls(table, values, floor, gates, facts)
    claim = suite.claim(gates)
    decision = decide(
        coverage=coverage,
        gates=most_telling(gates, len(table.items)),
        controls=controls,
        instances=facts.instances,
        problems=problems,
        claim=claim,
        image_by_tag=facts.config.image_by_tag,
        alpha=options.alpha,
    )
    return Verdict(
        tool=tool,
        config=facts.config,
        verdict=decision.status,
        reason=decision.reason,
        claim=claim,
        caveats=list(decision.caveats),
        coverage=coverage,
        evidence=summarise_evidence(table, facts.all_arms),
        gates=gates,
        controls=controls,
        determinism=facts.determinism,
        instances=list(facts.instances),
        reference=Reference(floor_arms=list(facts.floor_arms), known=list(facts.problems), problems=problems),
        samples=Samples(
            planned=len(table.items),
            items_sha256=sha256_lines(table.items),
            **{kind: int(table.has(metric).sum()) for kind, metric in suite.counts.items()},
        ),
        options=options,
        options_sha256=sha256_json(options.model_dump(mode="json")),
        provenance=dict(provenance or {}),
    )


# --- controls ----------------------------------------------------------------------------------------------------


def evaluate_controls(
    table: ScoreTable, values: FloorValues, floor: Floor, gates: Sequence[Gate], facts: RunFacts
) -> Controls:
    """Positive controls: each planted fault, scored like served output, must fail its gate. Negative controls: each
    floor arm, judged against the others, must fail none (Holm over all of them: healthy arms together fail one at
    `alpha` at most).

    A control whose gate had no evidence, or could not decide, in this very run says nothing about the gate: it is
    recorded as not_applicable, with that reason.
    """
    positive = [_positive(table, floor, gates, facts, *entry) for entry in sorted(facts.controls)]
    negative = _negative(table, values, floor, facts)
    p_values = [control.p for control in negative if control.p is not None]
    ks = distributions.kstest(p_values, "uniform", alternative="greater") if len(p_values) >= KS_CONTROLS else None
    return Controls(positive=positive, negative=negative, null_p_ks=None if ks is None else float(ks.pvalue))


def _positive(
    table: ScoreTable, floor: Floor, gates: Sequence[Gate], facts: RunFacts, fault: str, name: str
) -> PositiveControl:
    arm = f"{CONTROL_PREFIX}{fault}"
    served = [gate for gate in gates if gate.id == name]
    if not served:
        detail = f"no item of this run calls for {name}"
        return PositiveControl(fault=fault, gate=name, got="not_applicable", detail=detail)
    if all(gate.status is Status.SKIPPED_OPTIONAL for gate in served):
        return PositiveControl(fault=fault, gate=name, got="not_applicable", detail=served[0].detail)
    check = facts.suite.checks[name]
    if blocked := check.powerless and check.powerless(table, facts.options):
        return PositiveControl(fault=fault, gate=name, got="not_applicable", detail=blocked)
    if not table.metrics(arm):
        return PositiveControl(fault=fault, gate=name, got=Status.ERROR, detail=f"the scores hold no arm '{arm}'")
    trial = facts.suite.trial(table, arm, floor, facts.options, facts.dtype, planned=False)
    (result,) = settle([check.judge(trial)], facts.options)
    undecided = result.status is Status.INCONCLUSIVE
    return PositiveControl(
        fault=fault, gate=name, got="not_applicable" if undecided else result.status, detail=result.detail
    )


def _negative(table: ScoreTable, values: FloorValues, floor: Floor, facts: RunFacts) -> list[NegativeControl]:
    suite = facts.suite
    drafts = []
    for arm in floor.effective:
        rest = [other for other in floor.effective if other != arm]
        if not rest:
            continue
        others = suite.cut_floor(table, values, rest, facts.dtype, facts.options)
        trial = suite.trial(table, arm, others, facts.options, facts.dtype, planned=False)
        drafts += [check.judge(trial) for check in suite.applicable(table).values() if check.on_floor]
    return [
        NegativeControl(
            arm=gate.arm, gate=gate.id, got=gate.status, p=gate.test.p if gate.test else None, detail=gate.detail
        )
        for gate in settle(drafts, facts.options)
    ]


def _control_errors(controls: Controls, alpha: float) -> dict[str, str]:
    """Gates whose controls misbehave -> what happened."""
    errors = {
        control.gate: f"gate blind: {control.gate} misses the planted fault '{control.fault}' ({control.detail})"
        for control in controls.positive
        if control.got not in (Status.FAIL, "not_applicable")
    }
    failed = [control for control in controls.negative if control.got is Status.FAIL]
    if len(failed) > alpha * len(controls.negative):
        for control in failed:
            errors.setdefault(
                control.gate,
                f"gate trigger-happy: {control.gate} fails on the healthy floor arm '{control.arm}' ({control.detail})",
            )
    return errors


# --- decision ----------------------------------------------------------------------------------------------------


def decide(
    *,
    coverage: Coverage,
    gates: Sequence[Gate],
    controls: Controls | None = None,
    instances: Sequence[Instance] = (),
    problems: Sequence[str] = (),
    claim: Claim | None = None,
    claim_rate: float | None = None,
    reference: bool = True,
    image_by_tag: str | None = None,
    alpha: float = 0.01,
) -> Decision:
    """One status and one reason, that of the first of the gates, by precedence:

    1. ERROR when no gate can be believed: no planned item, a reference that cannot be trusted, code that changed while
       it served, another execution provider than was asked for, devices that had faults. A server that ended by itself
       before it was ready needs no gate to be believed: FAIL(startup).
    2. FAIL: a planned request without a scored response, or a failing gate whose controls behaved.
    3. ERROR: an instance that never came up for a reason of ours or unknown, a gate with misbehaving controls, a server
       that left something behind, on its devices too.
    4. INCONCLUSIVE: a required gate that could not decide, or a bound above the `claim_rate` asked for.
    5. PASS_WITH_CAVEAT with any caveat (`reference` False: self-consistency only); else PASS.
    """
    caveats = tuple(_caveats(coverage, gates, instances, reference, image_by_tag))
    control_errors = _control_errors(controls or Controls(), alpha)
    steps = [
        (Status.ERROR, ["no item was planned: an empty sample set is never a pass"] if not coverage.planned else []),
        (Status.FAIL, _startup(instances, FailureKind.EXITED)),
        (Status.ERROR, [*problems, *_changed(instances), *_not_as_asked(instances), *_faulty(instances)]),
        (Status.FAIL, [*_uncovered(coverage, instances), *_failing(gates, control_errors)]),
        (
            Status.ERROR,
            [
                *_startup(instances, *(kind for kind in _HOW if kind is not FailureKind.EXITED)),
                *control_errors.values(),
                *_unclean(instances),
                *([] if gates else ["no gate was evaluated: nothing was measured"]),
            ],
        ),
        (Status.INCONCLUSIVE, [*_undecided(gates), *_unproven(claim, claim_rate)]),
    ]
    for status, reasons in steps:
        if reasons:
            return Decision(status, _sentence(reasons), caveats)
    bound = (
        f"at most {100 * claim.rate_upper95:.3g} % of items are bad (95 % confidence)" if claim else "every gate passes"
    )
    if caveats:
        codes = ", ".join(dict.fromkeys(caveat.code for caveat in caveats))
        return Decision(Status.PASS_WITH_CAVEAT, f"every gate passes, {bound}; mind: {codes}", caveats)
    return Decision(Status.PASS, f"every gate passes, {bound}" if claim else bound)


def _sentence(reasons: Sequence[str]) -> str:
    others = len(reasons) - 1
    return reasons[0] + (f" (and {others} more reason{'s' if others > 1 else ''})" if others else "")


def _startup(instances: Sequence[Instance], *kinds: FailureKind) -> list[str]:
    return [
        f"startup: instance {entry.instance} {_HOW[failure.kind]}: {failure.message}"
        for entry in instances
        if (failure := entry.startup.failure) and failure.kind in kinds
    ]


_HOW = {
    FailureKind.EXITED: "ended by itself before it was ready",
    FailureKind.NOT_READY: "never became ready, nothing was measured",
    FailureKind.PORT_TAKEN: "found its port taken, nothing was measured",
    FailureKind.CANNOT_START: "could not be started, nothing was measured",
    FailureKind.DEVICES_UNFIT: "had no devices fit to measure on, nothing was measured",
    FailureKind.OUT_OF_MEMORY: "ran out of the memory it was given, nothing was measured",
    FailureKind.ENGINE_UNREACHABLE: "had no container engine to run in, nothing was measured",
    FailureKind.IMAGE_MISSING: "had no image to run from, nothing was measured",
    FailureKind.IMAGE_MISMATCH: "would have run from an image that is not the one pinned, nothing was measured",
}


def _changed(instances: Sequence[Instance]) -> list[str]:
    return [
        f"instance {entry.instance} changed while it served: {', '.join(entry.changed)}"
        for entry in instances
        if entry.changed
    ]


def _not_as_asked(instances: Sequence[Instance]) -> list[str]:
    return [f"instance {entry.instance}: {entry.facts.refused}" for entry in instances if entry.facts.refused]


def _faulty(instances: Sequence[Instance]) -> list[str]:
    return [
        f"the devices of instance {entry.instance} had faults while it ran: "
        + "; ".join(health.said("refuse") or health.said("unknown"))
        for entry in instances
        if entry.devices and (health := entry.devices.during.health).outcome == "refuse"
    ]


def _unclean(instances: Sequence[Instance]) -> list[str]:
    changed = [
        f"instance {entry.instance} did not leave its devices as they were: "
        + "; ".join(entry.devices.after.said("refuse") or entry.devices.after.said("unknown"))
        for entry in instances
        if entry.devices and entry.devices.after.outcome == "refuse"
    ]
    return changed + [
        f"instance {entry.instance} did not stop cleanly: left {_listed(entry.cleanup.leftover) or 'no process'}, "
        f"its port {'free' if entry.cleanup.port_free else 'still taken'}"
        for entry in instances
        if not entry.cleanup.clean
    ]


def _listed(processes: Sequence[Left]) -> str:
    return ", ".join(map(str, processes))


def _uncovered(coverage: Coverage, instances: Sequence[Instance]) -> list[str]:
    absent = {arm for entry in instances if not entry.startup.ready for arm in entry.arms}
    lost = [entry for entry in (*coverage.failed, *coverage.missing) if entry.arm not in absent]
    if not lost:
        return []
    died = [entry for entry in instances if entry.died]
    why = f"; instance {died[0].instance} died: {died[0].died.message}" if died and died[0].died else ""
    first = lost[0]
    return [
        f"coverage: {len(lost)} of {coverage.planned} planned requests have no scored response, first {first.item_id} "
        f"on {first.arm}: {first.reason}{why}"
    ]


def _failing(gates: Sequence[Gate], errors: Mapping[str, str]) -> list[str]:
    # What the coverage gate says, the coverage block has said already.
    failing = [gate for gate in gates if gate.status is Status.FAIL and gate.id not in {*errors, COVERAGE}]
    return [
        f"{gate.id} on {gate.arm}: {gate.detail}" + "".join(f"; {entry.hint}" for entry in gate.diagnosis)
        for gate in failing
    ]


def _undecided(gates: Sequence[Gate]) -> list[str]:
    return [
        f"{gate.id} on {gate.arm} cannot decide: {gate.detail}"
        for gate in gates
        if gate.required and gate.status is Status.INCONCLUSIVE
    ]


def _unproven(claim: Claim | None, rate: float | None) -> list[str]:
    if claim is None or rate is None or claim.rate_upper95 <= rate:
        return []
    needed = stats.n_for_zero_failures(rate)
    bound = f"{claim.bad} bad of {claim.n} bounds the rate by {100 * claim.rate_upper95:.3g} %, not {100 * rate:.3g} %"
    return [f"{bound}; {needed} items without a bad one would"]


def _caveats(
    coverage: Coverage,
    gates: Sequence[Gate],
    instances: Sequence[Instance],
    reference: bool,
    image_by_tag: str | None,
) -> list[Caveat]:
    found = [caveat for gate in gates for caveat in gate.caveats]
    if coverage.retried:
        why = f"{coverage.retried} of {coverage.planned} requests were answered at the second attempt only"
        found.append(Caveat(code="retried", detail=f"{why}, after a transport error"))
    if image_by_tag:
        why = f"the image {image_by_tag} ran without a digest: the same tag may be another image tomorrow"
        found.append(Caveat(code="image_by_tag", detail=why))
    found += [caveat for entry in instances if entry.devices for caveat in _device_caveats(entry, entry.devices)]
    found += [
        Caveat(code="not_as_asked", detail=f"instance {entry.instance}: {name}: {entry.facts.statements[name]}")
        for entry in instances
        for name in entry.facts.otherwise
    ]
    if not reference:
        found.append(Caveat(code="self_consistency_only", detail="no reference: a deterministic fault stays unseen"))
    found += [
        Caveat(code="killed", detail=f"instance {entry.instance} stopped only when killed")
        for entry in instances
        if entry.cleanup.stopped_by == KILLED
    ]
    found += [
        Caveat(
            code="orphans",
            detail=f"workers of instance {entry.instance} outlived it and were ended: {_listed(entry.cleanup.orphans)}",
        )
        for entry in instances
        if entry.cleanup.orphans
    ]
    if len(instances) == 1:
        found.append(Caveat(code="single_instance", detail="no second instance: nothing could be confirmed on another"))
    return [caveat for index, caveat in enumerate(found) if caveat not in found[:index]]


def _device_caveats(entry: Instance, devices: Devices) -> Iterator[Caveat]:
    """What was not as it should be with an instance's devices, though it could be measured."""
    during, instance = devices.during, entry.instance
    wrong = [f"its processes were on {name}, which it was not given" for name in during.astray]
    if entry.startup.ready and during.looks:
        wrong += [f"none of its processes was seen on {name}, which it was given" for name in during.unused]
    if wrong:
        yield Caveat(code="device_use", detail=f"instance {instance}: {'; '.join(wrong)}")
    if during.strangers:
        who = ", ".join(
            f"{one['name'] or 'a process'} (pid {one['pid']}) on {one['device']}" for one in during.strangers
        )
        yield Caveat(code="co_tenant", detail=f"instance {instance}: others used its devices while it ran: {who}")
    unwell = [
        f"{when} it ran: {said}"
        for when, report in (("before", devices.before), ("while", during.health), ("after", devices.after))
        if report.outcome == "warn"
        for said in report.said("warn", "unknown")
    ]
    if unwell:
        yield Caveat(code="device_health", detail=f"instance {instance}: {'; '.join(unwell)}")
    unseen = [*during.failed[:1], *(f"no source lists the processes on {name}" for name in during.blind)]
    if not during.looks:
        unseen.append("its devices were never looked at while it ran")
    if unseen:
        yield Caveat(code="device_unwatched", detail=f"instance {instance}: {'; '.join(unseen)}")


# --- configs without evidence ------------------------------------------------------------------------------------


def undecided_verdict(config: ConfigInfo, status: Status, reason: str, tool: Tool) -> Verdict:
    """The verdict on a config of which there is no evidence: it cannot be judged yet, or a job of its run failed."""
    return Verdict(
        tool=tool,
        config=config,
        verdict=status,
        reason=reason,
        coverage=Coverage(planned=0, scored=0),
        samples=Samples(planned=0, items_sha256=sha256_text("")),
    )
