"""Loads the compiled ops and completes them: torch.ops.comppo with fake kernels and autograd.

The library (csrc/, CMakeLists.txt) registers schemas and the kernels for CPU and CUDA, and checks what it is
given; `kernels.compiled` is what to call.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).parent.parent / "_ops.so"
EDGES_PER_CHUNK = 256  # kEdgesPerChunk of comppo/pool_history.h


@cache
def load() -> str | None:
    """Register torch.ops.comppo once.

    Returns:
        What was built, such as `cpu avx512, cuda`; None where the library is not installed.

    Raises:
        OSError, ImportError: the library or its planner is there but broken.
    """
    if not LIBRARY.exists():
        return None
    torch.ops.load_library(str(LIBRARY))
    import comppo_mcore._host  # noqa: F401  a library without its planner is broken

    for name, fake in _FAKES.items():
        torch.library.register_fake(f"comppo::{name}", fake)
    torch.library.register_autograd(
        "comppo::pool_history", _pool_history_backward, setup_context=_save_for_backward
    )
    torch.library.impl("comppo::transpose_edges", "CUDA", transpose_edges)
    return torch.ops.comppo.build_info()


def transpose_edges(topk_index: Tensor, seq_start: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """The edges sorted by key, in torch: a stable sort of keys keeps the edges of one key in order."""
    key = torch.where(topk_index >= 0, seq_start[:, None] + topk_index, num_keys).flatten()
    order = torch.argsort(key, stable=True)
    counts = torch.zeros(num_keys + 1, dtype=torch.int64, device=key.device)
    counts = counts.scatter_add_(0, key, torch.ones_like(key))[:-1]
    return order.int(), _offsets(counts), _offsets((counts + EDGES_PER_CHUNK - 1) // EDGES_PER_CHUNK)


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors, *output)


def _pool_history_backward(
    ctx: Any, grad_pooled: Tensor, grad_score_sum: Tensor
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    key_features, index, seq_start = saved[2], saved[3], saved[5]
    transposed = torch.ops.comppo.transpose_edges(index, seq_start, key_features.shape[0])
    gradients = torch.ops.comppo.pool_history_backward(
        grad_pooled.contiguous(), grad_score_sum.contiguous(), *saved, *transposed, ctx.epsilon
    )
    return *gradients, None, None, None, None


# The shapes of every op's results, for tracing.


def _fake_attention_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    rows: Tensor,
    items: Tensor,
    blocks: Tensor,
    scale: float,
    top_k: int,
    statistics: int,
    *_: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = q.shape[0]
    sums = q.new_empty(2 + int(statistics).bit_count(), num_rows, dtype=torch.float32)
    index = q.new_empty(num_rows, top_k, dtype=torch.int32)
    return sums, index, torch.empty_like(index, dtype=torch.float32)


def _fake_pool_history(
    query_beta: Tensor, query_rel: Tensor, key_features: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    num_rows, width = query_beta.shape
    return query_beta.new_empty(num_rows, key_features.shape[1] - 2 * width), query_beta.new_empty(num_rows)


def _fake_transpose_edges(
    topk_index: Tensor, seq_start: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    offsets = topk_index.new_empty(num_keys + 1)
    return topk_index.new_empty(topk_index.numel()), offsets, torch.empty_like(offsets)


def _fake_pool_history_backward(
    grad_pooled: Tensor,
    grad_score_sum: Tensor,
    query_beta: Tensor,
    query_rel: Tensor,
    key_features: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query_beta, query_rel, key_features))


def _fake_comp_gae(rewards: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(rewards) for _ in range(3))


_FAKES = {
    "attention_statistics": _fake_attention_statistics,
    "pool_history": _fake_pool_history,
    "transpose_edges": _fake_transpose_edges,
    "pool_history_backward": _fake_pool_history_backward,
    "comp_gae": _fake_comp_gae,
}
