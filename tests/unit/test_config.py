"""The configuration: unknown keys and names are errors that say what to do."""

import shutil
from pathlib import Path
from typing import get_args

import pytest
import yaml

from assay import config
from assay.errors import ConfigError
from assay.samples.recipe import recipe_schema
from assay.verdicts.model import verdict_schema
from assay.verdicts.suites import SUITES

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
    assert config.floor_arms(loaded.resolve("smollm2_135m").floor) == ["float32-batch", "float32-attention"]


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
        (
            "configs.yaml",
            lambda c: c["smollm2_135m"].update(arm="mstar", dtype="bfloat16", instances=[[LOAD | {"stream": True}]]),
            "smollm2_135m: a pass sets `stream`, and arm 'mstar' speaks mstar, which has none",
        ),
        ("families/smollm2_135m.yaml", lambda c: c.update(modality="smell"), r"modality: .*text.* \(found 'smell'\)"),
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
        (
            "arms/cyllama.yaml",
            lambda c: c["process"].update(environment="cylama"),
            r"cylama' has no lock; add .*cylama\.txt",
        ),
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


IMAGE = {"repository": "org/engine", "tag": "v1", "digest": None}


@pytest.mark.parametrize(
    ("site", "file", "change", "message"),
    [
        (
            "embedded",
            "arms/embedded.yaml",
            lambda c: c.update(container={}),
            r"embedded\.yaml: an arm has one launcher section, `process` or `container`; this one has both$",
        ),
        ("embedded", "arms/embedded.yaml", lambda c: c.pop("process"), r"embedded\.yaml: .*this one has neither"),
        (
            "embedded",
            "arms/embedded.yaml",
            lambda c: c.update(devices={"cpu": {"image": IMAGE}}),
            r"devices\.cpu\.image: a process has no image",
        ),
        (
            "mi300x",
            "arms/vllm.yaml",
            lambda c: c["devices"]["nvidia"].pop("image"),
            r"vllm\.yaml: .*devices\.nvidia\.image is missing",
        ),
        (
            "mi300x",
            "arms/vllm.yaml",
            lambda c: c["devices"]["amd"]["image"].update(digest="sha256:12"),
            r"devices\.amd\.image\.digest: .*pattern.*found 'sha256:12'",
        ),
        (
            "mi300x",
            "arms/vllm.yaml",
            lambda c: c["devices"]["amd"]["image"].update(repository="vllm/vllm-openai-rocm:v1"),
            r"devices\.amd\.image\.repository: .*pattern",
        ),
        ("mi300x", "arms/vllm.yaml", lambda c: c.pop("gpus"), r"devices are amd, nvidia, but gpus is 0"),
        (
            "mi300x",
            "arms/mstar.yaml",
            lambda c: c["process"].pop("tree"),
            r"process: environment is 'tree', but `tree` names none$",
        ),
        (
            "mi300x",
            "arms/vllm-aiter.yaml",
            lambda c: c.update(like="vlm"),
            r"vllm-aiter\.yaml: like: unknown arm 'vlm'",
        ),
        (
            "mi300x",
            "arms/vllm-aiter.yaml",
            lambda c: c.update(argv=["vllm"]),
            r"vllm-aiter\.yaml: unknown key 'argv'",
        ),
        (
            "mi300x",
            "arms/mstar-tts.yaml",
            lambda c: c["client"].pop("protocol"),
            r"mstar-tts\.yaml: key 'client\.protocol' is missing$",
        ),
        (
            "mi300x",
            "arms/mstar-base.yaml",
            lambda c: c.update(like="vllm-aiter"),
            r"mstar-base\.yaml: like: 'vllm-aiter' is a variant itself",
        ),
        (
            "mi300x",
            "sites/mi300x.yaml",
            lambda c: c.pop("container"),
            r"mi300x\.yaml: arms: 'vllm' runs in a container, and this site runs none; add `container: {runtime:",
        ),
        (
            "mi300x",
            "sites/mi300x.yaml",
            lambda c: c.update(device="cpu"),
            r"arms: 'mstar' runs on amd, nvidia, and this site's device is cpu; .* or give it `devices\.cpu`",
        ),
        (
            "mi325x",
            "sites/mi325x.yaml",
            lambda c: c["container"].update(user="1000"),
            r"mi325x\.yaml: container: apptainer runs servers as you",
        ),
        (
            "mi300x",
            "sites/mi300x.yaml",
            lambda c: c["devices"].pop("lock_dir"),
            r"mi300x\.yaml: devices\.lock_dir is missing: name one place for all jobs of a node",
        ),
        (
            "mi300x",
            "sites/mi300x.yaml",
            lambda c: c.update(arms=["embedded"], devices={}),
            r"mi300x\.yaml: devices\.lock_dir is missing",
        ),
        (
            "embedded",
            "configs.yaml",
            lambda c: c["smollm2_135m"].update(gpus=2),
            r"smollm2_135m: gpus is 2, but arm 'transformers-serve' uses none",
        ),
    ],
)
def test_a_wrong_arm_or_site_names_file_key_and_remedy(folder, site, file, change, message):
    edit(folder / file, change)
    with pytest.raises(ConfigError, match=message):
        config.load({"site": site}, folder)


