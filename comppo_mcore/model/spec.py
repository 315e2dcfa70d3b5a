"""Layer specs by backend, the last layer's core attention exposing its row."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from comppo_mcore.errors import UserError
from comppo_mcore.model.attention import PackedAttention, RMSNorm, exposing

Backend = Literal["transformer_engine", "local"]


def resolve_backend(wanted: str) -> Backend:
    """`auto` is TransformerEngine where it is installed; asking for it by name never falls back."""
    present = importlib.util.find_spec("transformer_engine") is not None
    if wanted == "transformer_engine" and not present:
        raise UserError(
            "model.backend is transformer_engine, but TransformerEngine is not installed here: "
            "install it, or set model.backend to local"
        )
    if wanted == "auto":
        return "transformer_engine" if present else "local"
    return "local" if wanted == "local" else "transformer_engine"


def block_spec(config: Any, backend: Backend, pp_rank: int) -> TransformerBlockSubmodules:
    """This stage's layers; one spec object per layer, because only the last may expose its row."""
    specs = [_layer_spec(config, backend) for _ in range(config.num_layers)]
    attention = specs[-1].submodules.self_attention.submodules
    attention.core_attention = exposing(attention.core_attention)
    offset = get_transformer_layer_offset(config, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, pp_rank=pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=specs[offset : offset + count], layer_norm=_final_norm(backend)
    )


def _layer_spec(config: Any, backend: Backend) -> Any:
    if backend == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer: Any = spec.submodules
    if config.num_moe_experts is not None:  # TransformerEngine fuses no norm into a router, so names none so
        keys = layer.sharded_state_dict_keys_map
        layer.sharded_state_dict_keys_map = {k: v for k, v in keys.items() if k != "pre_mlp_layernorm."}
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    return spec


def _final_norm(backend: Backend) -> Any:
    if backend == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm
