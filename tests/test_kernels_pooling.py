"""Causal top-K pooling, eager and compiled, against a float64 oracle in plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from comppo_mcore.kernels import compiled, extension, pooling

IMPLEMENTATIONS = {"reference": pooling.pool_history, "compiled": compiled.pool_history}
LEARNED = ("query_beta", "query_rel", "key_features")
Pool = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=IMPLEMENTATIONS)
def pool(request: pytest.FixtureRequest) -> Pool:
    assert extension.load(), "the compiled ops are not installed"
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=["reference", "chunked", "compiled"])
def any_pool(request: pytest.FixtureRequest) -> Pool:
    """Also the reference with a workspace of a few rows."""
    assert extension.load(), "the compiled ops are not installed"
    if request.param == "chunked":
        return lambda **inputs: pooling.pool_history(**inputs, max_bytes=600)
    return IMPLEMENTATIONS[request.param]


def pooling_inputs(
    num_rows: int = 7, width: int = 5, out: int = 6, top_k: int = 4, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    index = torch.randint(0, 6, (num_rows, top_k), generator=generator, dtype=torch.int32)
    index[0] = -1
    index[1, 2:] = -1
    weight = torch.rand(num_rows, top_k, generator=generator) * (index >= 0)
    start = torch.tensor([0, 6, 6, 12, 0, 12, 6])[torch.arange(num_rows) % 7]
    return {
        "query_beta": normal(num_rows, width),
        "query_rel": normal(num_rows, width),
        "key_features": normal(18, 2 * width + out),
        "topk_index": index,
        "topk_weight": weight,
        "seq_start": start,
    }


def learning(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone().requires_grad_() if k in LEARNED else v for k, v in inputs.items()}


# ---------------------------------------------------------------- the oracle


def oracle(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 22–26 edge by edge in float64."""
    x = {k: v.double().numpy() if v.is_floating_point() else v.numpy() for k, v in inputs.items()}
    d = x["query_beta"].shape[1]
    pooled, totals = [], []
    for t in range(len(x["seq_start"])):
        total, acc = 0.0, np.zeros(x["key_features"].shape[1] - 2 * d)
        for i, a in zip(x["topk_index"][t], x["topk_weight"][t], strict=True):
            if i < 0:
                continue
            row = x["key_features"][x["seq_start"][t] + i]
            beta = x["query_beta"][t] @ row[:d] / math.sqrt(d)
            rel = max(x["query_rel"][t] @ row[d : 2 * d] / math.sqrt(d), 0.0)
            s = a / (1 + math.exp(-beta)) * rel
            total, acc = total + s, acc + s * row[2 * d :]
        pooled.append(acc / (total + 1e-8))
        totals.append(total)
    return np.array(pooled), np.array(totals)


def oracle_gradients(
    inputs: dict[str, Any], grad_pooled: np.ndarray, grad_sum: np.ndarray
) -> dict[str, np.ndarray]:
    """∂/∂ (queries, features) of ⟨pooled, grad_pooled⟩ + ⟨score_sum, grad_sum⟩, edge by edge in float64."""
    x = {k: v.double().numpy() if v.is_floating_point() else v.numpy() for k, v in inputs.items()}
    pooled, totals = oracle(inputs)
    d = x["query_beta"].shape[1]
    out = {name: np.zeros_like(x[name]) for name in LEARNED}
    for t in range(len(x["seq_start"])):
        norm = totals[t] + 1e-8
        for i, a in zip(x["topk_index"][t], x["topk_weight"][t], strict=True):
            if i < 0:
                continue
            at = x["seq_start"][t] + i
            row = x["key_features"][at]
            gate = 1 / (1 + math.exp(-(x["query_beta"][t] @ row[:d]) / math.sqrt(d)))
            rel = x["query_rel"][t] @ row[d : 2 * d] / math.sqrt(d)
            if rel <= 0:
                continue
            ds = grad_pooled[t] @ (row[2 * d :] - pooled[t]) / norm + grad_sum[t]
            d_beta = ds * a * rel * gate * (1 - gate) / math.sqrt(d)
            d_rel = ds * a * gate / math.sqrt(d)
            out["query_beta"][t] += d_beta * row[:d]
            out["query_rel"][t] += d_rel * row[d : 2 * d]
            out["key_features"][at, :d] += d_beta * x["query_beta"][t]
            out["key_features"][at, d : 2 * d] += d_rel * x["query_rel"][t]
            out["key_features"][at, 2 * d :] += a * gate * rel / norm * grad_pooled[t]
    return out


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-5)]
)
def test_pooling_matches_oracle(any_pool: Pool, dtype: torch.dtype, rtol: float) -> None:
    inputs = pooling_inputs(num_rows=23, dtype=dtype)
    pooled, total = any_pool(**inputs)
    want_pooled, want_total = oracle(inputs)
    assert pooled.dtype == total.dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(total.double(), want_total, rtol=rtol, atol=1e-7)
    np.testing.assert_allclose(pooled.double(), want_pooled, rtol=rtol, atol=10 * rtol)


