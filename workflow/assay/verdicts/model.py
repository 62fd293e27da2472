"""The verdict JSON, typed. Every number is finite or null; unknown keys are refused; coverage closes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from assay.config import AnyGates, CaveatCode, Padding
from assay.errors import StoreError
from assay.records import FailureKind, Status

SCHEMA_VERSION: Literal["assay/verdict/1"] = "assay/verdict/1"

Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Base of every part of a verdict."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Tool(Strict):
    """The program that wrote a verdict."""

    name: str = "assay"
    version: str
    commit: str | None = None
    dirty: bool | None = None


class ConfigInfo(Strict):
    """What was judged. Everything but the name is null for a config that cannot be judged yet."""

    name: str
    family: str | None = None
    arm: str | None = None
    modality: str | None = None
    model: str | None = None
    dtype: str | None = None
    tier: str | None = None
    fault: str | None = None
    image_by_tag: str | None = Field(default=None, description="Image that was run without a digest")
    weights_sha256: str | None = Field(default=None, description="Of the files of the model that was served")
    judge_weights_sha256: str | None = Field(default=None, description="Of the files of the model that judged")
    judge_padding: Padding | None = Field(
        default=None, description="Speech recognition: what the judge filled up the last window of an audio with"
    )


class Claim(Strict):
    """What the verdict claims about the rate of bad items: a bound, never a proof."""

    unit: Literal["item"] = "item"
    bad: Count
    n: Count
    rate_upper95: Finite
    method: Literal["clopper_pearson_one_sided"] = "clopper_pearson_one_sided"


class Caveat(Strict):
    """A limitation the reader must know of."""

    code: CaveatCode
    detail: str
    gate: str | None = None


class Unscored(Strict):
    """A planned request without a scored response."""

    item_id: str
    arm: str
    reason: str


class Coverage(Strict):
    """Planned requests (items x passes of every instance), and what became of each."""

    planned: Count
    scored: Count
    retried: Count = Field(default=0, description="Of those, answered at the second attempt, after a transport error")
    failed: list[Unscored] = Field(default=[], description="Answered wrongly or not at all, and recorded as such")
    missing: list[Unscored] = Field(default=[], description="No record at all")

    @model_validator(mode="after")
    def _closes(self) -> Coverage:
        found = self.scored + len(self.failed) + len(self.missing)
        if found != self.planned:
            raise ValueError(f"coverage does not close: planned {self.planned}, accounted for {found}")
        listed = [(entry.item_id, entry.arm) for entry in (*self.failed, *self.missing)]
        if len(set(listed)) != len(listed):
            raise ValueError("coverage lists a request twice")
        return self


class EvidenceSummary(Strict):
    """How much the served responses prove, counted over items and passes."""

    level_counts: dict[str, Count]
    prompt_by_ids: Count
    prompt_by_count: Count
    prompt_unchecked: Count


class Threshold(Strict):
    """Where the line is, and why there."""

    value: Finite | None
    source: Literal["floor", "device_profile", "fallback_strictest", "absolute", "declared"]
    kappa: Finite | None = None
    unit: str | None = Field(
        default=None, description="If it is a limit of each item, of which the gate counts those above"
    )
    detail: str


class FloorSummary(Strict):
    """The floor a threshold was cut from."""

    arms: list[str]
    arms_effective: Count = Field(description="Arms that differ from one another in any score")
    n_items: Count
    n_values: Count
    q50: Finite | None
    q99: Finite | None
    max: Finite | None
    cap: Finite | None = None
    method: str


class GateTest(Strict):
    """The statistical test of a gate."""

    name: Literal["B", "C", "R", "P", "N", "Q", "M", "binomial", "surprisal_z"]
    alpha: Finite
    p: Finite | None = None
    p_holm: Finite | None = None
    rank_p: Finite | None = Field(default=None, description="Test R on the same scores; it never fails a gate alone")
    ci_low: Finite | None = None
    ci_high: Finite | None = None
    ci_level: Finite | None = None
    n: Count
    seed: int | None = None
    permutations: int | None = None


class Confirm(Strict):
    """The same gate on another server instance."""

    performed: bool
    arm: str | None = None
    p: Finite | None = None
    reproduced_items: list[str] = []


class WorstItem(Strict):
    """An item to look at first."""

    item_id: str
    value: Finite | None = Field(
        description="null: infinite, the item failed or the judge gives a token no probability"
    )
    pos: int | None = Field(default=None, description="Token position of the worst margin")


class Diagnosis(Strict):
    """A hint at the cause."""

    hint: str
    gain: Finite | None = None


class Gate(Strict):
    """One named check of one pass."""

    id: str
    arm: str
    metric: str
    severity: Literal["hard", "gate", "info"]
    required: bool
    status: Status
    statistic: str
    value: Finite | None
    unit: str
    direction: Literal["lower_better", "higher_better"] = "lower_better"
    threshold: Threshold | None = None
    floor: FloorSummary | None = None
    test: GateTest | None = None
    confirm: Confirm | None = None
    worst_items: list[WorstItem] = []
    diagnosis: list[Diagnosis] = []
    caveats: list[Caveat] = []
    detail: str = Field(description="One sentence a person understands")


MOST = 0.5  # share of the items


def most_telling(gates: Sequence[Gate], items: int) -> list[Gate]:
    """Gates in the order to read them: the worst status first, and of those that fail the one that tells most.

    A gate that counts items tells the more, the larger their share of the planned `items`. One of a mean or a rate
    speaks of the whole set and names none: it comes behind gates that name most items, and before those of fewer.
    """
    order = list(Status)

    def rank(gate: Gate) -> tuple[int, float]:
        named = gate.value if gate.unit == "count" else None
        share = MOST if named is None or not items else named / items
        return order.index(gate.status), -share if gate.status is Status.FAIL else 0

    return sorted(gates, key=rank)


class PositiveControl(Strict):
    """A fault planted in the reference's own output, which its gate must fail."""

    fault: str
    gate: str
    expected: Literal["FAIL"] = "FAIL"
    got: Status | Literal["not_applicable"]
    detail: str


