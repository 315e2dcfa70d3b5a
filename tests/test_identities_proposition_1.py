"""Prop. 1: a fixed gate with the standard critic is PPO with GAE, through whole optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from comppo_mcore.config.schema import ParallelConfig
from comppo_mcore.model import parallel
from tests.invariance import GAPS, SIZES, VARIANTS, Case, Finding, evidence, run, write_folders

GAMMA = VARIANTS["ppo"]["transport"]["gamma"]
LAM = 0.95


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Finding, Finding]]:
    """(algorithm ppo, CompPO with a fixed gate and the standard critic): unequal lengths, gaps, γ = 0.97."""
    root = tmp_path_factory.mktemp("hf")
    write_folders(root)
    parallel.initialize(ParallelConfig(), seed=0)
    yield run(Case("one", "ppo", "wide"), root), run(Case("one", "fixed", "wide"), root)
    parallel.shutdown()


def test_identities_fixed_gate_is_ppo_bit_for_bit(runs: tuple[Finding, Finding]) -> None:
    ppo, fixed = runs
    assert 0 < GAMMA < 1 and GAPS and len({n for _, n in SIZES}) > 1
    for quantity, by_trajectory in ppo.tokens.items():
        for i, expected in by_trajectory.items():
            assert torch.equal(fixed.tokens[quantity][i], expected), (quantity, i)
    assert fixed.steps == ppo.steps
    for name, expected in ppo.gradients.items():
        assert torch.equal(fixed.gradients[name], expected), name
    for before, after in zip(ppo.weights, fixed.weights, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_identities_the_steps_moved_every_kind_of_weight(runs: tuple[Finding, Finding]) -> None:
    change = runs[0].change()
    for part in ("critic.w1_local", "critic.w2_local", "embed_tokens", "q_proj", "down_proj"):
        moved = [delta for name, delta in change.items() if part in name]
        assert moved and all(delta.any() for delta in moved), part


def test_identities_ppo_advantages_are_those_of_a_float64_gae_loop(runs: tuple[Finding, Finding]) -> None:
    tokens = runs[0].tokens
    loops = {i: gae(i, tokens["value"][i].double().numpy()) for i in range(len(SIZES))}
    for i, expected in loops.items():
        np.testing.assert_allclose(tokens["advantage"][i].numpy(), expected, rtol=0, atol=1e-6)
    valid = np.concatenate([loops[i][mask(i)] for i in loops])
    for i, expected in loops.items():
        white = np.where(mask(i), (expected - valid.mean()) / (valid.std() + 1e-8), 0.0).clip(-5, 5)
        np.testing.assert_allclose(tokens["credit"][i].numpy(), white, rtol=0, atol=1e-5)


def mask(trajectory: int) -> np.ndarray:
    return np.array([t not in GAPS.get(trajectory, ()) for t in range(SIZES[trajectory][1])])


def gae(trajectory: int, values: np.ndarray) -> np.ndarray:
    """A_j = r_j + γ V_{j+1} − V_j + λ γ A_{j+1} over the valid tokens, the reward on the last of them."""
    valid = np.flatnonzero(mask(trajectory))
    advantage = np.zeros(len(values))
    next_value = next_advantage = 0.0
    for t in reversed(valid):
        reward = float(evidence().rewards[trajectory]) if t == valid[-1] else 0.0
        advantage[t] = reward + GAMMA * next_value - values[t] + LAM * GAMMA * next_advantage
        next_value, next_advantage = values[t], advantage[t]
    return advantage