def test_pooling_gradients_match_oracle(any_pool: Pool) -> None:
    """At the width of the critic, with a key that 600 rows share: three chunks of its sum."""
    generator = torch.Generator().manual_seed(3)
    inputs = pooling_inputs(num_rows=600, width=40, out=48, dtype=torch.float32)
    inputs["topk_index"][2:, 0] = 5
    inputs["seq_start"].fill_(6)
    inputs = learning(inputs)
    pooled, total = any_pool(**inputs)
    grads = torch.randn(*pooled.shape, generator=generator), torch.randn(600, generator=generator)
    torch.autograd.backward((pooled, total), grads)
    detached = {k: v.detach() for k, v in inputs.items()}
    for name, want in oracle_gradients(detached, *(g.double().numpy() for g in grads)).items():
        np.testing.assert_allclose(inputs[name].grad, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_pooling_error_is_bounded_by_that_of_torch() -> None:
    """At most twice the eager float32 error plus 4 ulp, forward and backward, over all entries."""
    assert extension.load()
    inputs = pooling_inputs(num_rows=200, width=128, out=256, top_k=64, dtype=torch.float32)
    errors: dict[str, list[float]] = {}
    exact = [torch.tensor(x) for x in oracle(inputs)]
    for name, pool in IMPLEMENTATIONS.items():
        given = learning(inputs)
        results = pool(**given)
        sum(x.sum() for x in results).backward()
        gradients = oracle_gradients(inputs, np.ones_like(exact[0]), np.ones_like(exact[1]))
        found = [*results, *(given[key].grad for key in LEARNED)]
        wanted = [*exact, *(torch.tensor(gradients[key]) for key in LEARNED)]
        errors[name] = [
            (f.detach().double() - w).abs().max().item() for f, w in zip(found, wanted, strict=True)
        ]
        scales = [w.abs().max().item() for w in wanted]
    for ours, torchs, scale in zip(errors["compiled"], errors["reference"], scales, strict=True):
        assert ours <= 2 * torchs + 4 * 2**-23 * scale


def test_pooling_gradcheck(any_pool: Pool) -> None:
    inputs = pooling_inputs()

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return any_pool(**{**inputs, **dict(zip(LEARNED, tensors, strict=True))})

    assert torch.autograd.gradcheck(run, [inputs[name].requires_grad_() for name in LEARNED])


# ---------------------------------------------------------------- edges


def test_pooling_reports_dead_rows(pool: Pool) -> None:
    """Empty top-K, irrelevant keys and zero weights: no score, nothing pooled, finite gradients."""
    inputs = pooling_inputs(dtype=torch.float32)
    inputs["query_rel"][2] = 0.0
    inputs["topk_weight"][3] = 0.0
    inputs = learning(inputs)
    pooled, total = pool(**inputs)
    dead = total <= pooling.ROUTE_EPSILON
    assert dead[[0, 2, 3]].all() and not dead.all()
    assert (pooled[[0, 2, 3]] == 0).all()
    torch.where(dead[:, None], 0.0, pooled).sum().backward()
    for name in LEARNED:
        assert inputs[name].grad.isfinite().all()
    assert not inputs["query_beta"].grad[[0, 2, 3]].any()


def test_padding_is_selected_away(pool: Pool) -> None:
    """Whatever stands beside an index of −1 reaches neither the result nor a gradient."""
    inputs = pooling_inputs()
    poisoned = {
        **inputs,
        "topk_weight": inputs["topk_weight"].masked_fill(inputs["topk_index"] < 0, torch.nan),
    }
    query = poisoned["query_beta"].requires_grad_()
    pooled, total = pool(**poisoned)
    assert torch.equal(pooled, pool(**inputs)[0])
    assert torch.autograd.grad(pooled.sum() + total.sum(), query)[0].isfinite().all()


def test_nan_features_are_not_lost(pool: Pool) -> None:
    """A key with NaN spoils the rows that take it, and no others."""
    inputs = pooling_inputs(num_rows=21, dtype=torch.float32)
    inputs["key_features"][8] = torch.nan
    pooled, total = pool(**inputs)
    takes = ((inputs["topk_index"] == 8 - inputs["seq_start"][:, None]) & (inputs["topk_index"] >= 0)).any(1)
    assert torch.equal(total.isnan(), takes) and torch.equal(pooled.isnan().all(1), takes)
    assert not pooled[~takes].isnan().any()


@pytest.mark.parametrize(("num_rows", "top_k"), [(0, 4), (3, 0)])
def test_nothing_to_pool(pool: Pool, num_rows: int, top_k: int) -> None:
    inputs = {k: v[:num_rows] if k != "key_features" else v for k, v in pooling_inputs().items()}
    inputs |= {k: inputs[k][:, :top_k] for k in ("topk_index", "topk_weight")}
    inputs = learning(inputs)
    pooled, total = pool(**inputs)
    assert pooled.shape == (num_rows, 6) and not pooled.any() and not total.any()
    (pooled.sum() + total.sum()).backward()
    assert not inputs["key_features"].grad.any()


# ---------------------------------------------------------------- the same bits


def test_invariance_of_pooling_to_packing_is_bitwise(pool: Pool) -> None:
    """The rows of one sequence, alone or among others, forward and backward."""
    inputs = pooling_inputs(num_rows=21, width=64, out=96, dtype=torch.float32)
    mine = inputs["seq_start"] == 6
    alone = {k: v[mine].clone() for k, v in inputs.items() if k != "key_features"}
    alone |= {
        "key_features": inputs["key_features"][6:12].clone(),
        "seq_start": torch.zeros(int(mine.sum())).long(),
    }
    for x in (inputs, alone):
        x["key_features"].requires_grad_()
    packed, single = pool(**inputs), pool(**alone)
    assert torch.equal(packed[0][mine], single[0]) and torch.equal(packed[1][mine], single[1])
    packed[0].sum().backward()
    single[0].sum().backward()
    assert torch.equal(inputs["key_features"].grad[6:12], alone["key_features"].grad)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_invariance_of_pooling_to_threads_is_bitwise(threads: Callable[[int], None]) -> None:
    """Compiled: the same bits from run to run and for any number of threads, a hot key included."""
    assert extension.load()
    inputs = pooling_inputs(num_rows=900, width=33, out=50, top_k=9, dtype=torch.float32)
    inputs["topk_index"][:, 0] = 0
    results = []
    for count in (1, 1, 2, 3, 8):
        threads(count)
        given = learning(inputs)
        pooled, total = compiled.pool_history(**given)
        (pooled.square().sum() + total.sum()).backward()
        results.append([pooled, total, *(given[name].grad for name in LEARNED)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---------------------------------------------------------------- refusals


def test_pooling_refuses_wrong_shapes(pool: Pool) -> None:
    inputs = pooling_inputs()
    for name, bad in (
        ("key_features", torch.zeros(18, 10)),
        ("seq_start", torch.zeros(6)),
        ("topk_weight", torch.zeros(7, 3)),
    ):
        with pytest.raises(ValueError):
            pool(**{**inputs, name: bad})
