"""Row statistics and top-K, eager and compiled, against a float64 oracle in plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from comppo_mcore.credit.concentration import herfindahl
from comppo_mcore.credit.gate import Envelope, attention_gate
from comppo_mcore.kernels import compiled, concentration, extension
from tests.attention_cases import (
    CASES,
    SUMS,
    ULP,
    Case,
    oracle_order,
    oracle_row,
    oracle_rows,
    oracle_sums,
    run,
    solved,
    torch_weights,
)

IMPLEMENTATIONS = {
    "reference": concentration.attention_statistics,
    "compiled": compiled.attention_statistics,
}
Statistics = Callable[..., Any]


@pytest.fixture(params=IMPLEMENTATIONS)
def statistics(request: pytest.FixtureRequest) -> Statistics:
    assert extension.load(), "the compiled ops are not installed"
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def ops() -> None:
    assert extension.load(), "the compiled ops are not installed"


given_lse = pytest.mark.parametrize("given_lse", [False, True], ids=["own_lse", "given_lse"])


# ---------------------------------------------------------------- numbers


@given_lse
@pytest.mark.parametrize("name", CASES)
def test_statistics_match_oracle(statistics: Statistics, name: str, given_lse: bool) -> None:
    """Each error is at most twice that of plain float32 torch, plus 4 ulp."""
    case = CASES[name]
    known = solved(case)
    stats, _ = run(statistics, case, known.q, known.k, known.lse if given_lse else None)
    expected = [oracle_sums(case, r, r.weights) for r in known.rows]
    by_torch = torch_weights(case, known.q, known.k, known.rows, given_lse)
    plain = [oracle_sums(case, r, a) for r, a in zip(known.rows, by_torch, strict=True)]
    assert stats.num_history.tolist() == [len(r.history) for r in known.rows]
    for key in SUMS:
        want = np.array([e[key] for e in expected])
        got = getattr(stats, key).double().numpy()
        torch_error = np.abs(np.array([p[key] for p in plain]) - want).max()
        tolerance = 2 * torch_error + 4 * ULP * np.abs(want)
        assert (np.abs(got - want) <= tolerance).all(), key


@given_lse
@pytest.mark.parametrize("name", CASES)
def test_top_k_matches_oracle(statistics: Statistics, name: str, given_lse: bool) -> None:
    """The same sets except within 1e-6 of the K-th weight; renormalised, descending, padded."""
    case = CASES[name]
    known = solved(case)
    _, top = run(statistics, case, known.q, known.k, known.lse if given_lse else None)
    assert top.index.dtype == torch.int32 and top.weight.dtype == torch.float32
    assert top.index.shape == top.weight.shape == (len(case.rows), case.top_k)
    for row, index, weight in zip(known.rows, top.index.tolist(), top.weight.tolist(), strict=True):
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


@given_lse
@pytest.mark.parametrize("window", [None, 3000])
def test_long_rows_match_oracle(statistics: Statistics, window: int | None, given_lse: bool) -> None:
    """Rows around the boundaries of work items, and one that spans three of them."""
    case = Case(lengths=(4500,), prompts=(1,), heads=2, groups=1, width=16, window=window, seed=4)
    q, k = case.tensors()
    rows = torch.tensor([4499, 2047, 2048, 4096, 63, 3001, 2049, 4095])
    known = [oracle_row(case, q.double().numpy(), k.double().numpy(), row) for row in rows.tolist()]
    lse = torch.tensor([r.lse for r in known], dtype=torch.float32).t() if given_lse else None
    stats, top = statistics(q[rows], k, lse, rows, case.cu_seqlens, **case.arguments())
    by_torch = torch_weights(case, q, k, known, given_lse)
    for key in SUMS:
        want = np.array([oracle_sums(case, r, r.weights)[key] for r in known])
        plain = np.array([oracle_sums(case, r, a)[key] for r, a in zip(known, by_torch, strict=True)])
        error = np.abs(getattr(stats, key).double().numpy() - want)
        assert (error <= 2 * np.abs(plain - want).max() + 4 * ULP * np.abs(want)).all(), key
    for i, row in enumerate(known):
        a, want, got = row.weights, oracle_order(row)[:64], top.index[i].tolist()
        for j in set(want) ^ set(got):
            assert abs(a[j - row.first] - a[want[-1] - row.first]) <= 1e-6 * a[want[-1] - row.first]


def test_kappa_of_the_epilogue(ops: None) -> None:
    """κ of the kernel is the gate of its statistics (Eq. 18–20), empty and single-key rows included."""
    envelope = Envelope(0.15, 0.85, 6.0, 0.9)
    for case in (CASES["gqa_4_2"], CASES["response_skip"], CASES["window_of_one"]):
        known = solved(case)
        plan = compiled.make_plan(
            case.rows,
            case.cu_seqlens,
            torch.tensor(case.prompts),
            len(known.k),
            history=case.history,
            skip_first=case.skip_first,
            window=case.window,
        )
        given: dict[str, Any] = {"scale": case.width**-0.5, "top_k": 4}
        sums, _ = compiled.planned_statistics(
            known.q[case.rows], known.k, None, plan, **given, wanted=("max_weight",), envelope=envelope
        )
        stats, _ = run(compiled.attention_statistics, case, known.q, known.k)
        torch.testing.assert_close(sums["kappa"], attention_gate(herfindahl(stats), envelope))
        assert torch.equal(sums["max_weight"], stats.max_weight)


# ---------------------------------------------------------------- exact ties


@given_lse
def test_planted_ties_go_to_the_smaller_position(statistics: Statistics, given_lse: bool) -> None:
    """Keys drawn from three vectors: all but three weights of a row are tied, across tiles and blocks."""
    case = Case(lengths=(140, 5), prompts=(70, 2), top_k=10, seed=3)
    q, k = case.tensors()
    k = k[torch.randint(0, 3, (len(k),), generator=torch.Generator().manual_seed(1))]
    oracle = oracle_rows(case, q, k)
    lse = torch.tensor([r.lse for r in oracle], dtype=torch.float32).t() if given_lse else None
    _, top = run(statistics, case, q, k, lse)
    for row, index in zip(oracle, top.index.tolist(), strict=True):
        want = oracle_order(row)[: case.top_k]
        assert index == want + [-1] * (case.top_k - len(want))


EXACT = [
    Case((130,), (1,), heads=4, groups=2, width=2, top_k=64, seed=s, dtype=dtype, **options)
    for s, (dtype, options) in enumerate(
        (dtype, options)
        for dtype in (torch.float32, torch.bfloat16)
        for options in (
            {},
            {"history": "response"},
            {"window": 50},
            {"skip_first": 3},
            {"window": 90, "skip_first": 70},
        )
    )
] + [
    Case((97, 70), (60, 5), heads=16, groups=4, width=4, top_k=17, seed=20),
    Case((97, 70), (60, 5), heads=16, groups=16, width=1, top_k=64, seed=21),
    Case((300,), (200,), heads=8, groups=1, width=8, top_k=1, seed=22),
    Case((300,), (200,), heads=32, groups=8, width=4, top_k=64, seed=23),
    Case((2200,), (2150,), heads=2, groups=1, width=2, top_k=64, seed=24),
]


@pytest.mark.parametrize("permuted", [False, True], ids=["drawn", "permuted"])
@pytest.mark.parametrize("case", EXACT, ids=lambda case: f"seed{case.seed}")
def test_top_k_is_exact_where_weights_are(statistics: Statistics, case: Case, permuted: bool) -> None:
    """Each head sees a key fully or not at all: a counts heads, with few levels, many ties, no rounding."""
    group, total = case.heads // case.groups, sum(case.lengths)
    generator = torch.Generator().manual_seed(case.seed)
    seen = torch.rand(total, case.groups, group, generator=generator) < 0.4
    if permuted:
        seen = seen[torch.randperm(total, generator=generator)]
    k = torch.zeros(total, case.groups, case.width).masked_scatter_(
        torch.arange(case.width).lt(group).expand(total, case.groups, case.width),
        torch.where(seen, 0.0, -1e4),
    )
    q = torch.eye(group, case.width).repeat(case.groups, 1).expand(total, -1, -1)
    lse = torch.zeros(case.heads, len(case.rows))
    stats, top = run(statistics, case, q.to(case.dtype), k.to(case.dtype), lse, scale=1.0)
    count = seen.flatten(1).sum(1).tolist()
    cu = case.cu_seqlens.tolist()
    for t, packed in enumerate(case.rows.tolist()):
        b = max(i for i in range(len(cu) - 1) if cu[i] <= packed)
        first = max(case.skip_first, 0 if case.window is None else packed - cu[b] - case.window + 1)
        first = max(first, case.prompts[b] if case.history == "response" else 0)
        a = {i: count[cu[b] + i] / case.heads for i in range(first, packed - cu[b] + 1)}
        assert stats.mass[t] == sum(a.values()) and stats.sum_squares[t] == sum(x * x for x in a.values())
        want = sorted(a, key=lambda i: (-a[i], i))[: case.top_k] if sum(a.values()) else []
        assert top.index[t].tolist() == want + [-1] * (case.top_k - len(want))
        mass = np.float32(sum(a.values()))
        weights = [np.float32(a[i]) / mass for i in want]
        assert top.weight[t].tolist() == weights + [0.0] * (case.top_k - len(want))


def test_uniform_rows_take_the_first_positions(statistics: Statistics) -> None:
    case = Case(lengths=(90,), prompts=(80,), top_k=64, skip_first=1)
    _, k = case.tensors()
    stats, top = run(statistics, case, torch.zeros(90, 4, 64), k)
    assert top.index.tolist() == [list(range(1, 65))] * 11
    n = stats.num_history.double()
    torch.testing.assert_close(stats.sum_squares / stats.mass**2, (1 / n).float())
    torch.testing.assert_close(top.weight, (1 / n).float()[:, None].expand(-1, 64))


# ---------------------------------------------------------------- edges


def test_row_without_mass_has_no_top_k(statistics: Statistics) -> None:
    """Two rows: all weight on the prompt (mass underflows), and no response position at all (n = 0)."""
    case = Case(lengths=(4,), prompts=(2,), history="response", heads=1, groups=1, width=4, top_k=3)
    q, k = torch.zeros(4, 1, 4), torch.zeros(4, 1, 4)
    q[:, 0, 0] = 1e3
    k[0, 0, 0] = 1.0
    stats, top = run(statistics, case, q, k)
    assert stats.num_history.tolist() == [0, 1, 2]
    assert not stats.mass.any() and not stats.sum_squares.any()
    assert (top.index == -1).all() and (top.weight == 0).all()


def test_mass_floor_of_the_top_k(statistics: Statistics) -> None:
    """A response mass of 2e-19 still routes; 4e-21, below the floor of 1e-20, does not."""
    case = Case(lengths=(2,), prompts=(1,), history="response", heads=1, groups=1, width=1, top_k=2)
    k = torch.tensor([1.0, 0.0]).view(2, 1, 1)
    for score, index, weight in ((43.0, [1, -1], 1.0), (47.0, [-1, -1], 0.0)):
        stats, top = run(statistics, case, torch.full((2, 1, 1), score), k)
        torch.testing.assert_close(stats.mass[1].item(), math.exp(-score), rtol=1e-5, atol=0)
        assert top.index[1].tolist() == index
        torch.testing.assert_close(top.weight[1].tolist(), [weight, 0.0])


def test_zero_weights_of_the_history_still_count(statistics: Statistics) -> None:
    """A weight that underflows belongs to I_t: all of I_t is taken when n_t < K."""
    case = Case(lengths=(3,), prompts=(3,), heads=1, groups=1, width=1, top_k=4)
    q, k = torch.full((3, 1, 1), 1e3), torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1)
    _, top = run(statistics, case, q, k)
    assert top.index.tolist() == [[1, 0, 2, -1]]
    assert top.weight.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_overflow_above_the_diagonal_is_selected_away(statistics: Statistics) -> None:
    """With a given lse, exp of a future key is inf: it must not reach any row."""
    case = Case(lengths=(3,), prompts=(1,), heads=1, groups=1, width=1, top_k=2)
    q, k = torch.ones(3, 1, 1), torch.tensor([0.0, 0.0, 1e4]).view(3, 1, 1)
    lse = torch.tensor([[0.0, math.log(2.0), 1e4]])
    stats, top = run(statistics, case, q, k, lse)
    torch.testing.assert_close(stats.mass, torch.ones(3))
    torch.testing.assert_close(stats.sum_squares, torch.tensor([1.0, 0.5, 1.0]))
    assert top.index.tolist() == [[0, -1], [0, 1], [2, 0]]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_broken_lse_gives_a_defined_result(statistics: Statistics, value: float) -> None:
    """+inf leaves no mass, −inf an infinite one, NaN a NaN; none routes, and other rows keep theirs."""
    case = Case(lengths=(70,), prompts=(1,), heads=2, groups=1, width=8, top_k=3)
    known = solved(case)
    lse = known.lse.clone()
    lse[:, 5] = value
    stats, top = run(statistics, case, known.q, known.k, lse)
    want = {math.inf: 0.0, -math.inf: math.inf}.get(value, math.nan)
    for sums in (stats.mass, stats.sum_squares):
        torch.testing.assert_close(sums[5], torch.tensor(want), equal_nan=True)
    assert top.index[5].tolist() == [-1] * 3 and not top.weight[5].any()
    clean, clean_top = run(statistics, case, known.q, known.k, known.lse)
    others = torch.arange(70) != 5
    assert torch.equal(stats.mass[others], clean.mass[others])
    assert torch.equal(top.index[others], clean_top.index[others])


@given_lse
def test_scores_of_ten_thousand(statistics: Statistics, given_lse: bool) -> None:
    """One key takes all weight; ties at the top share it."""
    case = Case(lengths=(200,), prompts=(1,), heads=2, groups=2, width=1, top_k=2)
    k = torch.zeros(200, 2, 1)
    k[50] = k[90] = 1.0
    q = torch.full((200, 2, 1), 1e4)
    tops = torch.tensor([0.0] * 50 + [1e4] * 150)
    count = torch.tensor([float(t + 1) for t in range(50)] + [1.0] * 40 + [2.0] * 110)
    lse = (tops + count.log()).expand(2, -1)
    stats, top = run(statistics, case, q, k, lse if given_lse else None)
    # A float32 LSE near 1e4 is good to 5e-4.
    torch.testing.assert_close(stats.mass, torch.ones(200), rtol=1e-3 if given_lse else 1e-6, atol=0)
    torch.testing.assert_close(stats.sum_squares / stats.mass**2, 1 / count)
    assert top.index[50:90, 0].eq(50).all() and top.index[90:].eq(torch.tensor([50, 90])).all()


def test_other_sequences_do_not_leak(statistics: Statistics) -> None:
    """NaN in every other sequence leaves a sequence's rows as they were."""
    case = Case(lengths=(30, 7, 41), prompts=(5, 2, 9))
    q, k = case.tensors()
    poisoned = k.clone()
    poisoned[:30] = poisoned[37:] = torch.nan
    clean, spoiled = run(statistics, case, q, k), run(statistics, case, q, poisoned)
    middle = slice(26, 32)  # the rows of the second sequence
    for key in SUMS:
        assert torch.equal(getattr(clean[0], key)[middle], getattr(spoiled[0], key)[middle])
    assert torch.equal(clean[1].index[middle], spoiled[1].index[middle])
    assert spoiled[0].mass[:26].isnan().all()