class NegativeControl(Strict):
    """A floor arm judged as if served, which no gate may fail."""

    arm: str
    gate: str
    got: Status | Literal["not_applicable"]
    p: Finite | None = None
    detail: str


class Controls(Strict):
    """The proof that the gates of this very run see faults and leave healthy output alone."""

    positive: list[PositiveControl] = []
    negative: list[NegativeControl] = []
    null_p_ks: Finite | None = Field(
        default=None,
        description="One-sided KS of the negative controls' p-values against U(0, 1), from 20 on; p-values of one arm "
        "depend on one another, so this is reported and decides nothing",
    )

    def tally(self) -> ControlTally:
        """The controls that applied, counted."""
        planted = [item.got for item in self.positive if item.got != "not_applicable"]
        harmless = [item.got for item in self.negative if item.got != "not_applicable"]
        return ControlTally(len(planted), planted.count(Status.FAIL), len(harmless), harmless.count(Status.FAIL))


class ControlTally(NamedTuple):
    """How the controls of a run came out."""

    planted: int
    caught: int
    harmless: int
    alarms: int


class Determinism(Strict):
    """Share of items whose output is the same bytes; null where there was nothing to compare. Never required."""

    under_load_identical: Finite | None
    cross_instance_identical: Finite | None
    n: Count


class StartupFailure(Strict):
    """Why a server never got ready."""

    kind: FailureKind
    message: str
    exit_code: int | None = None
    log_tail: str | None = None


class Startup(Strict):
    """How a server came up."""

    ready: bool
    seconds: Finite | None = None
    caches: dict[str, Literal["cold", "warm"] | None] = Field(
        default={}, description="Kind of engine cache -> what it was before the start; null: it could not be read"
    )
    room: dict[str, Count | None] = Field(
        default={}, description="Place its arm needs room in -> free bytes before the start; null: it could not be read"
    )
    failure: StartupFailure | None = None


class Left(Strict):
    """A process of a server's, or a container (which has no pid), that was there when it should not have been."""

    pid: int | None = None
    started_utc: str | None = Field(default=None, description="With the pid it names one process for ever")
    command: str | None = Field(default=None, description="null: it could not be looked at")

    def __str__(self) -> str:
        since = f" since {self.started_utc}" if self.started_utc else ""
        what = self.command or "a process"
        return what if self.pid is None else f"{what} (pid {self.pid}{since})"


class Cleanup(Strict):
    """How a server was stopped, and what it left."""

    stopped_by: str | None = Field(description="'exited', or the last signal that was needed")
    clean: bool
    orphans: list[Left] = Field(default=[], description="What outlived its first process and was ended by us")
    leftover: list[Left] = Field(default=[], description="What could not be ended")
    port_free: bool
    seconds: Finite | None = None
    exit_code: int | None = None


class Death(Strict):
    """A server that ended while requests were still planned."""

    message: str
    exit_code: int | None = None
    log_tail: str | None = None
    kind: FailureKind | None = None


class DeviceReport(Strict):
    """What the health gates said of an instance's devices."""

    outcome: Literal["pass", "warn", "refuse"]
    checks: list[dict[str, JsonValue]]
    elsewhere: list[str] = Field(default=[], description="Processes of others on devices that are not ours")
    error: str | None = None

    def said(self, *outcomes: str) -> list[str]:
        """What the gates with one of these outcomes said, each once."""
        found = [
            f"{one['gate']} on {one['device']}: {one['detail']}" for one in self.checks if one["outcome"] in outcomes
        ]
        return [*found, *([self.error] if self.error else [])]


