"""Whitening of advantages over all valid tokens of a rollout batch, on all data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comppo_mcore.credit import packed

# Sums a tensor over the data-parallel ranks and returns the sum. None stands for a single rank.
AllReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Moments:
    """count, mean and centred sum of squares Σ (x − mean)², float64 scalars."""

    count: Tensor
    mean: Tensor
    centred_squares: Tensor

    @property
    def std(self) -> Tensor:
        """Population standard deviation, 0 for no entries."""
        return (self.centred_squares / self.count.clamp(min=1)).sqrt()


def global_moments(x: Tensor, mask: Tensor, all_reduce: AllReduce | None = None) -> Moments:
    """Moments of the valid entries of every rank, in two passes.

    The mean is known before squares are taken, so nothing cancels. A rank without valid entries takes part
    with zeros: leaving it out would hang the others.

    Args:
      x: float [N], this rank's share.
      mask: bool [N].
      all_reduce: sum over the data-parallel ranks.

    Returns:
      Moments over all ranks; mean 0 when there is no entry at all.
    """
    reduce = all_reduce if all_reduce is not None else lambda tensor: tensor
    valid = x[mask].double()
    count, total = reduce(torch.stack([mask.sum().double(), valid.sum()]))
    mean = total / count.clamp(min=1)
    return Moments(count, mean, reduce((valid - mean).square().sum()))


def whiten(
    advantage: Tensor, mask: Tensor, *, clip: float, all_reduce: AllReduce | None = None, eps: float = 1e-8
) -> Tensor:
    """Normalised advantage Â of Eq. 17.

    Â = clip((A − mean) / (std + ε), ±clip), population std over the valid tokens of all ranks.

    Args:
      advantage: float32 [N], this rank's share.
      mask: bool [N].
      clip: bound on |Â|, in standard deviations.
      all_reduce: sum over the data-parallel ranks.
      eps: ε.

    Returns:
      float32 [N], exactly 0 outside the mask.
    """
    moments = global_moments(advantage, mask, all_reduce)
    white = (advantage.double() - moments.mean) / (moments.std + eps)
    return packed.select(mask, white.clamp(-clip, clip).to(advantage.dtype))[0]
