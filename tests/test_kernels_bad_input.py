"""What the compiled ops refuse, by name and value; and arbitrary input, which gives an error or a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comppo_mcore.credit import transport
from comppo_mcore.kernels import compiled, concentration, extension, pooling
from tests.attention_cases import SUMS, Case, run

EXAMPLES = 60


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    assert extension.load(), "the compiled ops are not installed"


# ---------------------------------------------------------------- refusals


def attention_call() -> dict[str, Any]:
    case = Case(lengths=(5, 4), prompts=(2, 2), width=8)
    q, k = case.tensors()
    rows = case.rows
    lse = torch.zeros(4, len(rows))
    positional = {"q": q[rows], "k": k, "lse": lse, "rows": rows, "cu_seqlens": case.cu_seqlens}
    return positional | case.arguments()


def pooling_call() -> dict[str, Any]:
    return {
        "query_beta": torch.ones(3, 4),
        "query_rel": torch.ones(3, 4),
        "key_features": torch.ones(6, 13),
        "topk_index": torch.tensor([[0, -1], [1, 0], [2, 1]], dtype=torch.int32),
        "topk_weight": torch.ones(3, 2),
        "seq_start": torch.tensor([0, 3, 3]),
    }


def gae_call() -> dict[str, Any]:
    per_token = {name: torch.ones(4) for name in ("rewards", "values", "kappa")}
    return per_token | {
        "cu_seqlens": torch.tensor([0, 1, 4]),
        "mask": torch.ones(4, dtype=torch.bool),
        "lam": 0.9,
        "bootstrap_values": torch.zeros(2),
    }


CALLS = {
    "attention": (compiled.attention_statistics, attention_call),
    "pooling": (compiled.pool_history, pooling_call),
    "comp_gae": (compiled.comp_gae, gae_call),
}
REFUSED: list[tuple[str, str, Any, str]] = [
    ("attention", "q", torch.ones(7, 4, 8, dtype=torch.float64), r"q is torch\.float64; .*float32 or"),
    ("attention", "q", torch.ones(7, 4, 16)[..., ::2], r"q has strides \[64, 16, 2\]"),
    ("attention", "k", torch.ones(9, 2, 8, dtype=torch.bfloat16), r"k is torch\.bfloat16"),
    ("attention", "k", torch.ones(9, 3, 8), r"k \[9, 3, 8\]"),
    ("attention", "k", torch.ones(8, 2, 8), r"cu_seqlens ends at 9, but k has 8 keys"),
    ("attention", "lse", torch.zeros(4, 7, dtype=torch.float64), r"lse is torch\.float64"),
    ("attention", "lse", torch.zeros(4, 7, device="meta"), r"lse is on meta"),
    ("attention", "lse", torch.zeros(7, 4), r"lse \[7, 4\] is not"),
    ("attention", "rows", torch.tensor([1, 2, 3, 4, 5, 6, 9]), r"rows\[6\] is 9, not .* 0 to 8"),
    ("attention", "rows", torch.tensor([-1, 2, 3, 4, 5, 6, 7]), r"rows\[0\] is -1"),
    ("attention", "rows", torch.arange(7, dtype=torch.int32), r"rows must be int64"),
    ("attention", "cu_seqlens", torch.tensor([0, 6, 5]), r"cu_seqlens decreases from 6 to 5 at entry 2"),
    ("attention", "cu_seqlens", torch.tensor([1, 5, 9]), r"cu_seqlens must begin with 0"),
    ("attention", "cu_seqlens", torch.tensor([0.0, 5.0, 9.0]), r"cu_seqlens must be int64"),
    ("attention", "prompt_lengths", torch.tensor([2, -1]), r"prompt_lengths\[1\] is -1"),
    ("attention", "skip_first", -2, r"skip_first is -2"),
    ("attention", "window", 0, r"window is 0"),
    ("attention", "history", "prompt", r"history is 'prompt'"),
    ("attention", "top_k", -1, r"top_k is -1"),
    ("attention", "top_k", 65, r"top_k is 65"),
    ("attention", "mass_top_k", 0, r"mass_top_k is 0"),
    ("attention", "mass_top_k", 65, r"mass_top_k is 65"),
    ("attention", "wanted", ("gini",), r"gini"),
    ("pooling", "query_beta", torch.ones(3, 4, dtype=torch.int64), r"query_beta is torch\.int64"),
    ("pooling", "query_rel", torch.ones(3, 4, device="meta"), r"query_rel is on meta"),
    ("pooling", "query_rel", torch.ones(3, 5), r"\[3, 5\]"),
    ("pooling", "key_features", torch.ones(6, 8), r"\[6, 8\]"),
    ("pooling", "key_features", torch.ones(4, 13), r"lead to position 5; .* 0 to 3"),
    ("pooling", "topk_index", torch.full((3, 2), -2, dtype=torch.int32), r"topk_index holds -2"),
    ("pooling", "topk_index", torch.full((3, 2), 3, dtype=torch.int32), r"topk_index \(up to 3\)"),
    ("pooling", "topk_index", torch.zeros(3, 2), r"topk_index is torch\.float32"),
    ("pooling", "seq_start", torch.tensor([0, -1, 3]), r"seq_start \(from -1\)"),
    ("pooling", "seq_start", torch.zeros(3, dtype=torch.int32), r"seq_start is torch\.int32"),
    ("comp_gae", "values", torch.ones(4, dtype=torch.float64), r"values is torch\.float64"),
    ("comp_gae", "rewards", torch.ones(4, dtype=torch.float16), r"rewards is torch\.float16"),
    ("comp_gae", "kappa", torch.ones(5), r"kappa must have shape \[4\], got \[5\]"),
    ("comp_gae", "kappa", torch.ones(4, device="meta"), r"kappa is on meta"),
    ("comp_gae", "mask", torch.ones(4), r"mask must be bool"),
    ("comp_gae", "cu_seqlens", torch.tensor([0, 3, 2, 4]), r"never decrease, got \[0, 3, 2, 4\]"),
    ("comp_gae", "bootstrap_values", torch.zeros(3), r"bootstrap_values .* got \[3\]"),
    ("comp_gae", "gaps", "skip", r"gaps must be .* got 'skip'"),
]


@pytest.mark.parametrize(
    ("op", "name", "value", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_bad_input_is_refused_by_name_and_value(op: str, name: str, value: Any, message: str) -> None:
    function, call = CALLS[op]
    function(**call())  # fine as it stands
    with pytest.raises(ValueError, match=message):
        function(**{**call(), name: value})


# ---------------------------------------------------------------- the ops themselves


def planned(call: dict[str, Any]) -> dict[str, Tensor]:
    """The tables of a call of `attention_statistics`."""
    names = ("history", "skip_first", "window")
    plan = compiled.make_plan(
        call["rows"],
        call["cu_seqlens"],
        call["prompt_lengths"],
        len(call["k"]),
        **{name: call[name] for name in names},
    )
    return {"rows": plan.rows, "items": plan.items, "blocks": plan.blocks}


def raw_attention(call: dict[str, Any], **changes: Any) -> Any:
    """torch.ops.comppo.attention_statistics with an argument replaced."""
    x = {
        "lse": None,
        "top_k": 4,
        "statistics": 0,
        **{name: call[name] for name in ("q", "k")},
        **planned(call),
    }
    x |= changes
    tensors = (x[name] for name in ("q", "k", "lse", "rows", "items", "blocks"))
    return torch.ops.comppo.attention_statistics(
        *tensors, 1.0, x["top_k"], x["statistics"], 3.0, 8, 0.0, 0.0, 0.0
    )


def with_entry(table: Tensor, index: tuple[int, ...], value: int) -> Tensor:
    out = table.clone()
    out[index] = value
    return out


def test_bad_input_of_the_attention_op() -> None:
    """A table that would lead outside a tensor is refused."""
    call = attention_call()
    plan = planned(call)
    assert len(raw_attention(call)[0]) == 2
    for column, value in ((0, 7), (0, -1), (1, -1), (2, 9), (2, -1), (3, -1), (4, -1)):
        with pytest.raises(RuntimeError, match=r"rows\[3\]"):
            raw_attention(call, rows=with_entry(plan["rows"], (3, column), value))
    for column, value in ((0, 6), (1, 65), (1, 0), (2, 1), (3, 0), (3, 2049), (3, 6)):
        with pytest.raises(RuntimeError, match=r"items\[1\]"):
            raw_attention(call, items=with_entry(plan["items"], (1, column), value))
    for value in ([0, 2, 1], [0, 1, 3], [1, 1, 2], [0, 0, 2]):
        with pytest.raises(RuntimeError, match="blocks"):
            raw_attention(call, blocks=torch.tensor(value, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="blocks hold 4 of 7 rows"):
        raw_attention(call, items=plan["items"][:1], blocks=plan["blocks"][:2])
    with pytest.raises(RuntimeError, match="blocks is empty"):
        raw_attention(call, blocks=plan["blocks"][:0])
    with pytest.raises(RuntimeError, match="rows is Long, not Int"):
        raw_attention(call, rows=plan["rows"].long())
    with pytest.raises(RuntimeError, match=r"k has shape \[9, 2, 7\]"):
        raw_attention(call, k=call["k"][..., :7])
    with pytest.raises(RuntimeError, match="top_k is 65"):
        raw_attention(call, top_k=65)
    with pytest.raises(RuntimeError, match="statistics is 32"):
        raw_attention(call, statistics=32)


def test_bad_input_of_the_pooling_ops() -> None:
    x = pooling_call()
    order, offsets, chunks = torch.ops.comppo.transpose_edges(x["topk_index"], x["seq_start"], 6)
    pooled, total = torch.ops.comppo.pool_history(*x.values(), 1e-8)

    def backward(order: Tensor = order, offsets: Tensor = offsets, chunks: Tensor = chunks) -> None:
        saved = (*x.values(), pooled, total, order, offsets, chunks)
        torch.ops.comppo.pool_history_backward(torch.ones_like(pooled), torch.ones_like(total), *saved, 1e-8)

    backward()
    with pytest.raises(RuntimeError, match=r"order\[2\] is 6"):
        backward(order=with_entry(order, (2,), 6))
    with pytest.raises(RuntimeError, match=r"key_offsets\[1\] is 7"):
        backward(offsets=with_entry(offsets, (1,), 7))
    with pytest.raises(RuntimeError, match=r"chunk_offsets\[1\] is 5"):
        backward(chunks=with_entry(chunks, (1,), 5))
    for entry, value in (((0, 0), -2), ((1, 1), 3), ((2, 0), 2**31 - 1)):
        index = with_entry(x["topk_index"], entry, value)
        with pytest.raises(RuntimeError, match=rf"topk_index\[{entry[0]}, {entry[1]}\] is {value}"):
            torch.ops.comppo.transpose_edges(index, x["seq_start"], 6)
        with pytest.raises(RuntimeError, match="topk_index"):
            torch.ops.comppo.pool_history(*{**x, "topk_index": index}.values(), 1e-8)
    with pytest.raises(RuntimeError, match=r"seq_start\[1\] is 7"):
        torch.ops.comppo.transpose_edges(x["topk_index"], with_entry(x["seq_start"], (1,), 7), 6)


def test_bad_input_of_the_comp_gae_op() -> None:
    x = gae_call()
    tensors = [x[name] for name in ("rewards", "values", "kappa")]
    with pytest.raises(RuntimeError, match="cu_seqlens decreases from 5 to 4 at entry 3"):
        torch.ops.comppo.comp_gae(*tensors, torch.tensor([0, 1, 5, 4]), x["mask"], None, 0.9, False)
    with pytest.raises(RuntimeError, match="cu_seqlens does not lead from 0 to 4"):
        torch.ops.comppo.comp_gae(*tensors, torch.tensor([0, 3]), x["mask"], None, 0.9, False)
    with pytest.raises(RuntimeError, match=r"values has strides \[2\]"):
        tensors[1] = torch.ones(8)[::2]
        torch.ops.comppo.comp_gae(*tensors, x["cu_seqlens"], x["mask"], None, 0.9, False)


# ---------------------------------------------------------------- arbitrary input


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 150), min_size=1, max_size=4))
    groups = draw(st.integers(1, 3))
    return Case(
        lengths=tuple(lengths),
        prompts=tuple(draw(st.integers(min(n, 1), n)) for n in lengths),
        heads=groups * draw(st.integers(1, 7)),
        groups=groups,
        width=draw(st.integers(1, 70)),
        history=draw(st.sampled_from(("all", "response"))),
        skip_first=draw(st.integers(0, 20)),
        window=draw(st.none() | st.integers(1, 160)),
        top_k=draw(st.integers(0, 64)),
        renyi_alpha=draw(st.sampled_from((0.5, 2.5, 3.0))),
        mass_top_k=draw(st.integers(1, 64)),
        dtype=draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases(), spread=st.sampled_from((0.0, 1.0, 30.0)), given_lse=st.booleans())
def test_any_attention_agrees_with_the_reference(case: Case, spread: float, given_lse: bool) -> None:
    if not any(case.lengths):
        return
    q, k = case.tensors()
    q = (q * spread).to(case.dtype)
    noise = torch.randn(case.heads, len(case.rows), generator=torch.Generator().manual_seed(case.seed))
    lse = 5 + 3 * noise if given_lse and spread < 30 else None  # far from overflow, whose edge is rounding
    got, top = run(compiled.attention_statistics, case, q, k, lse)
    want, want_top = run(concentration.attention_statistics, case, q, k, lse)
    assert torch.equal(got.num_history, want.num_history)
    rtol = 1e-4 if spread < 30 else 2e-2  # scores of several hundred are good to 1e-4 in float32
    for key in SUMS:
        # log a cancels where a passes 1; other sums may be of weights that underflow.
        atol = 1e-4 * (1 + want.mass.max().item()) if key == "entropy_sum" else 1e-18
        ours, theirs = getattr(got, key), getattr(want, key)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    torch.testing.assert_close(top.weight, want_top.weight, rtol=rtol, atol=1e-6)
    assert torch.equal(top.index.lt(0).sum(1), want_top.index.lt(0).sum(1))


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_arbitrary_tables_do_not_crash(data: st.DataObject) -> None:
    """Plans, edges and offsets of arbitrary small integers: an error or a result."""
    small = st.integers(-3, 12) | st.sampled_from((64, 128, 2048, 2**31 - 1, -(2**31)))

    def table(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return torch.tensor(data.draw(st.lists(small, min_size=size, max_size=size)), dtype=torch.int32).view(
            shape
        )

    def attempt(op: Any, *arguments: Any) -> None:
        try:
            op(*arguments)
        except RuntimeError as error:
            assert str(error)

    x, ops = pooling_call(), torch.ops.comppo
    arbitrary = {"rows": table(7, 5), "items": table(2, 4), "blocks": table(3)}
    attempt(lambda: raw_attention(attention_call(), **arbitrary))
    index, start = table(3, 2), table(3).long()
    attempt(ops.transpose_edges, index, start, 6)
    attempt(ops.pool_history, *{**x, "topk_index": index, "seq_start": start}.values(), 1e-8)
    saved = (torch.ones(3, 5), torch.ones(3), table(6), table(7), table(7), 1e-8)
    attempt(ops.pool_history_backward, torch.ones(3, 5), torch.ones(3), *x.values(), *saved)
    tokens = (torch.ones(4),) * 3
    attempt(ops.comp_gae, *tokens, table(3).long(), torch.ones(4, dtype=torch.bool), None, 0.9, False)


@settings(max_examples=4 * EXAMPLES, deadline=None)
@given(data=st.data(), given_lse=st.booleans())
def test_plans_with_wrong_entries_do_not_crash(data: st.DataObject, given_lse: bool) -> None:
    """A good plan of several blocks with an entry or two replaced."""
    case = Case(lengths=(300, 70), prompts=(1, 1), heads=2, groups=1, width=4, window=60)
    q, k = case.tensors()
    call = {"q": q[case.rows], "k": k, "rows": case.rows, "cu_seqlens": case.cu_seqlens} | case.arguments()
    tables = planned(call)
    for _ in range(data.draw(st.integers(1, 3))):
        flat = tables[data.draw(st.sampled_from(sorted(tables)))].view(-1)
        value = data.draw(st.sampled_from((-1, 0, 1, 64, 127, 128, 256, 300, 2048, 2**31 - 128)))
        flat[data.draw(st.integers(0, len(flat) - 1))] = value
    try:
        raw_attention(call, lse=torch.zeros(2, len(case.rows)) if given_lse else None, **tables)
    except RuntimeError as error:
        assert str(error)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 1000),
)
def test_any_pooling_agrees_with_the_reference(sizes: tuple[int, int, int, int], seed: int) -> None:
    num_rows, top_k, width, out = sizes
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-1, 8, (num_rows, top_k), generator=generator, dtype=torch.int32)
    # float64, because a row of one key has a gradient of pure cancellation.
    shapes = (num_rows, width), (num_rows, width), (20, 2 * width + out)
    learned = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    weight = torch.rand(num_rows, top_k, generator=generator)
    start = torch.randint(0, 13, (num_rows,), generator=generator)
    results = []
    for op in (compiled.pool_history, pooling.pool_history):
        own = [x.clone().requires_grad_() for x in learned]
        pooled, total = op(*own, index, weight, start)
        (pooled.square().sum() + total.sum()).backward()
        results.append([pooled, total, *(x.grad for x in own)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    lam=st.floats(0, 1),
    gaps=st.sampled_from(("compact", "cut")),
    seed=st.integers(0, 1000),
)
def test_any_comp_gae_agrees_with_the_reference(lengths: list[int], lam: float, gaps: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    rewards, values, kappa = (torch.rand(n, generator=generator) for _ in range(3))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(n, generator=generator) < 0.7
    bootstrap = torch.rand(len(lengths), generator=generator)
    got, want = (
        op(rewards, values, kappa, cu, mask, lam, gaps=gaps, bootstrap_values=bootstrap)
        for op in (compiled.comp_gae, transport.comp_gae)
    )
    for name in ("delta", "advantage", "lambda_return"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-5)
