"""The update: clipped policy loss, KL and critic loss over minibatches and epochs (Eq. 17, §4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comppo_mcore.config.algorithm import has_critic
from comppo_mcore.config.schema import Config
from comppo_mcore.credit.controller import Knobs
from comppo_mcore.credit.objective import (
    Denominators,
    aggregation_weights,
    clipped_surrogate,
    clipped_value_loss,
    kl_estimate,
    ratio_sums,
    truncated_importance_weights,
)
from comppo_mcore.model.batch import MicroBatch, Sample
from comppo_mcore.model.critic import ValueParts, mix
from comppo_mcore.model.execution import Work, forward_backward
from comppo_mcore.model.optimizer import PolicyOptimizer, Rates, StepResult
from comppo_mcore.model.parallel import Layout, any_rank
from comppo_mcore.model.policy import Pass, PolicyOutput
from comppo_mcore.trainer.behavior import Behavior, concatenate_routing, pack_for
from comppo_mcore.trainer.metrics import MinibatchSums
from comppo_mcore.trainer.schedule import minibatches, owned_columns, pack_micro_batches, step_seed
from comppo_mcore.trainer.transport import Credit, Evidence


@dataclass(frozen=True)
class Targets:
    """What the losses of one micro-batch read, a row each; extra rows are outside the mask."""

    mask: Tensor  # bool [R]
    behavior_logprob: Tensor
    ref_logprob: Tensor | None
    credit: Tensor  # Â
    importance: Tensor | None  # truncated engine-to-trainer weights
    kappa: Tensor | None
    behavior_value: Tensor | None
    lambda_return: Tensor | None
    policy_weight: Tensor  # w of Σ w ℓ over the minibatch of all ranks
    value_weight: Tensor

    def rows(self, index: Tensor) -> Targets:
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        picked: dict[str, Any] = {name: None if x is None else x[index] for name, x in arrays.items()}
        return Targets(**picked)


@dataclass(frozen=True)
class UpdateWork(Work):
    """One micro-batch with its targets (None but on the last pipeline stage)."""

    targets: Targets | None = None


# Entries of a micro-batch's record that add up; the largest ratio stands behind them.
SUMS = ("tokens", "ratio", "clipped", "approx_kl", "ref_kl", "policy_loss", "value_loss")


def objective(
    item: UpdateWork, out: PolicyOutput, parts: ValueParts | None, *, config: Config, knobs: Knobs
) -> tuple[Tensor, Tensor]:
    """Loss of one micro-batch, and its entries of SUMS with the largest ratio behind them, float64."""
    t = item.targets
    assert t is not None
    clip = config.algo.clip * knobs.clip
    policy = clipped_surrogate(out.ratio_logprob, t.behavior_logprob, t.credit, t.mask, clip)
    if t.importance is not None:
        policy = policy * t.importance
    policy_loss = (policy * t.policy_weight).sum()
    zero = torch.zeros_like(policy_loss)
    ref_kl, kl_loss, value_loss = zero, zero, zero
    if t.ref_logprob is not None:
        kl = config.algo.kl
        kind = kl.kind if kl.where == "loss" else "k3"
        estimate = kl_estimate(kind, out.logprob, t.ref_logprob, t.mask)
        if kl.where == "loss":
            kl_loss = kl.coef * knobs.kl * (estimate * t.policy_weight).sum()
        ref_kl = kl_estimate("k3", out.logprob.detach(), t.ref_logprob, t.mask).sum()
    if parts is not None:
        assert t.kappa is not None and t.behavior_value is not None and t.lambda_return is not None
        value = mix(parts, t.kappa, config.critic.clamp_gradient)
        per_token = clipped_value_loss(
            value, t.behavior_value, t.lambda_return, t.mask, config.critic.value_clip * knobs.value_clip
        )
        value_loss = (per_token * t.value_weight).sum()
    moved = ratio_sums(out.ratio_logprob, t.behavior_logprob, t.mask, clip)
    log_ratio = (out.ratio_logprob - t.behavior_logprob).detach()[t.mask]
    largest = log_ratio.exp().amax() if bool(t.mask.any()) else zero
    record = torch.stack(
        [
            x.detach().double()
            for x in (
                moved.tokens,
                moved.ratio,
                moved.clipped,
                moved.approx_kl,
                ref_kl,
                policy_loss,
                value_loss,
                largest,
            )
        ]
    )
    return policy_loss + kl_loss + value_loss, record


def token_targets(
    behavior: Behavior,
    credit: Credit,
    ref_logprob: Tensor | None,
    engine_logprob: Tensor,
    config: Config,
) -> Targets:
    """Targets of all owned trajectories, row by row of the behaviour pass; weights come per minibatch."""
    rows = behavior.token_rows().to(credit.mask.device)
    count = len(behavior.logprob)

    def spread(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros(count).index_copy(0, rows, x)

    mask = torch.zeros(count, dtype=torch.bool, device=rows.device).index_copy(0, rows, credit.mask)
    importance = None
    if config.algo.importance_cap is not None:
        importance = spread(
            truncated_importance_weights(
                behavior.logprob[rows], engine_logprob, credit.mask, config.algo.importance_cap
            )
        )
    spread_credit = spread(credit.credit)
    assert spread_credit is not None
    return Targets(
        mask=mask,
        behavior_logprob=behavior.ratio_logprob,
        ref_logprob=spread(ref_logprob),
        credit=spread_credit,
        importance=importance,
        kappa=credit.kappa_rows,
        behavior_value=spread(credit.value),
        lambda_return=spread(credit.lambda_return),
        policy_weight=torch.zeros_like(behavior.logprob),
        value_weight=torch.zeros_like(behavior.logprob),
    )


def with_weights(targets: Targets, cu_rows: Tensor, denominators: Denominators, config: Config) -> Targets:
    """Set the weights of one micro-batch's rows from the denominators of its whole minibatch."""
    weights = partial(aggregation_weights, cu_seqlens=cu_rows, mask=targets.mask, denominators=denominators)
    constant = config.algo.aggregation_constant
    aggregation = config.algo.aggregation
    assert aggregation != "auto"
    return replace(
        targets,
        policy_weight=weights(aggregation, constant=constant),
        value_weight=weights("token", constant=constant),
    )


