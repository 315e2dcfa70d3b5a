"""Credit does not depend on what else is packed, nor on how a rollout batch is spread over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comppo_mcore.credit import normalize, packed, transport
from tests import oracle
from tests.packings import Packing, packings, random_packing


def bits(x: Tensor) -> bytes:
    return x.numpy().tobytes()


@settings(max_examples=30, deadline=None)
@given(p=packings(dtype=torch.float32), gaps=st.sampled_from(["compact", "cut"]), data=st.data())
def test_packing_changes_no_bit(p: Packing, gaps: packed.Gaps, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(p.rewards))))
    together = transport.comp_gae(**p.pick(order).packed(), lam=0.95, gaps=gaps)
    pieces = {name: p.pick(order).split(getattr(together, name)) for name in ("advantage", "lambda_return")}
    for place, i in enumerate(order):
        alone = transport.comp_gae(**p.pick([i]).packed(), lam=0.95, gaps=gaps)
        for name, parts in pieces.items():
            assert bits(parts[place].clone()) == bits(getattr(alone, name)), name


def test_packing_beside_a_long_or_broken_neighbour_changes_no_bit() -> None:
    """More doubling rounds, and inf or NaN next door, leave a response's own numbers alone; −0 stays −0."""
    own = random_packing((5, 37, 64), seed=1)
    own.rewards[0][:], own.values[0][:] = -0.0, 0.0
    other = random_packing((1000,), seed=2)
    other.values[0][:3], other.rewards[0][5] = torch.inf, torch.nan
    both = Packing(*([*getattr(own, f), *getattr(other, f)] for f in ("rewards", "values", "kappa", "mask")))
    alone = transport.comp_gae(**own.packed(), lam=0.95).advantage
    for order in ([0, 1, 2, 3], [3, 0, 1, 2]):
        mixed = both.pick(order)
        parts = mixed.split(transport.comp_gae(**mixed.packed(), lam=0.95).advantage)
        ours = torch.cat([part for i, part in zip(order, parts, strict=True) if i != 3])
        assert bits(ours) == bits(alone)


def test_sums_per_response_change_no_bit_with_their_neighbours() -> None:
    x, mask = torch.randn(100, generator=torch.Generator().manual_seed(0)), torch.arange(100) % 5 != 0
    cu = torch.tensor([0, 33, 33, 90, 100])
    whole = packed.segment_sum(x, cu, mask)
    for b in range(4):
        span = slice(int(cu[b]), int(cu[b + 1]))
        alone = packed.segment_sum(x[span], torch.tensor([0, span.stop - span.start]), mask[span])
        assert bits(whole[b : b + 1].clone()) == bits(alone)


def on_ranks(shards: list[tuple[Tensor, Tensor]], work: Callable[..., Tensor]) -> list[Tensor]:
    """Runs `work(x, mask, all_reduce)` on a thread per shard, with a sum over threads as the all-reduce."""
    barrier = threading.Barrier(len(shards), timeout=30)
    slots: list[Tensor | None] = [None] * len(shards)
    results: list[Tensor | None] = [None] * len(shards)

    def rank(i: int) -> None:
        def all_reduce(tensor: Tensor) -> Tensor:
            slots[i] = tensor
            barrier.wait()
            total = torch.stack([s for s in slots if s is not None]).sum(0)
            barrier.wait()
            return total

        results[i] = work(*shards[i], all_reduce)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [r for r in results if r is not None]


def whitening_input() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = 0.3 + torch.randn(500, generator=generator)
    x[:40] *= 50  # some end up at the clip
    mask = torch.rand(500, generator=generator) > 0.25
    return torch.where(mask, x, torch.nan), mask


@pytest.mark.parametrize("sizes", [[500], [250, 250], [3, 0, 400, 97]])
def test_whitening_over_ranks_equals_one_process(sizes: list[int]) -> None:
    x, mask = whitening_input()
    shards = list(zip(x.split(sizes), mask.split(sizes), strict=True))
    parts = on_ranks(shards, lambda a, m, reduce: normalize.whiten(a, m, clip=5.0, all_reduce=reduce))
    got = torch.cat(parts)
    torch.testing.assert_close(got, normalize.whiten(x, mask, clip=5.0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(got[mask].numpy(), oracle.whiten(x[mask].tolist(), 5.0), rtol=0, atol=1e-6)
    assert got[~mask].abs().max() == 0
    assert got.abs().max() == 5.0


def test_whitening_per_shard_would_differ() -> None:
    """The planted fault the tests above must see."""
    x, mask = whitening_input()
    alone = [normalize.whiten(a, m, clip=5.0) for a, m in zip(x.split(250), mask.split(250), strict=True)]
    assert (torch.cat(alone) - normalize.whiten(x, mask, clip=5.0)).abs().max() > 0.1


def test_whitening_is_two_pass() -> None:
    """A mean of 1e6 with a spread of 1 cancels in Σx² − (Σx)²/n taken in float32."""
    x = 1e6 + torch.tensor([-1.0, 0.0, 1.0, 0.0])
    got = normalize.whiten(x, torch.ones(4, dtype=torch.bool), clip=5.0)
    torch.testing.assert_close(got, torch.tensor([-1.0, 0.0, 1.0, 0.0]) * 2**0.5, rtol=1e-6, atol=0)


def test_whitening_without_spread_or_without_tokens_is_zero() -> None:
    ones = torch.ones(3, dtype=torch.bool)
    assert normalize.whiten(torch.full((3,), 0.7), ones, clip=5.0).tolist() == [0, 0, 0]
    assert normalize.whiten(torch.full((3,), torch.nan), ~ones, clip=5.0).tolist() == [0, 0, 0]
    assert normalize.whiten(torch.zeros(0), ones[:0], clip=5.0).shape == (0,)
