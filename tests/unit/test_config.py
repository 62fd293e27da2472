"""The configuration: unknown keys and names are errors that say what to do."""

import shutil
from pathlib import Path
from typing import get_args

import pytest
import yaml

from assay import config
from assay.errors import ConfigError
from assay.samples.recipe import recipe_schema
from assay.verdicts.gates import GATES
from assay.verdicts.model import verdict_schema

LOAD = {"name": "load", "concurrency": 16}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(ROOT / "config", tmp_path / "config")
    return tmp_path / "config"


def edit(path, change):
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


def test_the_committed_configuration_is_valid(folder):
    loaded = config.load({"site": "embedded"}, folder)
    assert loaded.resolve("smollm2_135m").floor_arms == ["float32-batch", "float32-attention"]


def test_schemas_for_editors_are_in_step_with_the_models():
    committed = {path.name: path.read_text() for path in (ROOT / "config/schemas").glob("*.schema.yaml")}
    schemas = {**config.json_schemas(), "sampleset": recipe_schema(), "verdict": verdict_schema()}
    expected = {f"{name}.schema.yaml": config.schema_text(schema) for name, schema in schemas.items()}
    assert committed == expected, "run `assay schemas` and commit the result"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("sites/embedded.yaml", lambda c: c.update(gpus=8), r"embedded\.yaml: unknown key 'gpus'"),
        ("arms/embedded.yaml", lambda c: c.pop("argv"), r"embedded\.yaml: key 'argv' is missing"),
        ("arms/embedded.yaml", lambda c: c.update(start_limit_s=-1), r"start_limit_s: .*greater than 0 \(found -1\)"),
        ("families/smollm2_135m.yaml", lambda c: c["model"]["weights"].update(gguf="nope"), "unknown source 'nope'"),
        ("configs.yaml", lambda c: c["smollm2_135m"].update(arm="vlm"), "smollm2_135m: unknown arm 'vlm'"),
        ("configs.yaml", lambda c: c["smollm2_135m"].update(dtype="float16"), "serves .*, not float16"),
        ("configs.yaml", lambda c: c["smollm2_135m"].update(gates={"kapa": 3}), "unknown key 'kapa'"),
        ("configs.yaml", lambda c: c.update(qwen={"unsupported": ""}), "qwen: unsupported: .*at least 10"),
        (
            "configs.yaml",
            lambda c: c["smollm2_135m"].update(gates={"length_ratio": [2, 0.1]}),
            r"smollm2_135m: gates: length_ratio: .*range around 1",
        ),
        (
            "families/smollm2_135m.yaml",
            lambda c: c.update(gates={"resolution_nat": {"float32": -1}}),
            r"gates\.resolution_nat\.float32: .*greater than or equal to 0",
        ),
        ("configs.yaml", lambda c: c["smollm2_135m"].update(instances=[[]]), r"instances\.0: .*at least 1"),
        (
            "configs.yaml",
            lambda c: c["smollm2_135m"].update(instances=[[LOAD, LOAD]]),
            r"instances\.0: .*load is .*twice",
        ),
        ("arms/embedded.yaml", lambda c: c.update(instances=[[]]), r"embedded\.yaml: instances\.0: .*at least 1"),
        ("arms/embedded.yaml", lambda c: c.update(instances=[[LOAD, LOAD]]), r"instances\.0: .*load is there twice"),
        ("arms/embedded.yaml", lambda c: c.update(argv=["{python}"]), r"embedded\.yaml: .*argv has no \{port\}"),
        ("arms/cyllama.yaml", lambda c: c.update(environment="cylama"), r"cylama' has no lock; add .*cylama\.txt"),
        ("families/smollm2_135m.yaml", lambda c: c["sets"].update(smoke=[]), r"sets\.smoke: .*at least 1"),
        (
            "families/smollm2_135m.yaml",
            lambda c: c["sets"].update(smoke=["needles", "needles"]),
            r"sets\.smoke: .*needles is there twice",
        ),
        (
            "families/smollm2_135m.yaml",
            lambda c: c["reference"]["floor"].update(smoke=["batch", "batch"]),
            r"reference\.floor\.smoke: .*batch is there twice",
        ),
        (
            "families/smollm2_135m.yaml",
            lambda c: c["reference"]["floor"].pop("smoke"),
            r"smollm2_135m: family 'smollm2_135m' has no reference\.floor for tier 'smoke'",
        ),
        ("faults.yaml", lambda c: c["rms_eps"].update(gates=["G-hrad"]), r"rms_eps: gates\.0: .*found 'G-hrad'"),
        ("sources.yaml", lambda c: c["smollm2_135m_gguf"].update(sha256="abc"), "sha256"),
    ],
)
def test_a_wrong_value_names_file_key_and_remedy(folder, file, change, message):
    edit(folder / file, change)
    with pytest.raises(ConfigError, match=message):
        config.load({"site": "embedded"}, folder)


