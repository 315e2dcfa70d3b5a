"""Per-token arrays of several responses, laid one after another.

`cu_seqlens` int64 [B + 1] holds the offsets: response b owns entries cu_seqlens[b] … cu_seqlens[b + 1] − 1.
`mask` bool [N] is false at gap tokens. Responses may be empty, and so may the whole array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Gaps = Literal["compact", "cut"]


def check(cu_seqlens: Tensor, mask: Tensor, **arrays: Tensor) -> None:
    """Checks that offsets, mask and the named per-token arrays describe the same packing.

    Args:
      cu_seqlens: int64 [B + 1].
      mask: bool [N].
      **arrays: [N] each; the keyword is the name an error shows.

    Raises:
      ValueError: naming the first array that does not fit.
    """
    if cu_seqlens.dtype != torch.int64 or cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens must be int64 [B + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}")
    if int(cu_seqlens[0]) != 0 or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must start at 0 and never decrease, got {cu_seqlens.tolist()}")
    num_tokens = int(cu_seqlens[-1])
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    for name, array in {"mask": mask, **arrays}.items():
        if array.shape != (num_tokens,):
            raise ValueError(f"{name} must have shape [{num_tokens}], got {list(array.shape)}")


def lengths(cu_seqlens: Tensor) -> Tensor:
    """Tokens of each response, gaps included: int64 [B]."""
    return cu_seqlens.diff()


def broadcast(per_response: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Repeats one number per response, [B], over its tokens, [N]."""
    return per_response.repeat_interleave(lengths(cu_seqlens))


def segment_ids(cu_seqlens: Tensor) -> Tensor:
    """Index of the response each token belongs to: int64 [N]."""
    return broadcast(torch.arange(cu_seqlens.numel() - 1, device=cu_seqlens.device), cu_seqlens)


def positions(cu_seqlens: Tensor) -> Tensor:
    """Index t of each token within its response, from 0: int64 [N]."""
    starts = broadcast(cu_seqlens[:-1], cu_seqlens)
    return torch.arange(starts.numel(), device=starts.device) - starts


def tokens_to_end(cu_seqlens: Tensor) -> Tensor:
    """Tokens from each one to the end of its response, itself included (≥ 1): int64 [N]."""
    ends = broadcast(cu_seqlens[1:], cu_seqlens)
    return ends - torch.arange(ends.numel(), device=ends.device)


def select(mask: Tensor, *arrays: Tensor) -> tuple[Tensor, ...]:
    """Replaces entries outside the mask by 0, so that a NaN there reaches neither values nor gradients."""
    return tuple(torch.where(mask, array, torch.zeros_like(array)) for array in arrays)


def _offsets_of_valid(cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    before = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.cumsum(0)])
    return before[cu_seqlens]


def segment_count(cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Valid tokens of each response: int64 [B]."""
    return _offsets_of_valid(cu_seqlens, mask).diff()


def segment_sum(x: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Sum over the valid tokens of each response.

    Every response is summed by itself and in order, so that its sum does not depend on its neighbours.

    Args:
      x: [N].
      cu_seqlens: int64 [B + 1].
      mask: bool [N].

    Returns:
      float64 [B], 0 where a response has no valid token.
    """
    (x,) = select(mask, x.double())
    return torch.segment_reduce(x, "sum", offsets=cu_seqlens, initial=0)


def segment_mean(x: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Mean over the valid tokens of each response: float64 [B], NaN where there is none."""
    return segment_sum(x, cu_seqlens, mask) / segment_count(cu_seqlens, mask)


@dataclass(frozen=True)
class Chains:
    """The valid tokens alone, cut into the chains along which credit flows.

    index: int64 [M], place of each valid token in the packed array.
    cu_seqlens: int64 [C + 1], offsets of the chains in `index`.
    """

    index: Tensor
    cu_seqlens: Tensor

    def scatter(self, x: Tensor, num_tokens: int) -> Tensor:
        """Puts one number per valid token, [M], back into a packed array, [num_tokens], 0 elsewhere."""
        return x.new_zeros(num_tokens).index_copy(0, self.index, x)

    def is_last(self) -> Tensor:
        """True at the last token of each chain: bool [M]."""
        return tokens_to_end(self.cu_seqlens) == 1


def compact(cu_seqlens: Tensor, mask: Tensor) -> Chains:
    """One chain per response, gap tokens left out."""
    return Chains(mask.nonzero().flatten(), _offsets_of_valid(cu_seqlens, mask))


def runs(cu_seqlens: Tensor, mask: Tensor) -> Chains:
    """One chain per maximal run of valid tokens, so that a gap ends a chain as the response's end does."""
    index = mask.nonzero().flatten()
    starts_response = positions(cu_seqlens)[index] == 0
    follows_gap = index.diff(prepend=index.new_full((1,), -2)) != 1
    starts = (starts_response | follows_gap).nonzero().flatten()
    return Chains(index, torch.cat([starts, starts.new_tensor([index.numel()])]))


def chains(cu_seqlens: Tensor, mask: Tensor, gaps: Gaps) -> Chains:
    """`compact` or `runs`, by the name of the gap rule.

    Raises:
      ValueError: for another name.
    """
    if gaps == "compact":
        return compact(cu_seqlens, mask)
    if gaps == "cut":
        return runs(cu_seqlens, mask)
    raise ValueError(f"gaps must be 'compact' or 'cut', got {gaps!r}")
