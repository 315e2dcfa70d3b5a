"""The eager reference ops against a float64 oracle in plain loops, which imports nothing of the package."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from comppo_mcore.credit.concentration import RowStats
from comppo_mcore.errors import UserError
from comppo_mcore.kernels import blocks, concentration, pooling, select
from comppo_mcore.kernels.concentration import TopK, attention_statistics

ALL = concentration.OPTIONAL_STATISTICS
SUMS = ("mass", "sum_squares", *ALL)
ULP = 2.0**-23


@dataclass(frozen=True)
class Case:
    """Packed sequences of random queries and keys, every response row wanted."""

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    width: int = 64
    history: str = "all"
    skip_first: int = 0
    window: int | None = None
    top_k: int = 64
    renyi_alpha: float = 3.0
    mass_top_k: int = 8
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0, *np.cumsum(self.lengths)])

    @property
    def rows(self) -> torch.Tensor:
        cu = self.cu_seqlens.tolist()
        spans = zip(cu[:-1], self.prompts, self.lengths, strict=True)
        return torch.cat([torch.arange(c + p - 1, c + n) for c, p, n in spans if n])

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(self.lengths)
        q = 2 * torch.randn(total, self.heads, self.width, generator=generator)
        k = torch.randn(total, self.groups, self.width, generator=generator)
        return q.to(self.dtype), k.to(self.dtype)


@dataclass(frozen=True)
class OracleRow:
    packed: int  # packed position
    weights: np.ndarray  # a over the visible keys, float64
    first: int  # position of the first visible key
    history: list[int]  # I_t
    lse: list[float]  # per head


def oracle_row(case: Case, q: np.ndarray, k: np.ndarray, packed: int) -> OracleRow:
    """SPEC by the book: softmax per head over the visible keys, mean over heads, then I_t."""
    cu = case.cu_seqlens.tolist()
    b = max(i for i in range(len(case.lengths)) if cu[i] <= packed and case.lengths[i])
    start, s = cu[b], packed - cu[b]
    first = 0 if case.window is None else max(0, s - case.window + 1)
    total, lse = np.zeros(s - first + 1), []
    for h in range(case.heads):
        keys = k[start + first : start + s + 1, h // (case.heads // case.groups)]
        # One dot product a key, so that equal keys get equal scores.
        scores = np.array([math.fsum(q[packed, h] * key) for key in keys]) / math.sqrt(case.width)
        top = scores.max()
        lse.append(top + math.log(math.fsum(np.exp(scores - top))))
        total += np.exp(scores - lse[-1])
    history = [
        i
        for i in range(first, s + 1)
        if i >= case.skip_first and (case.history == "all" or i >= case.prompts[b])
    ]
    return OracleRow(packed, total / case.heads, first, history, lse)


def oracle_rows(case: Case, q: torch.Tensor, k: torch.Tensor) -> list[OracleRow]:
    return [oracle_row(case, q.double().numpy(), k.double().numpy(), row) for row in case.rows.tolist()]


def oracle_sums(case: Case, row: OracleRow, weights: np.ndarray) -> dict[str, float]:
    a = [float(weights[i - row.first]) for i in row.history]
    return {
        "mass": math.fsum(a),
        "sum_squares": math.fsum(x * x for x in a),
        "entropy_sum": math.fsum(x * math.log(x) for x in a if x > 0),
        "max_weight": max(a, default=0.0),
        "power_sum": math.fsum(x**case.renyi_alpha for x in a),
        "topk_mass": math.fsum(sorted(a, reverse=True)[: case.mass_top_k]),
    }


def oracle_order(row: OracleRow) -> list[int]:
    """I_t by descending a, ties by position."""
    return sorted(row.history, key=lambda i: (-row.weights[i - row.first], i))


def torch_weights(
    case: Case, q: torch.Tensor, k: torch.Tensor, row: OracleRow, given_lse: bool
) -> np.ndarray:
    """What plain float32 torch makes of one row: the yardstick for rounding errors."""
    keys = k[row.packed - len(row.weights) + 1 : row.packed + 1].float()
    keys = keys.repeat_interleave(case.heads // case.groups, dim=1)
    scores = torch.einsum("hd,ihd->hi", q[row.packed].float(), keys) * case.width**-0.5
    p = (scores - torch.tensor(row.lse)[:, None]).exp() if given_lse else scores.softmax(-1)
    return p.mean(0).double().numpy()


def run(
    case: Case, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor | None = None, **changes: Any
) -> tuple[RowStats, TopK]:
    arguments: dict[str, Any] = {
        "scale": case.width**-0.5,
        "history": case.history,
        "skip_first": case.skip_first,
        "window": case.window,
        "prompt_lengths": torch.tensor(case.prompts),
        "top_k": case.top_k,
        "wanted": ALL,
        "renyi_alpha": case.renyi_alpha,
        "mass_top_k": case.mass_top_k,
    }
    rows = case.rows
    return attention_statistics(q[rows], k, lse, rows, case.cu_seqlens, **{**arguments, **changes})


PACKING: dict[str, Any] = {"lengths": (9, 0, 1, 70, 23, 0), "prompts": (3, 0, 1, 12, 22, 0)}
CASES = {
    "mha": Case(**PACKING, heads=2, groups=2),
    "gqa_4_2": Case(**PACKING),
    "gqa_9_3_width_80": Case(**PACKING, heads=9, groups=3, width=80, top_k=5),
    "gqa_32_8_width_16": Case(**PACKING, heads=32, groups=8, width=16),
    "mqa_width_96": Case(**PACKING, heads=5, groups=1, width=96),
    "response": Case(**PACKING, history="response"),
    "response_skip": Case(**PACKING, history="response", skip_first=14, top_k=3),
    "skip": Case(**PACKING, skip_first=4),
    "window": Case(**PACKING, window=7),
    "window_skip_response": Case(**PACKING, window=20, skip_first=2, history="response", top_k=20),
    "window_of_one": Case(**PACKING, window=1),
    "bf16": Case(**PACKING, dtype=torch.bfloat16),
    "fp16": Case(**PACKING, dtype=torch.float16, renyi_alpha=2.5, mass_top_k=70),
    "one_token": Case(lengths=(1,), prompts=(1,)),
    "several_blocks": Case(lengths=(150,), prompts=(2,), heads=2, groups=1, width=32),
}


@pytest.mark.parametrize("given_lse", [False, True], ids=["own_lse", "given_lse"])
@pytest.mark.parametrize("name", CASES)
def test_statistics_match_oracle(name: str, given_lse: bool) -> None:
    """Each error is at most twice that of plain float32 torch, plus 4 ulp."""
    case = CASES[name]
    q, k = case.tensors()
    oracle = oracle_rows(case, q, k)
    lse = torch.tensor([r.lse for r in oracle], dtype=torch.float32).t() if given_lse else None
    stats, _ = run(case, q, k, lse)
    expected = [oracle_sums(case, r, r.weights) for r in oracle]
    plain = [oracle_sums(case, r, torch_weights(case, q, k, r, given_lse)) for r in oracle]
    assert stats.num_history.tolist() == [len(r.history) for r in oracle]
    for key in SUMS:
        want = np.array([e[key] for e in expected])
        got = getattr(stats, key).double().numpy()
        torch_error = np.abs(np.array([p[key] for p in plain]) - want).max()
        tolerance = 2 * torch_error + 4 * ULP * np.abs(want)
        assert (np.abs(got - want) <= tolerance).all(), key


@pytest.mark.parametrize("name", CASES)
def test_top_k_matches_oracle(name: str) -> None:
    """The same sets except within 1e-6 of the K-th weight; renormalised, descending, padded."""
    case = CASES[name]
    q, k = case.tensors()
    _, top = run(case, q, k)
    assert top.index.dtype == torch.int32 and top.weight.dtype == torch.float32
    assert top.index.shape == top.weight.shape == (len(case.rows), case.top_k)
    for row, index, weight in zip(
        oracle_rows(case, q, k), top.index.tolist(), top.weight.tolist(), strict=True
    ):
        count = min(case.top_k, len(row.history))
        assert index[count:] == [-1] * (case.top_k - count) and not any(weight[count:])
        if not count:
            continue
        a = row.weights
        want, got = oracle_order(row)[:count], index[:count]
        kth = a[want[-1] - row.first]
        assert len(set(got)) == count
        for i in set(want) ^ set(got):
            assert abs(a[i - row.first] - kth) <= 1e-6 * kth
        mass = math.fsum(a[i - row.first] for i in row.history)
        np.testing.assert_allclose(weight[:count], [a[i - row.first] / mass for i in got], rtol=1e-5)
        assert weight[:count] == sorted(weight[:count], reverse=True)


@pytest.mark.parametrize("given_lse", [False, True], ids=["own_lse", "given_lse"])
def test_planted_ties_go_to_the_smaller_position(given_lse: bool) -> None:
    """Keys drawn from three vectors: all but three weights of a row are tied, across tiles and blocks."""
    case = Case(lengths=(140, 5), prompts=(70, 2), top_k=10, seed=3)
    q, k = case.tensors()
    k = k[torch.randint(0, 3, (len(k),), generator=torch.Generator().manual_seed(1))]
    oracle = oracle_rows(case, q, k)
    lse = torch.tensor([r.lse for r in oracle], dtype=torch.float32).t() if given_lse else None
    _, top = run(case, q, k, lse)
    for row, index in zip(oracle, top.index.tolist(), strict=True):
        want = oracle_order(row)[: case.top_k]
        assert index == want + [-1] * (case.top_k - len(want))


def test_uniform_rows_take_the_first_positions() -> None:
    case = Case(lengths=(90,), prompts=(80,), top_k=64, skip_first=1)
    _, k = case.tensors()
    stats, top = run(case, torch.zeros(90, 4, 64), k)
    assert top.index.tolist() == [list(range(1, 65))] * 11
    n = stats.num_history.double()
    torch.testing.assert_close(stats.sum_squares / stats.mass**2, (1 / n).float())
    torch.testing.assert_close(top.weight, (1 / n).float()[:, None].expand(-1, 64))


def test_row_without_mass_has_no_top_k() -> None:
    """Two rows: all weight on the prompt (mass underflows), and no response position at all (n = 0)."""
    case = Case(lengths=(4,), prompts=(2,), history="response", heads=1, groups=1, width=4, top_k=3)
    q, k = torch.zeros(4, 1, 4), torch.zeros(4, 1, 4)
    q[:, 0, 0] = 1e3
    k[0, 0, 0] = 1.0
    stats, top = run(case, q, k)
    assert stats.num_history.tolist() == [0, 1, 2]
    assert not stats.mass.any() and not stats.sum_squares.any()
    assert (top.index == -1).all() and (top.weight == 0).all()


def test_mass_floor_of_the_top_k() -> None:
    """A response mass of 2e-19 still routes; 4e-21, below the floor of 1e-20, does not."""
    case = Case(lengths=(2,), prompts=(1,), history="response", heads=1, groups=1, width=1, top_k=2)
    k = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    for score, index, weight in ((43.0, [1, -1], 1.0), (47.0, [-1, -1], 0.0)):
        stats, top = run(case, torch.full((2, 1, 1), score), k)
        torch.testing.assert_close(stats.mass[1].item(), math.exp(-score), rtol=1e-5, atol=0)
        assert top.index[1].tolist() == index
        torch.testing.assert_close(top.weight[1].tolist(), [weight, 0.0])


def test_zero_weights_of_the_history_still_count() -> None:
    """A weight that underflows belongs to I_t: all of I_t is taken when n_t < K."""
    case = Case(lengths=(3,), prompts=(3,), heads=1, groups=1, width=1, top_k=4)
    _, top = run(case, torch.full((3, 1, 1), 1e3), torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1))
    assert top.index.tolist() == [[1, 0, 2, -1]]
    assert top.weight.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_overflow_above_the_diagonal_is_selected_away() -> None:
    """With a given lse, exp of a future key is inf: it must not reach any row."""
    case = Case(lengths=(3,), prompts=(1,), heads=1, groups=1, width=1, top_k=2)
    q, k = torch.ones(3, 1, 1), torch.tensor([0.0, 0.0, 1e4]).view(3, 1, 1)
    lse = torch.tensor([[0.0, math.log(2.0), 1e4]])
    stats, top = run(case, q, k, lse)
    torch.testing.assert_close(stats.mass, torch.ones(3))
    torch.testing.assert_close(stats.sum_squares, torch.tensor([1.0, 0.5, 1.0]))
    assert top.index.tolist() == [[0, -1], [0, 1], [2, 0]]


def test_other_sequences_do_not_leak() -> None:
    """NaN in every other sequence leaves a sequence's rows as they were."""
    case = Case(lengths=(30, 7, 41), prompts=(5, 2, 9))
    q, k = case.tensors()
    poisoned = k.clone()
    poisoned[:30] = poisoned[37:] = torch.nan
    clean, spoiled = run(case, q, k), run(case, q, poisoned)
    middle = slice(26, 32)  # the rows of the second sequence
    for key in SUMS:
        assert torch.equal(getattr(clean[0], key)[middle], getattr(spoiled[0], key)[middle])
    assert torch.equal(clean[1].index[middle], spoiled[1].index[middle])
    assert spoiled[0].mass[:26].isnan().all()


