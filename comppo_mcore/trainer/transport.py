"""From the behaviour pass and the rewards to per-token credit: gate, value mixture, Comp-GAE, whitening.

Runs on the last pipeline stage, on this data-parallel rank's trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from comppo_mcore.config.algorithm import has_critic
from comppo_mcore.config.schema import Config
from comppo_mcore.credit import packed
from comppo_mcore.credit.baselines import broadcast_to_tokens, grpo, rloo
from comppo_mcore.credit.gate import (
    Envelope,
    PositionTable,
    attention_gate,
    fixed_gate,
    global_permutation,
    position_gate,
    shuffled_gate,
)
from comppo_mcore.credit.normalize import whiten
from comppo_mcore.credit.objective import kl_estimate
from comppo_mcore.credit.reach import calibrate
from comppo_mcore.credit.transport import place_terminal_rewards
from comppo_mcore.kernels.select import Kernels
from comppo_mcore.model.critic import mix
from comppo_mcore.model.parallel import Layout, all_reduce_sum, gather_objects
from comppo_mcore.trainer.behavior import Behavior


@dataclass(frozen=True)
class Evidence:
    """What the environment says of all trajectories of the step, on every rank."""

    rewards: Tensor  # float32 [B_all], terminal
    groups: Tensor  # int64 [B_all], prompt of each
    masks: tuple[tuple[bool, ...], ...]  # valid tokens of each response
    truncated: Tensor  # bool [B_all]


@dataclass(frozen=True)
class Gate:
    """What decides κ beside the behaviour policy's attention; frozen for a run, part of its checkpoint."""

    envelope: Envelope
    table: PositionTable | None = None  # of gate.mode position


@dataclass(frozen=True)
class Credit:
    """Per-token credit of this rank's trajectories, float32 [N], 0 outside the mask."""

    cu_seqlens: Tensor  # int64 [B + 1]
    mask: Tensor  # bool [N]
    advantage: Tensor  # A (Eq. 11), or b_i broadcast (Eq. 8)
    credit: Tensor  # Â of Eq. 17
    kappa_rows: Tensor | None  # κ of every row of the behaviour pass, extra rows included
    kappa: Tensor | None  # κ of every token
    value: Tensor | None  # V of the behaviour pass
    lambda_return: Tensor | None  # G (Eq. 28)


def transport(
    behavior: Behavior,
    ref_logprob: Tensor | None,
    evidence: Evidence,
    owned: Tensor,
    config: Config,
    gate: Gate,
    layout: Layout,
    kernels: Kernels,
    *,
    advantage_clip: float,
    shuffle_seed: int,
) -> Credit:
    """Credit of the owned trajectories.

    Args:
        behavior: this rank's behaviour pass.
        ref_logprob: float32 [N], reference policy; only read for a KL in the reward.
        evidence: rewards and masks of all trajectories.
        owned: int64 [B], which of them are this rank's.
        advantage_clip: bound on |Â| after whitening.
        shuffle_seed: of the global permutation, for gate.mode shuffled.
    """
    masks = [evidence.masks[i] for i in owned.tolist()]
    lengths = torch.tensor([len(m) for m in masks])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(layout.device)
    mask = torch.tensor([v for m in masks for v in m], dtype=torch.bool, device=layout.device)
    rows = behavior.token_rows().to(layout.device)
    penalty = _kl_penalty(behavior.logprob[rows], ref_logprob, mask, config)
    if not has_critic(config):
        advantage = _group_advantage(evidence, owned, penalty, cu_seqlens, mask, config, layout)
        return Credit(cu_seqlens, mask, advantage, advantage, None, None, None, None)
    kappa_rows = _kappa(behavior, rows, cu_seqlens, mask, config, gate, layout, shuffle_seed)
    assert behavior.values is not None
    value_rows = mix(behavior.values, kappa_rows, config.critic.clamp_gradient)
    rewards = place_terminal_rewards(evidence.rewards[owned].to(layout.device), cu_seqlens, mask) - penalty
    kappa, value = kappa_rows[rows], value_rows[rows]
    moved = kernels.comp_gae(
        rewards,
        value,
        kappa,
        cu_seqlens,
        mask,
        gate.envelope.lam,
        gaps=config.transport.gaps,
        bootstrap_values=_bootstrap(behavior, value_rows, evidence.truncated[owned].to(layout.device)),
    )
    credit = whiten(
        moved.advantage,
        mask,
        clip=advantage_clip,
        all_reduce=partial(all_reduce_sum, group=layout.groups.dp),
    )
    return Credit(cu_seqlens, mask, moved.advantage, credit, kappa_rows, kappa, value, moved.lambda_return)


