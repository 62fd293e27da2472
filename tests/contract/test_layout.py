"""The layout of the repository: what committed files may name, what every rule has, which way imports point.

Each check is a function from what it looks at to what is wrong, so that a planted fault can prove that it sees.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.fingerprint import MODALITIES, PICKED
from assay.judge import JUDGES
from assay.reference import REFERENCES
from assay.score import SCORERS
from assay.verdicts.suites import SUITES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "workflow/assay"

# --- what committed files may name --------------------------------------------------------------------------------

NEVER = {
    "an absolute path": re.compile(r"(?<![\w.:/*}-])/(?:home|root|work|Users|mnt|srv|opt|data|scratch|tmp)\d*/[\w.]+"),
    "the host of a package registry": re.compile(
        r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|registry\.npmjs\.org|wheels\.\w+\.ai)\b"
    ),
    "an index of packages": re.compile(r"--(?:extra-)?index-url[ =]\S+://"),
    "a user": re.compile(r"\b[\w.+-]+@(?!example\.)[\w-]+\.(?:com|org|net|io|local|internal)\b"),
}


def unwanted(name: str, text: str) -> list[str]:
    """What `text`, the content of file `name`, must not say."""
    return [
        f"{name}:{number}: {what}: {found[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in NEVER.items()
        for found in pattern.finditer(line)
    ]


def committed() -> Iterator[tuple[str, str]]:
    """Name and text of every file that git tracks or would track."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file():
            yield name, path.read_bytes().decode(errors="replace")


def test_no_committed_file_names_a_place_a_registry_or_a_person():
    files = dict(committed())
    assert {"Snakefile", "README.md", "workflow/assay/config.py"} <= files.keys()
    assert [line for name, text in files.items() for line in unwanted(name, text)] == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("MODEL = '~home~alex~models'", "an absolute path"),
        ("cache_dir: ~work~cache", "an absolute path"),
        ("cache_dir: ~work1~cache", "an absolute path"),
        ("-v ~scratch~models:~models", "an absolute path"),
        ("recipe: https:~~pypi~org~project", "the host of a package registry"),
        ("pip install --index-url https:~~index.example~simple", "an index of packages"),
        ("maintainer: alex~corp.com", "a user"),
    ],
)
def test_a_planted_name_is_found(text, what):
    # Written with ~, so that this very file is not found.
    planted = text.replace("pypi~", "pypi.").replace("~", "@" if what == "a user" else "/")
    assert any(what in line for line in unwanted("planted", planted))


@pytest.mark.parametrize("text", ["#!/usr/bin/env bash", "/proc/<pid>/maps", "resources/data/x", "tests/tmp/x", "a@b"])
def test_an_innocent_line_is_left_alone(text):
    assert unwanted("clean", text) == []


# --- rules --------------------------------------------------------------------------------------------------------

COMPUTING = {"reference", "judge", "judge_reference"}
TARGETS = {"all", "gate"}  # they make nothing of their own, so there is nothing to measure


def rules_of(text: str) -> dict[str, dict[str, str]]:
    """Rule -> directive -> its text."""
    rules = {}
    for name, body in re.findall(r"^rule (\w+):\n((?:(?:    .*)?\n)+)", text + "\n", re.MULTILINE):
        parts = re.split(r"^    (\w+):", body, flags=re.MULTILINE)
        rules[name] = dict(zip(parts[1::2], parts[2::2], strict=True))
    return rules


