"""The `assay` command where it does more than pass a file to the library."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from gpu import Nvml, build, case
from rich.console import Console
from sample_sources import make_resources
from typer.testing import CliRunner

from assay.cli import app
from assay.errors import ConfigError, DeviceError, NoDeviceError, SampleError
from assay.records import Status
from assay.samples.build import build_set
from assay.store import write_json
from assay.verdicts.decide import undecided_verdict
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
    verdict = undecided_verdict(ConfigInfo(name="x"), Status.UNSUPPORTED, "a reason", Tool(version="1")).model_dump(
        mode="json"
    )
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


# --- devices ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_site(tmp_path):
    """A function that writes a configuration whose default site is a machine of tests/data/gpu."""

    def write(number):
        machine = build(case(number), tmp_path / "machine")
        shutil.copytree(CONFIG, tmp_path / "config")
        site = yaml.safe_load((CONFIG / "sites/embedded.yaml").read_text())
        site |= {"device": "amd", "devices": machine.options.model_dump()}
        (tmp_path / "config/sites/gpu.yaml").write_text(yaml.safe_dump(site))
        (tmp_path / "config/config.yaml").write_text("site: gpu\n")
        return tmp_path / "config"

    return write


@pytest.fixture
def unmasked(monkeypatch):
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("assay.cli.console", Console(width=200, highlight=False, markup=False))
    return monkeypatch


def rows(output):
    return [[cell.strip() for cell in line.strip("│ ").split("│")] for line in output.splitlines() if line[0] == "│"]


def test_devices_prints_which_is_which_who_is_on_it_and_what_is_free(gpu_site, unmasked):
    result = run("devices", "--folder", gpu_site("02"))
    assert result.exit_code == 0
    name, mode, idle = "AMD Instinct MI300X", "SPX/NPS1", "0.3 GB of 206.1 GB"
    first, second, third, *_ = rows(result.output)
    assert first[:6] == ["0", "0000:65:00.0", "3", name, mode, "171.0 GB of 206.1 GB"]
    assert first[6:] == ["pid 207588 (VLLM::Worker_TP0, 170.7 GB)", "busy"]
    assert second[:3] == ["1", "0000:46:00.0", "2"] and second[7] == "busy"
    assert third == ["2", "0000:05:00.0", "0", name, mode, idle, "nobody", "free"]


def test_devices_counts_under_the_masks_that_are_set_and_says_when_they_are_stacked(gpu_site, unmasked):
    folder = gpu_site("02")
    unmasked.setenv("HIP_VISIBLE_DEVICES", "6,0")
    found = rows(run("devices", "--folder", folder).output)
    assert [row[0] for row in found] == ["1", *["masked"] * 5, "0", "masked"]
    unmasked.setenv("ROCR_VISIBLE_DEVICES", "0")
    assert "Nothing can be leased: ROCR_VISIBLE_DEVICES=0 and HIP_VISIBLE_DEVICES=6,0 are set at once" in (
        run("devices", "--folder", folder).output
    )


def test_devices_as_json_holds_every_value_with_its_source(gpu_site, unmasked):
    result = run("devices", "--json", "--folder", gpu_site("05"))
    found = json.loads(result.output)
    assert [one["verdict"] for one in found["devices"]] == ["free"] * 3 + ["busy"] + ["free"] * 4
    leaked = found["devices"][3]
    assert (leaked["index"], leaked["pci"], leaked["tool_index"]) == (
        3,
        "0000:65:00.0",
        {"value": 3, "source": "amd-smi"},
    )
    assert leaked["memory_used"] == {"value": 137_900_000_000, "source": "sysfs"}
    assert leaked["reason"].startswith("137.9 GB in use, 1.1 GB allowed; 137.9 GB in use and no process holds it")
    assert leaked["bad_pages_pending"]["value"] is None and leaked["holders"] == []
    assert found["sources"]["amd-smi"] == "read" and found["warning"] is None


def test_devices_of_other_roots_and_sites(gpu_site, unmasked, tmp_path):
    folder = gpu_site("01")
    other = build(case("05"), tmp_path / "other", tools=False)
    (tmp_path / "machine/amd-smi").unlink()
    result = run("devices", "--folder", folder, "--sysfs-root", other.sysfs, "--proc-root", other.proc)
    assert [row[7] for row in rows(result.output)] == ["free"] * 3 + ["busy"] + ["free"] * 4
    # A site without accelerators looks for those of any vendor.
    result = run("devices", "--folder", folder, "--site", "embedded", "--sysfs-root", other.sysfs)
    assert len(rows(result.output)) == 8
    result = run("devices", "--folder", folder, "--site", "nowhere")
    assert isinstance(result.exception, ConfigError) and "unknown site 'nowhere'" in str(result.exception)


def test_devices_where_there_is_none_names_the_sources_and_fails(unmasked, tmp_path):
    unmasked.setattr("assay.devices.nvidia._pynvml", lambda: Nvml([], driver=False))
    result = run("devices", "--folder", CONFIG, "--sysfs-root", tmp_path)
    assert result.exit_code != 0 and isinstance(result.exception, NoDeviceError)
    assert re.search(
        r"no accelerator is found\n.*sysfs: .*amdsmi: .*amd-smi: .*rocm-smi: .*\n.*NVML", str(result.exception)
    )
    assert f"no {tmp_path}/class/kfd/kfd/topology/nodes: the driver amdgpu is not loaded" in str(result.exception)


@pytest.mark.parametrize("name", ["sysfs", "proc"])
@pytest.mark.parametrize("site", ["gpu", "embedded", "h100"])
def test_devices_below_a_root_that_is_not_there_are_not_said_to_be_absent(gpu_site, unmasked, tmp_path, name, site):
    unmasked.setattr("assay.devices.nvidia._pynvml", lambda: Nvml(case("09")["nvml"]["devices"]))
    result = run("devices", "--folder", gpu_site("01"), "--site", site, f"--{name}-root", tmp_path / "typo")
    assert type(result.exception) is DeviceError
    said = str(result.exception)
    assert f"{name}_root is '{tmp_path}/typo', which is no directory" in said and f"--{name}-root" in said


def test_devices_keep_their_addresses_whole_in_a_narrow_terminal(gpu_site, unmasked):
    unmasked.setattr("assay.cli.console", Console(width=80, highlight=False, markup=False))
    assert run("devices", "--folder", gpu_site("02")).output.count("0000:65:00.0") == 1
