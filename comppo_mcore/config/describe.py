"""A configuration's numbers in lines a person reads before a run starts."""

from __future__ import annotations

from comppo_mcore.config.check import data_parallel_size, layers_per_stage
from comppo_mcore.config.model_shape import ModelShape
from comppo_mcore.config.schema import Config


def batch_line(config: Config, world_size: int) -> str:
    """Every batch number of `comppo train` in one line."""
    prompts, responses, minibatch = config.rollout.prompts, config.rollout.responses, config.algo.minibatch
    dp_size = data_parallel_size(config.parallel, world_size)
    return (
        f"batch: {prompts} prompts × {responses} responses = {prompts * responses} trajectories; "
        f"minibatch {minibatch} trajectories ({minibatch // dp_size} per data-parallel rank); "
        f"micro-batch ≤ {config.train.micro_batch_tokens} tokens; "
        f"{prompts * responses // minibatch} optimizer steps per epoch × {config.algo.epochs} epochs; "
        f"{_data_parallel(config, world_size)}"
    )


def sft_batch_line(config: Config, world_size: int) -> str:
    """Every batch number of `comppo sft` in one line."""
    batch, dp_size = config.sft.batch, data_parallel_size(config.parallel, world_size)
    return (
        f"batch: {batch} examples per optimizer step ({batch // dp_size} per data-parallel rank); "
        f"micro-batch ≤ {config.train.micro_batch_tokens} tokens; {config.sft.steps} optimizer steps; "
        f"{_data_parallel(config, world_size)}"
    )


def model_line(config: Config, shape: ModelShape) -> str:
    """The model's shape and how its layers lie on the pipeline stages."""
    stages = layers_per_stage(config.parallel, shape.num_layers)
    return (
        f"model: {shape.family}, {shape.num_layers} layers ({' + '.join(map(str, stages))} over "
        f"{len(stages)} pipeline {'stage' if len(stages) == 1 else 'stages'}); hidden {shape.hidden_size}; "
        f"{shape.num_heads} heads in {shape.num_kv_groups} key-value groups of head_dim {shape.head_dim}; "
        f"MLP {shape.ffn_size}; vocabulary {shape.vocab_size}, {'tied' if shape.tied else 'untied'}; "
        f"context {config.model.max_context or shape.max_positions} tokens"
    )


def _data_parallel(config: Config, world_size: int) -> str:
    p, dp_size = config.parallel, data_parallel_size(config.parallel, world_size)
    return (
        f"data-parallel size {dp_size} "
        f"(world {world_size} = TP {p.tp} × PP {p.pp} × CP {p.cp} × DP {dp_size})"
    )
