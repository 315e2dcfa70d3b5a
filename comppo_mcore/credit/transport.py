"""Comp-GAE: residuals, advantages and λ-returns along a gated trace (Eq. 10–13, 28).

Indices: entry t is read at the position that predicts y_t; r_{T−1} is the last reward, V_T = 0 unless a
bootstrap value is given. PPO is the case κ ≡ γ.

Gaps (tokens with mask false). `compact`: the equations run over the valid tokens alone, numbered without the
gaps; a reward on a gap moves to the last valid token before it, or to the first valid one. `cut`: the masks
m_{t+1} of Eq. 10–11 taken literally, so that a gap ends the trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comppo_mcore.credit import packed
from comppo_mcore.credit.packed import Chains, Gaps


@dataclass(frozen=True)
class Transported:
    """Results of `comp_gae`, [N] each, exactly 0 outside the mask.

    delta: TD residual δ (Eq. 10); advantage: A (Eq. 11); lambda_return: G (Eq. 28).
    """

    delta: Tensor
    advantage: Tensor
    lambda_return: Tensor


def affine_suffix_scan(coef: Tensor, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Solves the affine recursion of Eq. 11 in every segment at once.

    A_t = x_t + coef_t A_{t+1},  A = x at the last entry of a segment.

    After k rounds A_t sums the window t … t + 2ᵏ − 1 and coef_t is the product over it; a round joins two
    adjacent windows. Windows open forward from t, so the order of the additions, and with it every bit of
    A_t, depends on the rest of its own segment alone.

    Args:
      coef: float [N]; the last one of a segment is not used.
      x: float [N].
      cu_seqlens: int64 [B + 1].

    Returns:
      float [N].
    """
    to_end = packed.tokens_to_end(cu_seqlens)
    longest = int(to_end.max()) if to_end.numel() else 0
    width = 1
    while width < longest:
        left = (to_end > width).nonzero().flatten()  # windows that do not reach the segment's end yet
        right = left + width
        x = x.index_copy(0, left, x[left] + coef[left] * x[right])
        coef = coef.index_copy(0, left, coef[left] * coef[right])
        width *= 2
    return x


def _valid_rewards(rewards: Tensor, cu_seqlens: Tensor, mask: Tensor, chains: Chains, gaps: Gaps) -> Tensor:
    """Rewards of the valid tokens, [M]; under `compact` with those of the gaps moved onto them."""
    if gaps == "cut":
        return rewards[chains.index]
    first = packed.broadcast(chains.cu_seqlens[:-1], cu_seqlens)
    has_valid = packed.broadcast(packed.lengths(chains.cu_seqlens) > 0, cu_seqlens)
    last_before = mask.cumsum(0) - 1
    target = torch.maximum(last_before, first)[has_valid]
    return rewards.new_zeros(chains.index.numel()).index_add(0, target, rewards[has_valid])


def _next_values(
    values: Tensor, chains: Chains, cu_seqlens: Tensor, bootstrap_values: Tensor | None, gaps: Gaps
) -> Tensor:
    """V at the following token of the chain, [M]; at its end 0, or V_T where the response itself ends."""
    following = torch.cat([values[1:], values.new_zeros(1)])[: values.numel()]
    at_end = torch.zeros_like(values)
    if bootstrap_values is not None:
        at_end = packed.broadcast(bootstrap_values.to(values), cu_seqlens)[chains.index]
        if gaps == "cut":
            ends_response = packed.tokens_to_end(cu_seqlens)[chains.index] == 1
            (at_end,) = packed.select(ends_response, at_end)
    return torch.where(chains.is_last(), at_end, following)