def denominators(evidence: Evidence, trajectories: Sequence[int]) -> Denominators:
    """Of one minibatch over all ranks; every rank knows all masks, so nothing is communicated."""
    valid = [sum(evidence.masks[i]) for i in trajectories]
    return Denominators(sum(valid), sum(v > 0 for v in valid))


def micro_work(
    samples: Sequence[Sample],
    index: Sequence[int],
    behavior: Behavior | None,
    targets: Targets | None,
    totals: Denominators,
    config: Config,
    layout: Layout,
) -> UpdateWork:
    """One micro-batch of the owned trajectories `index`, with what its losses need on the last stage."""
    batch = pack_for(config, layout, samples, index)
    if behavior is None or targets is None:
        return UpdateWork(batch)
    routing = None
    if behavior.routing is not None:
        routing = concatenate_routing([behavior.routing[i] for i in index])
    mine = with_weights(targets.rows(_rows_of(behavior, index)), _cu_rows(batch), totals, config)
    return UpdateWork(batch, routing, mine)


def run_minibatch(
    ddp: Any,
    optimizer: PolicyOptimizer,
    work: Sequence[UpdateWork],
    config: Config,
    knobs: Knobs,
    rates: Rates,
    layout: Layout,
) -> MinibatchSums:
    """Gradient of one minibatch over micro-batches and ranks, then one optimizer step."""
    request = Pass(config.rollout.temperature, values=has_critic(config))
    loss = partial(objective, config=config, knobs=knobs)
    records = forward_backward(ddp, work, request, layout, loss)
    sums, largest = _reduce_records(records, layout)
    if any_rank(not all(map(math.isfinite, sums.values())), layout.device):
        return _minibatch_sums(sums, largest, StepResult(False, {}), config, rates)
    return _minibatch_sums(sums, largest, optimizer.step(rates), config, rates)


