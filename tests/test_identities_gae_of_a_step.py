"""The advantages that PPO trains on are those of a GAE loop over the run's own values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from comppo_mcore.config.schema import ParallelConfig
from comppo_mcore.model import parallel
from tests.invariance import GAPS, SIZES, VARIANTS, Case, Finding, evidence, run, write_folders

GAMMA = VARIANTS["ppo"]["transport"]["gamma"]
LAM = 0.95


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finding]:
    """A step of algorithm ppo: unequal lengths, gaps, γ = 0.97."""
    root = tmp_path_factory.mktemp("hf")
    write_folders(root)
    parallel.initialize(ParallelConfig(), seed=0)
    yield run(Case("one", "ppo", "wide"), root)
    parallel.shutdown()


def test_identities_ppo_advantages_are_those_of_a_float64_gae_loop(ppo: Finding) -> None:
    tokens = ppo.tokens
    assert 0 < GAMMA < 1 and GAPS and len({n for _, n in SIZES}) > 1
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
