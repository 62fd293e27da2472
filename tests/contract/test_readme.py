"""README and CONTRIBUTING stay in step with what they describe: the DAG, caveats, exit codes, commands, examples."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from assay import config
from assay.cli import app
from assay.engines.plan import serve_plan
from assay.errors import ConfigError
from assay.records import EXIT_CODES
from assay.report.words import CAVEATS

ROOT = Path(__file__).parents[2]
DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
README = DOCUMENTS["README.md"]

# --- the DAG ------------------------------------------------------------------------------------------------------

Edges = set[tuple[str, str]]


def drawn(readme: str) -> Edges:
    """Edges of the diagram."""
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", readme, re.DOTALL)
    return set(re.findall(r"^ *(\w+) --> (\w+)$", diagram, re.MULTILINE))


def rule_graph() -> Edges:
    """Edges between the rules that make every verdict, and a report."""
    targets = ["gate", "results/reports/smollm2_135m.html"]
    command = [sys.executable, "-m", "snakemake", "--rulegraph", "mermaid-js", *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = dict(re.findall(r"(id\d+)\[(\w+)\]", done))
    return {(names[a], names[b]) for a, b in re.findall(r"(id\d+) --> (id\d+)", done)}


def reduced(edges: Edges) -> Edges:
    """Edges that do not follow from others, loops left out (a source may be made from another source)."""
    edges = {(a, b) for a, b in edges if a != b}

    def reaches(start: str, goal: str, without: tuple[str, str]) -> bool:
        seen, todo = set(), [start]
        while todo:
            here = todo.pop()
            steps = {b for a, b in edges if a == here and (a, b) != without} - seen
            seen |= steps
            todo += steps
        return goal in seen

    return {edge for edge in edges if not reaches(*edge, without=edge)}


def as_lines(edges: Edges) -> str:
    return "\n".join(f"    {a} --> {b}" for a, b in sorted(edges))


@pytest.fixture(scope="module")
def graph() -> Edges:
    return reduced(rule_graph())


def test_the_diagram_is_the_rule_graph(graph):
    assert drawn(README) == graph, f"draw these arrows in README.md:\n{as_lines(graph)}"


def test_a_diagram_with_an_arrow_lost_turned_or_renamed_is_found(graph):
    for change in (("    judge --> score\n", ""), ("judge --> score", "score --> judge"), ("judge -->", "jury -->")):
        changed = README.replace(*change)
        assert changed != README
        assert drawn(changed) != graph


def test_only_arrows_that_follow_from_others_are_left_out():
    assert reduced({("a", "b"), ("b", "c"), ("a", "c"), ("a", "a")}) == {("a", "b"), ("b", "c")}


# --- tables -------------------------------------------------------------------------------------------------------


def table_after(heading: str, readme: str) -> list[list[str]]:
    """Cells of the first table after a heading or line that starts so, without its head."""
    lines = readme[readme.index(heading) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


def codes_in(source: str) -> set[str]:
    """Caveat codes that a module can emit."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None)
            first = node.args[:1] if name == "caveat" else []
            named = [item.value for item in node.keywords if item.arg == "code"] if name == "Caveat" else []
            found |= {item.value for item in [*first, *named] if isinstance(item, ast.Constant)}
    return found


def emitted() -> set[str]:
    return set().union(*(codes_in(path.read_text()) for path in (ROOT / "workflow/assay").rglob("*.py")))


def explained(readme: str) -> dict[str, str]:
    return {row[0].strip("`"): row[1] for row in table_after("### Caveats", readme)}


def test_every_caveat_that_can_be_emitted_is_explained_and_no_other():
    assert explained(README).keys() == emitted() == set(get_args(config.CaveatCode))


def test_reports_explain_caveats_as_the_readme_does():
    assert explained(README) == CAVEATS


def test_a_caveat_in_one_place_only_is_found():
    assert explained(re.sub(r"\| `killed`.*\n", "", README)).keys() != emitted()
    assert codes_in('f(caveat("new_one", "G-x", why))\nCaveat(code="another", detail="")') == {"new_one", "another"}


def test_the_status_table_has_the_exit_codes():
    table = {row[0].strip("`"): int(row[1]) for row in table_after("| status | exit code |", README)}
    assert table == {status.value: code for status, code in EXIT_CODES.items()}


