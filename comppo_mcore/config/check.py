"""The rules between fields, checked before anything heavy is imported or started.

Every rule raises `UserError` with the field, its value and what would be right. What needs the prompts, the
tokenizer or the weights is checked where those are read.
"""

from __future__ import annotations

import importlib.util
import math

from comppo_mcore.config.algorithm import has_critic
from comppo_mcore.config.model_shape import ModelShape
from comppo_mcore.config.schema import (
    AlgoConfig,
    ArithmeticConfig,
    Config,
    ControllerConfig,
    CriticConfig,
    DataConfig,
    GateConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RewardConfig,
    SGLangConfig,
)
from comppo_mcore.errors import UserError


def check(config: Config, shape: ModelShape, world_size: int) -> None:
    """Refuse a configuration that `comppo train` and `comppo eval` cannot run.

    Args:
        config: as `load` returns it.
        shape: of the model at `config.model.path`.
        world_size: number of processes.

    Raises:
        UserError: at the first rule broken.
    """
    check_model(config, shape, world_size)
    check_dense(shape)
    if has_critic(config):
        check_critic(config.critic, config.parallel, shape)
    check_algorithm(config)
    check_rollout(config)
    check_gate(config.gate)
    check_batches(config, data_parallel_size(config.parallel, world_size))
    check_lengths(config, shape)
    check_data(config.data)
    check_arithmetic(config.data.arithmetic)
    check_schedules(config.reward, config.controller)


def check_sft(config: Config, shape: ModelShape, world_size: int) -> None:
    """Refuse a configuration that `comppo sft` cannot run; arguments and errors as `check`."""
    check_model(config, shape, world_size)
    check_dense(shape)
    check_arithmetic(config.data.arithmetic)
    if config.sft.path is None and config.data.source != "arithmetic":
        raise UserError(
            f"sft.path is null with data.source = {config.data.source}; give a file of prompts "
            "with responses (.jsonl or .parquet), which only the arithmetic task makes itself"
        )
    dp_size = data_parallel_size(config.parallel, world_size)
    if config.sft.batch % dp_size:
        raise UserError(
            f"sft.batch is {config.sft.batch}, which the data-parallel size {dp_size} does not divide; "
            f"make it a multiple of {dp_size}"
        )


def check_model(config: Config, shape: ModelShape, world_size: int) -> None:
    """What every command that builds the model needs."""
    data_parallel_size(config.parallel, world_size)
    check_tensor_parallel(config.parallel, shape)
    layers_per_stage(config.parallel, shape.num_layers)
    check_backend(config.model, config.parallel)
    check_optimizer(config.optim)
    if config.model.max_context is not None and not 2 <= config.model.max_context <= shape.max_positions:
        raise UserError(
            f"model.max_context is {config.model.max_context}; it must be from 2 to the model's "
            f"{shape.max_positions} positions"
        )


def check_dense(shape: ModelShape) -> None:
    """Experts can be converted and run, but training them needs more than is here."""
    if shape.experts is not None:
        raise UserError(
            f"model.path names a mixture of experts ({shape.family}), which `comppo convert` takes but "
            "training does not, for want of expert parallelism and router losses; give a qwen3 or llama model"
        )


# ---------------------------------------------------------------------------- layout


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """DP = world / (TP · PP · CP).

    Raises:
        UserError: the world does not divide.
    """
    tp, pp, cp = parallel.tp, parallel.pp, parallel.cp
    if world_size % (tp * pp * cp):
        raise UserError(
            f"parallel.tp × pp × cp is {tp} × {pp} × {cp} = {tp * pp * cp}, which does not divide the world "
            f"size {world_size}; start a multiple of {tp * pp * cp} processes"
        )
    return world_size // (tp * pp * cp)


