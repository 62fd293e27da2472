"""The `assay` command where it does more than pass a file to the library."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from sample_sources import make_resources
from typer.testing import CliRunner

from assay.cli import app
from assay.errors import ConfigError, SampleError
from assay.records import Status
from assay.samples.build import build_set
from assay.store import write_json
from assay.verdicts.decide import unsupported_verdict
from assay.verdicts.model import ConfigInfo, Tool

CONFIG = Path(__file__).parents[2] / "config"
RECIPE = {
    "description": "a small set",
    "modality": "text",
    "seed": 7,
    "tokenizer": "model",
    "sources": ["lm_eval"],
    "parts": [{"name": "chat", "kind": "chat", "count": 3, "max_tokens": 8, "styles": ["open"]}],
}


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_lock_makes_a_changed_recipe_buildable_and_says_what_changed(tmp_path):
    resources, folder = make_resources(tmp_path / "resources"), tmp_path / "samplesets"
    folder.mkdir()

    def recipe(**part):
        (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE | {"parts": [RECIPE["parts"][0] | part]}))

    def lock():
        return run("lock", "small", "--folder", folder, "--resources", resources).output.replace("\n", "")

    def build():
        return build_set("small", tmp_path / "small.parquet", folder, resources)

    recipe(count=2)
    assert "2 items (2 added, 0 removed, 0 changed)" in lock()
    recipe(count=3)
    with pytest.raises(SampleError, match="recipe of sample set 'small' has changed"):
        build()
    assert "3 items (1 added, 0 removed, 0 changed)" in lock()
    assert len(build().items) == 3
    recipe(count=3, max_tokens=9)
    assert "3 items (0 added, 0 removed, 3 changed)" in lock()


def write_verdict(path, **changes):
    verdict = unsupported_verdict(ConfigInfo(name="x"), "a reason", Tool(version="1")).model_dump(mode="json")
    write_json(path, verdict | changes)


def test_text_in_brackets_is_printed_and_never_read_as_markup(tmp_path):
    write_verdict(tmp_path / "a.json")
    write_verdict(tmp_path / "b.json", reason="the prompt ends in [/INST] [red]")
    for arguments in (["diff", tmp_path / "a.json", tmp_path / "b.json"], ["explain", tmp_path / "b.json"]):
        result = run(*arguments)
        assert result.exit_code == 0 and "[/INST]" in result.output and "[red]" in result.output


def test_a_long_line_is_not_wrapped(tmp_path):
    case = {"id": "X" * 200, "metric": "psnr", "input": {}, "expected": 0, "tol": 0}
    write_json(tmp_path / "cases.json", {"schema": "metric-cases/1", "cases": [case]})
    assert run("cases", tmp_path / "cases.json").output == f"{'X' * 200} not covered (psnr)\n"


@pytest.mark.parametrize(("content", "message"), [("", "key 'site' is missing"), ("- a\n", "valid dict.*\\['a'\\]")])
def test_settings_that_are_empty_or_no_mapping_are_refused_by_file(tmp_path, content, message):
    shutil.copytree(CONFIG, tmp_path / "config")
    (tmp_path / "config/config.yaml").write_text(content)
    result = run("configs", "--tree", tmp_path, "--folder", tmp_path / "config")
    assert isinstance(result.exception, ConfigError)
    assert re.search(rf"config\.yaml: .*{message}", str(result.exception))


@pytest.mark.parametrize(
    ("status", "strict", "code"),
    [
        (Status.PASS, True, 0),
        (Status.PASS_WITH_CAVEAT, False, 0),
        (Status.PASS_WITH_CAVEAT, True, 5),
        (Status.FAIL, False, 1),
        (Status.ERROR, False, 2),
        (Status.INCONCLUSIVE, False, 3),
        (Status.UNSUPPORTED, False, 4),
    ],
)
def test_status_exits_with_the_code_of_the_verdict(tmp_path, status, strict, code):
    write_verdict(tmp_path / "x.json", verdict=status.value)
    result = run("status", tmp_path / "x.json", *(["--strict"] if strict else []))
    assert (result.exit_code, result.output.strip()) == (code, status.value)