def test_strided_and_misaligned_arguments(statistics: Statistics) -> None:
    """Views of larger tensors that begin at odd addresses give what copies of them give."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = Case(lengths=(20, 33), prompts=(3, 2), heads=6, groups=3, width=12, dtype=dtype)
        q, k = case.tensors()
        lse = torch.tensor([r.lse for r in oracle_rows(case, q, k)], dtype=torch.float32).t()
        want, want_top = run(statistics, case, q, k, lse.contiguous())
        wide = torch.zeros(53, 3, 15, dtype=dtype)[..., 1:13]
        wide.copy_(k)
        rows = case.rows
        flat = torch.zeros(len(rows), 6 * 12 + 1, dtype=dtype)[:, 1:]
        odd_q = flat.unflatten(1, (6, 12)).copy_(q[rows])
        odd_lse = torch.zeros(6, 3 * len(rows))[:, 1::3].copy_(lse)
        got, top = statistics(odd_q, wide, odd_lse, rows, case.cu_seqlens, **case.arguments())
        for key in SUMS:
            assert torch.equal(getattr(got, key), getattr(want, key))
        assert torch.equal(top.index, want_top.index) and torch.equal(top.weight, want_top.weight)


def test_no_rows_and_detached(statistics: Statistics) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    arguments: dict[str, Any] = {"scale": 1.0, "history": "all", "skip_first": 0, "window": None, "top_k": 3}
    empty, cu = torch.zeros(0, 4, 8), torch.tensor([0, 0, 0])
    stats, top = statistics(empty, empty, None, none, cu, prompt_lengths=none.new_zeros(2), **arguments)
    assert stats.mass.shape == stats.num_history.shape == (0,) and top.index.shape == (0, 3)
    q = torch.ones(1, 4, 8, requires_grad=True)
    cu = torch.tensor([0, 1])
    stats, top = statistics(q, q, None, cu[:1], cu, prompt_lengths=cu[1:], **arguments)
    assert not stats.mass.requires_grad and not top.weight.requires_grad
    assert stats.entropy_sum is None and stats.topk_mass is None


# ---------------------------------------------------------------- the same bits


def packed_results(
    statistics: Statistics, lengths: list[int], prompts: list[int], qs: list, ks: list, order: list[int]
) -> list:
    """Statistics per sequence of one packing, in the sequences' own order."""
    case = Case(tuple(lengths[i] for i in order), tuple(prompts[i] for i in order))
    stats, top = run(statistics, case, torch.cat([qs[i] for i in order]), torch.cat([ks[i] for i in order]))
    columns = [getattr(stats, f.name) for f in fields(stats)] + [top.index, top.weight]
    counts = [lengths[i] - prompts[i] + 1 for i in order]
    split = zip(*(c.split(counts) for c in columns), strict=True)
    return [r for _, r in sorted(zip(order, split, strict=True), key=lambda pair: pair[0])]


