"""Minibatches, ownership, micro-batches and seeds."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo_mcore.errors import UserError
from comppo_mcore.trainer.schedule import minibatches, owned, owned_columns, pack_micro_batches, step_seed


@pytest.mark.parametrize(("n", "m"), [(16, 4), (12, 4), (8, 8), (6, 1), (1, 1), (96, 12)])
def test_every_epoch_takes_every_trajectory_once(n: int, m: int) -> None:
    table = minibatches(n, m, epoch_seed=3)
    assert table.shape == (n // m, m)
    assert table.dtype == torch.int64
    assert sorted(table.flatten().tolist()) == list(range(n))


def test_column_holds_a_permutation_of_its_stratum() -> None:
    table = minibatches(24, 4, epoch_seed=11)
    for c in range(4):
        assert sorted(table[:, c].tolist()) == list(range(6 * c, 6 * c + 6))
    relative = table - 6 * torch.arange(4)
    assert any(not torch.equal(relative[:, 0], relative[:, c]) for c in range(1, 4)), (
        "columns share one permutation"
    )


def test_epoch_seed_alone_decides_the_order() -> None:
    torch.manual_seed(0)
    first = minibatches(64, 4, epoch_seed=5)
    torch.rand(7)
    assert torch.equal(first, minibatches(64, 4, epoch_seed=5))
    assert not torch.equal(first, minibatches(64, 4, epoch_seed=6))


@pytest.mark.parametrize("m", [1, 4, 12])
def test_invariance_of_minibatches_over_data_parallel_sizes(m: int) -> None:
    """Whatever dp divides m, the ranks' parts together are the same minibatches, of owned trajectories."""
    n = 5 * m
    table = minibatches(n, m, epoch_seed=1)
    for dp in (d for d in range(1, m + 1) if m % d == 0):
        parts = [table[:, owned_columns(m, dp, rank)] for rank in range(dp)]
        assert torch.equal(torch.cat(parts, dim=1), table)
        owners = [owned(n, m, dp, rank) for rank in range(dp)]
        assert torch.equal(torch.cat(owners), torch.arange(n))
        for part, mine in zip(parts, owners, strict=True):
            assert sorted(part.flatten().tolist()) == mine.tolist()


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide 10"):
        minibatches(10, 4, epoch_seed=0)
    with pytest.raises(ValueError, match="no equal share"):
        owned(12, 4, dp_size=3, dp_rank=0)
    with pytest.raises(ValueError, match="no equal share"):
        owned(12, 4, dp_size=2, dp_rank=2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(100, 400))
def test_micro_batches_hold_every_trajectory_once_and_fit(lengths: list[int], max_tokens: int) -> None:
    batches = pack_micro_batches(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batch == sorted(batch) for batch in batches)
    assert batches == sorted(batches)
    load = [sum(lengths[i] for i in batch) for batch in batches]
    assert max(load) <= max_tokens
    # Longest-first assignment never leaves two micro-batches further apart than one trajectory.
    assert max(load) - min(load) <= max(lengths)
    assert batches == pack_micro_batches(list(lengths), max_tokens)


def test_micro_batches_are_few_and_even() -> None:
    batches = pack_micro_batches([50, 50, 50, 50, 10, 10], max_tokens=115)
    assert batches == [[0, 2, 4], [1, 3, 5]]
    assert pack_micro_batches([], max_tokens=8) == []
    assert pack_micro_batches([8], max_tokens=8) == [[0]]


def test_a_trajectory_longer_than_a_micro_batch_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"train\.micro_batch_tokens is 8, but a trajectory has 9 tokens"):
        pack_micro_batches([3, 9], max_tokens=8)


def test_seed_is_the_same_in_another_process_and_different_for_another_use() -> None:
    code = "from comppo_mcore.trainer.schedule import step_seed; print(step_seed(17, 3, 'rollout', 2))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == step_seed(17, 3, "rollout", 2)
    uses = [
        (17, 3, "rollout"),
        (17, 3, "epoch"),
        (17, 4, "rollout"),
        (18, 3, "rollout"),
        (17, 3, "rollout", 0),
    ]
    uses += [(1, 73, "rollout"), (17, 3, "rollout", 0, 0), (17, 3, "rollout", 1)]
    seeds = [step_seed(*use) for use in uses]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))
