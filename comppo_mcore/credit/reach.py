"""Credit reach: how far back from the last reward a gated trace carries; envelopes made to a wished reach."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from comppo_mcore.credit import packed
from comppo_mcore.credit.gate import Envelope
from comppo_mcore.credit.normalize import AllReduce
from comppo_mcore.errors import UserError

MIN_WEIGHT = 1e-3  # a trace weight at or below it counts as no credit
LOW_REACH = 0.1  # a trace reach below it deserves a warning
_LAMS = (0.95, 0.99, 0.995, 0.999, 1.0)
# κ = 1 − w (9 − 8 σ): the envelope (1 − 9w, 1 − w) keeps the 1 : 8 proportion of the paper's (0.1, 0.9).
_MIN_W, _MAX_W = 1e-6, 1 / 9


def _share(part: Tensor, whole: Tensor, all_reduce: AllReduce | None) -> float:
    sums = torch.stack([part.double().sum(), whole.double().sum()])
    part_sum, whole_sum = (all_reduce(sums) if all_reduce is not None else sums).tolist()
    return part_sum / whole_sum if whole_sum else math.nan


def credit_reach(weights: Tensor, mask: Tensor, all_reduce: AllReduce | None = None) -> float:
    """Share of valid tokens that the last reward reaches with a weight above 1e-3.

    With `transport.trace_weights` at λ this is the trace reach, at λ = 1 the value reach.

    Args:
      weights: float64 [N], weight of the last residual in each advantage (last column of K, Eq. 13).
      mask: bool [N].
      all_reduce: sum over the data-parallel ranks.

    Returns:
      share in [0, 1]; NaN when there is no valid token.
    """
    return _share((weights > MIN_WEIGHT) & mask, mask, all_reduce)


def share_beyond_reach(
    advantage: Tensor, weights: Tensor, mask: Tensor, all_reduce: AllReduce | None = None
) -> float:
    """Share of Σ |Â| on valid tokens that the last reward does not reach: update made of critic noise.

    Args:
      advantage: float32 [N], whitened.
      weights: float64 [N], `transport.trace_weights` at λ.
      mask: bool [N].
      all_reduce: sum over the data-parallel ranks.

    Returns:
      share in [0, 1]; NaN when every advantage is 0.
    """
    (size,) = packed.select(mask, advantage.abs())
    (beyond,) = packed.select(weights <= MIN_WEIGHT, size)
    return _share(beyond, size, all_reduce)


def _lower_median(x: Tensor) -> float:
    """The middle element, the lower of two: at least half of the entries are no smaller."""
    return float(x.median())


def _tail_lengths(num_valid: Tensor, reach: float) -> Tensor:
    """⌈reach · T⌉ for each response; the offset undoes products such as 0.07 · 100 = 7.000000000000001."""
    return (reach * num_valid.double() - 1e-9).ceil().long()


def _largest_reach(num_valid: Tensor, lam: float) -> float:
    """The largest reach some envelope attains at this λ, rounded down to three digits."""
    steps = math.floor(math.log(MIN_WEIGHT) / (math.log(lam) + math.log1p(-9 * _MIN_W))) if lam > 0 else 0
    longer_median = -_lower_median(-num_valid)
    largest = min(1.0, steps / longer_median)
    if largest == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(largest)) - 2)
    return float(f"{math.floor(largest / unit + 1e-9) * unit:.3g}")


def _widest(loss: Tensor, tail: Tensor, tail_lengths: Tensor, offsets: Tensor, lam: float) -> float | None:
    """The largest w whose median weight is at least 1e-3; None when even the smallest w fails.

    `loss` is 9 − 8 σ of each valid token, so that κ = 1 − w · loss.
    """
    log_lam = math.log(lam) if lam > 0 else -math.inf

    def reaches(w: float) -> bool:
        log_kappa = packed.segment_sum(torch.log1p(-w * loss), offsets, tail)
        return _lower_median(log_kappa + tail_lengths * log_lam) >= math.log(MIN_WEIGHT)

    if not reaches(_MIN_W):
        return None
    if reaches(_MAX_W):
        return _MAX_W
    low, high = _MIN_W, _MAX_W
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low


def calibrate(
    concentration: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    *,
    reach: float,
    keep: Literal["lam", "free"],
    tau: float,
    lam: float,
) -> Envelope:
    """The widest envelope whose trace carries over the last `reach` of the median response.

    κ_lo = 1 − 9w, κ_hi = 1 − w, with the largest w ≤ 1/9 such that the lower median over responses of
    λⁿ ∏κ, over the last n = ⌈reach · T⌉ valid tokens, is at least 1e-3. Empty responses do not count.

    Args:
      concentration: float32 [N], c of the whole first rollout batch (all ranks).
      cu_seqlens: int64 [B + 1].
      mask: bool [N].
      reach: wished share of the response, in (0, 1].
      keep: `lam` leaves λ as it is; `free` may raise it to 0.95, 0.99, 0.995, 0.999 or 1.
      tau: slope of the gate, kept.
      lam: λ.

    Returns:
      the envelope to freeze, with κ_sup < 1.

    Raises:
      UserError: naming `gate.calibrate.reach` and the largest feasible one, when λⁿ alone is below 1e-3.
      ValueError: when the batch has no valid token.
    """
    packed.check(cu_seqlens, mask, concentration=concentration)
    valid = packed.compact(cu_seqlens, mask)
    num_valid = packed.lengths(valid.cu_seqlens)
    num_valid = num_valid[num_valid > 0]
    if num_valid.numel() == 0:
        raise ValueError("no valid token to calibrate the gate with")
    offsets = torch.cat([num_valid.new_zeros(1), num_valid.cumsum(0)])
    tail_lengths = _tail_lengths(num_valid, reach)
    tail = packed.tokens_to_end(offsets) <= packed.broadcast(tail_lengths, offsets)
    loss = 9 - 8 * torch.sigmoid(tau * (concentration[valid.index].double() - 0.5))
    for candidate in (lam, *(x for x in _LAMS if x > lam and keep == "free")):
        w = _widest(loss, tail, tail_lengths, offsets, candidate)
        if w is not None:
            return Envelope(max(0.0, 1 - 9 * w), 1 - w, tau, candidate)
    raise UserError(
        f"gate.calibrate.reach is {reach}, but at transport.lam {lam} the trace fades below {MIN_WEIGHT:g} "
        f"sooner: use at most {_largest_reach(num_valid, lam):g}, raise transport.lam, "
        "or set gate.calibrate.keep to free"
    )
