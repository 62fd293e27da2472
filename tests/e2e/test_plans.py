"""The serve plan of a GPU site's configs, as `snakemake -n` prints it on a machine without a GPU."""

import re

import pytest
import yaml


def printed(workspace, name, *options):
    """What a dry run says of a config's serve plan: the lines above it, and the plan itself."""
    done = workspace.snakemake("-n", "--config", "site=mi300x", *options, "--", f"results/verdicts/{name}.json")
    text = done.stdout + done.stderr
    head, plan = re.search(rf"serve plan of {name}\n((?:[A-Z ]+: .*\n)*)(schema_version:.*?\n)\n", text, re.S).groups()
    return head, yaml.safe_load(plan)


@pytest.mark.parametrize("name", ["qwen3_5_9b_vllm", "qwen3_5_9b_vllm_aiter", "qwen3_5_9b_sglang"])
def test_a_dry_run_prints_the_whole_plan_and_what_stands_in_its_way(workspace, name):
    head, plan = printed(workspace, name)
    assert head.count("WILL NOT RUN") == 2 and "imagetools inspect" in head
    assert plan["container"]["devices"] == ["/dev/kfd", "/dev/dri"] and plan["gpus"] == 1
    assert plan["argv"][-1] == "--port={port}" and plan["env"]["HF_HUB_OFFLINE"] == "1"
    assert {"caches", "client", "identity", "instances", "limits", "options_sha256"} <= plan.keys()


@pytest.mark.parametrize("name", ["whisper_large_v3", "whisper_large_v3_turbo"])
def test_a_speech_model_whose_weights_are_not_pinned_says_what_to_fill_in(workspace, name):
    head, plan = printed(workspace, name)
    repository = f"openai/{plan['model']['name']}"
    assert head.count("WILL NOT RUN") == 2 and f"40-digit commit of {repository}" in head
    assert "--max-model-len=448" in plan["argv"] and plan["sets"] == ["asr_smoke"]
    assert plan["client"]["routes"] == {"transcription": "/v1/audio/transcriptions"}


def test_a_checkout_is_given_on_the_command_line(workspace):
    head, plan = printed(workspace, "qwen3_5_9b_mstar_base")
    assert head.startswith("UNSUPPORTED: arm 'mstar-base'") and "trees='{base: PATH}'" in head
    head, plan = printed(workspace, "qwen3_5_9b_mstar_base", f"trees={{base: {workspace.path}}}")
    assert plan["tree"]["path"] == str(workspace.path) and "UNSUPPORTED" not in head


def test_an_allowed_tag_is_said_where_it_is_planned(workspace):
    head, plan = printed(workspace, "qwen3_5_9b_sglang", "allow_tag=true")
    assert "IMAGE BY TAG: lmsysorg/sglang:" in head and plan["image_by_tag"].startswith("lmsysorg/sglang:")


def test_every_config_of_the_site_can_be_planned_at_once(workspace):
    done = workspace.snakemake("-n", "--config", "site=mi300x")
    shown = set(re.findall(r"serve plan of (\w+)", done.stdout + done.stderr))
    assert {"qwen3_5_9b_vllm", "qwen3_5_9b_mstar", "qwen3_omni"} <= shown and "smollm2_135m" not in shown