# --- commands and files -------------------------------------------------------------------------------------------


def missing_commands(text: str) -> set[str]:
    """Subcommands of `assay` and targets of `make` that a document names and that do not exist."""
    commands = {item.name or item.callback.__name__ for item in app.registered_commands}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join([*re.findall(r"```sh\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)])
    named = re.findall(r"^(?:\.venv/bin/)?assay +([a-z]+)", code, re.MULTILINE)
    made = re.findall(r"^(?:\w+=\w+ )?make +([a-z-]+)(?![\w/-])", code, re.MULTILINE)
    return (set(named) - commands) | (set(made) - targets)


def missing_files(text: str) -> set[str]:
    """Links to files that do not exist."""
    return {link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not (ROOT / link).exists()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_and_links_exist(name):
    assert missing_commands(DOCUMENTS[name]) == set()
    assert missing_files(DOCUMENTS[name]) == set()


def test_a_command_or_link_that_does_not_exist_is_found():
    assert missing_commands("`assay judge x`, `make coffee`, `assay explain x`, `make test`") == {"judge", "coffee"}
    assert missing_files("[a](docs/nowhere.md) [b](Makefile)") == {"docs/nowhere.md"}


# --- examples -----------------------------------------------------------------------------------------------------


def examples() -> dict[str, str]:
    """File -> YAML of every example in the documents."""
    return dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", "".join(DOCUMENTS.values()), re.DOTALL))


def add_examples(folder: Path, changes: dict[str, tuple[str, str]] | None = None) -> config.Config:
    """The committed configuration with the examples added to it, as the text says."""
    shutil.copytree(ROOT / "config", folder / "config")
    for name, text in examples().items():
        path = folder / name
        before = path.read_text() if path.exists() else ""
        path.write_text(f"{before}\n{text.replace(*(changes or {}).get(name, ('', '')))}")
    (folder / "config/environments/my-engine.txt").touch()
    site = folder / "config/sites/embedded.yaml"
    content = yaml.safe_load(site.read_text())
    site.write_text(yaml.safe_dump(content | {"arms": [*content["arms"], "my-engine"]}))
    return config.load({"site": "embedded"}, folder / "config")


ENTRY = "\nmine: {family: my_model, arm: my-engine}\n"


def test_the_examples_make_configs_that_can_be_planned(tmp_path):
    loaded = add_examples(tmp_path, {"config/configs.yaml": ("\nmy_speech", f"{ENTRY}my_speech")})
    assert serve_plan(loaded, "mine")["argv"][1:4] == ["-m", "my_engine.server", "--model=resources/my_model"]
    plan = serve_plan(loaded, "my_model_vllm")
    assert (plan["dtype"], plan["tier"], plan["sets"][0]) == ("bfloat16", "standard", "text_standard")
    assert loaded.resolve("my_model_vllm").gates.kappa == 2.5
    assert loaded.resolve("my_speech_model").unsupported


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config/configs.yaml", ("kappa", "kapa"), "unknown key 'kapa'"),
        ("config/families/my_model.yaml", ("context", "contexts"), "unknown key 'model.contexts'"),
        ("config/families/my_model.yaml", ("my_model}", "your_model}"), "unknown source 'your_model'"),
        ("config/arms/my-engine.yaml", ("start_limit_s", "start_limit"), "unknown key 'start_limit'"),
        ("config/sources.yaml", ('000000"', '"'), "should match pattern"),
    ],
)
def test_an_example_with_a_mistake_is_found(tmp_path, file, change, message):
    with pytest.raises(ConfigError, match=message):
        add_examples(tmp_path, {file: change})


def test_the_placeholders_listed_are_those_that_templates_may_use(tmp_path):
    changes = {
        "config/arms/my-engine.yaml": ("{model_dir}", "{nope}"),
        "config/configs.yaml": ("\nmy_speech", f"{ENTRY}my_speech"),
    }
    with pytest.raises(ConfigError, match="nope") as error:
        serve_plan(add_examples(tmp_path, changes), "mine")
    known = set(str(error.value).rpartition("known: ")[2].split(", "))
    assert set(re.findall(r"`\{(\w+)\}`", README)) == known
