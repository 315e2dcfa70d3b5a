"""The oracle's critic on cases worked by hand, so that agreement with it means something."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests import oracle

EYE = np.eye(2)


def weights(w_rel: np.ndarray = EYE, eta: tuple[float, ...] = (0.0,)) -> oracle.CriticWeights:
    """d = D = 2, β = 0 for every edge, both heads read the first component (V^G twice it)."""
    return oracle.CriticWeights(
        np.array(eta), 0 * EYE, EYE, w_rel, EYE, lambda h: float(h[0]), lambda h: 2 * float(h[0])
    )


def test_fusion_normalises_each_layer_and_weighs_by_softmax() -> None:
    hidden = np.array([[[3.0, 4.0]], [[300.0, -400.0]]])
    fused = oracle.fuse(hidden, np.array([math.log(3), 0.0]), norm_eps=0.0)
    unit = math.sqrt(12.5)
    assert fused[0] == pytest.approx([3 / unit, (0.75 * 4 - 0.25 * 4) / unit])
    plain = oracle.fuse(hidden, np.array([0.0, 0.0]), normalize=False)
    assert plain[0] == pytest.approx([151.5, -198.0])


def test_top_history_breaks_ties_by_the_smaller_index() -> None:
    row = np.array([0.1, 0.3, 0.3, 0.1, 0.2])
    assert oracle.top_history(row, np.ones(5, dtype=bool), 3) == [1, 2, 4]
    assert oracle.top_history(row, np.ones(5, dtype=bool), 4) == [1, 2, 4, 0]
    assert oracle.top_history(row, np.array([True, False, True, True, False]), 64) == [2, 0, 3]


def test_pooling_by_hand() -> None:
    """h̄ = (1, 0), (0, 1), (1, 1); from the last, m = (1, 1, 2)/√2, σ(0) = ½, a = (½, ¼, ¼)."""
    fused = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    row = np.array([0.5, 0.25, 0.25])
    token = oracle.aligned_critic_token(fused, 2, row, np.ones(3, dtype=bool), 0.25, weights(), eps=0.0)
    assert token.index == [0, 1, 2]
    assert token.route_score == pytest.approx([v / 8 / math.sqrt(2) for v in (2, 1, 2)])
    assert token.hidden_routed == pytest.approx([0.8, 0.6])
    assert not token.dead
    assert token.value_raw == pytest.approx(0.25 * 1.6 + 0.75 * 1.0)
    assert token.value == 1.0  # 1.15 before the clamp
    top = oracle.aligned_critic_token(
        fused, 2, row, np.ones(3, dtype=bool), 0.25, weights(), top_k=1, eps=0.0
    )
    assert top.hidden_routed == pytest.approx([1.0, 0.0])


def test_dead_and_empty_rows_read_their_own_state() -> None:
    fused = np.array([[1.0, 0.0], [0.0, 0.25]])
    row, history = np.array([0.5, 0.5]), np.ones(2, dtype=bool)
    dead = oracle.aligned_critic_token(fused, 1, row, history, 0.5, weights(w_rel=-EYE))
    empty = oracle.aligned_critic_token(fused, 1, row, ~history, 0.5, weights())
    massless = oracle.aligned_critic_token(fused, 1, 0 * row, history, 0.5, weights())
    for token in (dead, empty, massless):
        assert token.dead
        assert token.hidden_routed == pytest.approx([0.0, 0.25])
    assert dead.index == [0, 1]
    assert empty.index == massless.index == []


def test_value_loss_takes_the_worse_of_the_two() -> None:
    assert oracle.clipped_value_loss(0.9, 0.0, 1.0) == pytest.approx(
        0.5 * 0.25
    )  # the step was 0.9, cut to 0.5
    assert oracle.clipped_value_loss(0.3, 0.0, 1.0) == pytest.approx(0.5 * 0.49)
    assert oracle.clipped_value_loss(-0.9, 0.0, 1.0) == pytest.approx(0.5 * 1.9**2)
