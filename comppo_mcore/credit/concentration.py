"""How concentrated an attention row is: c in [0, 1], 0 for a uniform row and 1 for a single key (Eq. 18–19).

A row is a_i ≥ 0 over the valid history I_t, the mean over heads of attention probabilities. The kernels
hand over sums of the unnormalised row; here they are divided by its mass. Each statistic is a gain over the
uniform row divided by the largest possible gain, both as logarithms: for the Herfindahl index this is Eq. 19.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from comppo_mcore.errors import UserError

Statistic = Literal["herfindahl", "shannon", "renyi", "max", "topk_mass"]

# Which accumulator of RowStats a statistic reads, besides num_history and mass.
ACCUMULATORS: dict[str, str] = {
    "herfindahl": "sum_squares",
    "shannon": "entropy_sum",
    "renyi": "power_sum",
    "max": "max_weight",
    "topk_mass": "topk_mass",
}

MIN_MASS = 1e-20  # below it a row says nothing about where the policy looked


@dataclass(frozen=True)
class RowStats:
    """Accumulators of unnormalised attention rows, one entry per token.

    num_history: int64 [N], n_t = |I_t|.
    mass: float32 [N], Σ a over I_t.
    sum_squares: float32 [N], Σ a².
    entropy_sum: float32 [N], Σ a log a (0 log 0 = 0), nats; None when not asked for, as below.
    max_weight: float32 [N], max a.
    power_sum: float32 [N], Σ a^α.
    topk_mass: float32 [N], sum of the k largest a.
    """

    num_history: Tensor
    mass: Tensor
    sum_squares: Tensor
    entropy_sum: Tensor | None = None
    max_weight: Tensor | None = None
    power_sum: Tensor | None = None
    topk_mass: Tensor | None = None


def empty_history(stats: RowStats) -> Tensor:
    """True where a row has no key or no mass: bool [N]. Such rows get c = 1/2 and no top-K."""
    return (stats.num_history == 0) | (stats.mass < MIN_MASS)


def _accumulator(stats: RowStats, statistic: str) -> Tensor:
    name = ACCUMULATORS[statistic]
    value = getattr(stats, name)
    if value is None:
        raise ValueError(f"statistic {statistic!r} needs RowStats.{name}, which was not accumulated")
    return value.double()


def _log_n(stats: RowStats) -> Tensor:
    return stats.num_history.double().log()


def _log_mass(stats: RowStats) -> Tensor:
    return stats.mass.double().log()


def _relative_gain(stats: RowStats, gain: Tensor, largest_gain: Tensor) -> Tensor:
    """gain / largest_gain in [0, 1]; 1/2 where no row could differ from the uniform one."""
    undetermined = empty_history(stats) | (largest_gain <= 0)
    return torch.where(undetermined, 0.5, (gain / largest_gain).clamp(0, 1)).float()


def herfindahl(stats: RowStats) -> Tensor:
    """Normalised Herfindahl concentration (Eq. 18–19).

    H = Σ a² / (Σ a)²,  c = log(n H) / log n;  c = 1/2 where n ≤ 1 or the row has no mass.

    Args:
      stats: accumulators, [N] each.

    Returns:
      float32 [N] in [0, 1].
    """
    log_h = _accumulator(stats, "herfindahl").log() - 2 * _log_mass(stats)
    return _relative_gain(stats, _log_n(stats) + log_h, _log_n(stats))


def shannon(stats: RowStats) -> Tensor:
    """One minus the normalised Shannon entropy, another choice of Φ in Eq. 9.

    entropy = log Σa − (Σ a log a) / Σa,  c = 1 − entropy / log n.

    Args:
      stats: accumulators with entropy_sum, [N] each.

    Returns:
      float32 [N] in [0, 1].
    """
    entropy = _log_mass(stats) - _accumulator(stats, "shannon") / stats.mass.double()
    return _relative_gain(stats, _log_n(stats) - entropy, _log_n(stats))


def renyi(stats: RowStats, alpha: float) -> Tensor:
    """One minus the normalised Rényi entropy of order α; α = 2 is `herfindahl`.

    entropy = log(Σ a^α / (Σ a)^α) / (1 − α),  c = 1 − entropy / log n.

    Args:
      stats: accumulators with power_sum taken at this α, [N] each.
      alpha: order, positive and not 1.

    Returns:
      float32 [N] in [0, 1].

    Raises:
      UserError: for α = 1, where the formula is singular.
    """
    if abs(alpha - 1) < 1e-6:
        raise UserError(
            f"gate.renyi_alpha is {alpha}, where Rényi entropy is Shannon's: set gate.statistic to shannon"
        )
    entropy = (_accumulator(stats, "renyi").log() - alpha * _log_mass(stats)) / (1 - alpha)
    return _relative_gain(stats, _log_n(stats) - entropy, _log_n(stats))


def max_weight(stats: RowStats) -> Tensor:
    """Normalised largest weight, the limit α → ∞ of `renyi`.

    c = log(n max a / Σ a) / log n.

    Args:
      stats: accumulators with max_weight, [N] each.

    Returns:
      float32 [N] in [0, 1].
    """
    log_max = _accumulator(stats, "max").log() - _log_mass(stats)
    return _relative_gain(stats, _log_n(stats) + log_max, _log_n(stats))


def topk_mass(stats: RowStats, k: int) -> Tensor:
    """Normalised share of the k largest weights.

    c = log((n / k) Σ_top-k a / Σ a) / log(n / k);  c = 1/2 where n ≤ k, since any row then has share 1.

    Args:
      stats: accumulators with topk_mass taken at this k, [N] each.
      k: number of weights, at least 1.

    Returns:
      float32 [N] in [0, 1].
    """
    log_ratio = (stats.num_history.double() / k).log()
    log_share = _accumulator(stats, "topk_mass").log() - _log_mass(stats)
    return _relative_gain(stats, log_ratio + log_share, log_ratio)


def concentration(
    stats: RowStats, statistic: Statistic, *, renyi_alpha: float = 3.0, mass_top_k: int = 8
) -> Tensor:
    """c_t by the name of the statistic (Eq. 19 for `herfindahl`).

    Args:
      stats: accumulators, [N] each, with the one `ACCUMULATORS` names.
      statistic: a key of `ACCUMULATORS`.
      renyi_alpha: order at which power_sum was taken.
      mass_top_k: k at which topk_mass was taken.

    Returns:
      float32 [N] in [0, 1].

    Raises:
      ValueError: for another name, or a missing accumulator.
    """
    match statistic:
        case "herfindahl":
            return herfindahl(stats)
        case "shannon":
            return shannon(stats)
        case "renyi":
            return renyi(stats, renyi_alpha)
        case "max":
            return max_weight(stats)
        case "topk_mass":
            return topk_mass(stats, mass_top_k)
    raise ValueError(f"statistic must be one of {sorted(ACCUMULATORS)}, got {statistic!r}")
