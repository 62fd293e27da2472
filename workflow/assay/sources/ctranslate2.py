"""Whisper models in CTranslate2's format, read and rewritten for transformers: the same weights for two engines.

The binary format is what CTranslate2's converters write, version 6
(https://github.com/OpenNMT/CTranslate2/blob/master/python/ctranslate2/specs/model_spec.py); the names of the
weights are those of its Whisper specification (specs/whisper_spec.py there).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import SourceError
from assay.sources.manifest import only

_DTYPES = [np.float32, np.int8, np.int16, np.int32, np.float16]
_VERSION = 6
_BYTES = 256  # tokens of one byte, which come first in a vocabulary

Weights = dict[str, np.ndarray]


def whisper_to_transformers(origins: Sequence[Path], directory: Path) -> None:
    """Write the CTranslate2 Whisper model in the one origin as a transformers model directory, weights unchanged.

    Raises:
        SourceError: the files are not such a model, or hold what a transformers Whisper has no place for.
    """
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    origin = only(origins)
    weights = read_model(origin / "model.bin")
    facts = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    tokenizer = whisper_tokenizer(origin)
    model = WhisperForConditionalGeneration(_config(weights, facts, tokenizer)).to(torch.float16)
    state = {name: torch.from_numpy(np.array(value)) for name, value in _renamed(origin, weights).items()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state)
    model.generation_config = _generation_config(facts, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    WhisperFeatureExtractor(feature_size=model.config.num_mel_bins).save_pretrained(directory)


def read_model(path: Path) -> Weights:
    """The variables of a CTranslate2 `model.bin` by name; an alias is not followed.

    Raises:
        SourceError: it is of another version, truncated, or not such a file.
    """
    try:
        return dict(_variables(path.read_bytes()))
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
        raise SourceError(
            f"{path} is not a CTranslate2 model of version {_VERSION}, or is cut short: {error}"
        ) from None


def _variables(content: bytes) -> Iterator[tuple[str, np.ndarray]]:
    place = 0

    def take(code: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{code}", content, place)
        place += struct.calcsize(code)
        return value

    def name() -> str:
        nonlocal place
        length = take("H")  # the closing zero counts
        place += length
        return content[place - length : place - 1].decode()

    if (version := take("I")) != _VERSION:
        raise ValueError(f"version {version}")
    name()  # of the specification
    take("I")  # its revision
    for _ in range(take("I")):
        key, shape = name(), [take("I") for _ in range(take("B"))]
        dtype, size = np.dtype(_DTYPES[take("B")]), take("I")
        values = np.frombuffer(content, dtype, size // dtype.itemsize, place)
        place += size
        yield key, values.reshape(shape)


# --- weights ------------------------------------------------------------------------------------------------------


def _renamed(origin: Path, weights: Weights) -> Weights:
    """The weights under transformers' names; joined projections are split, and zero biases of keys dropped."""
    renamed = {
        "model.encoder.conv1.weight": weights["encoder/conv1/weight"],
        "model.encoder.conv1.bias": weights["encoder/conv1/bias"],
        "model.encoder.conv2.weight": weights["encoder/conv2/weight"],
        "model.encoder.conv2.bias": weights["encoder/conv2/bias"],
        "model.decoder.embed_tokens.weight": weights["decoder/embeddings/weight"],
    }
    for side in ("encoder", "decoder"):
        there, here = f"model.{side}", side
        renamed[f"{there}.embed_positions.weight"] = weights[f"{here}/position_encodings/encodings"]
        renamed |= _norm(weights, f"{here}/layer_norm", f"{there}.layer_norm")
        for layer in range(_layers(weights, side)):
            renamed |= _layer(weights, f"{here}/layer_{layer}", f"{there}.layers.{layer}", side)
    zeros = [name for name in renamed if name.endswith("k_proj.bias")]
    if filled := [name for name in zeros if renamed[name].any()]:
        raise SourceError(f"{origin}: {filled[0]} is not zero, and a transformers Whisper has no such weight")
    return {name: value for name, value in renamed.items() if name not in zeros}


def _layer(weights: Weights, here: str, there: str, side: str) -> Weights:
    own, ffn = f"{here}/self_attention", f"{here}/ffn"
    found = {
        **_split(weights, f"{own}/linear_0", [f"{there}.self_attn.{part}_proj" for part in "qkv"]),
        **_linear(weights, f"{own}/linear_1", f"{there}.self_attn.out_proj"),
        **_norm(weights, f"{own}/layer_norm", f"{there}.self_attn_layer_norm"),
        **_linear(weights, f"{ffn}/linear_0", f"{there}.fc1"),
        **_linear(weights, f"{ffn}/linear_1", f"{there}.fc2"),
        **_norm(weights, f"{ffn}/layer_norm", f"{there}.final_layer_norm"),
    }
    if side == "decoder":
        cross = f"{here}/attention"
        found |= _linear(weights, f"{cross}/linear_0", f"{there}.encoder_attn.q_proj")
        found |= _split(weights, f"{cross}/linear_1", [f"{there}.encoder_attn.{part}_proj" for part in "kv"])
        found |= _linear(weights, f"{cross}/linear_2", f"{there}.encoder_attn.out_proj")
        found |= _norm(weights, f"{cross}/layer_norm", f"{there}.encoder_attn_layer_norm")
    return found


