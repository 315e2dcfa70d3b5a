"""Concentration: the extremes of §D.4 for every statistic, degenerate rows, rows against float64 loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo_mcore.credit import concentration as conc
from comppo_mcore.credit.concentration import RowStats, Statistic
from comppo_mcore.errors import UserError
from tests import oracle

ALPHA, TOP_K = 3.0, 8
STATISTICS: list[Statistic] = ["herfindahl", "shannon", "renyi", "max", "topk_mass"]
each_statistic = pytest.mark.parametrize("statistic", STATISTICS)


def row_stats(rows: list[np.ndarray], alpha: float = ALPHA) -> RowStats:
    """Accumulators of unnormalised rows, each over its own history."""

    def column(f) -> torch.Tensor:
        return torch.tensor([float(f(a)) for a in rows], dtype=torch.float32)

    return RowStats(
        num_history=torch.tensor([len(a) for a in rows]),
        mass=column(lambda a: a.sum()),
        sum_squares=column(lambda a: (a**2).sum()),
        entropy_sum=column(lambda a: sum(x * math.log(x) for x in a if x > 0)),
        max_weight=column(lambda a: a.max(initial=0)),
        power_sum=column(lambda a: (a**alpha).sum()),
        topk_mass=column(lambda a: np.sort(a)[-TOP_K:].sum()),
    )


def c_of(rows: list[np.ndarray], statistic: Statistic) -> torch.Tensor:
    return conc.concentration(row_stats(rows), statistic, renyi_alpha=ALPHA, mass_top_k=TOP_K)


@each_statistic
@pytest.mark.parametrize("mass", [1.0, 0.03])
def test_d4_uniform_is_zero_and_one_hot_is_one(statistic: Statistic, mass: float) -> None:
    sizes = (9, 64, 65, 1000, 16384)
    uniform = c_of([np.full(n, mass / n) for n in sizes], statistic)
    one_hot = c_of([mass * np.eye(1, n, n // 2)[0] for n in sizes], statistic)
    torch.testing.assert_close(uniform, torch.zeros(5), rtol=0, atol=1e-5)
    torch.testing.assert_close(one_hot, torch.ones(5), rtol=0, atol=1e-5)
    for c in (uniform, one_hot):
        assert ((c >= 0) & (c <= 1)).all()


@each_statistic
def test_d4_order_is_kept_between_the_extremes(statistic: Statistic) -> None:
    """Moving weight from every key onto one raises c."""
    n = 50
    rows = [(1 - w) * np.full(n, 1 / n) + w * np.eye(1, n)[0] for w in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0)]
    c = c_of(rows, statistic)
    assert (c.diff() > 0).all()


@each_statistic
def test_rows_that_say_nothing_are_one_half(statistic: Statistic) -> None:
    """n = 1, n = 0 and a mass below 1e-20; only the last two are counted as empty."""
    rows = [np.array([0.7]), np.zeros(0), np.full(30, 1e-23), np.zeros(5)]
    assert c_of(rows, statistic).tolist() == [0.5] * 4
    assert conc.empty_history(row_stats(rows)).tolist() == [False, True, True, True]


def test_topk_mass_of_a_history_no_longer_than_k_is_one_half() -> None:
    rows = [np.eye(1, n)[0] for n in (2, TOP_K, TOP_K + 1)]
    assert c_of(rows, "topk_mass").tolist() == [0.5, 0.5, 1.0]
    assert c_of(rows, "herfindahl").tolist() == [1.0, 1.0, 1.0]


@settings(max_examples=30, deadline=None)
@given(
    num_keys=st.integers(1, 40), sharpness=st.floats(0, 6), skip=st.integers(0, 3), seed=st.integers(0, 2**16)
)
def test_rows_match_loops(num_keys: int, sharpness: float, skip: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.standard_normal((4, num_keys))
    probs = np.exp(logits - logits.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    history = np.arange(num_keys) >= skip
    stats = row_stats([probs.mean(0)[history]])
    for statistic in STATISTICS:
        c = conc.concentration(stats, statistic, renyi_alpha=ALPHA, mass_top_k=TOP_K)
        expected = oracle.row_concentration(probs, history, statistic, ALPHA, TOP_K)
        assert float(c) == pytest.approx(expected, abs=2e-5), statistic


def test_the_mean_over_heads_comes_before_the_square() -> None:
    """Two heads, each on a key of its own: half the mass on each, not a mean of two point masses."""
    probs = np.array([[1.0, 0, 0, 0], [0, 1.0, 0, 0]])
    history = np.ones(4, dtype=bool)
    assert oracle.row_concentration(probs, history) == pytest.approx(0.5)  # log(4 · ½) / log 4
    assert float(c_of([probs.mean(0)], "herfindahl")) == pytest.approx(0.5)


def test_renyi_of_order_two_is_herfindahl() -> None:
    rows = [np.random.default_rng(i).random(20 + i) for i in range(5)]
    torch.testing.assert_close(
        conc.renyi(row_stats(rows, alpha=2.0), 2.0), conc.herfindahl(row_stats(rows)), rtol=0, atol=1e-6
    )


def test_scale_of_the_row_does_not_matter() -> None:
    row = np.random.default_rng(1).random(30)
    for statistic in STATISTICS:
        c = c_of([row, 1e-3 * row], statistic)
        assert float(c[0]) == pytest.approx(float(c[1]), abs=1e-5), statistic


def test_nan_is_not_taken_for_an_empty_row() -> None:
    stats = RowStats(torch.tensor([4]), torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert conc.herfindahl(stats).isnan().all()


@each_statistic
def test_a_missing_accumulator_is_named(statistic: Statistic) -> None:
    stats = row_stats([np.ones(3)])
    bare = RowStats(stats.num_history, stats.mass, stats.sum_squares)
    if statistic == "herfindahl":
        assert conc.concentration(bare, statistic).shape == (1,)
        return
    with pytest.raises(ValueError, match=conc.ACCUMULATORS[statistic]):
        conc.concentration(bare, statistic)


def test_bad_input_renyi_of_order_one_and_unknown_statistics() -> None:
    with pytest.raises(UserError, match=r"gate\.renyi_alpha is 1\.0.*shannon"):
        conc.renyi(row_stats([np.ones(3)]), 1.0)
    with pytest.raises(ValueError, match="gini"):
        conc.concentration(row_stats([np.ones(3)]), "gini")  # type: ignore[arg-type]
