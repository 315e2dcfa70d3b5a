"""Query sharding of the attention rows for tensor parallelism.

Heads are sharded, and their mean must precede the square of Eq. 18. Adding up partial rows would move T × T
numbers; here each rank takes a share of the query rows with the heads of all ranks instead, which moves
O(T) and gives every row to the very code that serves one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def owned_rows(length: int, world: int, rank: int) -> Tensor:
    """A rank's zig-zag share of one response's rows.

    The rows are cut into 2·world chunks of near-equal length; rank r owns chunks r and 2·world − 1 − r.
    Later rows have more keys, and an early chunk paired with a late one evens that out. The share depends on
    the response alone, not on what it is packed with.

    Args:
        length: T, rows of the response.
        world: ranks.
        rank: 0 ≤ rank < world.

    Returns:
        int64, ascending offsets within the response.
    """
    if length < 0 or not 0 <= rank < world:
        raise ValueError(f"no share of {length} rows for rank {rank} of {world}")
    edges = [i * length // (2 * world) for i in range(2 * world + 1)]
    chunks = (rank, 2 * world - 1 - rank)
    return torch.cat([torch.arange(edges[c], edges[c + 1]) for c in chunks])


def gather_query_shards(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    rows_per_rank: Sequence[Tensor],
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Trade sharded heads for sharded query rows: all-to-all of q and lse, all-gather of k.

    Rank r holds query heads [r·H_q/tp, (r+1)·H_q/tp) and key heads [r·H_kv/tp, (r+1)·H_kv/tp) of every row.

    Args:
        q: [T, H_q/tp, d], this rank's heads.
        k: [T, H_kv/tp, d].
        lse: float32 [H_q/tp, T], or None.
        rows_per_rank: tp tensors int64 [R_r], the packed positions each rank is to own; the same on all
            ranks.
        group: the tensor-parallel group; not used when tp = 1.

    Returns:
        q [R, H_q, d] and lse [H_q, R] (or None) of this rank's own rows with the heads of all ranks, and
        all of k [T, H_kv, d]: the arguments of `attention_statistics`.
    """
    own_q = _heads_for_rows(q, rows_per_rank, group)
    own_lse = None if lse is None else _heads_for_rows(lse.t(), rows_per_rank, group).t()
    if len(rows_per_rank) == 1:
        return own_q, k, own_lse
    shards = [torch.empty_like(k, memory_format=torch.contiguous_format) for _ in rows_per_rank]
    dist.all_gather(shards, k.contiguous(), group=group)
    return own_q, torch.cat(shards, dim=1), own_lse


def gather_rows(own: Tensor, rows_per_rank: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """The way back: what each rank computed for its rows, on every rank, by ascending packed position.

    Args:
        own: [R_r, ...], in the order of this rank's `rows_per_rank`.
        rows_per_rank: as for `gather_query_shards`.
        group: the tensor-parallel group; not used when tp = 1.

    Returns:
        [Σ R_r, ...], ordered like the sorted rows of all ranks.
    """
    order = torch.argsort(torch.cat(list(rows_per_rank)), stable=True).to(own.device)
    if len(rows_per_rank) == 1:
        return own[order]
    longest = max(len(rows) for rows in rows_per_rank)
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    shards = [torch.empty_like(padded) for _ in rows_per_rank]
    dist.all_gather(shards, padded, group=group)
    return torch.cat([s[: len(rows)] for s, rows in zip(shards, rows_per_rank, strict=True)])[order]


def _heads_for_rows(x: Tensor, rows_per_rank: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """[T, heads/tp, ...] of this rank's heads → [R, heads, ...] of this rank's rows."""
    if len(rows_per_rank) == 1:
        return x[rows_per_rank[0]]
    sent = [len(rows) for rows in rows_per_rank]
    own = sent[dist.get_rank(group)]
    received = x.new_empty(len(sent) * own, *x.shape[1:])
    outgoing = x[torch.cat(list(rows_per_rank))].contiguous()
    dist.all_to_all_single(received, outgoing, [own] * len(sent), sent, group=group)
    heads = received.view(len(sent), own, *x.shape[1:]).transpose(0, 1)  # [R, tp, heads/tp, ...]
    return heads.flatten(1, 2)
