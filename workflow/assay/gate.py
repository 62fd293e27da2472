"""Verdicts as an exit status and as JUnit: the only place where a verdict stops a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from assay import store
from assay.errors import AssayError
from assay.records import EXIT_CODES, Status
from assay.verdicts.model import Verdict, parse_verdict

STRICT_CAVEAT = 5


def read_verdict(path: str | Path) -> Verdict:
    """A verdict file, checked.

    Raises:
        StoreError: it is missing, not JSON, or not a verdict.
    """
    return parse_verdict(store.read_json(path), str(path))


def exit_code(status: Status, strict: bool = False) -> int:
    """Exit status of one verdict; `strict` does not accept caveats."""
    return STRICT_CAVEAT if strict and status is Status.PASS_WITH_CAVEAT else EXIT_CODES[status]


def write_junit(paths: Iterable[str | Path], output: str | Path) -> None:
    """Write one JUnit test case a verdict: FAIL and INCONCLUSIVE are failures, ERROR an error, UNSUPPORTED a skip."""
    suite = TestSuite("assay")
    for path in paths:
        suite.add_testcase(_test_case(read_verdict(path)))
    report = JUnitXml()
    report.add_testsuite(suite)
    with store.atomic_path(output) as temporary:
        report.write(str(temporary), pretty=True)


def _test_case(verdict: Verdict) -> TestCase:
    case = TestCase(verdict.config.name, classname=f"assay.{verdict.config.family or 'unsupported'}")
    kind = {
        Status.FAIL: Failure,
        Status.INCONCLUSIVE: Failure,
        Status.ERROR: Error,
        Status.UNSUPPORTED: Skipped,
    }.get(verdict.verdict)
    if kind is not None:
        case.result = [kind(verdict.reason, verdict.verdict.value.lower())]
    else:
        case.system_out = verdict.reason
    return case


def check(
    paths: Iterable[str | Path], allowed_caveats: set[str] | None = None, known_wrong: Collection[str] = ()
) -> list[str]:
    """One line for every verdict that does not pass. UNSUPPORTED configs are listed in JUnit and stop nothing.

    Args:
        paths: verdict files; none at all is an error, never a pass.
        allowed_caveats: caveat codes that are accepted; None accepts every caveat.
        known_wrong: configs that must FAIL: arms that are wrong and kept to show that it is seen.

    Raises:
        AssayError: there is no verdict, or nothing but unsupported ones.
    """
    verdicts = [read_verdict(path) for path in paths]
    supported = [item for item in verdicts if item.verdict is not Status.UNSUPPORTED]
    if not supported:
        raise AssayError("no verdict on any supported config: nothing was checked, so nothing passes")
    lines = []
    for item in supported:
        if item.config.name in known_wrong:
            if item.verdict is not Status.FAIL:
                lines.append(f"{item.config.name}: {item.verdict}, though it is known to be wrong: {item.reason}")
            continue
        refused = {caveat.code for caveat in item.caveats} - (allowed_caveats or set())
        if item.verdict is Status.PASS_WITH_CAVEAT and allowed_caveats is not None and refused:
            lines.append(f"{item.config.name}: caveats not accepted: {', '.join(sorted(refused))}")
        elif exit_code(item.verdict):
            lines.append(f"{item.config.name}: {item.verdict}: {item.reason}")
    return lines
