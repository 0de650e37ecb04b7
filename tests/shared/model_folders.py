"""Folders of tiny models as transformers writes them, with the tokenizer of the shipped job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from toolkit.jobs.finetune_lora import tiny_model
from toolkit.train.huggingface.models import library

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
    "mistral": {"sliding_window": 256},
    "gpt2": {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
    },
}


def model_folder(folder: Path, kind: str, **settings: Any) -> Path:
    """Write a model of several shards with random weights, large enough that one has clear predictions."""
    transformers = library()
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, pad_token_id=256, bos_token_id=None,
        eos_token_id=257, **KINDS[kind] | settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder, max_shard_size="150KB")
    tiny_model().tokenizer.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def transformers_model(folder: Path) -> Any:
    return library().AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
