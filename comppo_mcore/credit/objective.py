"""Per-token losses of the update (Eq. 17 and the critic's), their weights in the sum, and diagnostics.

Every function that takes a mask gives 0 outside it, in value and in gradient, whatever the inputs hold there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from comppo_mcore.credit import packed

MAX_LOG_RATIO = 20.0  # e²⁰ ≈ 5e8: far beyond any ratio of use, far below float32 overflow


def clipped_surrogate(
    log_prob: Tensor, behavior_log_prob: Tensor, advantage: Tensor, mask: Tensor, clip: float
) -> Tensor:
    """Clipped policy loss (Eq. 17), without a second clip for negative advantages.

    ℓ = −min(ρ Â, clip(ρ, 1 − ε, 1 + ε) Â),  ρ = π_θ / π_θ⁻

    Args:
      log_prob: float32 [N], current policy, nats.
      behavior_log_prob: float32 [N], behaviour policy, nats, detached.
      advantage: float32 [N], whitened or a group coefficient, detached.
      mask: bool [N].
      clip: ε.

    Returns:
      float32 [N].
    """
    log_prob, behavior_log_prob, advantage = packed.select(mask, log_prob, behavior_log_prob, advantage)
    ratio = (log_prob - behavior_log_prob).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def kl_estimate(
    kind: Literal["k1", "k2", "k3"], log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor
) -> Tensor:
    """Single-sample estimate of KL(π_θ ‖ π_ref).

    With x = log π_θ − log π_ref clamped to ±20:  k1 = x,  k2 = x²/2,  k3 = e^{−x} − 1 + x.
    k1 has zero expected gradient and therefore serves in a reward only.

    Args:
      kind: k1, k2 or k3.
      log_prob: float32 [N], current policy, nats.
      ref_log_prob: float32 [N], reference policy, nats, detached.
      mask: bool [N].

    Returns:
      float32 [N], nats; k2 and k3 are never negative.

    Raises:
      ValueError: for another kind.

    Source: Schulman, "Approximating KL divergence" (2020).
    """
    log_prob, ref_log_prob = packed.select(mask, log_prob, ref_log_prob)
    x = (log_prob - ref_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match kind:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x
    raise ValueError(f"kind must be k1, k2 or k3, got {kind!r}")


def clipped_value_loss(
    value: Tensor, behavior_value: Tensor, lambda_return: Tensor, mask: Tensor, value_clip: float
) -> Tensor:
    """Clipped regression to the detached λ-return (Eq. 28, §4.3).

    ℓ = ½ max((V − G)², (V_old + clip(V − V_old, ±value_clip) − G)²)

    Args:
      value: float32 [N], current critic.
      behavior_value: float32 [N], V_old of the behaviour pass, detached.
      lambda_return: float32 [N], G, detached.
      mask: bool [N].
      value_clip: bound on the step of V.

    Returns:
      float32 [N].
    """
    value, old, target = packed.select(mask, value, behavior_value, lambda_return)
    near = old + (value - old).clamp(-value_clip, value_clip)
    return torch.maximum((value - target).square(), (near - target).square()) / 2


@dataclass(frozen=True)
class Denominators:
    """Of one optimizer minibatch, summed over micro-batches and data-parallel ranks.

    tokens: valid tokens; sequences: responses with at least one valid token.
    """

    tokens: int
    sequences: int


def count_denominators(cu_seqlens: Tensor, mask: Tensor) -> Denominators:
    """This share's part of the minibatch's denominators; add the parts of all micro-batches and ranks."""
    return Denominators(int(mask.sum()), int((packed.segment_count(cu_seqlens, mask) > 0).sum()))


def aggregation_weights(
    aggregation: Literal["token", "sequence", "constant"],
    cu_seqlens: Tensor,
    mask: Tensor,
    denominators: Denominators,
    constant: float,
) -> Tensor:
    """Weights w such that the minibatch's loss is Σ w_t ℓ_t over all its micro-batches and ranks.

    token: w = 1 / tokens;  sequence: w = 1 / (sequences · T_i), T_i the valid tokens of the response;
    constant: w = 1 / (sequences · constant).

    Args:
      aggregation: token, sequence or constant.
      cu_seqlens: int64 [B + 1], of a micro-batch.
      mask: bool [N].
      denominators: of the whole minibatch.
      constant: tokens per response, for `constant`.

    Returns:
      float32 [N], 0 outside the mask.

    Raises:
      ValueError: for another aggregation.
    """
    match aggregation:
        case "token":
            per_token = torch.full(mask.shape, float(denominators.tokens), device=mask.device)
        case "sequence":
            valid = packed.broadcast(packed.segment_count(cu_seqlens, mask), cu_seqlens)
            per_token = valid.float() * denominators.sequences
        case "constant":
            per_token = torch.full(mask.shape, constant * denominators.sequences, device=mask.device)
        case _:
            raise ValueError(f"aggregation must be token, sequence or constant, got {aggregation!r}")
    return packed.select(mask, 1 / per_token)[0]


def truncated_importance_weights(
    trainer_log_prob: Tensor, engine_log_prob: Tensor, mask: Tensor, cap: float
) -> Tensor:
    """Correction for sampling by an engine whose numbers differ from the trainer's.

    w = min(π_trainer / π_engine, cap), of the behaviour policy, detached.

    Args:
      trainer_log_prob: float32 [N], behaviour pass, nats.
      engine_log_prob: float32 [N], as sampled, nats.
      mask: bool [N].
      cap: largest weight.

    Returns:
      float32 [N], 0 outside the mask.
    """
    trainer, engine = packed.select(mask, trainer_log_prob.detach(), engine_log_prob)
    return packed.select(mask, (trainer - engine).exp().clamp(max=cap))[0]


class _InwardClamp(torch.autograd.Function):
    """Clamp whose gradient passes where a descent step would lead inside."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, bound: float) -> Tensor:
        ctx.save_for_backward(value)
        ctx.bound = bound
        return value.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (value,) = ctx.saved_tensors
        (grad,) = grads
        bound = ctx.bound
        stuck = ((value > bound) & (grad < 0)) | ((value < -bound) & (grad > 0))
        return torch.where(stuck, torch.zeros_like(grad), grad), None


