"""What a server's log says it runs: attention backend, fused-MoE configurations, execution provider, version.

Asked for is not picked: several engines end on another backend than the one they were told to use, so what was picked
is taken from the log alone, and is unknown when nothing was logged. The wordings are data (`config/facts/`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from assay.config import ASKED, FactKind, FactStatus, LogRule
from assay.engines.identity import HIDDEN
from assay.errors import ServerError, StoreError

TEXT_LIMIT = 1000  # characters of a message that are kept: engines print their whole configuration in one

# --- messages -----------------------------------------------------------------------------------------------------

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TIME = r"(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:\d\d)?"
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
_WRITER = r"\([\w-]+ pid=\d+\)|\[Stage-\d+\]"
_STAMP = rf"{_LEVEL} {_TIME}(?: \[[\w.]+:\d+\])?|\[{_TIME}(?: [A-Z]+\d+)*\]"
_WRAPPER = r"[\w-]+ +\||\[rank\d+\]:|\[\d+,\d+\]<std\w+>:"  # of docker compose, torchrun, mpirun
_ONNXRUNTIME = r"\[[VIWEF]:onnxruntime:[^\]]*\]"
# What may stand before a message at the start of a line.
_PREFIX = re.compile(rf"(?:(?:{_WRAPPER}|{_WRITER}|{_STAMP}|{_TIME}|{_ONNXRUNTIME})\s*)*")
# What starts a message in the middle of a line too: writers that share a pipe, and progress bars, leave out newlines.
_HEADER = re.compile(rf"(?:(?:{_WRITER}) ?)*(?:{_STAMP})")
_STAGE = re.compile(r"\[Stage-(\d+)\]")
_PROCESS = re.compile(rf"\(([\w-]+) pid=\d+\)|\[{_TIME} ((?: ?[A-Z]+\d+)+)\]|\[(rank\d+)\]:|\[(\d+,\d+)\]<")
_SECRET = re.compile(r"""((?:key|token|secret|password)['"]?(?:=|: ?))(?:'[^']*'|"[^"]*"|\[[^\]]*\])""", re.IGNORECASE)
_WATCHED = re.compile(r"backend|attention|moe|execution ?provider", re.IGNORECASE)


@dataclass(frozen=True)
class Message:
    """One message of a log, without colours and prefix."""

    line: int  # from 1
    process: str | None  # which rank or worker wrote it, as the engine names it; without pid
    stage: str | None  # of a pipeline of models, where the engine serves one
    text: str


def messages(lines: Iterable[str]) -> Iterator[Message]:
    """The messages of a log, in order; secrets among an engine's printed arguments are hidden."""
    for number, line in enumerate(lines, 1):
        for part in _COLOUR.sub("", line).split("\r"):
            rest = part.strip()
            while rest:
                head = _PREFIX.match(rest)
                assert head is not None  # it matches the empty string too
                next_header = _HEADER.search(rest, head.end())
                end = next_header.start() if next_header else len(rest)
                if text := rest[head.end() : end].strip():
                    yield Message(number, _process(head[0]), _stage(head[0]), _SECRET.sub(rf"\1'{HIDDEN}'", text))
                rest = rest[end:]


def _process(prefix: str) -> str | None:
    found = _PROCESS.search(prefix)
    return found[found.lastindex or 0] if found else None


def _stage(prefix: str) -> str | None:
    found = _STAGE.search(prefix)
    return found[1] if found else None


# --- facts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoeShape:
    """The shape that a fused-MoE kernel configuration is for, in one convention whatever the engine's own.

    E is the number of experts on this rank; N the last size of w2, that is the intermediate size per rank (w1 has 2 N
    rows, gate and up); K the hidden size. vLLM and SGLang name files by this N, AITER prints `inter_dim`.
    """

    E: int
    N: int
    K: int | None = None
    top_k: int | None = None
    dtype: str | None = None  # as the engine spells it
    device: str | None = None
    block: tuple[int, ...] | None = None
    triton: str | None = None  # version whose folder the file lies in, 3_1_0
    stages: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Sighting:
    """Where a fact was logged."""

    line: int
    process: str | None


@dataclass(frozen=True)
class Fact:
    """One thing that a log says, however many ranks say it."""

    kind: FactKind
    value: str
    role: str | None  # the part of the model
    status: FactStatus | None
    stage: str | None
    moe: MoeShape | None
    rule: str  # FILE/RULE of config/facts
    source: str  # where that wording was seen
    text: str  # the first message that says it
    sightings: tuple[Sighting, ...]

    @property
    def line(self) -> int:
        """Line of the first sighting."""
        return self.sightings[0].line

    def line_in(self, process: str | None) -> int:
        """Line of the first sighting in one process that says it."""
        return next(sighting.line for sighting in self.sightings if sighting.process == process)

    @property
    def answer(self) -> str:
        """What distinguishes this fact from another answer to the same question."""
        return self.value if self.moe is None else f"{self.value} {self.status}"

    def as_json(self) -> dict[str, Any]:
        """The fact as JSON-ready data."""
        return {**asdict(self), "line": self.line}


@dataclass(frozen=True)
class Unmatched:
    """A message that may hold a fact in a wording that no rule knows."""

    line: int
    text: str
    count: int


@dataclass(frozen=True)
class LogFacts:
    """All that rules read from one log."""

    facts: list[Fact]
    unmatched: list[Unmatched]

    def as_json(self) -> dict[str, Any]:
        """The contract of `assay facts --json`."""
        return {
            "facts": [fact.as_json() for fact in self.facts],
            "unmatched": [asdict(item) for item in self.unmatched],
        }


def read_facts(lines: Iterable[str], rules: Mapping[str, LogRule]) -> LogFacts:
    """Facts and unmatched messages of a log, each once, in the order of their first line.

    Args:
        lines: of the log, with or without newlines.
        rules: FILE/RULE -> rule (`Config.rules_of`). Every rule is tried on every message.
    """
    compiled = {name: (re.compile(rule.pattern), rule) for name, rule in rules.items()}
    facts: dict[tuple[Any, ...], Fact] = {}
    unmatched: dict[str, Unmatched] = {}
    for message in messages(lines):
        matched = False
        for name, (pattern, rule) in compiled.items():
            if found := pattern.search(message.text):
                matched = True
                fact = _fact(name, rule, found.groupdict(), message)
                key = (fact.kind, fact.value, fact.role, fact.status, fact.stage, fact.moe)
                known = facts.get(key)
                facts[key] = replace(known, sightings=known.sightings + fact.sightings) if known else fact
        if not matched and _WATCHED.search(message.text):
            first = unmatched.get(message.text, Unmatched(message.line, message.text[:TEXT_LIMIT], 0))
            unmatched[message.text] = replace(first, count=first.count + 1)
    return LogFacts(list(facts.values()), list(unmatched.values()))


def read_log(path: str | Path, rules: Mapping[str, LogRule]) -> LogFacts:
    """`read_facts` of the file at `path`.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        # Only newlines end a line here, so that numbers are those that an editor shows.
        return read_facts(Path(path).read_text(encoding="utf-8", errors="replace").split("\n"), rules)
    except OSError as error:
        raise StoreError(f"cannot read the log {path}: {error.strerror}") from None


def _fact(name: str, rule: LogRule, groups: Mapping[str, str], message: Message) -> Fact:
    moe = None
    if rule.kind is FactKind.MOE_CONFIG:
        value, moe = groups["file"], _shape_of_file(groups["file"], groups.get("triton"))
    elif rule.kind is FactKind.AITER_MOE:
        moe = _shape_of_numbers(groups)
        value = f"E={moe.E},N={moe.N},K={moe.K},top_k={moe.top_k},dtype={moe.dtype}"
    else:
        value = groups["value"]
    role = rule.role and rule.role.format(**groups)
    sightings = (Sighting(message.line, message.process),)
    return Fact(
        rule.kind, value, role, rule.status, message.stage, moe, name, rule.source, message.text[:TEXT_LIMIT], sightings
    )


def _shape_of_file(name: str, triton: str | None) -> MoeShape:
    """The shape in a file name like `E=128,N=768,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json`."""
    values = dict(part.split("=", 1) for part in re.split(r",(?=\w+=)", name.removesuffix(".json")) if "=" in part)
    block = values.get("block_shape")
    return MoeShape(
        E=int(values["E"]),
        N=int(values["N"]),
        dtype=values.get("dtype"),
        device=values.get("device_name"),
        block=tuple(map(int, re.findall(r"\d+", block))) if block else None,
        triton=triton,
    )


def _shape_of_numbers(groups: Mapping[str, str]) -> MoeShape:
    return MoeShape(
        E=int(groups["experts"]),
        N=int(groups["intermediate"]),
        K=int(groups["hidden"]),
        top_k=int(groups["top_k"]),
        dtype=groups["dtype"],
        stages=int(groups["stages"]),
        tokens=int(groups["tokens"]),
    )


# --- what they say together ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """What a log says of one question: a kind, for one part of the model and one stage."""

    kind: FactKind
    role: str | None
    stage: str | None
    asked: tuple[Fact, ...]
    picked: Mapping[str | None, tuple[Fact, ...]]  # process -> what holds there at the end of the log
    agreed: bool  # whether all processes that say anything say the same

    @property
    def question(self) -> str:
        """What this is a statement of."""
        parts = [self.kind.value, self.role or "", f"(stage {self.stage})" if self.stage else ""]
        return " ".join(part for part in parts if part)

    @property
    def otherwise(self) -> bool:
        """Whether the log says anything but what was asked for: it was turned down, another was picked, or processes
        disagree. Names are compared without case: engines spell one in several."""
        asked = {fact.value.casefold() for fact in self.asked}
        picked = {fact.value.casefold() for facts in self.picked.values() for fact in facts}
        turned_down = any(fact.status is FactStatus.REJECTED for fact in self.asked)
        return turned_down or not self.agreed or bool(asked and picked - asked)

    def __str__(self) -> str:
        asked = ", ".join(f"{fact.value}{' (rejected)' * (fact.status is FactStatus.REJECTED)}" for fact in self.asked)
        if not asked:
            return self._picked
        return f"asked {asked} → {'picked ' * bool(self.picked)}{self._picked}"

    @property
    def _picked(self) -> str:
        if not self.picked:
            return "unknown: not logged"
        if self.agreed:
            return _answers((fact.line, fact) for facts in self.picked.values() for fact in facts)
        sides = (
            f"{process or 'unnamed'}: {_answers((fact.line_in(process), fact) for fact in facts)}"
            for process, facts in self.picked.items()
        )
        return f"processes disagree: {'; '.join(sides)}"


def _answers(facts: Iterable[tuple[int, Fact]]) -> str:
    """Each answer once, with the line that says it first."""
    lines: dict[str, int] = {}
    for line, fact in facts:
        lines.setdefault(fact.answer, line)
    return ", ".join(f"{answer} (line {line})" for answer, line in lines.items())


def resolve(facts: Sequence[Fact], rules: Iterable[LogRule]) -> list[Statement]:
    """One statement for each question that the facts answer, and for each kind of fact that is not logged at all.

    Kinds that none of the engine's `rules` looks for are no questions. Attention of role `main` is one even when only
    the vision tower (`vit`) said what it picked.
    """
    kinds = {rule.kind for rule in rules}
    settled = [fact for fact in facts if fact.status not in ASKED]
    questions = dict.fromkeys((fact.kind, fact.role, fact.stage) for fact in settled)
    answered = {(kind, role) for kind, role, _ in questions}
    for fact in facts:  # what was asked for without a stage was asked for in every stage
        if fact.stage or (fact.kind, fact.role) not in answered:
            questions[fact.kind, fact.role, fact.stage] = None
    attention = {role for kind, role, _ in questions if kind is FactKind.ATTENTION}
    if FactKind.ATTENTION in kinds and attention <= {"vit"}:
        questions[FactKind.ATTENTION, "main", None] = None
    order = list(FactKind)
    for kind in kinds - {kind for kind, _, _ in questions}:
        questions[kind, None, None] = None
    return [
        _statement(kind, role, stage, facts)
        for kind, role, stage in sorted(questions, key=lambda key: (order.index(key[0]), key[1] or "", key[2] or ""))
    ]


def _statement(kind: FactKind, role: str | None, stage: str | None, facts: Sequence[Fact]) -> Statement:
    here = [fact for fact in facts if fact.kind is kind]
    asked = [f for f in here if f.status in ASKED and f.role == role and f.stage in (None, stage)]
    asked.sort(key=lambda fact: fact.status is FactStatus.REJECTED)  # of one value, that it was rejected says more
    found = [f for f in here if f.status not in ASKED and f.stage == stage and _concerns(f, role)]
    picked = {
        process: _last_word(process, found) for process in dict.fromkeys(s.process for f in found for s in f.sightings)
    }
    return Statement(
        kind, role, stage, tuple({f.value: f for f in asked}.values()), picked, _agree(kind, picked.values())
    )


def _concerns(fact: Fact, role: str | None) -> bool:
    """Whether `fact` answers for `role`: an override of `dit` holds for `dit:self` too."""
    overrides = fact.status is FactStatus.OVERRIDDEN and (role or "").startswith(f"{fact.role}:")
    return fact.role == role or overrides


def _last_word(process: str | None, facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """What holds in `process` at the end: an override drops what was picked before it."""
    seen = sorted(((s.line, f) for f in facts for s in f.sightings if s.process == process), key=lambda item: item[0])
    holds: dict[Fact, None] = {}
    for _, fact in seen:
        if fact.status is FactStatus.OVERRIDDEN:
            holds.clear()
        holds[fact] = None
    return tuple(holds)


def _agree(kind: FactKind, sides: Collection[tuple[Fact, ...]]) -> bool:
    if kind is FactKind.AITER_MOE:  # one line for each number of tokens, and ranks see different numbers
        shapes = [{fact.moe: fact.status for fact in side} for side in sides]
        return all(a[shape] == b[shape] for a in shapes for b in shapes for shape in a.keys() & b.keys())
    return len({frozenset(fact.answer for fact in side) for side in sides}) <= 1


# --- refusal ------------------------------------------------------------------------------------------------------


def require_logged_provider(facts: Iterable[Fact]) -> None:
    """Refuse a log in which an execution provider was asked for and turned down, or another one was picked.

    Raises:
        ServerError: the message names what was asked for and what was picked.
    """
    providers = [fact for fact in facts if fact.kind is FactKind.EXECUTION_PROVIDER]
    asked = list(dict.fromkeys(fact.value for fact in providers if fact.status in ASKED))
    picked = list(dict.fromkeys(fact.value for fact in providers if fact.status not in ASKED))
    rejected = any(fact.status is FactStatus.REJECTED for fact in providers)
    if rejected or (asked and picked and picked[0] not in asked):
        raise ServerError(
            f"execution providers {asked} were asked for, the log says that {picked or 'an unknown one'} was picked: "
            "install a build of onnxruntime that holds the one asked for, or ask for one that is there"
        )
