"""How far the engine's log-probs are from the trainer's for the same tokens and weights.

They differ by arithmetic alone, so a large gap means a broken weight sync, another temperature or
shifted tokens, and the ratios of Eq. 17 would be built on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from comppo_mcore.errors import UserError


@dataclass(frozen=True)
class Gap:
    """Sums rather than means, so that ranks can be added."""

    total: float  # Σ |engine − trainer|, nats
    tokens: int
    largest: float  # nats

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0


def engine_gap(engine: Tensor, trainer: Tensor, mask: Tensor) -> Gap:
    """|log π_engine(y_t) − log π_trainer(y_t)| over valid tokens.

    Args:
        engine: float32 [N], nats, log_softmax(z/T) of the engine.
        trainer: float32 [N], nats, of the behaviour pass.
        mask: bool [N], false at gap tokens.
    """
    if not engine.shape == trainer.shape == mask.shape:
        raise ValueError(f"shapes differ: {tuple(engine.shape)}, {tuple(trainer.shape)}, {tuple(mask.shape)}")
    difference = (engine - trainer)[mask].abs().double()
    largest = difference.max().item() if len(difference) else 0.0
    return Gap(total=difference.sum().item(), tokens=len(difference), largest=largest)


def merge_gaps(gaps: list[Gap]) -> Gap:
    """Of all data-parallel ranks together."""
    return Gap(
        total=sum(gap.total for gap in gaps),
        tokens=sum(gap.tokens for gap in gaps),
        largest=max(gap.largest for gap in gaps),
    )


def check_gap(gap: Gap, limit: float) -> None:
    """Stop the run when the mean gap is above `rollout.gap_limit`, or is NaN.

    Raises:
        UserError: with the numbers and what to do.
    """
    if not gap.mean <= limit:
        raise UserError(
            f"rollout.gap_limit is {limit:g} nats per token but the engine's log-probs differ from the "
            f"trainer's by {gap.mean:.4g} on average and {gap.largest:.4g} at most over {gap.tokens} tokens: "
            "check the weight sync and model.dtype, and raise the limit only if so large a gap is expected"
        )