@pytest.mark.parametrize("repository", ["vllm/vllm-openai", "localhost:5000/a/b", "ghcr.io/org/x_y", "sglang-omni"])
def test_an_images_repository_may_have_a_registry_and_a_port(repository):
    assert config.Image(**IMAGE | {"repository": repository}).repository == repository


def test_a_checkout_that_no_arm_is_served_from_is_a_slip(folder):
    with pytest.raises(ConfigError, match=r"config\.yaml: trees: unknown tree 'bas': did you mean base"):
        config.load({"site": "mi300x", "trees": {"bas": "x"}}, folder)


def test_vllm_aiter_differs_from_vllm_in_its_environment_alone(folder):
    arms = config.load({"site": "mi300x"}, folder).arms
    plain, aiter = (arms[name].model_dump() for name in ("vllm", "vllm-aiter"))
    notes = {"description", "recipe", "recipe_date"}
    assert {key for key in plain if plain[key] != aiter[key]} - notes == {"devices"}
    amd = [arm["devices"]["amd"] for arm in (plain, aiter)]
    assert amd[0] | {"env": None} == amd[1] | {"env": None}
    assert amd[0]["env"] == {"VLLM_ROCM_USE_AITER": "0"} and amd[1]["env"] == {"VLLM_ROCM_USE_AITER": "1"}
    assert plain["devices"]["nvidia"] == aiter["devices"]["nvidia"]


def test_a_digest_filled_in_for_an_arm_holds_for_what_is_like_it(folder):
    digest = f"sha256:{'a' * 64}"
    edit(folder / "arms/vllm.yaml", lambda c: c["devices"]["amd"]["image"].update(digest=digest))
    assert config.load({"site": "mi300x"}, folder).arms["vllm-aiter"].devices["amd"].image.digest == digest


def test_a_variant_that_is_asked_otherwise_shares_image_and_launch_line(folder):
    arms = config.load({"site": "mi300x"}, folder).arms
    plain, speech = (arms[name].model_dump() for name in ("mstar", "mstar-tts"))
    notes = {"description", "recipe", "recipe_date"}
    assert {key for key in plain if plain[key] != speech[key]} - notes == {"dtypes", "client", "instances"}
    # Whole: nothing of the other protocol's client is left.
    assert plain["client"]["protocol"] == "mstar" and "models" not in speech["client"]
    assert arms["mstar-asr"].env == arms["mstar"].env | {"OMP_WAIT_POLICY": "PASSIVE"}


def test_what_speaks_whole_and_in_streams_does_both_on_either_instance(folder):
    """A fault of whole answers alone is not confirmed by streams of the other instance, and so it would never FAIL."""
    arms = config.load({"site": "embedded"}, folder).arms
    speaking = {name: arm for name, arm in arms.items() if "speech" in getattr(arm.client, "routes", {})}
    assert {"embedded-hibari", "embedded-kokoro", "mstar-tts"} <= speaking.keys()
    for name, arm in speaking.items():
        first, *others = ({(one.name, one.stream) for one in passes} for passes in arm.instances)
        assert first <= set().union(*others), name