def calibrated(behavior: Behavior, evidence: Evidence, config: Config, layout: Layout) -> Envelope:
    """The envelope `gate.calibrate` asks for, from the first rollout batch of all ranks."""
    settings = config.gate.calibrate
    assert settings is not None and behavior.concentration is not None
    mine = behavior.concentration[behavior.token_rows().to(layout.device)].cpu()
    everyone = torch.cat(gather_objects(mine, layout.groups.dp))
    lengths = torch.tensor([0, *(len(m) for m in evidence.masks)])
    mask = torch.tensor([v for m in evidence.masks for v in m], dtype=torch.bool)
    return calibrate(
        everyone,
        lengths.cumsum(0),
        mask,
        reach=settings.reach,
        keep=settings.keep,
        tau=config.gate.tau,
        lam=config.transport.lam,
    )


def _kappa(
    behavior: Behavior,
    rows: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    config: Config,
    gate: Gate,
    layout: Layout,
    shuffle_seed: int,
) -> Tensor:
    """κ of every row by gate mode; a control replaces the κ of tokens only."""
    mode = config.gate.mode
    if mode == "fixed":
        return fixed_gate(behavior.logprob, config.gate.fixed_kappa)
    if mode == "position":
        assert gate.table is not None
        kappa_rows = torch.full_like(behavior.logprob, gate.table.kappa[-1])
        return kappa_rows.index_copy(0, rows, position_gate(gate.table, cu_seqlens))
    assert behavior.concentration is not None
    kappa_rows = attention_gate(behavior.concentration, gate.envelope)
    if mode == "attention":
        return kappa_rows
    kappa = kappa_rows[rows]
    pools: Sequence[Tensor] = gather_objects(kappa[mask].cpu(), layout.groups.dp)
    pool = torch.cat(list(pools)).to(kappa)
    offset = sum(len(p) for p in pools[: layout.dp_rank])
    permutation = global_permutation(len(pool), shuffle_seed)
    shuffled = shuffled_gate(kappa, mask, permutation, pool=pool, offset=offset)
    return kappa_rows.index_copy(0, rows, shuffled)


def _bootstrap(behavior: Behavior, value_rows: Tensor, truncated: Tensor) -> Tensor | None:
    """V at t = T of responses cut by the length limit, 0 of others; None where the run does not bootstrap."""
    if not behavior.extra_row:
        return None
    last = value_rows[behavior.cu_rows[1:].to(value_rows.device) - 1]
    return torch.where(truncated, last, 0.0)


def _kl_penalty(logprob: Tensor, ref_logprob: Tensor | None, mask: Tensor, config: Config) -> Tensor:
    """coef · KL estimate per token where the KL is part of the reward; 0 where it is a loss."""
    kl = config.algo.kl
    if kl.where == "loss" or kl.coef == 0:
        return torch.zeros_like(logprob)
    assert ref_logprob is not None
    return kl.coef * kl_estimate(kl.kind, logprob, ref_logprob, mask)


def _group_advantage(
    evidence: Evidence,
    owned: Tensor,
    penalty: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    config: Config,
    layout: Layout,
) -> Tensor:
    """b_i of Eq. 8 over groups that may span ranks, broadcast to this rank's tokens."""
    mine = packed.segment_sum(penalty, cu_seqlens, mask).cpu()
    penalties = torch.cat(gather_objects(mine, layout.groups.dp)).float()
    rewards = evidence.rewards - penalties
    baseline = grpo if config.algo.name == "grpo" else rloo
    coefficient = baseline(rewards, evidence.groups)[owned].to(layout.device)
    return broadcast_to_tokens(coefficient, cu_seqlens, mask)