def _linear(weights: Weights, here: str, there: str) -> Weights:
    return {f"{there}.{part}": weights[f"{here}/{part}"] for part in ("weight", "bias")}


def _split(weights: Weights, here: str, there: list[str]) -> Weights:
    return {
        f"{name}.{part}": piece
        for part in ("weight", "bias")
        for name, piece in zip(there, np.split(weights[f"{here}/{part}"], len(there)), strict=True)
    }


def _norm(weights: Weights, here: str, there: str) -> Weights:
    return {f"{there}.weight": weights[f"{here}/gamma"], f"{there}.bias": weights[f"{here}/beta"]}


def _layers(weights: Weights, side: str) -> int:
    return len({name.split("/")[1] for name in weights if name.startswith(f"{side}/layer_") and "norm" not in name})


# --- configuration and tokenizer ----------------------------------------------------------------------------------


def _config(weights: Weights, facts: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import WhisperConfig

    vocabulary, width = weights["decoder/embeddings/weight"].shape
    end = tokenizer.eos_token_id
    return WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=weights["encoder/conv1/weight"].shape[1],
        d_model=width,
        encoder_layers=_layers(weights, "encoder"),
        decoder_layers=_layers(weights, "decoder"),
        encoder_attention_heads=int(weights["encoder/num_heads"]),
        decoder_attention_heads=int(weights["decoder/num_heads"]),
        encoder_ffn_dim=weights["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_ffn_dim=weights["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=weights["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=weights["decoder/position_encodings/encodings"].shape[0],
        decoder_start_token_id=tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=facts["suppress_ids"],
        begin_suppress_tokens=facts["suppress_ids_begin"],
    )


def _generation_config(facts: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import GenerationConfig

    token_id, end = tokenizer.convert_tokens_to_ids, tokenizer.eos_token_id
    return GenerationConfig(
        decoder_start_token_id=token_id("<|startoftranscript|>"),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        max_length=448,
        suppress_tokens=facts["suppress_ids"],
        begin_suppress_tokens=facts["suppress_ids_begin"],
        alignment_heads=facts["alignment_heads"],
        is_multilingual=True,
        lang_to_id={tokenizer.convert_ids_to_tokens(token): token for token in facts["lang_ids"]},
        task_to_id={task: token_id(f"<|{task}|>") for task in ("transcribe", "translate")},
        no_timestamps_token_id=token_id("<|notimestamps|>"),
        prev_sot_token_id=token_id("<|startofprev|>"),
        return_timestamps=False,
    )


def whisper_tokenizer(directory: Path) -> Any:
    """The tokenizer of a CTranslate2 Whisper model, with all the merges and timestamps that its vocabulary needs.

    Some packagings' tokenizer.json lost the first merge (a space and "t") and every timestamp: it decodes text well,
    but " the" encodes to two tokens that the model never gives. The vocabulary file is whole, and a merge's place is
    that of the token it makes, so what is missing is known. Ids are tested against another
    packaging's (tests/data/whisper_token_ids.json).

    Raises:
        SourceError: more is missing than can be known.
    """
    from transformers import AddedToken, WhisperTokenizer

    vocabulary = _vocabulary(directory)
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in content["model"]["merges"]]
    end = vocabulary.index("<|endoftext|>")
    wanted = [token for token in vocabulary[_BYTES:end] if token]
    if ["".join(pair) for pair in merges] == wanted[1:]:
        merges.insert(0, (wanted[0][0], wanted[0][1]))
    if ["".join(pair) for pair in merges] != wanted:
        raise SourceError(f"{directory}: tokenizer.json has not the merges that make the vocabulary")
    first = vocabulary.index("<|0.00|>")
    special = [AddedToken(token, normalized=False, special=True) for token in vocabulary[end + 1 : first]]
    tokenizer = WhisperTokenizer(
        vocab={token: place for place, token in enumerate(vocabulary[:end])},
        merges=merges,
        extra_special_tokens=special,
    )
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in vocabulary[first:]])
    if tokenizer.convert_ids_to_tokens(range(len(vocabulary))) != vocabulary:
        raise SourceError(f"{directory}: the tokens of its vocabulary cannot be given their ids")
    return tokenizer


def _vocabulary(directory: Path) -> list[str]:
    """Tokens in the order of their ids, from a JSON list or one a line; the older name of a token is made the newer."""
    listed = directory / "vocabulary.json"
    if listed.is_file():
        tokens = json.loads(listed.read_text(encoding="utf-8"))
    else:
        tokens = (directory / "vocabulary.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return ["<|nospeech|>" if token == "<|nocaptions|>" else token for token in tokens]