def clamp_value(value: Tensor, gradient: Literal["hard", "inward"], bound: float = 1.0) -> Tensor:
    """The value-domain clamp of Eq. 27, V = clip(v, −bound, bound).

    `hard`: no gradient outside. `inward`: outside, the gradient passes when a descent step, −∂L/∂V, points
    inside; a saturated value can then come back.

    Args:
      value: float32 [N].
      gradient: hard or inward.
      bound: 1 in the paper.

    Returns:
      float32 [N].

    Raises:
      ValueError: for another gradient.
    """
    if gradient == "hard":
        return value.clamp(-bound, bound)
    if gradient == "inward":
        return _InwardClamp.apply(value, bound)
    raise ValueError(f"gradient must be hard or inward, got {gradient!r}")


@dataclass(frozen=True)
class RatioSums:
    """Sums over valid tokens, float64 scalars; add those of micro-batches and ranks, then divide by tokens.

    ratio: ρ; clipped: tokens with |ρ − 1| > ε; approx_kl: k3 estimate of KL(π_θ⁻ ‖ π_θ), nats.
    """

    tokens: Tensor
    ratio: Tensor
    clipped: Tensor
    approx_kl: Tensor


def ratio_sums(log_prob: Tensor, behavior_log_prob: Tensor, mask: Tensor, clip: float) -> RatioSums:
    """How far the policy has moved from the behaviour policy, for the log and the phase controller.

    Args:
      log_prob: float32 [N], current policy, nats.
      behavior_log_prob: float32 [N], behaviour policy, nats.
      mask: bool [N].
      clip: ε of Eq. 17.

    Returns:
      sums over this share's valid tokens.
    """
    log_ratio = (log_prob - behavior_log_prob).detach()[mask].double()
    ratio = log_ratio.exp()
    clipped = (ratio - 1).abs() > clip
    approx_kl = torch.expm1(log_ratio) - log_ratio
    return RatioSums(mask.sum().double(), ratio.sum(), clipped.sum().double(), approx_kl.sum())
