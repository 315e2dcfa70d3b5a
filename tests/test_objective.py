"""Per-token losses, their weights, the value clamp and the diagnostics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from comppo_mcore.credit import objective
from comppo_mcore.credit.objective import Denominators
from tests import oracle


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ALL = torch.ones(200, dtype=torch.bool)


def test_surrogate_matches_loops() -> None:
    new, old, advantage = random(200), random(200) + 0.3 * random(200, seed=1), random(200, seed=2)
    loss = objective.clipped_surrogate(new, old, advantage, ALL, 0.2)
    expected = [oracle.clipped_surrogate(*map(float, x)) for x in zip(new, old, advantage, strict=True)]
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "passes"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False), (5.0, -1.0, True)],
)
def test_surrogate_gradient_stops_only_where_the_step_has_been_taken(
    log_ratio: float, advantage: float, passes: bool
) -> None:
    """The last case has no second clip: a large ratio with a negative advantage keeps its gradient."""
    new = torch.tensor([log_ratio], requires_grad=True)
    objective.clipped_surrogate(new, torch.zeros(1), torch.tensor([advantage]), ALL[:1], 0.2).sum().backward()
    assert new.grad is not None
    expected = -math.exp(log_ratio) * advantage if passes else 0.0
    assert new.grad.item() == pytest.approx(expected)


def test_kl_expected_gradient_of_k1_is_zero_and_of_k2_is_that_of_the_divergence() -> None:
    """Sum over the whole vocabulary: E_{y∼π}[∇k1] = E[∇ log π] = 0, while E[∇k2] = ∇KL(π ‖ π_ref)."""
    logits = random(50).double().requires_grad_()
    ref = random(50, seed=1).double().log_softmax(0)

    def expected_gradient(kind: Literal["k1", "k2", "k3"]) -> Tensor:
        log_p = logits.log_softmax(0)
        estimate = objective.kl_estimate(kind, log_p, ref, ALL[:50])
        return torch.autograd.grad((log_p.exp().detach() * estimate).sum(), logits)[0]

    log_p = logits.log_softmax(0)
    true = torch.autograd.grad((log_p.exp() * (log_p - ref)).sum(), logits)[0]
    assert expected_gradient("k1").abs().max() < 1e-15
    torch.testing.assert_close(expected_gradient("k2"), true, rtol=0, atol=1e-12)
    assert true.abs().max() > 0.01
    # k3's expected gradient is that of the reverse divergence, Σ_y (π − π_ref) ∇ log π = −Σ π_ref ∇ log π.
    reverse = torch.autograd.grad(-(ref.exp() * logits.log_softmax(0)).sum(), logits)[0]
    torch.testing.assert_close(expected_gradient("k3"), reverse, rtol=0, atol=1e-12)


def test_kl_estimates_are_right_on_average() -> None:
    log_p, ref = random(50).double().log_softmax(0), random(50, seed=1).double().log_softmax(0)
    true = float((log_p.exp() * (log_p - ref)).sum())
    for kind in ("k1", "k3"):
        mean = (log_p.exp() * objective.kl_estimate(kind, log_p, ref, ALL[:50])).sum()
        assert float(mean) == pytest.approx(true, abs=1e-12)


def test_kl_k3_is_never_negative_and_bounded() -> None:
    x = torch.cat(
        [torch.linspace(-40, 40, 4001), torch.logspace(-12, 1, 2000), -torch.logspace(-12, 1, 2000)]
    )
    mask = torch.ones_like(x, dtype=torch.bool)
    zero = torch.zeros_like(x)
    for kind in ("k2", "k3"):
        estimate = objective.kl_estimate(kind, x, zero, mask)
        assert (estimate >= 0).all()
        assert estimate.isfinite().all()
    k3 = objective.kl_estimate("k3", x.double(), zero.double(), mask)
    assert k3.max().item() == pytest.approx(math.exp(20) - 21)
    assert objective.kl_estimate("k1", x, zero, mask).abs().max().item() == 20


def test_value_loss_matches_loops() -> None:
    value, old, target = random(200), random(200, seed=1), random(200, seed=2)
    loss = objective.clipped_value_loss(value, old, target, ALL, 0.5)
    expected = [oracle.clipped_value_loss(*map(float, x)) for x in zip(value, old, target, strict=True)]
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-5, atol=1e-6)


def masked_losses(mask: Tensor) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    return {
        "surrogate": lambda a, b, c: objective.clipped_surrogate(a, b, c, mask, 0.2),
        "value": lambda a, b, c: objective.clipped_value_loss(a, b, c, mask, 0.5),
        "k1": lambda a, b, _: objective.kl_estimate("k1", a, b, mask),
        "k2": lambda a, b, _: objective.kl_estimate("k2", a, b, mask),
        "k3": lambda a, b, _: objective.kl_estimate("k3", a, b, mask),
    }


@pytest.mark.parametrize("name", ["surrogate", "value", "k1", "k2", "k3"])
def test_nan_under_the_mask_reaches_neither_loss_nor_gradient(name: str) -> None:
    mask = random(30) > 0
    clean = [random(30, seed=10 + i) for i in range(3)]
    dirty = [torch.where(mask, x, torch.nan) for x in clean]
    dirty[0].requires_grad_()
    loss = masked_losses(mask)[name]
    got = loss(*dirty)
    assert torch.equal(got, torch.where(mask, loss(*clean), 0.0))
    (grad,) = torch.autograd.grad(got.sum(), dirty[0])
    assert grad.isfinite().all()
    assert grad[mask].abs().max() > 0
    assert grad[~mask].abs().max() == 0


CU = torch.tensor([0, 4, 4, 6, 9])
MASK = torch.tensor([True, True, False, True, False, False, True, True, True])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_aggregation_over_micro_batches_is_that_of_the_minibatch(
    aggregation: Literal["token", "sequence", "constant"],
) -> None:
    loss = random(9)
    parts = [
        objective.count_denominators(CU[:3], MASK[:4]),
        objective.count_denominators(CU[2:] - 4, MASK[4:]),
    ]
    total = Denominators(*(sum(getattr(p, f) for p in parts) for f in ("tokens", "sequences")))
    assert total == objective.count_denominators(CU, MASK) == Denominators(6, 2)
    pieces = [
        (objective.aggregation_weights(aggregation, CU[:3], MASK[:4], total, 10.0) * loss[:4]).sum(),
        (objective.aggregation_weights(aggregation, CU[2:] - 4, MASK[4:], total, 10.0) * loss[4:]).sum(),
    ]
    first, last = loss[[0, 1, 3]], loss[6:]
    expected = {
        "token": torch.cat([first, last]).mean(),
        "sequence": (first.mean() + last.mean()) / 2,
        "constant": (first.sum() + last.sum()) / (2 * 10.0),
    }[aggregation]
    torch.testing.assert_close(sum(pieces), expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_aggregation_of_a_minibatch_without_tokens_is_zero(
    aggregation: Literal["token", "sequence", "constant"],
) -> None:
    cu, mask = torch.tensor([0, 2]), torch.zeros(2, dtype=torch.bool)
    weights = objective.aggregation_weights(aggregation, cu, mask, Denominators(0, 0), 10.0)
    assert weights.tolist() == [0.0, 0.0]


def test_truncated_importance_weights() -> None:
    trainer = torch.tensor([-1.0, -1.0, -1.0, torch.nan], requires_grad=True)
    engine = torch.tensor([-1.0, -3.0, -0.5, 0.0])
    weights = objective.truncated_importance_weights(trainer, engine, torch.arange(4) < 3, 2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-0.5), 0.0])
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [("hard", [0, 0, 1, -1, 1, -1, 0, 0]), ("inward", [0, -1, 1, -1, 1, -1, 1, 0])],
)
def test_value_clamp_gradients(gradient: Literal["hard", "inward"], expected: list[float]) -> None:
    """Values below, inside (twice), above; upstream gradients +1 and −1. A step goes against the gradient."""
    value = torch.tensor([-1.5, -1.5, -0.5, -0.5, 0.5, 0.5, 1.5, 1.5], requires_grad=True)
    clamped = objective.clamp_value(value, gradient)
    assert clamped.tolist() == [-1, -1, -0.5, -0.5, 0.5, 0.5, 1, 1]
    clamped.backward(torch.tensor([1.0, -1.0] * 4))
    assert value.grad is not None
    assert value.grad.tolist() == expected


def test_value_clamp_inward_lets_a_saturated_value_return() -> None:
    value = torch.tensor([3.0], requires_grad=True)
    optimizer = torch.optim.SGD([value], lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        (objective.clamp_value(value, "inward") - 0.25).square().sum().backward()
        optimizer.step()
    assert value.item() == pytest.approx(0.25, abs=1e-4)


def test_ratio_sums() -> None:
    old = torch.zeros(5)
    new = torch.tensor([0.0, 0.1, 0.5, -0.5, torch.nan])
    sums = objective.ratio_sums(new, old, torch.tensor([True, True, True, True, False]), 0.2)
    x = [0.0, 0.1, 0.5, -0.5]
    assert (sums.tokens.item(), sums.clipped.item()) == (4, 2)
    assert sums.ratio.item() == pytest.approx(sum(math.exp(v) for v in x), rel=1e-6)
    assert sums.approx_kl.item() == pytest.approx(sum(math.exp(v) - 1 - v for v in x), rel=1e-5)


def test_unknown_names_are_refused() -> None:
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="k4"):
        objective.kl_estimate("k4", x, x, ALL[:3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="soft"):
        objective.clamp_value(x, "soft")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch"):
        objective.aggregation_weights("batch", CU, MASK, Denominators(6, 2), 1.0)  # type: ignore[arg-type]
