"""How Megatron-Core and Hugging Face name and lay out the same weights: one table for both directions.

Megatron fuses q, k, v into one matrix and gate, up into another, splits matrices over the
tensor-parallel group, spreads layers over pipeline stages and pads the vocabulary. `RULES` says for
every Megatron parameter which HF tensors it is made of and along which dimension it is split.

The manifest (expected name → shape, dtype) comes from the HF config alone, so that a wrong table,
a wrong folder or a wrong config shows as a difference between two independent sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AutoConfig, PretrainedConfig

from comppo_mcore.config.model_shape import FAMILIES, read_model_shape
from comppo_mcore.errors import UserError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


Manifest = Mapping[str, TensorSpec]
Stream = Iterator[tuple[str, torch.Tensor]]


# ---------------------------------------------------------------------------- what HF expects


def read_config(source: str | Path | PretrainedConfig) -> PretrainedConfig:
    """The HF config of a folder, checked to be one that `RULES` covers.

    Raises:
        UserError: no readable config.json, another family, or biases in the linear layers.
    """
    config = source if isinstance(source, PretrainedConfig) else _load_config(source)
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type {config.model_type!r} is not one of {FAMILIES}")
    if config.attention_bias or getattr(config, "mlp_bias", False):
        raise UserError(
            "model.path names a model with attention_bias or mlp_bias true in config.json; "
            "only models without biases are supported"
        )
    return config


def _load_config(folder: str | Path) -> PretrainedConfig:
    read_model_shape(folder)  # for its checks: every size is there, and the family is a known one
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"model.path {str(folder)!r} has a wrong value in config.json: {reason}") from error


def hf_manifest(source: str | Path | PretrainedConfig, dtype: torch.dtype | None = None) -> Manifest:
    """Every tensor a HF folder must hold, in the order of `hf.export_hf`; tied: without lm_head.

    Args:
        source: a HF folder or its config.
        dtype: of every tensor; default: the config's, float32 where it names none.

    Raises:
        UserError: as `read_config`.
    """
    config = read_config(source)
    kept = dtype or getattr(torch, str(config.dtype or "float32").removeprefix("torch."))
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = table
    return {name: TensorSpec(shape, kept) for name, shape in shapes.items()}


def _layer_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    has_head_norms = config.model_type != "llama"
    head_norms = {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        **(head_norms if has_head_norms else {}),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        **_mlp_shapes(config),
    }


def _mlp_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    if config.model_type != "qwen3_moe":
        return _gated_shapes("mlp", config.hidden_size, config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (config.num_experts, config.hidden_size)}
    for expert in range(config.num_experts):
        prefix = f"mlp.experts.{expert}"
        shapes |= _gated_shapes(prefix, config.hidden_size, config.moe_intermediate_size)
    return shapes


def _gated_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def check_stream(stream: Iterable[tuple[str, torch.Tensor]], manifest: Manifest) -> Stream:
    """Pass tensors on, each expected name exactly once with its shape and dtype.

    Raises:
        ValueError: while streaming at the first violation, or at the end for missing names.
    """
    pending = dict(manifest)
    for name, tensor in stream:
        if name not in pending:
            raise ValueError(f"tensor {name} was {'sent twice' if name in manifest else 'not expected'}")
        expected, got = pending.pop(name), TensorSpec(tuple(tensor.shape), tensor.dtype)
        if got != expected:
            raise ValueError(f"tensor {name} is {got}, expected {expected}")
        yield name, tensor
        del tensor  # the consumer may have let it go, to make room for the next one
    if pending:
        raise ValueError(f"tensors never sent: {shortened(pending)}")


def differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """Names with shapes that are missing, unexpected or of another shape; "" if there are none."""
    kinds = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys(),
        "wrong shape": {n for n in expected.keys() & found.keys() if found[n] != expected[n]},
    }
    return "; ".join(f"{kind}: {shortened(names)}" for kind, names in kinds.items() if names)


def shortened(names: Iterable[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


# ---------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the HF tensors it is made of.

    Two HF tensors are stacked on each rank; three (q, k, v) are interleaved by key-value group.
    """

    megatron: tuple[str, ...]  # the local spec's name, TransformerEngine's name
    hf: tuple[str, ...]  # {layer} and {expert} stand for indices in both
    axis: int | None = None  # dimension split over tensor parallelism; None: whole on every rank
    padded: bool = False  # Megatron's tensor has zero rows behind the vocabulary


