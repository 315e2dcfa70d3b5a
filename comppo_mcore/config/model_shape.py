"""The shape of a model, read from the config.json of its Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comppo_mcore.errors import UserError

FAMILIES = ("qwen3", "llama", "qwen3_moe")
# Llama 3's rotary scaling stretches long wavelengths; Megatron-Core lets only its factor vary.
LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that takes the MLP's place in every layer."""

    number: int
    per_token: int
    normalized: bool  # the weights of a token's experts sum to 1


@dataclass(frozen=True)
class ModelShape:
    """What sizes a decoder; lengths in tokens, widths in elements."""

    family: str  # of FAMILIES
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_groups: int
    head_dim: int
    ffn_size: int  # of the MLP, or of one expert
    vocab_size: int
    tied: bool  # the output layer is the embedding
    qk_norm: bool
    norm_eps: float
    initializer_range: float  # standard deviation of random weights
    rope_theta: float
    rope_scaling_factor: float | None  # of Llama 3's scaling
    max_positions: int
    experts: Experts | None = None


def read_model_shape(folder: str | Path) -> ModelShape:
    """Read `<folder>/config.json`.

    Raises:
        UserError: no readable config.json, a family other than `FAMILIES`, a size missing or below 1, or a
            variant of the family that is not supported.
    """
    raw = _read(folder)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"model.path names a model of type {family!r}; supported are {', '.join(FAMILIES)}")
    _refuse_variants(raw)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # the newer and the older name
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    return ModelShape(
        family=family,
        num_layers=_size(raw, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_groups=_size(raw, "num_key_value_heads", num_heads),
        head_dim=_size(raw, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads),
        ffn_size=_size(raw, "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"),
        vocab_size=_size(raw, "vocab_size"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=family != "llama",
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rope_scaling_factor=_rope_scaling_factor(rope),
        max_positions=_size(raw, "max_position_embeddings"),
        experts=_experts(raw) if family == "qwen3_moe" else None,
    )


def _experts(raw: dict[str, Any]) -> Experts:
    key = "num_experts" if "num_experts" in raw else "num_local_experts"  # the older and the newer name
    return Experts(_size(raw, key), _size(raw, "num_experts_per_tok"), bool(raw.get("norm_topk_prob", False)))


def _read(folder: str | Path) -> dict[str, Any]:
    if not str(folder):
        raise UserError("model.path is empty; give a Hugging Face model folder (config.json and tokenizer)")
    try:
        raw = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"model.path {str(folder)!r} holds no config.json; give a Hugging Face model folder"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"model.path {str(folder)!r} has an unreadable config.json: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"model.path {str(folder)!r} has a config.json that is not a JSON object")
    return raw


def _refuse_variants(raw: dict[str, Any]) -> None:
    """Members of the families that this package would compute wrongly."""
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,  # of a mixture of experts: in every layer
        "mlp_only_layers": [],
    }
    for key, value in wanted.items():
        if raw.get(key) is not None and raw[key] != value:
            raise UserError(
                f"model.path has {key} = {json.dumps(raw[key])} in config.json; "
                f"only {json.dumps(value)} is supported"
            )


def _size(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int or value < 1:
        raise UserError(
            f"model.path has {key} = {json.dumps(value)} in config.json; it must be a whole number ≥ 1"
        )
    return value


def _rope_scaling_factor(rope: dict[str, Any]) -> float | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3" or any(rope.get(key) != value for key, value in LLAMA3_SCALING.items()):
        raise UserError(
            f"model.path has rotary scaling {json.dumps(rope)} in config.json; supported are none and "
            f"llama3 with {json.dumps(LLAMA3_SCALING)}"
        )
    return float(rope["factor"])