class DevicesSeen(Strict):
    """What was seen of an instance's devices while it ran."""

    looks: Count
    failed: list[str] = Field(description="Why looks gave no answer, each reason once")
    strangers: list[dict[str, JsonValue]] = Field(description="Processes of others that came onto them")
    astray: list[str] = Field(description="Devices that were not leased and that its processes were on")
    unused: list[str] = Field(description="Leased devices that none of its processes was seen on")
    blind: list[str] = Field(description="Leased devices whose processes no source lists")
    health: DeviceReport = Field(description="The worst that each gate said, and what the kernel logged")


class Devices(Strict):
    """The devices an instance held."""

    leased: list[dict[str, JsonValue]]
    before: DeviceReport
    during: DevicesSeen
    after: DeviceReport


class Facts(Strict):
    """What an instance's log says it runs."""

    statements: dict[str, str] = Field(default={}, description="Question -> asked and picked, as logged")
    unmatched: Count = Field(default=0, description="Messages that may hold a fact and that no rule reads")
    otherwise: list[str] = Field(default=[], description="Questions whose answer is not what was asked for")
    refused: str | None = Field(default=None, description="The execution provider that runs, if another was asked for")


class Instance(Strict):
    """One server process tree."""

    instance: int
    arms: list[str] = Field(description="Passes it served, as arms of the score table")
    startup: Startup
    died: Death | None = None
    changed: list[str] = Field(default=[], description="Identity fields that differ between start and end")
    cleanup: Cleanup
    identity: dict[str, JsonValue] = Field(default={}, description="As measured at start and end")
    devices: Devices | None = Field(default=None, description="null: it uses none, or never had them")
    facts: Facts = Facts()

    @classmethod
    def measured(
        cls, identity: dict[str, Any], cleanup: dict[str, Any], facts: dict[str, Any], arms: list[str]
    ) -> Instance:
        """From the content of identity.json, cleanup.json and the facts of its log.

        A server that lived and whose identity was not measured at the end counts as changed: nothing proves that it was
        not.
        """
        changed = identity["changed"]
        lived = identity["startup"]["ready"] and identity["died"] is None
        unproven = ["identity at the end (not measured)"] if lived else []
        return cls.model_validate(
            {
                "instance": identity["instance"],
                "arms": arms,
                "startup": identity["startup"],
                "died": identity["died"],
                "changed": unproven if changed is None else changed,
                "cleanup": cleanup,
                "identity": {"start": identity["start"], "end": identity["end"]},
                "devices": identity["devices"],
                "facts": {
                    "statements": facts["statements"],
                    "unmatched": len(facts["unmatched"]),
                    "otherwise": facts["otherwise"],
                    "refused": facts["refused"],
                },
            }
        )


class Samples(Strict):
    """The planned items; besides, how many there are of each kind that the modality tells apart."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Count] = Field(init=False)

    planned: Count
    items_sha256: str


class Reference(Strict):
    """The judge's side."""

    floor_arms: list[str]
    known: list[str] = Field(default=[], description="Problems known before scoring (hashes, missing weights)")
    problems: list[str] = Field(default=[], description="Why the reference cannot be trusted; any is an ERROR")


class Verdict(Strict):
    """One verdict on one config."""

    schema_version: Literal["assay/verdict/1"] = SCHEMA_VERSION
    tool: Tool
    config: ConfigInfo
    verdict: Status
    reason: str = Field(min_length=1, description="One machine-built sentence")
    claim: Claim | None = None
    caveats: list[Caveat] = []
    coverage: Coverage
    evidence: EvidenceSummary | None = None
    gates: list[Gate] = []
    controls: Controls = Controls()
    determinism: Determinism | None = None
    instances: list[Instance] = []
    reference: Reference | None = None
    samples: Samples
    options: AnyGates | None = None
    options_sha256: str | None = None
    provenance: dict[str, JsonValue] = Field(default={}, description="Inputs with sha256, host, times; set by the rule")

    @model_validator(mode="after")
    def _is_for_a_config(self) -> Verdict:
        if self.verdict is Status.SKIPPED_OPTIONAL:
            raise ValueError("SKIPPED_OPTIONAL is a status of gates only")
        if self.verdict in (Status.PASS, Status.PASS_WITH_CAVEAT) and self.coverage.scored < self.coverage.planned:
            raise ValueError("a pass needs every planned request scored")
        return self


def parse_verdict(value: Any, where: str) -> Verdict:
    """A verdict as read from JSON.

    Raises:
        StoreError: a key is unknown or missing, or a value is wrong; each is named.
    """
    try:
        return TypeAdapter(Verdict).validate_python(value)
    except ValidationError as error:
        lines = (f"{where}: {'.'.join(map(str, item['loc'])) or 'verdict'}: {item['msg']}" for item in error.errors())
        raise StoreError("\n".join(lines)) from None


def verdict_schema() -> dict[str, Any]:
    """JSON Schema of the verdict file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "verdict",
        **Verdict.model_json_schema(),
    }
