"""One place that builds Megatron models: the policy, with or without a critic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from comppo_mcore.config.model_shape import ModelShape
from comppo_mcore.config.schema import Config
from comppo_mcore.kernels.select import Kernels
from comppo_mcore.model.critic import build_critic
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.model.shims import cuda_as_cpu
from comppo_mcore.model.spec import block_spec, resolve_backend


def torch_dtype(name: str) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def transformer_config(config: Config, shape: ModelShape) -> TransformerConfig:
    """Megatron's configuration of a HF model in this run's layout and precision."""
    parallel, dtype = config.parallel, torch_dtype(config.model.dtype)
    on_gpu = torch.cuda.is_available()
    uneven = parallel.last_stage_layers if parallel.pp > 1 else None
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        init_method_std=shape.initializer_range,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        num_layers_in_last_pipeline_stage=uneven,
        variable_seq_lengths=parallel.pp > 1,
        moe_token_dispatcher_type="alltoall",  # what variable sequence lengths ask for, dense or not
        batch_p2p_comm=on_gpu,
        deallocate_pipeline_outputs=True,
        calculate_per_token_loss=True,  # sums, not means: losses are normalised by us
        use_cpu_initialization=not on_gpu,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=on_gpu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,  # needs NVIDIA's apex
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_recompute(config.model.recompute),
        **_experts(shape),
    )


def _experts(shape: ModelShape) -> dict[str, Any]:
    """A token's experts are weighed by the softmax over all, or over those chosen if they are to sum to 1."""
    if shape.experts is None:
        return {}
    return {
        "num_moe_experts": shape.experts.number,
        "moe_router_topk": shape.experts.per_token,
        "moe_ffn_hidden_size": shape.ffn_size,
        "moe_router_pre_softmax": not shape.experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _recompute(on: bool) -> dict[str, Any]:
    if not on:
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build_policy(
    config: Config, shape: ModelShape, layout: Layout, kernels: Kernels, *, with_critic: bool
) -> PolicyModel:
    """This rank's part of the policy on its device, randomly initialised, the critic seeded by the run."""
    megatron = transformer_config(config, shape)
    num_features = config.critic.layers if with_critic and config.critic.kind == "aligned" else 0
    with cuda_as_cpu():
        backend = resolve_backend(config.model.backend)
        model = PolicyModel(
            config=megatron,
            transformer_layer_spec=block_spec(megatron, backend, layout.pp_rank),
            vocab_size=padded_vocab(shape.vocab_size, layout.tp_size),
            max_sequence_length=shape.max_positions,
            pre_process=layout.is_first_stage,
            post_process=layout.is_last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta),
            pg_collection=layout.groups,
            num_features=num_features,
            true_vocab_size=shape.vocab_size,
            **_rope_scaling(shape),
        )
        if with_critic and layout.is_last_stage:
            model.attach_critic(
                build_critic(megatron, config.critic, layout.groups.tp, config.run.seed, kernels.pool_history)
            )
        return model.to(layout.device)


def _rope_scaling(shape: ModelShape) -> dict[str, Any]:
    if shape.rope_scaling_factor is None:
        return {}
    return {"rope_scaling": True, "rope_scaling_factor": shape.rope_scaling_factor}


def padded_vocab(vocab_size: int, tp: int, multiple: int = 1) -> int:
    """Rows of the embedding: the vocabulary rounded up until every tensor-parallel rank has equally many."""
    unit = tp * multiple
    return -(-vocab_size // unit) * unit