def _layer_rule(megatron: Sequence[str], hf: Sequence[str], axis: int | None = None) -> Rule:
    return Rule(
        tuple(f"decoder.layers.{{layer}}.{name}" for name in megatron),
        tuple(f"model.layers.{{layer}}.{name}" for name in hf),
        axis,
    )


RULES = (
    Rule(("embedding.word_embeddings.weight",), (EMBEDDING,), axis=0, padded=True),
    _layer_rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.weight",),
    ),
    _layer_rule(
        ("self_attention.linear_qkv.weight",),
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        axis=0,
    ),
    _layer_rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    _layer_rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
    _layer_rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), axis=1),
    _layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("post_attention_layernorm.weight",),
    ),
    _layer_rule(("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), axis=0),
    _layer_rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), axis=1),
    _layer_rule(("mlp.router.weight",), ("mlp.gate.weight",)),
    _layer_rule(
        ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        axis=0,
    ),
    _layer_rule(
        ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
        ("mlp.experts.{expert}.down_proj.weight",),
        axis=1,
    ),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",)),
    Rule(("output_layer.weight",), (HEAD,), axis=0, padded=True),
)
_RULE_OF = {name: rule for rule in RULES for name in rule.megatron}
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")

# Tied models on several pipeline stages hold the embedding a second time, on the last one.
TIED_HEAD = Rule(("output_layer.weight",), (EMBEDDING,), axis=0, padded=True)


class MegatronModel(Protocol):
    """What is asked of a Megatron `GPTModel`."""

    config: Any
    pg_collection: Any
    decoder: Any
    share_embeddings_and_output_weights: bool

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


class Held(NamedTuple):
    """A parameter of this pipeline stage with its rule and HF names."""

    parameter: torch.nn.Parameter
    rule: Rule
    names: tuple[str, ...]


def held(model: MegatronModel) -> Iterator[Held]:
    """This stage's parameters, those of the critic left out.

    Raises:
        ValueError: a parameter without a rule.
    """
    for name, parameter in model.named_parameters():
        if "critic" in name:
            continue
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        rule = _RULE_OF.get(_EXPERT.sub("{expert}", _LAYER.sub("{layer}", name)))
        if rule is None:
            raise ValueError(f"no HF name is known for the Megatron parameter {name}")
        if rule.hf == (HEAD,) and model.share_embeddings_and_output_weights:
            rule = TIED_HEAD
        # The index in the name counts from this stage's first layer, `layer_number` from the model's, from 1.
        index = model.decoder.layers[int(layer[0])].layer_number - 1 if layer else None
        names = (template.format(layer=index, expert=expert and expert[0]) for template in rule.hf)
        yield Held(parameter, rule, tuple(names))


def fuse(parts: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """One rank's HF tensors → its Megatron tensor: [q of group 0, k, v, q of group 1, …] or [gate, up]."""
    if len(parts) < 3:
        return torch.cat(list(parts))
    rows = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(rows, dim=1).flatten(0, 1)


def unfuse(tensor: torch.Tensor, index: int, num_parts: int, groups: int, head_dim: int) -> torch.Tensor:
    """The inverse of `fuse`, for one of the parts."""
    if num_parts < 3:
        return tensor.chunk(num_parts)[index]
    rows = tensor.reshape(groups, -1, *tensor.shape[1:])
    return rows.split([rows.shape[1] - 2 * head_dim, head_dim, head_dim], dim=1)[index].flatten(0, 1)


def assemble(entry: Held, shards: Sequence[torch.Tensor], config: Any) -> list[torch.Tensor]:
    """Every tensor-parallel rank's Megatron tensor → full HF tensors, vocabulary padding included."""
    parts = [
        [part_of(entry, i, shard, config, len(shards)) for shard in shards] for i in range(len(entry.names))
    ]
    if entry.rule.axis is None:
        return [copies[0] for copies in parts]
    return [torch.cat(pieces, dim=entry.rule.axis) for pieces in parts]


def part_of(entry: Held, index: int, shard: torch.Tensor, config: Any, tp_size: int) -> torch.Tensor:
    """What one tensor-parallel rank's Megatron tensor holds of one of the entry's HF tensors."""
    return unfuse(shard, index, len(entry.names), config.num_query_groups // tp_size, config.kv_channels)
