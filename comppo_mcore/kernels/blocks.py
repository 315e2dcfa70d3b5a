"""Cuts the wanted attention rows of packed sequences into blocks of few shapes.

A block is up to `BLOCK_ROWS` rows of one sequence together with the span of keys they can see. Its
padded shape depends on its own sequence only, never on what it was packed with: this is what makes
the results of different packings agree bit for bit. Blocks of equal shape are then batched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK_ROWS = 64  # a power of two
KEY_TILE = 64  # spans are padded to a multiple of this

History = Literal["all", "response"]


@dataclass(frozen=True)
class RowRanges:
    """The keys of each wanted row: int64 [R], positions inside the row's own sequence."""

    sequence_start: Tensor  # packed position of the sequence's first token
    position: Tensor  # s, the row itself and its last key
    visible_from: Tensor  # first key under the softmax (causal, sliding window)
    history_from: Tensor  # first key of I_t

    @property
    def num_history(self) -> Tensor:
        """n_t = |I_t|: int64 [R]."""
        return (self.position - self.history_from + 1).clamp(min=0)


@dataclass(frozen=True)
class RowBatch:
    """b blocks of one shape."""

    slot: Tensor  # int64 [b, rows], which of the R wanted rows; −1 is padding
    first_key: Tensor  # int64 [b], position inside the sequence
    num_keys: int  # padded


def row_ranges(
    rows: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    *,
    history: History,
    skip_first: int,
    window: int | None,
) -> RowRanges:
    """The valid history I_t of each row as one contiguous range (Eq. 18).

    I_t = {i : max(skip_first, P if history = response, s − window + 1) ≤ i ≤ s}

    Args:
        rows: int64 [R], packed positions.
        cu_seqlens: int64 [B + 1], packed position of each sequence's first token.
        prompt_lengths: int64 [B], P, tokens.
        history: `all` keeps the prompt, `response` drops it.
        skip_first: leading positions of every sequence that are dropped.
        window: keys a row sees, itself included; None is unlimited.
    """
    if history not in ("all", "response"):
        raise ValueError(f"history is {history!r}, not 'all' or 'response'")
    sequence = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    start = cu_seqlens[sequence]
    position = rows - start
    visible_from = torch.zeros_like(position) if window is None else (position - window + 1).clamp(min=0)
    history_from = visible_from.clamp(min=skip_first)
    if history == "response":
        history_from = torch.maximum(history_from, prompt_lengths[sequence])
    return RowRanges(start, position, visible_from, history_from)


def row_batches(ranges: RowRanges, *, pair_bytes: int, key_bytes: int, max_bytes: int) -> Iterator[RowBatch]:
    """Batches of equally shaped blocks that together hold every row once.

    Args:
        pair_bytes: workspace of one (row, key) pair.
        key_bytes: workspace of one key of a block, whatever its number of rows.
        max_bytes: workspace of a batch. Blocks that exceed it are cut down to as little as one row.
    """
    if not len(ranges.position):
        return
    slots, first_key, num_keys = _blocks(ranges)
    filled = (slots >= 0).sum(1)
    heights = torch.exp2(torch.log2(filled.double()).ceil()).long()
    widths = (num_keys + KEY_TILE - 1) // KEY_TILE * KEY_TILE
    for height, width in torch.unique(torch.stack([heights, widths], 1), dim=0).tolist():
        members = ((heights == height) & (widths == width)).nonzero().squeeze(1)
        cut = height
        while cut > 1 and width * (cut * pair_bytes + key_bytes) > max_bytes:
            cut //= 2
        slot = slots[members, :height].reshape(-1, cut)
        first = first_key[members].repeat_interleave(height // cut)
        step = max(1, max_bytes // (width * (cut * pair_bytes + key_bytes)))
        for s, f in zip(slot.split(step), first.split(step), strict=True):
            yield RowBatch(s, f, width)


def _blocks(ranges: RowRanges) -> tuple[Tensor, Tensor, Tensor]:
    """Consecutive rows of each sequence: slots [n, BLOCK_ROWS], first key [n] and key count [n]."""
    order = torch.argsort(ranges.sequence_start + ranges.position, stable=True)
    start = ranges.sequence_start[order]
    index = torch.arange(len(order), device=order.device)
    rank = index - torch.searchsorted(start, start)  # place among the rows of the same sequence
    head = (rank % BLOCK_ROWS == 0).nonzero().squeeze(1)  # rank is 0 where a sequence begins
    tail = torch.cat([head[1:], head.new_tensor([len(order)])]) - 1
    block = torch.searchsorted(head, index, right=True) - 1
    slots = torch.full((len(head), BLOCK_ROWS), -1, dtype=torch.int64, device=order.device)
    slots[block, rank % BLOCK_ROWS] = order
    first_key = ranges.visible_from[order[head]]
    return slots, first_key, ranges.position[order[tail]] - first_key + 1
