"""Comp-GAE: identities of the paper, and the recursion against float64 loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comppo_mcore.credit import gate, transport
from comppo_mcore.credit.gate import Envelope
from comppo_mcore.credit.packed import Gaps
from tests import oracle
from tests.packings import Packing, packings, random_packing

PAPER = Envelope(0.1, 0.9, 4.0, 0.95)
LENGTHS = (7, 1, 64, 0, 33, 128, 2)
quick = settings(max_examples=30, deadline=None)


def run(p: Packing, lam: float, gaps: Gaps = "compact", **kwargs: torch.Tensor) -> transport.Transported:
    return transport.comp_gae(**p.packed(), lam=lam, gaps=gaps, **kwargs)


def looped(p: Packing, lam: float, gaps: str, bootstrap: list[float] | None = None) -> list[np.ndarray]:
    """δ, A, G of all responses, packed, by the oracle."""
    boot = bootstrap or [0.0] * len(p.rewards)
    each = [
        oracle.comp_gae(r.tolist(), v.tolist(), k.tolist(), m.tolist(), lam, gaps, b)
        for r, v, k, m, b in zip(p.rewards, p.values, p.kappa, p.mask, boot, strict=True)
    ]
    return [np.concatenate(parts) for parts in zip(*each, strict=True)]


@pytest.mark.parametrize("gamma", [0.37, 0.61, 0.99])
@pytest.mark.parametrize("lam", [0.5, 0.95])
def test_prop1_constant_gate_is_gae(gamma: float, lam: float) -> None:
    p = random_packing(LENGTHS, seed=3)
    fixed = Packing(p.rewards, p.values, [gate.fixed_gate(k, gamma) for k in p.kappa], p.mask)
    result = run(fixed, lam)
    each = [oracle.gae(r.tolist(), v.tolist(), gamma, lam) for r, v in zip(p.rewards, p.values, strict=True)]
    advantage, returns = (np.concatenate(parts) for parts in zip(*each, strict=True))
    assert result.advantage.dtype == torch.float32
    np.testing.assert_allclose(result.advantage.numpy(), advantage, rtol=0, atol=1e-6)
    np.testing.assert_allclose(result.lambda_return.numpy(), returns, rtol=0, atol=1e-6)


@quick
@given(p=packings(), lam=st.floats(0, 1), gaps=st.sampled_from(["compact", "cut"]), data=st.data())
def test_recursion_matches_loops(p: Packing, lam: float, gaps: Gaps, data: st.DataObject) -> None:
    count = len(p.rewards)
    boot = data.draw(st.none() | st.lists(st.floats(-1, 1), min_size=count, max_size=count))
    tensor = None if boot is None else torch.tensor(boot, dtype=torch.float64)
    result = transport.comp_gae(**p.packed(), lam=lam, gaps=gaps, bootstrap_values=tensor)
    expected = looped(p, lam, gaps, boot)
    for got, want in zip((result.delta, result.advantage, result.lambda_return), expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-12)


@quick
@given(p=packings(), lam=st.floats(0, 1))
def test_prop2_dense_kernel_is_recursion(p: Packing, lam: float) -> None:
    result = run(p, lam)
    deltas, advantages = p.split(result.delta), p.split(result.advantage)
    for k, m, delta, advantage in zip(p.kappa, p.mask, deltas, advantages, strict=True):
        dense = transport.dense_kernel(k[m], lam)
        np.testing.assert_allclose(dense.numpy(), oracle.kernel(k[m].tolist(), lam), atol=1e-14)
        torch.testing.assert_close(dense @ delta[m], advantage[m], rtol=0, atol=1e-12)


def test_prop2_kernel_inverts_the_bidiagonal_operator() -> None:
    kappa = random_packing((12,), dtype=torch.float64).kappa[0]
    shift = torch.diag(torch.ones(11, dtype=torch.float64), 1)
    operator = torch.eye(12, dtype=torch.float64) - 0.95 * torch.diag(kappa) @ shift
    product = transport.dense_kernel(kappa, 0.95) @ operator
    torch.testing.assert_close(product, torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-14)


def test_jacobian_is_kernel() -> None:
    """∂A_t/∂δ_u = K_{t,u} (Eq. 14); δ is the reward plus terms that do not depend on it."""
    p = random_packing((9, 5), dtype=torch.float64)
    parts = p.packed()

    def advantage(rewards: torch.Tensor) -> torch.Tensor:
        return transport.comp_gae(**{**parts, "rewards": rewards}, lam=0.9).advantage

    jacobian = torch.autograd.functional.jacobian(advantage, parts["rewards"])
    expected = torch.block_diag(*(transport.dense_kernel(k, 0.9) for k in p.kappa))
    torch.testing.assert_close(jacobian, expected, rtol=0, atol=1e-14)


def backup(p: Packing, values: list[torch.Tensor]) -> torch.Tensor:
    """(T_κ V)_t = r_t + κ_t V_{t+1} (Eq. 16), as δ + V."""
    at = Packing(p.rewards, values, p.kappa, p.mask)
    return run(at, 1.0).delta + torch.cat(values)


def test_prop3_backup_contracts_by_kappa_sup() -> None:
    generator = torch.Generator().manual_seed(5)
    p = random_packing(LENGTHS, dtype=torch.float64)
    concentration = [torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    concentration[2][:] = 1.0  # the supremum is attained
    p = Packing(p.rewards, p.values, [gate.attention_gate(c, PAPER) for c in concentration], p.mask)
    other = random_packing(LENGTHS, seed=9, dtype=torch.float64).values
    shrunk = (backup(p, p.values) - backup(p, other)).abs().max()
    apart = (torch.cat(p.values) - torch.cat(other)).abs().max()
    assert shrunk <= PAPER.kappa_sup * apart + 1e-15
    values = p.values
    for _ in range(300):
        values = p.split(backup(p, values))
    torch.testing.assert_close(torch.cat(values), run(p, 1.0).lambda_return, rtol=0, atol=1e-12)


def test_prop3_bound_is_attained_at_full_concentration() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    p = Packing([ones], [ones], [gate.attention_gate(ones, PAPER)], [ones.bool()])
    gap = (backup(p, [ones]) - backup(p, [0 * ones])).abs().max()
    assert float(gap) == pytest.approx(PAPER.kappa_sup, abs=1e-15)
    assert PAPER.kappa_sup == pytest.approx(0.8046, abs=5e-5)
    assert PAPER.kappa_sup < PAPER.kappa_hi


@quick
@given(p=packings(), lam=st.floats(0, 1))
def test_prop4_trace_is_bounded(p: Packing, lam: float) -> None:
    result = run(p, lam)
    kappa_sup = max((float(k.max()) for k in p.kappa if k.numel()), default=0.0)
    bound = result.delta.abs().max() / (1 - lam * kappa_sup) if result.delta.numel() else 0.0
    assert (result.advantage.abs() <= bound + 1e-12).all()


def test_prop4_bound_uses_the_attained_supremum() -> None:
    """A long response of full concentration comes close to D / (1 − λ g(1)), and never exceeds it."""
    n = 400
    kappa = gate.attention_gate(torch.ones(n, dtype=torch.float64), PAPER)
    zeros, mask = torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.bool)
    result = transport.comp_gae(zeros + 1, zeros, kappa, torch.tensor([0, n]), mask, PAPER.lam)
    bound = 1 / (1 - PAPER.lam * PAPER.kappa_sup)
    assert float(result.advantage[0]) == pytest.approx(bound, abs=1e-12)
    assert bound < 1 / (1 - PAPER.lam * PAPER.kappa_hi)


def test_lambda_extremes() -> None:
    """λ = 0: A = δ. λ = 1: G is the gated Monte-Carlo return, whatever V is."""
    p = random_packing(LENGTHS, gap_share=0.3, dtype=torch.float64)
    assert torch.equal(run(p, 0.0).advantage, run(p, 0.0).delta)
    blind = Packing(p.rewards, [torch.zeros_like(v) for v in p.values], p.kappa, p.mask)
    mask = torch.cat(p.mask)
    torch.testing.assert_close(
        run(p, 1.0).lambda_return[mask], run(blind, 1.0).advantage[mask], rtol=0, atol=1e-12
    )


def test_one_token_response() -> None:
    """A = r − V and G = r: no next value, no trace."""
    tensors = (torch.tensor([0.75]), torch.tensor([0.25]), torch.tensor([0.5]))
    cu, mask = torch.tensor([0, 1]), torch.tensor([True])
    result = transport.comp_gae(*tensors, cu, mask, 0.95)
    assert (result.delta.item(), result.advantage.item(), result.lambda_return.item()) == (0.5, 0.5, 0.75)


def test_truncation_bootstraps_only_when_told() -> None:
    """V_T is 0 by default, also after the length limit; a bootstrap value enters δ_{T−1} through κ_{T−1}."""
    p = random_packing((4, 3), dtype=torch.float64)
    plain, zero = run(p, 0.9), run(p, 0.9, bootstrap_values=torch.zeros(2, dtype=torch.float64))
    assert torch.equal(plain.advantage, zero.advantage)
    cut = run(p, 0.9, bootstrap_values=torch.tensor([0.5, 0.0], dtype=torch.float64))
    step = cut.delta - plain.delta
    assert step[3].item() == pytest.approx(0.5 * p.kappa[0][3].item(), abs=1e-15)
    assert step[[0, 1, 2, 4, 5, 6]].abs().max() == 0


@pytest.mark.parametrize("gaps", ["compact", "cut"])
def test_truncation_bootstrap_behind_a_trailing_gap(gaps: Gaps) -> None:
    """`compact` carries V_T over gap tokens at the end; `cut` ends the trace there (m_T = 0)."""
    p = random_packing((4,), dtype=torch.float64)
    p = Packing(p.rewards, p.values, p.kappa, [torch.tensor([True, True, True, False])])
    boot = torch.tensor([0.5], dtype=torch.float64)
    change = (run(p, 0.9, gaps, bootstrap_values=boot).delta - run(p, 0.9, gaps).delta)[2].item()
    assert change == pytest.approx(0.5 * p.kappa[0][2].item() if gaps == "compact" else 0.0, abs=1e-15)


def test_gaps_compact_equals_the_response_without_them() -> None:
    p = random_packing((20, 11), gap_share=0.4, seed=4, dtype=torch.float64)
    moved = [
        torch.tensor(oracle.move_rewards(r.tolist(), m.tolist()))
        for r, m in zip(p.rewards, p.mask, strict=True)
    ]
    dense = [[x[m] for x, m in zip(xs, p.mask, strict=True)] for xs in (moved, p.values, p.kappa, p.mask)]
    mask = torch.cat(p.mask)
    result, without = run(p, 0.9), run(Packing(*dense), 0.9)
    assert torch.equal(result.advantage[mask], without.advantage)
    assert torch.equal(result.lambda_return[mask], without.lambda_return)
    assert result.advantage[~mask].abs().max() == 0


def test_gaps_reward_on_a_gap_moves_to_the_valid_token_before_or_else_the_first() -> None:
    cu = torch.tensor([0, 5, 7])
    mask = torch.tensor([False, True, False, False, True, False, False])
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    zeros = torch.zeros(7)
    result = transport.comp_gae(rewards, zeros, zeros, cu, mask, 0.0)
    assert result.delta.tolist() == [0, 15, 0, 0, 16, 0, 0]
    cut = transport.comp_gae(rewards, zeros, zeros, cu, mask, 0.0, gaps="cut")
    assert cut.delta.tolist() == [0, 2, 0, 0, 16, 0, 0]


def test_gaps_cut_ends_the_trace_and_compact_does_not() -> None:
    cu, mask = torch.tensor([0, 3]), torch.tensor([True, False, True])
    rewards, values, kappa = torch.tensor([0.0, 0.0, 1.0]), torch.zeros(3), torch.full((3,), 0.5)
    compact = transport.comp_gae(rewards, values, kappa, cu, mask, 0.5)
    cut = transport.comp_gae(rewards, values, kappa, cu, mask, 0.5, gaps="cut")
    assert compact.advantage.tolist() == [0.25, 0.0, 1.0]
    assert cut.advantage.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("gaps", ["compact", "cut"])
def test_gaps_nan_under_the_mask_reaches_nothing(gaps: Gaps) -> None:
    p = random_packing((16, 9), gap_share=0.4, seed=2, dtype=torch.float64)
    parts = p.packed()
    clean = transport.comp_gae(**parts, lam=0.9, gaps=gaps)
    for name in ("values", "kappa", *(["rewards"] if gaps == "cut" else [])):
        parts[name] = torch.where(parts["mask"], parts[name], torch.nan).requires_grad_()
    dirty = transport.comp_gae(**parts, lam=0.9, gaps=gaps)
    assert torch.equal(dirty.advantage, clean.advantage)
    assert torch.equal(dirty.lambda_return, clean.lambda_return)
    dirty.advantage.sum().backward()
    assert parts["values"].grad is not None
    assert parts["values"].grad.isfinite().all()
    assert parts["values"].grad[~parts["mask"]].abs().max() == 0


def test_empty_batches_and_responses_without_valid_tokens() -> None:
    empty, none = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    for cu in (torch.tensor([0]), torch.tensor([0, 0])):
        assert transport.comp_gae(empty, empty, empty, cu, none, 0.95).advantage.shape == (0,)
    gap_only = transport.comp_gae(
        torch.ones(2), torch.ones(2), torch.ones(2), torch.tensor([0, 2]), torch.tensor([False, False]), 0.95
    )
    assert gap_only.advantage.tolist() == gap_only.lambda_return.tolist() == [0.0, 0.0]


def test_terminal_reward_sits_on_the_last_valid_token() -> None:
    cu = torch.tensor([0, 3, 3, 5, 7])
    mask = torch.tensor([True, True, False, True, True, False, False])
    placed = transport.place_terminal_rewards(torch.tensor([1.0, 9.0, 0.5, 9.0]), cu, mask)
    assert placed.tolist() == [0, 1.0, 0, 0, 0.5, 0, 0]


def test_shapes_that_disagree_are_refused() -> None:
    p = random_packing((3, 2)).packed()
    with pytest.raises(ValueError, match="kappa"):
        transport.comp_gae(**{**p, "kappa": torch.zeros(4)}, lam=0.9)
    with pytest.raises(ValueError, match="bootstrap_values"):
        transport.comp_gae(**p, lam=0.9, bootstrap_values=torch.zeros(3))


@quick
@given(p=packings(), lam=st.floats(0, 1))
def test_trace_weights_are_the_last_column_of_the_kernel(p: Packing, lam: float) -> None:
    parts = p.packed()
    weights = transport.trace_weights(parts["kappa"], parts["cu_seqlens"], parts["mask"], lam)
    for k, m, w in zip(p.kappa, p.mask, p.split(weights), strict=True):
        if m.any():
            torch.testing.assert_close(w[m], transport.dense_kernel(k[m], lam)[:, -1], rtol=0, atol=1e-12)
        assert (w[~m] == 0).all()
