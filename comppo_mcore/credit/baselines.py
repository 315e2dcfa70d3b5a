"""Group baselines: one coefficient per response, broadcast to its tokens (Eq. 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from comppo_mcore.credit import packed
from comppo_mcore.errors import UserError


def _group_sum(x: Tensor, group: Tensor, num_groups: int) -> Tensor:
    return x.new_zeros(num_groups).index_add(0, group, x)


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R − mean over the group, group sizes, group index; [B] each.

    float64 sums of a group of equal float32 rewards are exact, so those centre to exactly 0.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(
            f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)} must both be [B]"
        )
    labels, group = group_ids.unique(return_inverse=True)
    r = rewards.double()
    size = _group_sum(torch.ones_like(r), group, labels.numel())
    if bool((size < 2).any()):
        raise UserError("rollout.responses is 1, but a group baseline compares responses: use at least 2")
    mean = _group_sum(r, group, labels.numel()) / size
    return r - mean[group], size[group], group


def grpo(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Group-relative coefficient (Eq. 8).

    b_i = (R_i − mean_j R_j) / (std_j R_j + ε), std with n − 1 in the denominator.

    Args:
      rewards: float32 [B].
      group_ids: int64 [B], equal for responses to the same prompt; in any order.
      eps: ε.

    Returns:
      float32 [B]; exactly 0 in a group of equal rewards.

    Raises:
      UserError: naming `rollout.responses`, for a group of one.
    """
    centred, size, group = _centred(rewards, group_ids)
    variance = _group_sum(centred.square(), group, rewards.numel())[group] / (size - 1)
    return (centred / (variance.sqrt() + eps)).to(rewards.dtype)


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Leave-one-out coefficient.

    b_i = R_i − mean_{j ≠ i} R_j = n / (n − 1) · (R_i − mean_j R_j)

    Args:
      rewards: float32 [B].
      group_ids: int64 [B], equal for responses to the same prompt; in any order.

    Returns:
      float32 [B]; exactly 0 in a group of equal rewards.

    Raises:
      UserError: naming `rollout.responses`, for a group of one.
    """
    centred, size, _ = _centred(rewards, group_ids)
    return (centred * size / (size - 1)).to(rewards.dtype)


def broadcast_to_tokens(coefficient: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """A^(i) = b_i 1 (Eq. 8): a response's coefficient, [B], at each of its valid tokens, [N]; else 0."""
    packed.check(cu_seqlens, mask)
    return packed.select(mask, packed.broadcast(coefficient, cu_seqlens))[0]
