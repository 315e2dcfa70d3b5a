"""The retention gate κ: from concentration by Eq. 20, and its controls (fixed, shuffled, by position).

A control changes κ alone. It must act before both uses of κ, the transport and the critic's mixture.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from comppo_mcore.credit import packed
from comppo_mcore.errors import UserError

POSITION_BINS = 20


@dataclass(frozen=True)
class Envelope:
    """Parameters of the gate map (Eq. 20) and the λ they are used with.

    kappa_lo, kappa_hi: asymptotes of κ; tau: slope; lam: trace parameter λ of Eq. 11.
    """

    kappa_lo: float
    kappa_hi: float
    tau: float
    lam: float

    def __post_init__(self) -> None:
        if not 0 <= self.kappa_lo <= self.kappa_hi <= 1 or self.kappa_sup >= 1:
            raise ValueError(f"{self} must have 0 ≤ kappa_lo ≤ kappa_hi ≤ 1 and stay below κ = 1")

    @property
    def kappa_sup(self) -> float:
        """g(1), the attained supremum of κ; Prop. 3 and 4 use it, not κ_hi."""
        return self.kappa_lo + (self.kappa_hi - self.kappa_lo) / (1 + math.exp(-self.tau / 2))


def attention_gate(concentration: Tensor, envelope: Envelope) -> Tensor:
    """Retention gate of the behaviour policy's attention (Eq. 20).

    κ = κ_lo + (κ_hi − κ_lo) σ(τ (c − 1/2))

    Args:
      concentration: float32 [N] in [0, 1].
      envelope: κ_lo, κ_hi, τ.

    Returns:
      float32 [N] in [g(0), g(1)].
    """
    slope = torch.sigmoid(envelope.tau * (concentration - 0.5))
    return envelope.kappa_lo + (envelope.kappa_hi - envelope.kappa_lo) * slope


def fixed_gate(concentration: Tensor, kappa: float) -> Tensor:
    """The same κ at every token, [N]; with the standard critic this is PPO at γ = κ (Prop. 1)."""
    return torch.full_like(concentration, kappa)


def global_permutation(num_valid: int, seed: int) -> Tensor:
    """One permutation of all valid tokens of a rollout batch: int64 [num_valid], the same on every rank."""
    return torch.randperm(num_valid, generator=torch.Generator().manual_seed(seed))


def shuffled_gate(
    kappa: Tensor, mask: Tensor, permutation: Tensor, *, pool: Tensor | None = None, offset: int = 0
) -> Tensor:
    """Moves the gates of a rollout batch to other valid tokens (global shuffle, §6.4).

    κ'_j = pool[π(offset + j)] for the j-th valid token here.

    Args:
      kappa: float32 [N].
      mask: bool [N].
      permutation: int64 [M], over all valid tokens of the rollout batch.
      pool: float32 [M], their gates in rank order; None: the batch is not sharded, and they are all here.
      offset: valid tokens on the ranks before this one.

    Returns:
      float32 [N]; entries outside the mask are as they were.

    Raises:
      ValueError: when permutation and pool differ in length.
    """
    pool = kappa[mask] if pool is None else pool
    if permutation.shape != pool.shape:
        raise ValueError(f"permutation of {permutation.numel()} tokens for {pool.numel()} gates")
    index = mask.nonzero().flatten()
    source = permutation.to(pool.device)[offset : offset + index.numel()]
    return kappa.index_copy(0, index, pool[source].to(kappa.dtype))


@dataclass(frozen=True)
class PositionTable:
    """Mean κ in equal-width bins of t/T over a whole run, and the tokens each mean rests on.

    A bin no token fell into (count 0) holds the mean of the nearest bin that has some, the earlier of two.
    """

    kappa: tuple[float, ...]
    count: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str, source: str) -> PositionTable:
        """Reads what `to_json` wrote.

        Args:
          text: the JSON document.
          source: where it came from, for the message.

        Raises:
          UserError: naming `gate.table`, when it is not a table of 20 gates in [0, 1].
        """
        try:
            record = json.loads(text)
            table = PositionTable(
                tuple(float(k) for k in record["kappa"]), tuple(int(n) for n in record["count"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"gate.table is {source}, which is not a position table "
                f"({type(error).__name__}: {error}): write one with `comppo gate-table`"
            ) from error
        if len(table.kappa) != POSITION_BINS or len(table.count) != POSITION_BINS:
            raise UserError(
                f"gate.table is {source}, which has {len(table.kappa)} gates and {len(table.count)} counts: "
                f"it must have {POSITION_BINS} of each"
            )
        if not all(0 <= k <= 1 for k in table.kappa):
            raise UserError(f"gate.table is {source}, with gates {list(table.kappa)}: all must lie in [0, 1]")
        return table


def position_bins(cu_seqlens: Tensor) -> Tensor:
    """⌊20 t/T⌋ of each token, in integers: int64 [N]."""
    length = packed.broadcast(packed.lengths(cu_seqlens), cu_seqlens)
    return packed.positions(cu_seqlens) * POSITION_BINS // length


def position_sums(kappa: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Sum of κ and number of valid tokens in each position bin; add those of all batches and ranks.

    Args:
      kappa: float32 [N].
      cu_seqlens: int64 [B + 1].
      mask: bool [N].

    Returns:
      float64 [2, 20].
    """
    bins, valid = position_bins(cu_seqlens)[mask], kappa[mask].double()
    sums = torch.zeros(2, POSITION_BINS, dtype=torch.float64, device=kappa.device)
    return sums.index_add(1, bins, torch.stack([valid, torch.ones_like(valid)]))


def position_table(sums: Tensor) -> PositionTable:
    """The frozen schedule of the position control (§6.4) from the sums of a whole run.

    Args:
      sums: float64 [2, 20], as `position_sums` gives.

    Raises:
      ValueError: when no bin holds a token.
    """
    total, count = sums.tolist()
    filled = [b for b in range(POSITION_BINS) if count[b] > 0]
    if not filled:
        raise ValueError("no valid token to average gates over")
    nearest = [min(filled, key=lambda f: (abs(f - b), f)) for b in range(POSITION_BINS)]
    return PositionTable(tuple(total[f] / count[f] for f in nearest), tuple(int(n) for n in count))


def position_gate(table: PositionTable, cu_seqlens: Tensor) -> Tensor:
    """κ by t/T alone, from a frozen table: float32 [N]."""
    kappa = torch.tensor(table.kappa, dtype=torch.float32, device=cu_seqlens.device)
    return kappa[position_bins(cu_seqlens)]
