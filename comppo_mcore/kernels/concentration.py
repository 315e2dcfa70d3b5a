"""Statistics and top-K of head-averaged attention rows (Eq. 18), without a T × T buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comppo_mcore.credit.concentration import MIN_MASS, RowStats
from comppo_mcore.kernels.blocks import History, RowBatch, RowRanges, row_batches, row_ranges

OPTIONAL_STATISTICS = ("entropy_sum", "max_weight", "power_sum", "topk_mass")
MAX_TOP_K = 64
WORKSPACE_BYTES = 32 << 20  # measured on a CPU: a larger workspace gains nothing
_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1


@dataclass(frozen=True)
class TopK:
    """The K heaviest keys of each row, heaviest first, ties by position."""

    index: Tensor  # int32 [R, K], position inside the sequence; −1 is padding
    weight: Tensor  # float32 [R, K], a renormalised over I_t; 0 in padding


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
    max_bytes: int = WORKSPACE_BYTES,
) -> tuple[RowStats, TopK]:
    """Accumulators over I_t and top-K of the head-averaged attention rows (Eq. 18).

    a_ti = 1/H_q · Σ_h exp(scale · ⟨q_h,t , k_g(h),i⟩ − lse_h,t),   g(h) = ⌊h · H_kv / H_q⌋

    The mean runs over all heads before anything is squared, so q must hold the heads of every
    tensor-parallel rank. Sums stay unnormalised over I_t: a ratio such as Σa² / (Σa)² then absorbs a
    common error in a, and partial sums over key ranges can be added. Half-precision inputs are accumulated
    in float32.

    Args:
        q: float [R, H_q, d], the wanted rows' queries after normalisation and RoPE.
        k: float [T, H_kv, d], every key of the packed sequences, likewise.
        lse: float32 [H_q, R], natural log of the wanted rows' softmax denominators over all visible
            keys; None computes it here.
        rows: int64 [R], packed positions s of the wanted rows, in any order.
        cu_seqlens: int64 [B + 1], packed position of each sequence's first token.
        scale: the layer's softmax scale.
        history: `all` keeps the prompt in I_t, `response` drops it.
        skip_first: leading positions of every sequence dropped from I_t.
        window: the layer's sliding window in keys, the row itself included; None is unlimited.
        prompt_lengths: int64 [B], P, tokens.
        top_k: K ≤ 64.
        wanted: which of `OPTIONAL_STATISTICS` to compute as well.
        renyi_alpha: α of `power_sum`.
        mass_top_k: how many of the largest a `topk_mass` adds up.
        max_bytes: workspace to stay within, short of one row's own needs.

    Returns:
        The accumulators and the top-K, row by row in the order of `rows`. A row whose mass over I_t is below
        1e-20 or not finite has an empty top-K.

    Raises:
        ValueError: shapes disagree, or an argument is out of range.
    """
    check_arguments(q, k, lse, rows, cu_seqlens, prompt_lengths, top_k, wanted)
    ranges = row_ranges(
        rows, cu_seqlens, prompt_lengths, history=history, skip_first=skip_first, window=window
    )
    sums, top = _allocate(len(rows), top_k, wanted, q.device)
    num_largest = max(top_k, mass_top_k if "topk_mass" in wanted else 0)
    pair_bytes, key_bytes = 8 * (q.shape[1] // k.shape[1] + 4), 4 * q.shape[2]
    for batch in row_batches(ranges, pair_bytes=pair_bytes, key_bytes=key_bytes, max_bytes=max_bytes):
        weights, in_history = _history_weights(q, k, lse, ranges, batch, scale)
        column, largest = _largest(weights, in_history, num_largest)
        found = _row_sums(weights, wanted, renyi_alpha)
        if "topk_mass" in wanted:
            found["topk_mass"] = largest[..., :mass_top_k].sum(-1)
        real = batch.slot >= 0
        for name, value in found.items():
            sums[name][batch.slot[real]] = value[real]
        _store_top(top, batch, column[..., :top_k], largest[..., :top_k], found["mass"])
    return RowStats(num_history=ranges.num_history, **sums), top


def _allocate(
    num_rows: int, top_k: int, wanted: Sequence[str], device: torch.device
) -> tuple[dict[str, Tensor], TopK]:
    """Room for the results, uninitialised: every row is written by exactly one block."""
    sums = {name: torch.empty(num_rows, device=device) for name in ("mass", "sum_squares", *wanted)}
    index = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    return sums, TopK(index, torch.empty(num_rows, top_k, device=device))


def _history_weights(
    q: Tensor, k: Tensor, lse: Tensor | None, ranges: RowRanges, batch: RowBatch, scale: float
) -> tuple[Tensor, Tensor]:
    """a over I_t, zero elsewhere, float32 [b, rows, keys]; and where I_t is."""
    slot = batch.slot.clamp(min=0)
    key = batch.first_key[:, None] + torch.arange(batch.num_keys, device=q.device)
    packed_key = (ranges.sequence_start[slot[:, :1]] + key).clamp(max=len(k) - 1)
    last = ranges.position[slot].masked_fill(batch.slot < 0, -1)
    causal = key[:, None] <= last[..., None]
    visible = causal & (key[:, None] >= ranges.visible_from[slot][..., None])
    in_history = causal & (key[:, None] >= ranges.history_from[slot][..., None])
    weights = _head_mean(q[slot], k, None if lse is None else lse[:, slot], packed_key, visible, scale)
    # Select, never multiply: above the diagonal exp may be inf, and padding may read another sequence's keys.
    return torch.where(in_history, weights, 0.0), in_history


def _head_mean(
    q: Tensor, k: Tensor, lse: Tensor | None, packed_key: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Mean over query heads of the softmax weights; arbitrary where not `visible`.

    Args:
        q: [b, rows, H_q, d]; k: [T, H_kv, d]; lse: [H_q, b, rows] or None.
        packed_key: [b, keys]; visible: bool [b, rows, keys].
    """
    num_blocks, num_rows, num_heads, width = q.shape
    group = num_heads // k.shape[1]
    total = torch.zeros(visible.shape, device=q.device)
    for g in range(k.shape[1]):
        heads = slice(g * group, (g + 1) * group)
        queries = q[:, :, heads].float().transpose(1, 2).reshape(num_blocks, group * num_rows, width)
        keys = k[:, g][packed_key].float().transpose(1, 2)  # [b, d, keys]
        shape = (num_blocks, group, num_rows, -1)
        if lse is None:
            scores = torch.bmm(queries, keys).mul_(scale).view(shape)
            weights = scores.masked_fill_(~visible[:, None], -torch.inf).softmax(-1)
        else:
            denominator = lse[heads].float().transpose(0, 1).reshape(num_blocks, -1, 1)
            scores = torch.baddbmm(denominator, queries, keys, beta=-1, alpha=scale)
            weights = scores.exp_().view(shape)
        total += weights.sum(1)
    return total.div_(num_heads)