def packed_results(lengths: list[int], prompts: list[int], qs: list, ks: list, order: list[int]) -> list:
    """Statistics per sequence of one packing, in the sequences' own order."""
    case = Case(tuple(lengths[i] for i in order), tuple(prompts[i] for i in order))
    stats, top = run(case, torch.cat([qs[i] for i in order]), torch.cat([ks[i] for i in order]))
    columns = [getattr(stats, f.name) for f in fields(stats)] + [top.index, top.weight]
    counts = [lengths[i] - prompts[i] + 1 for i in order]
    split = zip(*(c.split(counts) for c in columns), strict=True)
    return [r for _, r in sorted(zip(order, split, strict=True), key=lambda pair: pair[0])]


def test_invariance_of_packing_is_bitwise() -> None:
    """One pack, two packs, one sequence at a time, another order: the same bits."""
    lengths, prompts = [60, 3, 129, 61, 1, 60, 200, 17], [5, 1, 64, 60, 1, 30, 10, 4]
    generator = torch.Generator().manual_seed(7)
    qs = [torch.randn(n, 4, 64, generator=generator) for n in lengths]
    ks = [torch.randn(n, 2, 64, generator=generator) for n in lengths]
    together = packed_results(lengths, prompts, qs, ks, list(range(8)))
    packings = [[7, 2, 5, 0, 1, 6, 3, 4]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[i] for i in range(8)]
    for packing in packings:
        parts = [
            (i, r)
            for o in packing
            for i, r in zip(sorted(o), packed_results(lengths, prompts, qs, ks, o), strict=True)
        ]
        for i, result in parts:
            for ours, theirs in zip(together[i], result, strict=True):
                assert torch.equal(ours, theirs)