def test_one_dtypes_resolution_can_be_changed_without_the_others(folder):
    edit(folder / "families/smollm2_135m.yaml", lambda c: c.update(gates={"resolution_nat": {"float16": 5e-4}}))
    changes = {"resolution_nat": {"float32": 1e-3}, "kappa": 3}
    edit(folder / "configs.yaml", lambda c: c["smollm2_135m_vllm_bf16"].update(gates=changes))
    gates = config.load({"site": "embedded"}, folder).resolve("smollm2_135m_vllm_bf16").gates
    assert gates.resolution_nat == {"float32": 1e-3, "float16": 5e-4, "bfloat16": 2e-3} and gates.kappa == 3


def test_every_gate_can_be_named_by_a_fault():
    assert get_args(config.GateName) == tuple(GATES)


def test_a_caveat_code_that_does_not_exist_cannot_be_accepted(folder):
    with pytest.raises(ConfigError, match=r"accepted_caveats\.0: .*'retokenised'.*\(found 'retokenized'\)"):
        config.load({"site": "embedded", "accepted_caveats": ["retokenized"]}, folder)


def test_an_unknown_key_in_the_settings_is_an_error(folder):
    with pytest.raises(ConfigError, match="unknown key 'sites'"):
        config.load({"site": "embedded", "sites": "x"}, folder)


def test_broken_yaml_names_the_file(folder):
    (folder / "faults.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"faults\.yaml is not valid YAML"):
        config.load({"site": "embedded"}, folder)


def test_an_unknown_config_lists_the_nearest_names(folder):
    loaded = config.load({"site": "embedded"}, folder)
    with pytest.raises(ConfigError, match=r"unknown config 'smolm2_135m_vllm'.*did you mean smollm2_135m_vllm"):
        loaded.resolve("smolm2_135m_vllm")


def test_a_fault_needs_an_arm_with_a_switch(folder):
    loaded = config.load({"site": "embedded"}, folder)
    assert loaded.resolve("smollm2_135m_embedded+rope_theta").fault.argument.startswith("rope_theta=")
    with pytest.raises(ConfigError, match=r"arm 'vllm-cpu' cannot plant faults.*embedded"):
        loaded.resolve("smollm2_135m_vllm+rope_theta")
    with pytest.raises(ConfigError, match="unknown fault 'rope_teta'"):
        loaded.resolve("smollm2_135m_embedded+rope_teta")


def test_an_unsupported_config_carries_its_reason(folder):
    resolved = config.load({"site": "embedded"}, folder).resolve("qwen3_omni")
    assert "speech" in resolved.unsupported
    with pytest.raises(ConfigError, match="'qwen3_omni' is unsupported"):
        _ = resolved.served


def test_concurrency_override_leaves_the_pass_that_is_sent_alone(folder):
    resolved = config.load({"site": "embedded"}, folder).resolve("smollm2_135m")
    assert [item.concurrency for item in resolved.passes(0, 32)] == [1, 32]


def test_families_that_share_a_model_share_its_judge(folder):
    edit(folder / "families/smollm2_135m_faults.yaml", lambda c: c["reference"].update(dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"'smollm2_135m': its families judge it at 2 dtypes"):
        config.load({"site": "embedded"}, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "Using (?P<value>x"}, "pattern is no regular expression: missing \\)"),
        ({"pattern": "Using x"}, r"kind attention needs the named groups \['value'\], pattern has \[\]"),
        (
            {"pattern": "(?P<value>x)(?P<other>y)"},
            r"needs the named groups \['value'\], pattern has \['other', 'value'\]",
        ),
        ({"role": "dit:{part}"}, r"needs the named groups \['part', 'value'\]"),
        ({"role": None}, "attention needs a role"),
        ({"kind": "moe_backend"}, "other kinds have none"),
        ({"status": "loaded"}, r"attention has a status of \['asked', .*\], not loaded"),
        ({"status": None}, "not none"),
        ({"kind": "moe_config", "role": None, "status": "loaded"}, r"needs the named groups \['file'\]"),
        ({"kind": "colour"}, "kind: .*found 'colour'"),
        ({"releases": []}, "releases: .*at least 1"),
        ({"source": "a colleague"}, "source: .*found 'a colleague'"),
        ({"level": "INFO"}, "unknown key 'level'"),
    ],
)
def test_a_wrong_log_rule_names_file_and_rule(folder, changes, message):
    edit(folder / "facts/vllm.yaml", lambda c: c["attention-enum"].update(changes))
    with pytest.raises(ConfigError, match=rf"facts/vllm\.yaml: attention-enum: .*{message}"):
        config.load({"site": "embedded"}, folder)


def test_a_file_of_log_rules_that_is_not_there_names_the_arm_and_key(folder):
    edit(folder / "arms/vllm-cpu.yaml", lambda c: c.update(log_rules=["vlm"]))
    with pytest.raises(ConfigError, match=r"arms/vllm-cpu\.yaml: log_rules: unknown file of log rules 'vlm': did you"):
        config.load({"site": "embedded"}, folder)