def layers_per_stage(parallel: ParallelConfig, num_layers: int) -> tuple[int, ...]:
    """Decoder layers of each pipeline stage, first to last.

    Raises:
        UserError: the layers cannot be cut that way.
    """
    pp, last = parallel.pp, parallel.last_stage_layers
    if last is None:
        if num_layers % pp:
            raise UserError(
                f"parallel.pp is {pp}, which does not divide the model's {num_layers} layers; "
                "choose another, or set parallel.last_stage_layers"
            )
        return (num_layers // pp,) * pp
    rest = num_layers - last
    if pp == 1 and rest:
        raise UserError(
            f"parallel.last_stage_layers is {last}, but with parallel.pp = 1 the only stage holds all "
            f"{num_layers} layers; leave it out"
        )
    if pp > 1 and (rest < pp - 1 or rest % (pp - 1)):
        raise UserError(
            f"parallel.last_stage_layers is {last}, which leaves {max(rest, 0)} of {num_layers} layers for "
            f"{pp - 1} other stage(s) of parallel.pp = {pp}; they must each get the same number, at least one"
        )
    return (rest // (pp - 1),) * (pp - 1) + (last,) if pp > 1 else (last,)


def check_tensor_parallel(parallel: ParallelConfig, shape: ModelShape) -> None:
    """TP divides what is sharded; the vocabulary is padded instead."""
    sharded = {
        "attention heads": shape.num_heads,
        "key-value groups": shape.num_kv_groups,
        "MLP width": shape.ffn_size,
    }
    for name, size in sharded.items():
        if size % parallel.tp:
            raise UserError(
                f"parallel.tp is {parallel.tp}, which does not divide the model's {name} ({size}); "
                f"choose a common divisor of {', '.join(f'{s} ({n})' for n, s in sharded.items())}"
            )
    if parallel.sequence_parallel and parallel.tp == 1:
        raise UserError(
            "parallel.sequence_parallel is true with parallel.tp = 1; it splits activations over the "
            "tensor-parallel ranks, so set it to false or raise parallel.tp"
        )


def check_backend(model: ModelConfig, parallel: ParallelConfig) -> None:
    """TransformerEngine where it is asked for or needed."""
    present = importlib.util.find_spec("transformer_engine") is not None
    if model.backend == "transformer_engine" and not present:
        raise UserError(
            "model.backend is transformer_engine, which is not installed here; install it or choose local"
        )
    if parallel.cp > 1 and (model.backend == "local" or not present):
        raise UserError(
            f"parallel.cp is {parallel.cp}, which the local attention backend cannot do; set it to 1, or "
            "install TransformerEngine and set model.backend to transformer_engine"
        )


def check_critic(critic: CriticConfig, parallel: ParallelConfig, shape: ModelShape) -> None:
    """The L' layers whose hidden states the aligned critic fuses lie on the last stage (Eq. 21)."""
    held = layers_per_stage(parallel, shape.num_layers)[-1]
    if critic.kind == "aligned" and critic.layers > held:
        remedy = f"set critic.layers to at most {held}"
        if critic.layers <= shape.num_layers - parallel.pp + 1:
            remedy += f" or parallel.last_stage_layers to at least {critic.layers}"
        raise UserError(
            f"critic.layers is {critic.layers}, but the last pipeline stage holds {held} of the model's "
            f"{shape.num_layers} layers; {remedy}"
        )


# ---------------------------------------------------------------------------- estimator and update


def check_algorithm(config: Config) -> None:
    """What the named algorithm can estimate and minimise."""
    algo = config.algo
    if algo.name in ("grpo", "rloo") and config.rollout.responses < 2:
        raise UserError(
            f"rollout.responses is {config.rollout.responses} with algo.name = {algo.name}, whose baseline "
            "is the group's other answers; set it to 2 or more"
        )
    if algo.name != "ppo" and config.transport.gamma != 1:
        raise UserError(
            f"transport.gamma is {config.transport.gamma} with algo.name = {algo.name}; it is the discount "
            "of ppo alone, so leave it at 1"
        )
    check_kl(algo)


def check_kl(algo: AlgoConfig) -> None:
    """k1 estimates the KL without bias, but its gradient as a loss is the score, which averages to zero."""
    if algo.kl.kind == "k1" and algo.kl.where == "loss":
        raise UserError(
            "algo.kl.kind is k1 with algo.kl.where = loss, whose expected gradient is zero, so it would not "
            "pull towards the reference; use k3 or k2, or set algo.kl.where to reward"
        )


def check_gate(gate: GateConfig) -> None:
    """The envelope of Eq. 20 is one, and the mode has what it reads."""
    if gate.kappa_lo > gate.kappa_hi:
        raise UserError(
            f"gate.kappa_lo is {gate.kappa_lo}, above gate.kappa_hi = {gate.kappa_hi}; it must not exceed it"
        )
    sup = gate.kappa_lo + (gate.kappa_hi - gate.kappa_lo) / (1 + math.exp(-gate.tau / 2))
    if gate.mode in ("attention", "shuffled") and sup > 1 - 2**-24:
        raise UserError(
            f"gate.kappa_lo, kappa_hi and tau are {gate.kappa_lo}, {gate.kappa_hi} and {gate.tau}, with "
            "which κ reaches 1 and credit need not decay; lower one so that κ_lo + (κ_hi − κ_lo) σ(τ/2) < 1"
        )
    if gate.mode == "position" and gate.table is None:
        raise UserError(
            "gate.table is null with gate.mode = position; give the JSON file that `comppo gate-table` writes"
        )
    if gate.calibrate is not None and gate.mode in ("fixed", "position"):
        raise UserError(
            f"gate.calibrate is set with gate.mode = {gate.mode}, which has no envelope to calibrate; "
            "set it to null"
        )


def check_optimizer(optim: OptimConfig) -> None:
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise UserError(f"optim.betas is {list(optim.betas)}; both must be at least 0 and below 1")


def check_schedules(reward: RewardConfig, controller: ControllerConfig) -> None:
    """Ramps run forward."""
    for name, ramp in (("format", reward.format), ("length", reward.length)):
        if ramp.stop < ramp.begin:
            raise UserError(
                f"reward.{name}.stop is {ramp.stop}, below reward.{name}.begin = {ramp.begin}; raise it"
            )
    if controller.ramp is not None and not 0 <= controller.ramp[0] < controller.ramp[1]:
        raise UserError(
            f"controller.ramp is {list(controller.ramp)}; give [first step, last step], rising, or null"
        )


# ---------------------------------------------------------------------------- rollout


def check_rollout(config: Config) -> None:
    """The engine can do what is asked, and what it makes of on-policyness is corrected for."""
    rollout = config.rollout
    if rollout.engine == "embedded":
        set_ = {
            "rollout.oversample": rollout.oversample > 0,
            "rollout.partial": rollout.partial,
            "rollout.max_wait_s": rollout.max_wait_s is not None,
            "rollout.lag": rollout.lag > 0,
            "algo.ratio": config.algo.ratio == "mask",
        }
        if asked := [name for name, is_set in set_.items() if is_set]:
            raise UserError(
                f"{asked[0]} is set with rollout.engine = embedded, which cannot do that; set rollout.engine "
                "to sglang or leave it out"
            )
        return
    check_servers(rollout.sglang)
    for name, is_set in (("partial", rollout.partial), ("lag", rollout.lag)):
        if is_set and config.algo.importance_cap is None:
            raise UserError(
                f"rollout.{name} is set with algo.importance_cap = null, but then tokens come from older "
                "weights; set algo.importance_cap, for example to 2, which corrects for them"
            )
    if rollout.lag and rollout.sglang.placement == "colocated":
        raise UserError(
            "rollout.lag is 1 with rollout.sglang.placement = colocated, where servers and training take "
            "turns; use disaggregated, or set rollout.lag to 0"
        )


def check_servers(servers: SGLangConfig) -> None:
    """Addresses are addresses, and no transport is asked for what it cannot reach."""
    for url in servers.urls:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"rollout.sglang.urls has {url!r}; give addresses such as http://10.0.0.7:30000")
    if len(set(servers.urls)) < len(servers.urls):
        raise UserError(f"rollout.sglang.urls names a server twice: {list(servers.urls)}")


# ---------------------------------------------------------------------------- batches, lengths, data


def check_batches(config: Config, dp_size: int) -> None:
    """Minibatches tile the rollout batch, data-parallel ranks tile the minibatch."""
    prompts, responses, minibatch = config.rollout.prompts, config.rollout.responses, config.algo.minibatch
    trajectories = prompts * responses
    if trajectories % minibatch:
        raise UserError(
            f"algo.minibatch is {minibatch}, which does not divide rollout.prompts × rollout.responses = "
            f"{prompts} × {responses} = {trajectories} trajectories; choose a divisor of {trajectories}"
        )
    if minibatch % dp_size:
        raise UserError(
            f"algo.minibatch is {minibatch} trajectories, which the data-parallel size {dp_size} does not "
            f"divide; make it a multiple of {dp_size}"
        )


def check_lengths(config: Config, shape: ModelShape) -> None:
    """A prompt and a full response fit the context and a micro-batch; the prompts' own lengths come later."""
    context, response = config.model.max_context or shape.max_positions, config.rollout.max_response_tokens
    if response >= context:
        raise UserError(
            f"rollout.max_response_tokens is {response}, which leaves no room for a prompt in the context "
            f"of {context} tokens; lower it or raise model.max_context (at most {shape.max_positions})"
        )
    if config.train.micro_batch_tokens <= response:
        raise UserError(
            f"train.micro_batch_tokens is {config.train.micro_batch_tokens}, too few for a prompt with "
            f"rollout.max_response_tokens = {response}; set it to at least their sum"
        )


def check_data(data: DataConfig) -> None:
    """The source has what it reads."""
    if data.source == "file" and data.path is None:
        raise UserError(
            "data.path is null with data.source = file; give a .jsonl or .parquet file of problems"
        )
    if data.source == "reasoning_gym" and not data.tasks:
        raise UserError(
            "data.tasks is empty with data.source = reasoning_gym; name some, for example [spell_backward]"
        )


def check_arithmetic(arithmetic: ArithmeticConfig) -> None:
    low, high = arithmetic.strength
    if not 0 <= low <= high <= 1:
        raise UserError(
            f"data.arithmetic.strength is {[low, high]}; give [lowest, highest] probability, from 0 to 1"
        )
