"""A small valid configuration on disk, for tests that vary one thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json of QWEN3; a value of None removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in {**QWEN3, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def write_config(folder: Path) -> Path:
    """A configuration of the arithmetic task on `write_model`'s model that passes every check."""
    model = write_model(folder / "model")
    path = folder / "run.yaml"
    path.write_text(
        f"""\
run: {{name: small, dir: {folder / "runs"}}}
model: {{path: {model}, weights: random, dtype: fp32, backend: local}}
data: {{source: arithmetic}}
rollout: {{prompts: 4, responses: 4, max_response_tokens: 64}}
train: {{steps: 2, micro_batch_tokens: 1024}}
"""
    )
    return path
