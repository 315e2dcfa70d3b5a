"""A tiny model that answers the arithmetic task in the right format most of the time, sometimes rightly.

Its logits are a table of the last token (orthogonal embeddings, an output layer that looks the token up) plus
what random layers make of the rest. So rewards vary from the first step without any training.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from comppo_mcore.data.tokenizer import load_tokenizer, make_arithmetic_tokenizer

HIDDEN = 32
FOLLOWS = {"?": "<think>", "<think>": "</think>", "</think>": "<answer>", "</answer>": "<eos>"}
DIGITS = "0123456789"


def write_bigram_policy(path: Path, *, layers: int = 5, seed: int = 0, tied: bool = False) -> Path:
    """A HF folder with weights and the arithmetic tokenizer; 4 heads in 2 groups, fp32.

    With tied embeddings there can be no table, and the weights are random altogether.
    """
    path.mkdir(parents=True)
    make_arithmetic_tokenizer(path)
    tokenizer = load_tokenizer(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if not tied:
            embedding = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN)).Q[: len(tokenizer)]
            model.get_input_embeddings().weight.copy_(embedding * HIDDEN**0.5)
            model.get_output_embeddings().weight.copy_(_table(tokenizer).T @ embedding / HIDDEN**0.5)
    model.save_pretrained(path)
    return path


def _table(tokenizer) -> torch.Tensor:
    """Logits [last token, next token]."""

    def ids(*words: str) -> list[int]:
        return tokenizer.convert_tokens_to_ids(list(words))

    table = torch.zeros(len(tokenizer), len(tokenizer))
    for last, following in FOLLOWS.items():
        table[ids(last), ids(following)] = 6.0
    table[ids("<answer>")[0], ids(*DIGITS)] = 4.0
    table[ids(*DIGITS), ids("</answer>")] = 6.0
    return table
