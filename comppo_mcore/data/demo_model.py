"""A model folder small enough for a laptop: config.json and tokenizer of the arithmetic task, no weights.

python -m comppo_mcore.data.demo_model FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from comppo_mcore.data.tokenizer import make_arithmetic_tokenizer

# Five layers leave four on the last of two pipeline stages, which the critic fuses; with heads narrower than
# 64 the attention of so small a model says little.
DEMO_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "initializer_range": 0.1,
    "dtype": "float32",
}


def write_demo_model(folder: Path) -> None:
    """Write tokenizer and config.json; `model.weights: random` draws the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_arithmetic_tokenizer(folder)
    special = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    special["pad_token_id"] = tokenizer.pad_token_id
    (folder / "config.json").write_text(json.dumps(DEMO_CONFIG | special, indent=2) + "\n")


if __name__ == "__main__":
    write_demo_model(Path(sys.argv[1]))
