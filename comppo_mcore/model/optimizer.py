"""DDP and Megatron's distributed optimizer, with the actor and the critic clipped by their own norms.

Megatron's one global clip is off. Its optimizer is driven in its own two halves, `prepare_grads` and
`step_with_ready_grads`, with the norms, the clip and the actor's freeze between them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module

from comppo_mcore.config.schema import OptimConfig
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.shims import cuda_as_cpu

Role = Literal["actor", "critic"]
ROLES: tuple[Role, ...] = ("actor", "critic")


@dataclass(frozen=True)
class Rates:
    """What the phase controller and the schedules decide anew for every step."""

    actor_lr: float
    critic_lr: float
    actor_clip: float
    critic_clip: float
    weight_decay: float = 0.0
    freeze_actor: bool = False  # critic warm-up: neither parameters nor Adam moments of the actor change


@dataclass(frozen=True)
class StepResult:
    applied: bool
    norms: dict[Role, float]  # before clipping; non-finite where `applied` is false


def wrap(model: Any, layout: Layout, dtype: torch.dtype) -> Any:
    """Cast (the critic keeps fp32) and wrap in Megatron's DDP. Gradients are summed, never averaged:
    losses arrive divided by the minibatch's global token count."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    module = Float16Module(model.config, model) if dtype == torch.bfloat16 else model
    with cuda_as_cpu():
        return DistributedDataParallel(
            model.config,
            ddp_config,
            module,
            pg_collection=layout.groups,
            full_param_layout=_param_layout(module, ddp_config, layout),
        )


def _param_layout(module: Any, ddp_config: Any, layout: Layout) -> Any:
    """Megatron's buffer layout, with the padding between buckets counted as content.

    Its reshardable checkpoint drops that padding from the saved buffer, but not from the offsets of the
    parameters behind it: with more than one bucket (tied embeddings at PP > 1) it would save shifted
    optimizer state and load it back without an error.
    """
    full = DistributedOptimizer.compute_full_param_layout(
        [p for p in module.parameters() if p.requires_grad], None, layout.groups.dp_cp.size(), ddp_config
    )
    for buffer in full.layouts.values():
        buffer.per_bucket_numel_unpadded = [end - start for start, end in buffer.bucket_indices]
    return full