def test_invariance_of_row_order_and_subsets() -> None:
    """Rows may come in any order and in any part: the same numbers to rounding, the same top-K."""
    case = Case(lengths=(150, 20), prompts=(3, 2))
    q, k = case.tensors()
    whole, top = run(case, q, k)
    chosen = torch.randperm(len(case.rows), generator=torch.Generator().manual_seed(0))[:70]
    rows = case.rows[chosen]
    stats, part = attention_statistics(
        q[rows],
        k,
        None,
        rows,
        case.cu_seqlens,
        scale=case.width**-0.5,
        history="all",
        skip_first=0,
        window=None,
        prompt_lengths=torch.tensor(case.prompts),
        top_k=64,
    )
    torch.testing.assert_close(stats.mass, whole.mass[chosen], rtol=1e-6, atol=0)
    torch.testing.assert_close(stats.sum_squares, whole.sum_squares[chosen], rtol=1e-6, atol=0)
    assert torch.equal(part.index, top.index[chosen])
    assert stats.entropy_sum is None and stats.topk_mass is None


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("window", [None, 300])
def test_workspace_bounds_every_buffer(window: int | None) -> None:
    """A 256 KiB workspace, a 4 MiB T × T: nothing grows beyond the workspace, and nothing else changes."""
    case = Case(lengths=(1000, 24), prompts=(1, 1), heads=2, groups=1, width=8, window=window, top_k=4)
    q, k = case.tensors()
    wide = run(case, q, k)
    with LargestTensor() as largest:
        narrow = run(case, q, k, max_bytes=256 << 10)
    assert largest.bytes <= 256 << 10
    for key in SUMS:
        torch.testing.assert_close(getattr(narrow[0], key), getattr(wide[0], key), rtol=1e-6, atol=1e-12)
    assert torch.equal(narrow[1].index, wide[1].index)


