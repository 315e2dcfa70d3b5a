"""Tiny Hugging Face folders with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

VOCAB = 131  # no multiple of 2, so that tensor parallelism pads it
CASES: dict[str, dict[str, Any]] = {
    "qwen3_untied": {"family": "qwen3", "head_dim": 32, "tied": False},
    "qwen3_tied": {"family": "qwen3", "head_dim": 32, "tied": True},
    "llama": {"family": "llama", "head_dim": 16, "tied": False},
    "llama_tied": {"family": "llama", "head_dim": 16, "tied": True},
    "qwen3_moe": {"family": "qwen3_moe", "head_dim": 32, "tied": False},
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


def write_folder(
    path: Path,
    *,
    family: str,
    head_dim: int,
    tied: bool,
    layers: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """A HF folder, 64 wide with 4 heads in 2 groups; no two weights alike, norms included."""
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}[family]
    settings = {"max_position_embeddings": 512} | (EXPERTS if family == "qwen3_moe" else {}) | changes
    config = kind(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        **settings,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(path)
    return path


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