def test_a_site_offers_what_it_can_serve_and_what_nothing_can(folder):
    loaded = config.load({"site": "mi300x"}, folder)
    offered = {name for name in loaded.configs if loaded.offered(name)}
    assert {"qwen3_5_9b_vllm", "qwen3_omni"} <= offered and "smollm2_135m" not in offered


@pytest.mark.parametrize("path", sorted((ROOT / "config/sites").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_committed_site_is_no_machine_of_anybodys(path):
    values = yaml.safe_load(path.read_text())
    assert not Path(values["cache_dir"]).is_absolute() and config.Site(**values).arms
    assert set(values) <= {"description", "device", "devices", "container", "arms", "threads", "cache_dir", "slurm"}
    assert config.SiteSlurm(**values.get("slurm", {})) == config.SiteSlurm()  # nothing that a cluster calls its own


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 1),
        ({"reference_gpus": 4}, 4),
        ({"reference_gpus": 0}, 0),
        ({"devices": None}, 0),
        ({"device": "cpu"}, 0),
        ({"device": "cpu", "devices": None}, 0),
    ],
)
def test_a_reference_job_takes_one_device_where_there_are_some_unless_the_site_says_otherwise(changes, gpus):
    values = config.read_yaml(ROOT / "config/sites/mi300x.yaml") | changes
    borrowed = config.Site(**values).borrowed
    assert (borrowed["gpus"], borrowed["device"]) == (gpus, "amd" if gpus else "cpu")
    assert (borrowed["device_options"] or {}).get("lock_dir") == ("resources/leases" if gpus else None)


def test_one_dtypes_resolution_can_be_changed_without_the_others(folder):
    edit(folder / "families/smollm2_135m.yaml", lambda c: c.update(gates={"resolution_nat": {"float16": 5e-4}}))
    changes = {"resolution_nat": {"float32": 1e-3}, "kappa": 3}
    edit(folder / "configs.yaml", lambda c: c["smollm2_135m_vllm_bf16"].update(gates=changes))
    gates = config.load({"site": "embedded"}, folder).resolve("smollm2_135m_vllm_bf16").gates
    assert gates.resolution_nat == {"float32": 1e-3, "float16": 5e-4, "bfloat16": 2e-3} and gates.kappa == 3


def test_every_gate_can_be_named_by_a_fault():
    assert set(get_args(config.GateName)) == {name for suite in SUITES.values() for name in suite.checks}


def test_a_fault_names_gates_that_its_modality_has_or_says_why_none_sees_it():
    faults = config.load({"site": "embedded"}, ROOT / "config").faults
    unknown = {name: set(fault.gates) - SUITES[fault.modality].checks.keys() for name, fault in faults.items()}
    assert {name: gates for name, gates in unknown.items() if gates} == {}
    assert [name for name, fault in faults.items() if not (fault.gates or fault.note or fault.benign)] == []


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


def test_a_fault_is_planted_in_servers_of_its_modality_only(folder):
    loaded = config.load({"site": "embedded"}, folder)
    assert loaded.resolve("whisper_base_embedded+asr_mel_htk").fault.argument == "mel_htk"
    with pytest.raises(ConfigError, match=r"'asr_mel_htk' is of asr servers, and this one is of text"):
        loaded.resolve("smollm2_135m_embedded+asr_mel_htk")


def test_an_unsupported_config_carries_its_reason(folder):
    resolved = config.load({"site": "embedded"}, folder).resolve("qwen3_omni")
    assert "speech" in resolved.unsupported
    with pytest.raises(ConfigError, match="'qwen3_omni' is unsupported"):
        _ = resolved.served


def test_concurrency_override_leaves_the_pass_that_is_sent_alone(folder):
    resolved = config.load({"site": "embedded"}, folder).resolve("smollm2_135m")
    assert [item.concurrency for item in resolved.passes(0, 32)] == [1, 32]


