"""Group baselines against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo_mcore.credit import baselines
from comppo_mcore.errors import UserError
from tests import oracle


@settings(max_examples=30, deadline=None)
@given(
    groups=st.lists(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_groups_in_any_order_match_loops(groups: list[list[float]], seed: int) -> None:
    flat = [(10 * g, r) for g, group in enumerate(groups) for r in group]
    order = torch.randperm(len(flat), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = torch.tensor([flat[i][0] for i in order])
    rewards = torch.tensor([flat[i][1] for i in order], dtype=torch.float64)
    for ours, loops in ((baselines.grpo, oracle.grpo), (baselines.rloo, oracle.rloo)):
        expected = torch.tensor([b for group in groups for b in loops(group)], dtype=torch.float64)[order]
        torch.testing.assert_close(ours(rewards, ids), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", [baselines.grpo, baselines.rloo])
def test_equal_rewards_give_exactly_zero(baseline) -> None:
    """Also for numbers whose mean rounds: a float32 mean of eleven 0.97s is not 0.97."""
    for n, value in ((3, 0.1), (7, 1 / 3), (11, 0.97)):
        b = baseline(torch.full((n,), value), torch.zeros(n, dtype=torch.int64))
        assert b.tolist() == [0.0] * n
    b = baseline(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2, 2, 2]))
    assert b[0] > 0 > b[1]
    assert b.dtype == torch.float32


def test_grpo_uses_the_sample_standard_deviation() -> None:
    b = baselines.grpo(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    assert b[0].item() == pytest.approx(0.5 / (0.5**0.5 + 1e-6))


def test_rloo_compares_with_the_others_only() -> None:
    b = baselines.rloo(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 0]))
    assert b.tolist() == pytest.approx([0.75, -0.75, 0.0])


@pytest.mark.parametrize("baseline", [baselines.grpo, baselines.rloo])
def test_bad_input_group_of_one(baseline) -> None:
    with pytest.raises(UserError, match=r"rollout\.responses is 1"):
        baseline(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))
    with pytest.raises(ValueError, match="group_ids"):
        baseline(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_coefficients_are_broadcast_to_valid_tokens() -> None:
    cu, mask = torch.tensor([0, 2, 2, 5]), torch.tensor([True, True, True, False, True])
    got = baselines.broadcast_to_tokens(torch.tensor([0.5, 9.0, -1.0]), cu, mask)
    assert got.tolist() == [0.5, 0.5, -1.0, 0.0, -1.0]
