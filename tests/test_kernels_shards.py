"""Query sharding: the zig-zag shares, and two processes against one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from comppo_mcore.kernels.concentration import attention_statistics
from comppo_mcore.kernels.shards import gather_query_shards, gather_rows, owned_rows

HEADS, GROUPS, WIDTH = 8, 4, 16
CU_SEQLENS, PROMPTS = [0, 40, 41, 48, 120], [30, 1, 6, 5]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shares_partition_any_length(world: int) -> None:
    for length in [*range(70), 1000]:
        shares = [owned_rows(length, world, rank) for rank in range(world)]
        assert all(s.dtype == torch.int64 and bool((s.diff() > 0).all()) for s in shares)
        assert torch.cat(shares).sort().values.tolist() == list(range(length))
        sizes = [len(s) for s in shares]
        assert max(sizes) - min(sizes) <= 2


def test_shares_even_out_causal_work() -> None:
    """Σ (row + 1) differs by far less between ranks than for contiguous shares, where it is 15-fold."""
    work = [int((owned_rows(1600, 8, rank) + 1).sum()) for rank in range(8)]
    assert max(work) == min(work)


def test_share_is_zig_zag() -> None:
    assert owned_rows(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert owned_rows(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert owned_rows(1, 2, 0).tolist() == [0] and owned_rows(1, 2, 1).tolist() == []


@pytest.mark.parametrize("length, world, rank", [(-1, 2, 0), (4, 2, 2), (4, 2, -1)])
def test_impossible_shares_are_refused(length: int, world: int, rank: int) -> None:
    with pytest.raises(ValueError):
        owned_rows(length, world, rank)


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(CU_SEQLENS[-1], HEADS, WIDTH, generator=generator)
    k = torch.randn(CU_SEQLENS[-1], GROUPS, WIDTH, generator=generator)
    lse = torch.randn(HEADS, CU_SEQLENS[-1], generator=generator)
    return q.to(dtype), k.to(dtype), lse


def rows_per_rank(world: int) -> list[torch.Tensor]:
    """The shards of every response's rows; the one-token response leaves rank 0 alone with a row."""
    spans = list(zip(CU_SEQLENS[:-1], PROMPTS, CU_SEQLENS[1:], strict=True))
    return [
        torch.cat([s + p - 1 + owned_rows(e - s - p + 1, world, r) for s, p, e in spans])
        for r in range(world)
    ]


def statistics(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Herfindahl index and top-K indices."""
    stats, top = attention_statistics(
        q,
        k,
        None,
        rows,
        torch.tensor(CU_SEQLENS),
        scale=WIDTH**-0.5,
        history="all",
        skip_first=0,
        window=None,
        prompt_lengths=torch.tensor(PROMPTS),
        top_k=8,
    )
    return stats.sum_squares / stats.mass**2, top.index


def test_one_rank_needs_no_group() -> None:
    q, k, lse = inputs(torch.float32)
    rows = torch.tensor([7, 2, 100])
    own_q, all_k, own_lse = gather_query_shards(q, k, lse, [rows], None)
    assert torch.equal(own_q, q[rows]) and all_k is k
    assert own_lse is not None and torch.equal(own_lse, lse[:, rows])
    assert gather_query_shards(q, k, None, [rows], None)[2] is None
    assert gather_rows(rows, [rows], None).tolist() == [2, 7, 100]


def _rank(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            check_exchange(rank, world, dtype)
        check_statistics(rank, world)
        check_rank_without_rows(rank, world)
    finally:
        dist.destroy_process_group()


def local_heads(x: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    return x.chunk(world, dim)[rank]


def check_exchange(rank: int, world: int, dtype: torch.dtype) -> None:
    q, k, lse = inputs(dtype)
    shards = rows_per_rank(world)
    own = gather_query_shards(
        local_heads(q, 1, rank, world),
        local_heads(k, 1, rank, world),
        local_heads(lse, 0, rank, world),
        shards,
        dist.group.WORLD,
    )
    for got, want in zip(own, (q[shards[rank]], k, lse[:, shards[rank]]), strict=True):
        assert got is not None and got.dtype == want.dtype and torch.equal(got, want)


def check_statistics(rank: int, world: int) -> None:
    """Sharded rows, gathered again, are those of one rank."""
    q, k, _ = inputs(torch.float32)
    shards = rows_per_rank(world)
    local_q, local_k = (local_heads(x, 1, rank, world) for x in (q, k))
    own_q, all_k, _ = gather_query_shards(local_q, local_k, None, shards, dist.group.WORLD)
    parts = statistics(own_q, all_k, shards[rank])
    herfindahl, index = (gather_rows(x, shards, dist.group.WORLD) for x in parts)
    rows = torch.cat(shards).sort().values
    want_herfindahl, want_index = statistics(q[rows], k, rows)
    torch.testing.assert_close(herfindahl, want_herfindahl, rtol=1e-6, atol=0)
    assert torch.equal(index, want_index)


def check_rank_without_rows(rank: int, world: int) -> None:
    q, k, lse = inputs(torch.float32)
    shards = [torch.tensor([3])] + [torch.zeros(0, dtype=torch.int64)] * (world - 1)
    own_q, _, own_lse = gather_query_shards(
        local_heads(q, 1, rank, world),
        local_heads(k, 1, rank, world),
        local_heads(lse, 0, rank, world),
        shards,
        dist.group.WORLD,
    )
    assert torch.equal(own_q, q[shards[rank]])
    assert own_lse is not None and torch.equal(own_lse, lse[:, shards[rank]])
    assert torch.equal(gather_rows(own_q, shards, dist.group.WORLD), q[[3]])


def test_invariance_of_two_tensor_parallel_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks assert that what they receive, and compute from it, is what one rank has."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spawn(_rank, (2, os.fspath(tmp_path / "store")), nprocs=2)