def _minibatch_sums(
    sums: dict[str, float], largest: float, step: StepResult, config: Config, rates: Rates
) -> MinibatchSums:
    has_reference, critic = needs_reference(config), has_critic(config)
    return MinibatchSums(
        tokens=sums["tokens"],
        ratio=sums["ratio"],
        ratio_max=largest,
        clipped=sums["clipped"],
        approx_kl=sums["approx_kl"],
        kl_loss=sums["ref_kl"] if has_reference else None,
        policy_loss=sums["policy_loss"],
        value_loss=sums["value_loss"] if critic else None,
        actor_grad_norm=None if rates.freeze_actor else step.norms.get("actor"),
        critic_grad_norm=step.norms.get("critic") if critic else None,
        applied=step.applied,
    )


def needs_reference(config: Config) -> bool:
    """Whether the reference policy is kept and scored: its KL is then a loss, a reward, or watched."""
    return config.algo.kl.coef > 0


def update(
    ddp: Any,
    optimizer: PolicyOptimizer,
    samples: Sequence[Sample],
    owned: Tensor,
    evidence: Evidence,
    behavior: Behavior | None,
    targets: Targets | None,
    config: Config,
    knobs: Knobs,
    rates: Rates,
    layout: Layout,
    *,
    step: int,
    epoch: int,
) -> list[MinibatchSums]:
    """One epoch over the rollout batch; stops at the first optimizer step that could not be applied."""
    seed = step_seed(config.run.seed, step, "minibatches", epoch)
    table = minibatches(len(evidence.rewards), config.algo.minibatch, seed)
    columns = owned_columns(config.algo.minibatch, layout.dp_size, layout.dp_rank)
    results: list[MinibatchSums] = []
    for row in table:
        totals = denominators(evidence, row.tolist())
        mine = (row[columns] - owned[0]).tolist()
        cut = pack_micro_batches([samples[i].num_tokens for i in mine], config.train.micro_batch_tokens)
        work = [
            micro_work(samples, [mine[j] for j in part], behavior, targets, totals, config, layout)
            for part in cut
        ]
        results.append(run_minibatch(ddp, optimizer, work, config, knobs, rates, layout))
        if not results[-1].applied:
            break
    return results


def _rows_of(behavior: Behavior, index: Sequence[int]) -> Tensor:
    cu = behavior.cu_rows
    return torch.cat([torch.arange(int(cu[i]), int(cu[i + 1])) for i in index]).to(behavior.logprob.device)


def _cu_rows(batch: MicroBatch) -> Tensor:
    return torch.tensor(batch.cu_rows, dtype=torch.int64, device=batch.rows.device)


def _reduce_records(records: list[Tensor], layout: Layout) -> tuple[dict[str, float], float]:
    """SUMS over micro-batches and data-parallel ranks, and the largest ratio, on every pipeline stage."""
    width = len(SUMS)
    total = torch.zeros(width + 1, dtype=torch.float64, device=layout.device)
    if records:
        stacked = torch.stack(records)
        total[:width], total[width] = stacked[:, :width].sum(0), stacked[:, width].amax()
        dist.all_reduce(total[:width], group=layout.groups.dp)
        dist.all_reduce(total[width:], op=dist.ReduceOp.MAX, group=layout.groups.dp)
    if layout.pp_size > 1:
        dist.broadcast(total, src=layout.last_stage_rank, group=layout.groups.pp)
    values = total.tolist()
    return dict(zip(SUMS, values[:width], strict=True)), values[width]
