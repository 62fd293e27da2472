"""A tiny Whisper with random weights and a byte-level tokenizer: real shapes and rules, and no idea of speech."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

SPECIAL = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startofprev", "nospeech"]
SPECIAL += ["notimestamps"]
STAMPS = [f"<|{number * 0.02:.2f}|>" for number in range(1501)]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END = len(BYTES)
FIRST_STAMP = END + len(SPECIAL)


def build(folder: Path, seed: int = 0, room: int = 24) -> Path:
    """Write the model to `folder`: 2 layers a side, one token a byte, windows of at most `room` decoder positions."""
    tokenizer = WhisperTokenizer(vocab={token: number for number, token in enumerate(BYTES)}, merges=[])
    special = [AddedToken(f"<|{name}|>", normalized=False, special=True) for name in SPECIAL]
    tokenizer.add_special_tokens({"eos_token": special[0], "bos_token": special[0], "unk_token": special[0]})
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(name, normalized=True, special=False) for name in STAMPS])
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    config = WhisperConfig(
        vocab_size=FIRST_STAMP + len(STAMPS),
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_target_positions=room,
        decoder_start_token_id=END + 1,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        init_std=0.4,  # large enough that logits differ clearly
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=END + 1,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        max_length=room,
        suppress_tokens=[5, END + 1, END + 4],
        begin_suppress_tokens=[9, END],
        alignment_heads=[[1, 0], [1, 1]],
        is_multilingual=True,
        lang_to_id={"<|en|>": END + 2, "<|de|>": END + 3},
        task_to_id={"translate": END + 4, "transcribe": END + 5},
        no_timestamps_token_id=FIRST_STAMP - 1,
        prev_sot_token_id=END + 6,
        max_initial_timestamp_index=50,
        return_timestamps=False,
    )
    model.save_pretrained(folder)
    return folder
