"""Random packed responses for the tests of credit transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """One entry per response in each field; `packed` lays them one after another."""

    rewards: list[Tensor]
    values: list[Tensor]
    kappa: list[Tensor]
    mask: list[Tensor]

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *(r.numel() for r in self.rewards)]).cumsum(0)

    def packed(self) -> dict[str, Any]:
        """Tensors by the argument names of `comp_gae`."""
        parts = {name: torch.cat(getattr(self, name)) for name in ("rewards", "values", "kappa", "mask")}
        return {**parts, "cu_seqlens": self.cu_seqlens}

    def pick(self, order: Sequence[int]) -> Packing:
        return Packing(
            *([getattr(self, name)[i] for i in order] for name in ("rewards", "values", "kappa", "mask"))
        )

    def split(self, x: Tensor) -> list[Tensor]:
        return list(x.split([r.numel() for r in self.rewards]))


def random_packing(
    lengths: Sequence[int], *, seed: int = 0, gap_share: float = 0.0, dtype: torch.dtype = torch.float32
) -> Packing:
    """Values in [−1, 1], κ in [0.1, 0.9], small rewards everywhere and a unit one on the last token."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> list[Tensor]:
        return [
            (low + (high - low) * torch.rand(n, generator=generator, dtype=torch.float64)).to(dtype)
            for n in lengths
        ]

    rewards = uniform(-0.1, 0.1)
    for r in rewards:
        r[-1:] += 1.0
    mask = [torch.rand(n, generator=generator) >= gap_share for n in lengths]
    return Packing(rewards, uniform(-1, 1), uniform(0.1, 0.9), mask)


@st.composite
def packings(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Packing:
    """Up to five responses of 0 to 40 tokens, from gapless to mostly gaps."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    gap_share = draw(st.sampled_from([0.0, 0.2, 0.7]))
    return random_packing(lengths, seed=draw(st.integers(0, 2**16)), gap_share=gap_share, dtype=dtype)