def test_no_rows_and_detached() -> None:
    case = Case(lengths=(0, 0), prompts=(0, 0), top_k=3)
    none = torch.zeros(0, dtype=torch.int64)
    arguments: dict[str, Any] = {"scale": 1.0, "history": "all", "skip_first": 0, "window": None, "top_k": 3}
    empty = torch.zeros(0, 4, 8)
    stats, top = attention_statistics(
        empty, empty, None, none, case.cu_seqlens, prompt_lengths=none.new_zeros(2), **arguments
    )
    assert stats.mass.shape == stats.num_history.shape == (0,) and top.index.shape == (0, 3)
    q = torch.ones(1, 4, 8, requires_grad=True)
    cu = torch.tensor([0, 1])
    stats, top = attention_statistics(q, q, None, cu[:1], cu, prompt_lengths=cu[1:], **arguments)
    assert not stats.mass.requires_grad and not top.weight.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 65},
        {"wanted": ("gini",)},
        {"history": "prompt"},
        {"prompt_lengths": torch.tensor([1, 1])},
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any]) -> None:
    case = Case(lengths=(3,), prompts=(1,))
    q, k = case.tensors()
    with pytest.raises(ValueError):
        run(case, q, k, **change)
    with pytest.raises(ValueError):
        run(case, q, k[:, :, :5])
    with pytest.raises(ValueError):
        run(case, q, k, torch.zeros(3, 4))