def test_invariance_of_packing_is_bitwise(statistics: Statistics) -> None:
    """One pack, two packs, one sequence at a time, another order: the same bits."""
    lengths, prompts = [60, 3, 129, 61, 1, 60, 200, 17], [5, 1, 64, 60, 1, 30, 10, 4]
    generator = torch.Generator().manual_seed(7)
    qs = [torch.randn(n, 4, 64, generator=generator) for n in lengths]
    ks = [torch.randn(n, 2, 64, generator=generator) for n in lengths]
    together = packed_results(statistics, lengths, prompts, qs, ks, list(range(8)))
    packings = [[7, 2, 5, 0, 1, 6, 3, 4]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[i] for i in range(8)]
    for packing in packings:
        parts = [
            (i, r)
            for o in packing
            for i, r in zip(sorted(o), packed_results(statistics, lengths, prompts, qs, ks, o), strict=True)
        ]
        for i, result in parts:
            for ours, theirs in zip(together[i], result, strict=True):
                assert torch.equal(ours, theirs)


def test_invariance_of_row_order_and_subsets(statistics: Statistics) -> None:
    """Rows may come in any order and in any part: the same numbers to rounding, the same top-K."""
    case = Case(lengths=(150, 20), prompts=(3, 2))
    q, k = case.tensors()
    whole, top = run(statistics, case, q, k)
    chosen = torch.randperm(len(case.rows), generator=torch.Generator().manual_seed(0))[:70]
    rows = case.rows[chosen]
    stats, part = statistics(q[rows], k, None, rows, case.cu_seqlens, **case.arguments())
    for key in SUMS:
        torch.testing.assert_close(getattr(stats, key), getattr(whole, key)[chosen], rtol=1e-6, atol=1e-12)
    assert torch.equal(part.index, top.index[chosen])


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@given_lse
def test_invariance_to_threads_and_shards_is_bitwise(
    ops: None, threads: Callable[[int], None], given_lse: bool
) -> None:
    """Compiled: the same bits from run to run, for any number of threads, and for any share of the rows."""
    case = Case(lengths=(2300, 40, 700), prompts=(900, 2, 30), heads=6, groups=3, width=40, window=2100)
    q, k = case.tensors()
    scores = torch.randn(6, len(case.rows), generator=torch.Generator().manual_seed(1))
    lse = 9 + scores if given_lse else None
    whole, top = run(compiled.attention_statistics, case, q, k, lse)

    def same(chosen: torch.Tensor) -> None:
        rows = case.rows[chosen]
        part_lse = None if lse is None else lse[:, chosen]
        stats, part = compiled.attention_statistics(
            q[rows], k, part_lse, rows, case.cu_seqlens, **case.arguments()
        )
        for key in SUMS:
            assert torch.equal(getattr(stats, key), getattr(whole, key)[chosen]), key
        assert torch.equal(part.index, top.index[chosen]) and torch.equal(part.weight, top.weight[chosen])

    for count in (1, 2, 3, 7):
        threads(count)
        same(torch.arange(len(case.rows)))
    for share in range(3):
        same(torch.arange(share, len(case.rows), 3).flip(0))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "change",
    [
        {"top_k": 65},
        {"wanted": ("gini",)},
        {"history": "prompt"},
        {"prompt_lengths": torch.tensor([1, 1])},
    ],
)
def test_wrong_arguments_are_refused(statistics: Statistics, change: dict[str, Any]) -> None:
    case = Case(lengths=(3,), prompts=(1,))
    q, k = case.tensors()
    with pytest.raises(ValueError):
        run(statistics, case, q, k, **change)
    with pytest.raises(ValueError):
        run(statistics, case, q, k[:, :, :5])
    with pytest.raises(ValueError):
        run(statistics, case, q, k, torch.zeros(3, 4))
    with pytest.raises(ValueError):
        run(statistics, case, q, k[:, [0, 1, 0]])