def all_rules() -> dict[str, dict[str, str]]:
    files = [ROOT / "Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]
    return {name: rule for path in files for name, rule in rules_of(path.read_text()).items()}


def incomplete(rules: dict[str, dict[str, str]], scripts: set[str]) -> list[str]:
    """What rules lack, and scripts that no rule runs."""
    faults = []
    used = set()
    for name, rule in rules.items():
        if name == "all":
            continue
        script = Path(rule.get("script", "").strip().strip('"')).name
        used.add(script)
        wanted = {"log", "resources", "params", "script"} | (set() if name in TARGETS else {"output", "benchmark"})
        faults += [f"rule {name} has no {directive}" for directive in sorted(wanted - rule.keys())]
        if not re.search(rf'code=(picked_)?code\("{script.removesuffix(".py")}"\)', rule.get("params", "")):
            faults.append(f"rule {name} does not depend on the code of {script}")
        if name in COMPUTING and "versions=VERSIONS" not in rule.get("params", ""):
            faults.append(f"rule {name} does not depend on the versions of the libraries it computes with")
        if name in COMPUTING and "devices=CONFIG.site.borrowed" not in rule.get("params", ""):
            faults.append(f"rule {name} does not say which devices it computes on")
        for directive in {"log", "benchmark"} & rule.keys():
            if name not in rule[directive].replace(".", "/").split('"')[1].split("/"):
                faults.append(f"the {directive} of rule {name} does not lie under its name")
    faults += [f"script {script} has no rule" for script in sorted(scripts - used)]
    faults += [f"script {script} is missing" for script in sorted(used - scripts)]
    return faults


def scripts() -> set[str]:
    return {path.name for path in (ROOT / "workflow/scripts").glob("*.py")}


def test_every_rule_is_complete_and_every_script_has_one():
    assert len(all_rules()) >= 12
    assert incomplete(all_rules(), scripts()) == []


@pytest.mark.parametrize("directive", ["log", "benchmark", "resources", "params", "script"])
def test_a_rule_without_a_directive_is_found(directive):
    rules = all_rules()
    rules["score"] = {key: value for key, value in rules["score"].items() if key != directive}
    assert f"rule score has no {directive}" in incomplete(rules, scripts())


def test_a_rule_that_watches_the_wrong_code_or_logs_elsewhere_is_found():
    rules = all_rules()
    rules["score"] = rules["score"] | {"params": 'code=code("verdict"),', "log": '"logs/other/{config}.log",'}
    faults = incomplete(rules, scripts())
    assert "rule score does not depend on the code of score.py" in faults
    assert "the log of rule score does not lie under its name" in faults


def test_a_rule_that_computes_with_or_on_whatever_is_there_is_found():
    rules = all_rules()
    rules["judge"] = rules["judge"] | {"params": 'devices=CONFIG.site.borrowed, code=code("judge"),'}
    (fault,) = incomplete(rules, scripts())
    assert fault == "rule judge does not depend on the versions of the libraries it computes with"
    rules["judge"] = rules["judge"] | {"params": 'versions=VERSIONS, code=code("judge"),'}
    (fault,) = incomplete(rules, scripts())
    assert fault == "rule judge does not say which devices it computes on"


def test_a_script_without_a_rule_and_a_rule_without_its_script_are_found():
    assert "script stray.py has no rule" in incomplete(all_rules(), scripts() | {"stray.py"})
    assert "script score.py is missing" in incomplete(all_rules(), scripts() - {"score.py"})


# --- imports ------------------------------------------------------------------------------------------------------

# Room (a package, or a module at the top) -> rooms of ours that it may import, besides itself. Rooms not named are
# stages and commands: they may import any room but those of ABOVE.
BASE = {"errors", "canonical", "records"}
MAY_IMPORT = {
    "errors": set(),
    "canonical": set(),
    "records": set(),
    "metrics": BASE,
    "media": {"errors", "metrics", "records"},
    "store": BASE,
    "tokens": BASE,
    "config": {"errors"},
    "progress": set(),
    "provenance": BASE,
    "fingerprint": set(),
    "stage": {"errors"},
    "verdicts": BASE | {"metrics", "media", "config", "store", "tokens"},
    "client": BASE | {"config"},
    "devices": BASE | {"config", "store"},
    "engines": BASE | {"config", "devices", "fingerprint", "provenance", "store"},
    "sources": BASE | {"config", "store"},
    "samples": BASE | {"config", "sources", "store"},
    "references": BASE | {"environments", "media", "metrics", "progress", "provenance", "samples", "sources", "store"},
    "judging": BASE
    | {"media", "metrics", "progress", "provenance", "references", "samples", "sources", "store", "verdicts"},
    "scoring": BASE | {"config", "media", "metrics", "provenance", "samples", "store", "tokens", "verdicts"},
    "drivers": {"errors"},
    "embedded": BASE | {"drivers", "media", "provenance"},
}
ABOVE = {"cli", "embedded"}
STANDARD = {"math", "re", "string", "unicodedata", "enum", "functools", "inspect", "importlib", "dataclasses", "typing"}
ARRAYS = {"numpy", "scipy", "rapidfuzz", "jiwer", "whisper_normalizer"}
PURE = ("metrics", STANDARD | ARRAYS | {"collections", "__future__"})


def imports(text: str) -> Iterator[str]:
    """Full names that a module imports, wherever in it, as far as they can be told."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            yield from (f"{module}.{alias.name}" for alias in node.names)


def modality_of(path: list[str]) -> str | None:
    """The modality that a module (its path below the package) is of, in a package that has one of each."""
    return path[1] if len(path) > 1 and path[0] in PICKED and path[1] in MODALITIES else None


def wrong_way(module: str, text: str) -> list[str]:
    """Imports of `module` (its path below the package, without suffix) that point the wrong way."""
    room = module.split("/")[0]
    faults = []
    for name in imports(text):
        top, *rest = name.split(".")
        if not top:
            faults.append(f"{module} imports {name}: relative imports hide where they point")
        elif top == "assay" and modality_of(rest) and modality_of(module.split("/")) not in (None, modality_of(rest)):
            faults.append(f"{module} imports assay.{'.'.join(rest[:2])}: a modality knows nothing of another")
        elif top == "assay" and rest and rest[0] != room:
            allowed = MAY_IMPORT.get(room)
            if rest[0] in ABOVE or (allowed is not None and rest[0] not in allowed):
                faults.append(f"{module} imports assay.{rest[0]}")
        elif top != "assay" and room == PURE[0] and top not in PURE[1]:
            faults.append(f"{module} imports {top}: metrics are pure functions of arrays")
    return faults


def modules() -> dict[str, str]:
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
    }


def test_imports_point_one_way():
    found = modules()
    assert MAY_IMPORT.keys() <= {name.split("/")[0] for name in found}
    assert [fault for name, text in found.items() for fault in wrong_way(name, text)] == []


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("metrics/text", "from assay import store", "metrics/text imports assay.store"),
        ("metrics/stats", "import torch", "metrics/stats imports torch: metrics are pure functions of arrays"),
        ("metrics/stats", "def f():\n    from pathlib import Path", "metrics/stats imports pathlib"),
        ("records", "import assay.config", "records imports assay.config"),
        ("verdicts/decide", "from assay.engines.plan import serve_plan", "verdicts/decide imports assay.engines"),
        ("score", "from assay.embedded.engine import Engine", "score imports assay.embedded"),
        ("devices/lease", "from assay.engines import process", "devices/lease imports assay.engines"),
        ("verdicts/trial", "from ..metrics import text", "relative imports"),
        ("scoring/text", "from assay.verdicts.asr import planted", "assay.verdicts.asr: a modality knows nothing of"),
    ],
)
def test_an_import_the_wrong_way_is_found(module, line, fault):
    faults = wrong_way(module, f"{modules()[module]}\n{line}\n")
    assert len(faults) == 1
    assert fault in faults[0]


def test_every_stage_picks_from_the_same_modalities():
    assert set(JUDGES) == set(REFERENCES) == set(SCORERS) == set(SUITES) <= set(MODALITIES)