def test_blocks_hold_every_row_once() -> None:
    cu = torch.tensor([0, 200, 200, 203, 500])
    rows = torch.randperm(500, generator=torch.Generator().manual_seed(2))[:400]
    ranges = blocks.row_ranges(
        rows, cu, torch.ones(4, dtype=torch.int64), history="all", skip_first=0, window=90
    )
    seen = []
    for batch in blocks.row_batches(ranges, pair_bytes=64, key_bytes=64, max_bytes=1 << 20):
        for slots, first in zip(batch.slot, batch.first_key, strict=True):
            slots = slots[slots >= 0]
            seen += slots.tolist()
            assert len(set(ranges.sequence_start[slots].tolist())) == 1
            assert (ranges.visible_from[slots] >= first).all()
            assert (ranges.position[slots] < first + batch.num_keys).all()
    assert sorted(seen) == list(range(400))


# --- pooling


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


def pooling_oracle(inputs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
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


@pytest.mark.parametrize(
    "dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 2e-5)]
)
@pytest.mark.parametrize("max_bytes", [pooling.GATHER_BYTES, 600], ids=["whole", "chunked"])
def test_pooling_matches_oracle(dtype: torch.dtype, rtol: float, max_bytes: int) -> None:
    inputs = pooling_inputs(num_rows=23, dtype=dtype)
    pooled, total = pooling.pool_history(**inputs, max_bytes=max_bytes)
    want_pooled, want_total = pooling_oracle(inputs)
    assert pooled.dtype == total.dtype == torch.promote_types(dtype, torch.float32)
    np.testing.assert_allclose(total.double(), want_total, rtol=rtol, atol=1e-7)
    np.testing.assert_allclose(pooled.double(), want_pooled, rtol=rtol, atol=10 * rtol)


def test_pooling_reports_dead_rows() -> None:
    """Empty top-K, irrelevant keys and zero weights: no score, nothing pooled, finite gradients."""
    inputs = pooling_inputs(dtype=torch.float32)
    inputs["query_rel"][2] = 0.0
    inputs["topk_weight"][3] = 0.0
    for name in ("query_beta", "query_rel", "key_features"):
        inputs[name].requires_grad_()
    pooled, total = pooling.pool_history(**inputs)
    dead = total <= pooling.ROUTE_EPSILON
    assert dead[[0, 2, 3]].all() and not dead.all()
    assert (pooled[[0, 2, 3]] == 0).all()
    torch.where(dead[:, None], 0.0, pooled).sum().backward()
    for name in ("query_beta", "query_rel", "key_features"):
        assert inputs[name].grad.isfinite().all()
    assert not inputs["query_beta"].grad[[0, 2, 3]].any()


@pytest.mark.parametrize("max_bytes", [pooling.GATHER_BYTES, 600], ids=["whole", "chunked"])
def test_pooling_gradcheck(max_bytes: int) -> None:
    inputs = pooling_inputs()
    names = ("query_beta", "query_rel", "key_features")

    def pool(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pooling.pool_history(
            **{**inputs, **dict(zip(names, tensors, strict=True))}, max_bytes=max_bytes
        )

    assert torch.autograd.gradcheck(pool, [inputs[name].requires_grad_() for name in names])


def test_invariance_of_pooling_to_packing_is_bitwise() -> None:
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
    packed = pooling.pool_history(**inputs)
    single = pooling.pool_history(**alone)
    assert torch.equal(packed[0][mine], single[0]) and torch.equal(packed[1][mine], single[1])
    packed[0].sum().backward()
    single[0].sum().backward()
    assert torch.equal(inputs["key_features"].grad[6:12], alone["key_features"].grad)


def test_padding_is_selected_away() -> None:
    """Whatever stands beside an index of −1 reaches neither the result nor a gradient."""
    inputs = pooling_inputs()
    poisoned = {
        **inputs,
        "topk_weight": inputs["topk_weight"].masked_fill(inputs["topk_index"] < 0, torch.nan),
    }
    query = poisoned["query_beta"].requires_grad_()
    pooled, total = pooling.pool_history(**poisoned)
    assert torch.equal(pooled, pooling.pool_history(**inputs)[0])
    assert torch.autograd.grad(pooled.sum() + total.sum(), query)[0].isfinite().all()


def test_pooling_refuses_wrong_shapes() -> None:
    inputs = pooling_inputs()
    for name, bad in (
        ("key_features", torch.zeros(18, 10)),
        ("seq_start", torch.zeros(6)),
        ("topk_weight", torch.zeros(7, 3)),
    ):
        with pytest.raises(ValueError):
            pooling.pool_history(**{**inputs, name: bad})


# --- choice of implementation


def test_auto_falls_back_aloud() -> None:
    kernels = select.select("auto")
    assert kernels.attention_statistics is attention_statistics
    assert "reference" in kernels.describe() and "auto" in kernels.describe()
    assert select.select("reference").pool_history is pooling.pool_history


def test_bad_input_kernels_mode_require() -> None:
    with pytest.raises(UserError, match=r"kernels\.mode.*'require'.*'auto'"):
        select.select("require")


def test_broken_extension_is_not_taken_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError(f"{name} needs a library", name="library")

    monkeypatch.setattr(select, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="needs a library"):
        select.select("auto")


def test_compiled_ops_are_used_where_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = SimpleNamespace(attention_statistics=object(), pool_history=object(), comp_gae=object())
    monkeypatch.setitem(sys.modules, select.EXTENSION, ops)
    for mode in ("auto", "require"):
        kernels = select.select(mode)
        assert kernels.attention_statistics is ops.attention_statistics and kernels.comp_gae is ops.comp_gae
        assert "compiled" in kernels.describe()
    assert select.select("reference").comp_gae is not ops.comp_gae
    assert replace(kernels, origin="x").describe() == "kernels: x"
