"""Whisper from CTranslate2 to transformers: the same logits, every token under its id, and nothing half-read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoProcessor, WhisperConfig, WhisperForConditionalGeneration

from assay.errors import SourceError
from assay.sources.converters import CONVERTERS, join_parts
from assay.sources.ctranslate2 import read_model, whisper_to_transformers, whisper_tokenizer

DATA = Path(__file__).parents[1] / "data"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")]
SPECIAL = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "nocaptions"]
SPECIAL += ["notimestamps", "0.00", "0.02"]
VOCABULARY = [*BYTES, *map("".join, MERGES), "", *(f"<|{name}|>" for name in SPECIAL)]


# --- a tiny model in CTranslate2's format, written from a transformers one ----------------------------------------


def tiny_model() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=len(VOCABULARY),
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=40,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=12,
        decoder_start_token_id=VOCABULARY.index("<|startoftranscript|>"),
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model = WhisperForConditionalGeneration(config).to(torch.float16).eval()
    with torch.no_grad():
        for tensor in model.parameters():  # biases and norms too: equal values would hide a wrong name
            tensor.add_(0.1 * torch.randn(tensor.shape))
    return model


def variables(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """The model's weights under CTranslate2's names (its whisper_spec.py), with its heads."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    heads = {"encoder": model.config.encoder_attention_heads, "decoder": model.config.decoder_attention_heads}
    found = {f"{side}/num_heads": np.array(count, np.int16) for side, count in heads.items()}

    def both(here: str, there: str, names: tuple[str, str] = ("weight", "bias")) -> None:
        for ours, theirs in zip(("weight", "bias"), names, strict=True):
            found[f"{here}/{theirs}"] = state[f"{there}.{ours}"]

    def joined(here: str, there: str, parts: str) -> None:
        found[f"{here}/weight"] = np.concatenate([state[f"{there}.{part}_proj.weight"] for part in parts])
        zero = np.zeros(model.config.d_model, np.float16)
        found[f"{here}/bias"] = np.concatenate([state.get(f"{there}.{part}_proj.bias", zero) for part in parts])

    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = state[f"model.{side}.embed_positions.weight"]
        both(f"{side}/layer_norm", f"model.{side}.layer_norm", ("gamma", "beta"))
        for layer in range(getattr(model.config, f"{side}_layers")):
            here, there = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            joined(f"{here}/self_attention/linear_0", f"{there}.self_attn", "qkv")
            both(f"{here}/self_attention/linear_1", f"{there}.self_attn.out_proj")
            both(f"{here}/self_attention/layer_norm", f"{there}.self_attn_layer_norm", ("gamma", "beta"))
            both(f"{here}/ffn/linear_0", f"{there}.fc1")
            both(f"{here}/ffn/linear_1", f"{there}.fc2")
            both(f"{here}/ffn/layer_norm", f"{there}.final_layer_norm", ("gamma", "beta"))
            if side == "decoder":
                both(f"{here}/attention/linear_0", f"{there}.encoder_attn.q_proj")
                joined(f"{here}/attention/linear_1", f"{there}.encoder_attn", "kv")
                both(f"{here}/attention/linear_2", f"{there}.encoder_attn.out_proj")
                both(f"{here}/attention/layer_norm", f"{there}.encoder_attn_layer_norm", ("gamma", "beta"))
    for number in (1, 2):
        both(f"encoder/conv{number}", f"model.encoder.conv{number}")
    found["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    return found


def model_bin(found: dict[str, np.ndarray], version: int = 6) -> bytes:
    codes = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}

    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    content = struct.pack("<I", version) + name("WhisperSpec") + struct.pack("<II", 3, len(found))
    for key, value in sorted(found.items()):
        content += name(key) + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        content += struct.pack("<BI", codes[value.dtype.name], value.nbytes) + value.tobytes()
    return content + struct.pack("<I", 1) + name("decoder/projection/weight") + name("decoder/embeddings/weight")


