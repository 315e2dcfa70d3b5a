"""The compiled ops behind the signatures of the eager reference.

Arguments are checked here by name; `kernels.extension.load` must have found the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comppo_mcore.credit import packed
from comppo_mcore.credit.concentration import RowStats
from comppo_mcore.credit.gate import Envelope
from comppo_mcore.credit.packed import Gaps
from comppo_mcore.credit.transport import Transported
from comppo_mcore.kernels import concentration, pooling
from comppo_mcore.kernels.blocks import History
from comppo_mcore.kernels.concentration import MAX_TOP_K, OPTIONAL_STATISTICS, TopK

_ATTENTION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Plan:
    """Uniform work of `attention_statistics`; the tables of csrc/include/comppo/plan.h."""

    rows: Tensor  # int32 [R, 5], ordered by packed position
    items: Tensor  # int32 [num_items, 4]
    blocks: Tensor  # int32 [num_blocks + 1]
    num_history: Tensor  # int64 [R], n_t


def make_plan(
    rows: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    num_keys: int,
    *,
    history: History,
    skip_first: int,
    window: int | None,
) -> Plan:
    """Cut the wanted rows into blocks of ≤ 64 rows and items of ≤ 2048 keys, on the host.

    Args:
        rows: int64 [R], packed positions.
        cu_seqlens: int64 [B + 1]; prompt_lengths: int64 [B], tokens.
        num_keys: T, packed tokens.
        history, skip_first, window: what I_t leaves out, as in `blocks.row_ranges`.

    Returns:
        The plan, on the device of `rows`.

    Raises:
        ValueError: an offset decreases, or a row or a length is out of range.
    """
    from comppo_mcore import _host

    if history not in ("all", "response"):
        raise ValueError(f"history is {history!r}, not 'all' or 'response'")
    tables = _host.plan(
        rows=_int64(rows, "rows"),
        cu_seqlens=_int64(cu_seqlens, "cu_seqlens"),
        prompt_lengths=_int64(prompt_lengths, "prompt_lengths"),
        num_keys=num_keys,
        response_only=history == "response",
        skip_first=skip_first,
        window=window,
    )
    return Plan(*(torch.from_numpy(table).to(rows.device) for table in tables))


@torch.no_grad()
def attention_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    history: History,
    skip_first: int,
    window: int | None,
    prompt_lengths: Tensor,
    top_k: int,
    wanted: Sequence[str] = (),
    renyi_alpha: float = 3.0,
    mass_top_k: int = 8,
) -> tuple[RowStats, TopK]:
    """`concentration.attention_statistics` (Eq. 18), compiled.

    A row's results have the same bits whatever rows, packing and number of threads it is computed with. q and
    k are float32, bfloat16 or float16 with any strides but 1 in the last dimension; lse has any strides.

    Raises:
        ValueError: shapes, dtypes, devices or strides disagree, or an argument is out of range.
    """
    concentration.check_arguments(q, k, lse, rows, cu_seqlens, prompt_lengths, top_k, wanted)
    plan = make_plan(
        rows, cu_seqlens, prompt_lengths, len(k), history=history, skip_first=skip_first, window=window
    )
    sums, top = planned_statistics(
        q,
        k,
        lse,
        plan,
        scale=scale,
        top_k=top_k,
        wanted=wanted,
        renyi_alpha=renyi_alpha,
        mass_top_k=mass_top_k,
    )
    return RowStats(num_history=plan.num_history, **sums), top


@torch.no_grad()
def planned_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    plan: Plan,
    *,
    scale: float,
    top_k: int,
    wanted: Sequence[str] = (),
    renyi_alpha: float = 3.0,
    mass_top_k: int = 8,
    envelope: Envelope | None = None,
) -> tuple[dict[str, Tensor], TopK]:
    """The op itself, for a plan made before.

    Args:
        plan: of the rows that q holds.
        envelope: κ_lo, κ_hi, τ of the gate: the kernel's epilogue adds `kappa` (Eq. 18–20, Herfindahl). The
            others as in `attention_statistics`.

    Returns:
        `mass`, `sum_squares` and the wanted sums by name, float32 [R] each; and the top-K.
    """
    _check_tensor("q", q, _ATTENTION_DTYPES, q.device, last_stride=True)
    _check_tensor("k", k, (q.dtype,), q.device, last_stride=True)
    if lse is not None:
        _check_tensor("lse", lse, (torch.float32,), q.device)
    if "topk_mass" not in wanted:
        mass_top_k = 1  # not read
    elif not 1 <= mass_top_k <= MAX_TOP_K:
        raise ValueError(f"mass_top_k is {mass_top_k}, not within 1 to {MAX_TOP_K}")
    names = [name for name in OPTIONAL_STATISTICS if name in wanted]
    statistics = sum(1 << OPTIONAL_STATISTICS.index(name) for name in names)
    gate = (0.0, 0.0, 0.0)
    if envelope is not None:
        names.append("kappa")
        statistics |= 1 << len(OPTIONAL_STATISTICS)
        gate = (envelope.kappa_lo, envelope.kappa_hi, envelope.tau)
    tables = (plan.rows, plan.items, plan.blocks)
    sums, index, weight = torch.ops.comppo.attention_statistics(
        q, k, lse, *tables, scale, top_k, statistics, renyi_alpha, mass_top_k, *gate
    )
    return dict(zip(("mass", "sum_squares", *names), sums, strict=True)), TopK(index, weight)


def pool_history(
    query_beta: Tensor,
    query_rel: Tensor,
    key_features: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    seq_start: Tensor,
) -> tuple[Tensor, Tensor]:
    """`pooling.pool_history` (Eq. 22–26), compiled; the backward is deterministic and gathers nothing.

    Differentiable once. An edge of no relevance is not read: NaN or inf in its value stays where it is.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or an index leaves the packed positions.
    """
    pooling.check_arguments(query_beta, query_rel, key_features, topk_index, topk_weight, seq_start)
    device, dtype = key_features.device, torch.promote_types(key_features.dtype, torch.float32)
    for name, x in (
        ("query_beta", query_beta),
        ("query_rel", query_rel),
        ("key_features", key_features),
        ("topk_weight", topk_weight),
    ):
        _check_tensor(name, x, (*_ATTENTION_DTYPES, torch.float64), device)
    _check_tensor("topk_index", topk_index, (torch.int32, torch.int64), device)
    _check_tensor("seq_start", seq_start, (torch.int64,), device)
    _check_edges(topk_index, seq_start, len(key_features))
    beta, rel, features = (x.to(dtype).contiguous() for x in (query_beta, query_rel, key_features))
    index, weight = topk_index.int().contiguous(), topk_weight.detach().to(dtype).contiguous()
    return torch.ops.comppo.pool_history(
        beta, rel, features, index, weight, seq_start.contiguous(), pooling.ROUTE_EPSILON
    )


@torch.no_grad()
def comp_gae(
    rewards: Tensor,
    values: Tensor,
    kappa: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    lam: float,
    *,
    gaps: Gaps = "compact",
    bootstrap_values: Tensor | None = None,
) -> Transported:
    """`credit.transport.comp_gae` (Eq. 10, 11, 28), compiled; not differentiable.

    Raises:
        ValueError: shapes, dtypes, devices or offsets disagree, or an argument is out of range.
    """
    packed.check(cu_seqlens, mask, rewards=rewards, values=values, kappa=kappa)
    if gaps not in ("compact", "cut"):
        raise ValueError(f"gaps must be 'compact' or 'cut', got {gaps!r}")
    _check_tensor("rewards", rewards, (torch.float32, torch.float64), rewards.device)
    _check_tensor("values", values, (rewards.dtype,), rewards.device)
    _check_tensor("kappa", kappa, (rewards.dtype,), rewards.device)
    _check_tensor("cu_seqlens", cu_seqlens, (torch.int64,), rewards.device)
    _check_tensor("mask", mask, (torch.bool,), rewards.device)
    if bootstrap_values is not None:
        if bootstrap_values.shape != (len(cu_seqlens) - 1,):
            shape = list(bootstrap_values.shape)
            raise ValueError(f"bootstrap_values must have one entry per response, got {shape}")
        _check_tensor("bootstrap_values", bootstrap_values, (rewards.dtype,), rewards.device)
        bootstrap_values = bootstrap_values.contiguous()
    tensors = (x.contiguous() for x in (rewards, values, kappa, cu_seqlens, mask))
    return Transported(*torch.ops.comppo.comp_gae(*tensors, bootstrap_values, lam, gaps == "cut"))


def _int64(x: Tensor, name: str) -> Any:
    """A host array of the planner."""
    if x.dtype != torch.int64 or x.dim() != 1:
        raise ValueError(f"{name} must be int64 in one dimension, got {x.dtype} {list(x.shape)}")
    return x.cpu().contiguous().numpy()


def _check_tensor(
    name: str, x: Tensor, dtypes: Sequence[torch.dtype], device: torch.device, *, last_stride: bool = False
) -> None:
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {x.dtype}; this op takes {' or '.join(map(str, dtypes))} here")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, but the other arguments are on {device}")
    if last_stride and x.numel() and x.stride(-1) != 1:
        raise ValueError(f"{name} has strides {list(x.stride())}; the last dimension must be contiguous")


def _check_edges(index: Tensor, seq_start: Tensor, num_keys: int) -> None:
    """Raise ValueError where an edge leaves the packed positions."""
    if not index.numel():
        return
    low, high = (int(x) for x in index.aminmax())
    if low < -1:
        raise ValueError(f"topk_index holds {low}; a position is at least 0, and -1 is padding")
    first, last = int(seq_start.min()), int((seq_start + index.amax(1)).max())
    if first < 0 or last >= num_keys:
        raise ValueError(
            f"topk_index (up to {high}) and seq_start (from {first}) lead to position {last}; "
            f"key_features has positions 0 to {num_keys - 1}"
        )
