"""The order of prompts, as a pure function of how many were already consumed."""

from __future__ import annotations

import random
from functools import lru_cache


def prompt_indices(seed: int, consumed: int, count: int, num_problems: int | None) -> list[int]:
    """Indices of the next prompts, epoch after epoch, each epoch in an order of its own.

    The whole state of the data stream is the one integer `consumed`: at step k it is
    k · prompts per step, and a resumed run continues exactly where it stopped.

    Args:
        seed: seed of the run.
        consumed: prompts taken so far, ≥ 0.
        count: prompts wanted now.
        num_problems: size of the data set; None for an endless one, whose order is 0, 1, 2, ….

    Returns:
        `count` indices into the training problems.
    """
    positions = range(consumed, consumed + count)
    if num_problems is None:
        return list(positions)
    return [_epoch_order(seed, p // num_problems, num_problems)[p % num_problems] for p in positions]


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_problems: int) -> tuple[int, ...]:
    order = list(range(num_problems))
    random.Random(f"order/{seed}/{epoch}").shuffle(order)
    return tuple(order)