def write_origin(
    folder: Path, found: dict[str, np.ndarray], merges: list[tuple[str, str]] = MERGES, listed: bool = False
) -> Path:
    folder.mkdir()
    (folder / "model.bin").write_bytes(model_bin(found))
    end = VOCABULARY.index("<|endoftext|>")
    facts = {"suppress_ids": [1], "suppress_ids_begin": [2, end], "alignment_heads": [[0, 1]]}
    languages = [VOCABULARY.index("<|en|>"), VOCABULARY.index("<|de|>")]
    (folder / "config.json").write_text(json.dumps({**facts, "lang_ids": languages}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"merges": [" ".join(pair) for pair in merges]}}))
    if listed:
        (folder / "vocabulary.json").write_text(json.dumps(VOCABULARY))
    else:
        (folder / "vocabulary.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    return folder


def logits(model: Any) -> torch.Tensor:
    """Of a fixed input, in float32: (positions, vocabulary)."""
    features = torch.sin(torch.arange(8 * 40, dtype=torch.float32).reshape(1, 8, 40))
    with torch.no_grad():
        return model.float()(features, decoder_input_ids=torch.arange(5, 13).reshape(1, -1)).logits[0]


@pytest.fixture(scope="module")
def tiny() -> WhisperForConditionalGeneration:
    return tiny_model()


def converted(tmp_path: Path, found: dict[str, np.ndarray]) -> WhisperForConditionalGeneration:
    (tmp_path / "out").mkdir()
    CONVERTERS["whisper_to_transformers"]([write_origin(tmp_path / "origin", found)], tmp_path / "out")
    return WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").eval()


def test_a_converted_model_gives_the_logits_it_gave_before(
    tiny: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    model = converted(tmp_path, variables(tiny))
    assert model.dtype == torch.float16
    assert torch.equal(logits(model), logits(tiny))
    generation = model.generation_config
    assert generation.lang_to_id == {"<|en|>": VOCABULARY.index("<|en|>"), "<|de|>": VOCABULARY.index("<|de|>")}
    assert generation.no_timestamps_token_id == VOCABULARY.index("<|0.00|>") - 1
    assert AutoProcessor.from_pretrained(tmp_path / "out").feature_extractor.feature_size == 8


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("decoder/layer_0/attention/linear_0", "decoder/layer_0/attention/linear_2"),
        ("encoder/layer_0/self_attention/linear_0", "encoder/layer_1/self_attention/linear_0"),
    ],
)
def test_weights_that_changed_places_change_the_logits(
    one: str, other: str, tiny: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    found = variables(tiny)
    found[f"{one}/weight"], found[f"{other}/weight"] = found[f"{other}/weight"], found[f"{one}/weight"]
    assert not torch.allclose(logits(converted(tmp_path, found)), logits(tiny), atol=1e-3)


def test_a_bias_that_transformers_has_no_place_for_is_refused(
    tiny: WhisperForConditionalGeneration, tmp_path: Path
) -> None:
    found = variables(tiny)
    bias = found["encoder/layer_0/self_attention/linear_0/bias"].copy()
    bias[16] = 1  # the first of the keys', after 16 of the queries'
    with pytest.raises(SourceError, match=r"layers\.0\.self_attn\.k_proj\.bias is not zero"):
        converted(tmp_path, {**found, "encoder/layer_0/self_attention/linear_0/bias": bias})


@pytest.mark.parametrize("kept", [0, 3, 30, 1000, -100])
def test_a_truncated_file_is_refused(kept: int, tiny: WhisperForConditionalGeneration, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(model_bin(variables(tiny)))
    assert read_model(path).keys() == variables(tiny).keys()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SourceError, match="not a CTranslate2 model of version 6, or is cut short"):
        read_model(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(model_bin({}, version=7))
    with pytest.raises(SourceError, match="version 6, or is cut short: version 7"):
        read_model(tmp_path / "model.bin")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot read .*model\.bin"):
        read_model(tmp_path / "model.bin")


def test_a_second_origin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="takes one origin, not 2"):
        whisper_to_transformers([tmp_path, tmp_path], tmp_path)


# --- tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_first_merge_is_found_again(lost: int, listed: bool, tmp_path: Path) -> None:
    tokenizer = whisper_tokenizer(write_origin(tmp_path / "origin", {}, MERGES[lost:], listed))
    assert tokenizer(" the", add_special_tokens=False).input_ids == [VOCABULARY.index("Ġthe")]
    newer = [token.replace("nocaptions", "nospeech") for token in VOCABULARY]
    assert tokenizer.convert_ids_to_tokens(range(len(VOCABULARY))) == newer
    assert tokenizer("<|0.02|>", add_special_tokens=False).input_ids == [len(VOCABULARY) - 1]


def test_any_other_lost_merge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has not the merges that make the vocabulary"):
        whisper_tokenizer(write_origin(tmp_path / "origin", {}, MERGES[:2]))


# --- parts --------------------------------------------------------------------------------------------------------


def test_parts_are_joined_in_the_order_of_their_origins(tmp_path: Path) -> None:
    origins = [tmp_path / name for name in ("b", "a")]
    for number, origin in enumerate(origins, 1):
        (origin / "data").mkdir(parents=True)
        (origin / "data" / f"model.bin.part{number}").write_bytes(b"%d" % number)
        (origin / "manifest.json").write_text("{}")
    (origins[1] / "data" / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    join_parts(origins, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        "model.bin": b"12",
        "config.json": b"{}",
    }


# --- the real model -----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_whisper_base_gives_ctranslate2s_logits(fetched: Callable[..., Path]) -> None:
    import soundfile

    resources = fetched("whisper_base", "pocketsphinx_testdata")
    measured = json.loads((DATA / "whisper_logits.json").read_text())
    processor = AutoProcessor.from_pretrained(resources / "whisper_base")
    model = WhisperForConditionalGeneration.from_pretrained(resources / "whisper_base", dtype=torch.float32).eval()
    folder = resources / "pocketsphinx_testdata/usr/share/pocketsphinx/test/data/librivox"
    samples, rate = soundfile.read(folder / "sense_and_sensibility_01_austen_64kb-0890.wav", dtype="float32")
    features = processor(samples, sampling_rate=rate, return_tensors="pt").input_features
    ids = torch.tensor([[*measured["prompt"], *measured["tokens"]]])
    places = range(len(measured["prompt"]) - 1, len(measured["prompt"]) + len(measured["tokens"]) - 1)

    def worst() -> float:
        with torch.no_grad():
            rows = model(features, decoder_input_ids=ids).logits[0, places]
        wanted = [(row, step) for row, step in zip(rows, measured["steps"], strict=True)]
        return max((row[step["top_ids"]] - torch.tensor(step["logits"])).abs().max().item() for row, step in wanted)

    assert worst() < 1e-3  # 1.4e-4 where this was written; logits go up to 67
    model.model.decoder.layers[5].fc1.bias.data[0] += 0.1
    assert worst() > 1e-3


@pytest.mark.model
def test_whisper_base_has_the_tokens_of_the_other_packaging(fetched: Callable[..., Path]) -> None:
    probes = json.loads((DATA / "whisper_token_ids.json").read_text())["probes"]
    tokenizer = AutoProcessor.from_pretrained(fetched("whisper_base") / "whisper_base").tokenizer
    assert len(probes) >= 10
    assert [p["text"] for p in probes if tokenizer(p["text"], add_special_tokens=False).input_ids != p["ids"]] == []