def _row_sums(weights: Tensor, wanted: Sequence[str], renyi_alpha: float) -> dict[str, Tensor]:
    """Unnormalised accumulators of a [..., keys] that is zero outside I_t."""
    sums = {"mass": weights.sum(-1), "sum_squares": weights.square().sum(-1)}
    if "entropy_sum" in wanted:
        sums["entropy_sum"] = torch.xlogy(weights, weights).sum(-1)
    if "max_weight" in wanted:
        sums["max_weight"] = weights.amax(-1)
    if "power_sum" in wanted:
        sums["power_sum"] = weights.pow(renyi_alpha).sum(-1)
    return sums


def _largest(weights: Tensor, in_history: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns and values of the `count` largest weights of I_t, descending; column −1, value 0 past its end.

    The bits of a non-negative float sort like the float. With the column, reversed, below them, one integer
    orders by weight and then by the smaller column: ties are exact, which `topk` on floats does not promise.
    """
    num_keys = weights.shape[-1]
    column = torch.arange(num_keys, device=weights.device)
    rank = (weights.view(torch.int32).long() << _INDEX_BITS) | (_INDEX_MASK - column)
    rank = rank.masked_fill_(~in_history, -1).topk(min(count, num_keys), dim=-1).values
    rank = torch.nn.functional.pad(rank, (0, count - rank.shape[-1]), value=-1)
    value = (rank >> _INDEX_BITS).int().view(torch.float32)
    empty = rank < 0
    return (_INDEX_MASK - (rank & _INDEX_MASK)).masked_fill_(empty, -1), value.masked_fill(empty, 0.0)


def _store_top(top: TopK, batch: RowBatch, column: Tensor, weight: Tensor, mass: Tensor) -> None:
    """Write one batch's top-K, as positions inside the sequence and renormalised weights."""
    has_mass = (mass >= MIN_MASS) & mass.isfinite()
    empty = (column < 0) | ~has_mass[..., None]
    index = torch.where(empty, -1, column + batch.first_key[:, None, None])
    share = torch.where(empty, 0.0, weight / mass[..., None])
    real = batch.slot >= 0
    top.index[batch.slot[real]] = index[real].int()
    top.weight[batch.slot[real]] = share[real]


def check_arguments(
    q: Tensor,
    k: Tensor,
    lse: Tensor | None,
    rows: Tensor,
    cu_seqlens: Tensor,
    prompt_lengths: Tensor,
    top_k: int,
    wanted: Sequence[str],
) -> None:
    """Raise ValueError where the arguments of `attention_statistics` do not fit together."""
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)} are not [R, H_q, d] and [T, H_kv, d]")
    if rows.shape != q.shape[:1]:
        raise ValueError(f"rows {list(rows.shape)} must name each of the {len(q)} queries")
    if lse is not None and lse.shape != (q.shape[1], q.shape[0]):
        raise ValueError(f"lse {list(lse.shape)} is not [H_q, R] = {[q.shape[1], q.shape[0]]}")
    if len(cu_seqlens) != len(prompt_lengths) + 1:
        raise ValueError(f"{len(cu_seqlens)} boundaries do not enclose {len(prompt_lengths)} sequences")
    if not 0 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}, not within 0 to {MAX_TOP_K}")
    if unknown := set(wanted) - set(OPTIONAL_STATISTICS):
        raise ValueError(f"unknown statistics {sorted(unknown)}; known: {OPTIONAL_STATISTICS}")