SPEECH = "families/hibari_tts.yaml"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (SPEECH, lambda c: c["reference"].update(environment="hibary"), r"reference: environment 'hibary' has no lock"),
        (
            SPEECH,
            lambda c: c["reference"]["floor"].update(smoke=["seed1"]),
            "names seed1, which `changes`",
        ),
        (SPEECH, lambda c: c.update(listener="whisper"), "unknown source 'whisper'"),
        (
            SPEECH,
            lambda c: c.update(speaker_encoder="resembler"),
            r"hibari_tts\.yaml: speaker_encoder: unknown source 'resembler'",
        ),
        (SPEECH, lambda c: c["reference"].update(weights="gguf"), "the reference needs a 'gguf' entry"),
        (SPEECH, lambda c: c["model"].update(contxt=1), r"hibari_tts\.yaml: unknown key 'model\.contxt'"),
        ("arms/embedded-hibari.yaml", lambda c: c["client"].update(audio_format="pcm"), "say the sample_rate"),
        (
            "arms/faster-whisper.yaml",
            lambda c: c.pop("padding"),
            "whisper_base: arm 'faster-whisper' does not say how it pads audio; add `padding: audio`",
        ),
        ("arms/faster-whisper.yaml", lambda c: c.update(padding="zero"), r"padding: .*'audio' or 'features'"),
        (
            "arms/transformers-serve.yaml",
            lambda c: c.update(padding="audio"),
            "smollm2_135m: arm 'transformers-serve' has `padding`, and family 'smollm2_135m' hears no audio",
        ),
    ],
)
def test_a_wrong_speech_family_or_arm_names_file_key_and_remedy(folder, file, change, message):
    edit(folder / file, change)
    with pytest.raises(ConfigError, match=message):
        config.load({"site": "embedded"}, folder)


def test_a_speech_family_is_judged_by_its_listener_and_its_floor_arms_are_changes_of_the_command(folder):
    loaded = config.load({"site": "embedded"}, folder)
    assert config.floor_arms(loaded.resolve("hibari_tts").floor) == ["float32-threads2", "float32-threads3"]
    assert (loaded.judge_model("hibari_tts"), loaded.judge_model("smollm2_135m")) == ("whisper_base", "smollm2_135m")
    options = loaded.reference_options("hibari_tts")
    assert (options["request"], options["environment"]) == ({"voice": "heart", "seed": 0}, "hibari")
    assert options["changes"]["threads2"] == ["--threads=2"] and "floor" not in options


def test_families_of_one_model_share_a_floor_where_its_changes_are_the_same(folder):
    def floors():
        loaded = config.load({"site": "embedded"}, folder)
        return [loaded.resolve(name).floor for name in ("smollm2_135m", "faults_32")]

    assert floors() == ["float32-batch-attention"] * 2
    edit(folder / "families/smollm2_135m_faults.yaml", lambda c: c["reference"]["floor"].update(smoke=["attention"]))
    assert floors() == ["float32-batch-attention", "float32-attention"]


@pytest.mark.parametrize("name", ["hibari_tts+rope_theta", "smollm2_135m_embedded+speech_twice"])
def test_a_fault_is_planted_only_in_a_server_of_its_modality(folder, name):
    with pytest.raises(ConfigError, match=r"fault '\w+' is of (text|tts) servers, and this one is of (text|tts)"):
        config.load({"site": "embedded"}, folder).resolve(name)


def test_references_that_differ_in_padding_alone_share_weights_judge_and_needs(folder):
    loaded = config.load({"site": "embedded"}, folder)
    audio, features = (loaded.reference_options(name) for name in ("whisper_base", "whisper_base+features"))
    assert audio.pop("padding") == "audio" and features.pop("padding") == "features" and audio == features
    assert loaded.judge_model("whisper_base+features") == config.source_of("whisper_base+features") == "whisper_base"
    assert loaded.judge_needs("whisper_base+features") == loaded.judge_needs("whisper_base")
    assert "padding" not in loaded.reference_options("smollm2_135m") | loaded.reference_options("hibari_tts")


def test_families_that_share_a_model_share_its_judge(folder):
    edit(folder / "families/smollm2_135m_faults.yaml", lambda c: c["reference"].update(dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"'smollm2_135m': its families .* share .* their reference differs"):
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