class PolicyOptimizer:
    """Megatron's optimizer over one model, split into the roles actor and critic."""

    def __init__(self, ddp: Any, config: OptimConfig, critic_lr: float, dtype: torch.dtype, layout: Layout):
        self.config = config
        self.layout = layout
        megatron = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        # `is_decoupled_lr` is Megatron's flag for a group with a learning rate of its own; it is part of the
        # key by which a checkpoint finds the group again, so equal rates cannot merge the two roles.
        overrides = {
            **get_standard_config_overrides(megatron),
            ParamKey(name="*critic.*"): {"max_lr": critic_lr, "min_lr": critic_lr, "is_decoupled_lr": True},
        }
        with cuda_as_cpu():
            self.megatron = get_megatron_optimizer(
                megatron,
                [ddp],
                config_overrides=overrides,  # type: ignore[arg-type]
                use_gloo_process_groups=False,
                pg_collection=layout.groups,
            )
        if config.name == "sgd":
            for part in self._parts():
                if part.optimizer is not None:
                    part.optimizer.step = partial(_sgd_step, part.optimizer)
        self._zero_fill_state()

    def _parts(self) -> list[Any]:
        return getattr(self.megatron, "chained_optimizers", [self.megatron])

    def _groups(self, role: Role | None = None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """(inner torch optimizer, parameter group) of a role, or of both."""
        for part in self._parts():
            if part.optimizer is None:
                continue
            for group in part.optimizer.param_groups:
                if role is None or role == _role(group):
                    yield part.optimizer, group

    def _zero_fill_state(self) -> None:
        # torch's AdamW allocates lazily, Megatron's checkpoint code wants the state of every parameter.
        for inner, group in self._groups():
            if not isinstance(inner, torch.optim.AdamW):
                continue
            for p in group["params"]:
                inner.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    def tensors(self) -> Iterator[torch.Tensor]:
        """What this rank steps and what it remembers of it: fp32 weights and moments."""
        for inner, group in self._groups():
            for p in group["params"]:
                yield p
                yield from (x for x in inner.state.get(p, {}).values() if torch.is_tensor(x))

    def step(self, rates: Rates) -> StepResult:
        """Norms per role, clip each by its own, apply unless a norm is not finite (then nothing changes)."""
        with cuda_as_cpu(), torch.no_grad():
            result = self._step(rates)
            self.megatron.zero_grad()
        return result

    def _step(self, rates: Rates) -> StepResult:
        self._set_rates(rates)
        self.megatron.prepare_grads()
        norms = self.norms()
        if not all(math.isfinite(n) for n in norms.values()):
            return StepResult(False, norms)
        limits: dict[Role, float] = {"actor": rates.actor_clip, "critic": rates.critic_clip}
        for role in ROLES:
            self._scale(role, limits[role] / (norms[role] + 1e-6))
        if rates.freeze_actor:
            with self._frozen("actor"):
                self.megatron.step_with_ready_grads()
        else:
            self.megatron.step_with_ready_grads()
        return StepResult(True, norms)

    def norms(self) -> dict[Role, float]:
        """2-norm of each role's gradient over every shard, tensor-parallel duplicates counted once."""
        sums = torch.zeros(len(ROLES), dtype=torch.float64, device=self.layout.device)
        for part in self._parts():
            for group in [] if part.optimizer is None else part.optimizer.param_groups:
                grads = part._filter_grads_for_norm(group["params"])
                for grad in grads:
                    sums[ROLES.index(_role(group))] += grad.double().square().sum()
        dist.all_reduce(sums, group=self._parts()[0].get_grad_stats_parallel_group())
        actor, critic = sums.sqrt().tolist()
        return {"actor": actor, "critic": critic}

    def _scale(self, role: Role, factor: float) -> None:
        if factor >= 1.0:
            return
        for _, group in self._groups(role):
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(factor)

    def _set_rates(self, rates: Rates) -> None:
        for _, group in self._groups():
            group["lr"] = rates.critic_lr if _role(group) == "critic" else rates.actor_lr
            group["weight_decay"] = rates.weight_decay * group["wd_mult"]

    @contextlib.contextmanager
    def _frozen(self, role: Role) -> Iterator[None]:
        """Adam skips a parameter without gradient; fused Adams count the step of its group all the same."""
        steps = self.steps()
        for _, group in self._groups(role):
            for p in group["params"]:
                p.grad = None
        yield
        self.set_steps({role: steps[role]})

    def steps(self) -> dict[Role, int]:
        """Adam's step count of each role, the same on every rank."""
        counts = torch.zeros(len(ROLES), dtype=torch.int64, device=self.layout.device)
        for inner, group in self._groups():
            found = [int(inner.state[p]["step"]) for p in group["params"] if "step" in inner.state.get(p, {})]
            if "step" in group:
                found.append(int(group["step"]))
            i = ROLES.index(_role(group))
            counts[i] = max([int(counts[i]), *found])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        actor, critic = counts.tolist()
        return {"actor": actor, "critic": critic}

    def set_steps(self, steps: dict[Role, int]) -> None:
        for role, step in steps.items():
            for inner, group in self._groups(role):
                if "step" in group:
                    group["step"] = step
                for p in group["params"]:
                    state = inner.state.get(p, {})
                    if "step" in state:  # a new tensor: after a load, all parameters share one
                        state["step"] = torch.full_like(state["step"], step)

    @contextlib.contextmanager
    def uniform_steps(self) -> Iterator[dict[Role, int]]:
        """Megatron's checkpoint holds one step count for all; yields the true ones to store beside it."""
        true = self.steps()
        highest = max(true.values())
        self.set_steps(dict.fromkeys(ROLES, highest))
        try:
            yield true
        finally:
            self.set_steps(true)


@torch.no_grad()
def _sgd_step(adam: torch.optim.Optimizer) -> None:
    """θ ← θ − lr (g + weight decay · θ), standing in for an Adam's step: Megatron's distributed optimizer
    and its checkpoints take no plain SGD. The moments stay zero."""
    for group in adam.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.sub_(group["lr"] * (p.grad + group["weight_decay"] * p))


def _role(group: dict[str, Any]) -> Role:
    return "critic" if group["is_decoupled_lr"] else "actor"