def comp_gae(
    rewards: Tensor,
    values: Tensor,
    kappa: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    lam: float,
    *,
    gaps: Gaps = "compact",
    bootstrap_values: Tensor | None = None,
) -> Transported:
    """Gated TD residuals, advantages and returns of packed responses (Eq. 10, 11, 28).

    δ_t = r_t + κ_t V_{t+1} m_{t+1} − V_t m_t
    A_t = δ_t + λ κ_t A_{t+1} m_{t+1}
    G_t = A_t + V_t m_t

    Special cases: κ ≡ γ is GAE; λ = 0 gives A = δ; λ = 1 makes G the gated Monte-Carlo return. Entries
    outside the mask are never read, apart from rewards under `compact`.

    Args:
      rewards: float32 [N].
      values: float32 [N], V of the behaviour pass.
      kappa: float32 [N] in [0, 1].
      cu_seqlens: int64 [B + 1].
      mask: bool [N].
      lam: λ in [0, 1].
      gaps: `compact` or `cut`.
      bootstrap_values: float32 [B], V_T of responses cut by the length limit, 0 for others; None: all 0.

    Returns:
      δ, A and G, [N] each; a response without a valid token gives none.

    Raises:
      ValueError: when shapes or offsets disagree.
    """
    packed.check(cu_seqlens, mask, rewards=rewards, values=values, kappa=kappa)
    if bootstrap_values is not None and bootstrap_values.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(
            f"bootstrap_values must have one entry per response, got {list(bootstrap_values.shape)}"
        )
    chains = packed.chains(cu_seqlens, mask, gaps)
    r = _valid_rewards(rewards, cu_seqlens, mask, chains, gaps)
    v, k = values[chains.index], kappa[chains.index]
    delta = r + k * _next_values(v, chains, cu_seqlens, bootstrap_values, gaps) - v
    advantage = affine_suffix_scan(lam * k, delta, chains.cu_seqlens)
    n = mask.numel()
    return Transported(
        chains.scatter(delta, n), chains.scatter(advantage, n), chains.scatter(advantage + v, n)
    )


def trace_weights(
    kappa: Tensor, cu_seqlens: Tensor, mask: Tensor, lam: float, gaps: Gaps = "compact"
) -> Tensor:
    """Weight of the last residual in each advantage, the last column of K (Eq. 13).

    K_{t,T−1} = λ^{T−1−t} ∏_{j=t}^{T−2} κ_j

    Args:
      kappa: float32 [N].
      cu_seqlens: int64 [B + 1].
      mask: bool [N].
      lam: λ; with 1 the weight is that of the value recursion.
      gaps: `compact` or `cut`.

    Returns:
      float64 [N]: 1 at the last valid token of each response, 0 outside the mask.
    """
    packed.check(cu_seqlens, mask, kappa=kappa)
    chains = packed.chains(cu_seqlens, mask, gaps)
    last_of_response = packed.compact(cu_seqlens, mask).is_last().double()
    weights = affine_suffix_scan(lam * kappa[chains.index].double(), last_of_response, chains.cu_seqlens)
    return chains.scatter(weights, mask.numel())


def dense_kernel(kappa: Tensor, lam: float) -> Tensor:
    """The transport operator of one response as a matrix, for inspection (Eq. 13).

    K_{t,u} = 1[u ≥ t] λ^{u−t} ∏_{j=t}^{u−1} κ_j,  so that A = K δ.

    Args:
      kappa: float [T], without gaps.
      lam: λ.

    Returns:
      float [T, T], upper triangular with unit diagonal.
    """
    u = torch.arange(kappa.numel(), device=kappa.device)
    entering = (lam * kappa).roll(1)  # factor picked up on the step u − 1 → u
    factors = torch.where(u[None, :] > u[:, None], entering[None, :], torch.ones_like(kappa)[None, :])
    return factors.cumprod(dim=1).triu()


def place_terminal_rewards(scores: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Per-token rewards of a terminal verifier: the score at the last valid token, 0 elsewhere.

    Args:
      scores: float32 [B].
      cu_seqlens: int64 [B + 1].
      mask: bool [N].

    Returns:
      float32 [N]; a response without a valid token has nowhere to put its score.
    """
    packed.check(cu_seqlens, mask)
    valid = packed.compact(cu_seqlens, mask)
    last = valid.index[valid.is_last()]
    has_valid = packed.lengths(valid.cu_seqlens) > 0
    return scores.new_zeros(mask.numel()).index_copy(0, last, scores[has_valid])
