"""MurmurHash3, 32 bits, of 16 bytes: seed (64 bits), position and column, in torch's int64."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """uint32 [N, M] from uint64 [N] seeds, integer [N] positions and integer [M] columns."""
    seed = seed.view(torch.int64)
    state = torch.zeros_like(seed)
    for word in (seed & WORD, (seed >> 32) & WORD, positions.to(torch.int64) & WORD):
        state = _absorb(state, word)
    state = _absorb(state[:, None], (col_indices.to(torch.int64) & WORD)[None, :])
    return _finish(state ^ 16).to(torch.uint32)


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    word = _times(_rotate(_times(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & WORD


def _finish(state: Tensor) -> Tensor:
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def _times(state: Tensor, factor: int) -> Tensor:
    """state · factor mod 2³²; the plain product could overflow int64."""
    low, high = state & 0xFFFF, state >> 16
    return (low * factor + ((high * factor & 0xFFFF) << 16)) & WORD


def _rotate(state: Tensor, bits: int) -> Tensor:
    return ((state << bits) | (state >> (32 - bits))) & WORD
