"""Causal top-K pooling of projected history features (Eq. 22–26)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROUTE_EPSILON = 1e-8  # ε of Eq. 26; a row whose scores add up to no more than this is dead
GATHER_BYTES = 128 << 20


def pool_history(
    query_beta: Tensor,
    query_rel: Tensor,
    key_features: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    seq_start: Tensor,
    *,
    max_bytes: int = GATHER_BYTES,
) -> tuple[Tensor, Tensor]:
    """Route each row to its top-K history and pool W₁h̄ (Eq. 22–26).

    s_ti = a_ti · σ(⟨q^β_t, k^β_i⟩/√d) · ReLU(⟨q^r_t, k^r_i⟩/√d),   pooled_t = Σ_i s_ti W₁h̄_i / (Σ_i s_ti + ε)

    W₁ Σ s h̄ = Σ s W₁h̄, so the narrow projected features are gathered in place of hidden states.
    Differentiable in the queries and the features; the attention prior a is data. Computed in float32, or
    in float64 for float64 features.

    Args:
        query_beta: [R, d], W_βq h̄ of the rows.
        query_rel: [R, d], W_rq h̄ of the rows.
        key_features: [T, 2d + F], [W_βk h̄ | W_rk h̄ | W₁ h̄] of every packed position.
        topk_index: int [R, K], positions inside the sequence; −1 is padding.
        topk_weight: float32 [R, K], a renormalised over I_t.
        seq_start: int64 [R], packed position of the first token of each row's sequence.
        max_bytes: gathered features to hold at once. More rows are processed in chunks, whose gathers
            are repeated in the backward pass instead of being kept.

    Returns:
        pooled [R, F] and score_sum [R] = Σ_i s_ti. Where score_sum ≤ `ROUTE_EPSILON` the row is dead:
        the caller puts W₁h̄_t in place of pooled.

    Raises:
        ValueError: shapes disagree.
    """
    check_arguments(query_beta, query_rel, key_features, topk_index, topk_weight, seq_start)
    dtype = torch.promote_types(key_features.dtype, torch.float32)
    features = key_features.to(dtype)
    rows = (query_beta.to(dtype), query_rel.to(dtype), topk_index, topk_weight.to(dtype), seq_start)
    row_bytes = topk_index.shape[1] * features.shape[1] * features.element_size()
    step = max(1, max_bytes // max(1, row_bytes))
    if len(query_beta) <= step:
        return _pool(features, *rows)
    chunks = zip(*(x.split(step) for x in rows), strict=True)
    pooled = [
        checkpoint(_pool, features, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks
    ]
    return torch.cat([p for p, _ in pooled]), torch.cat([s for _, s in pooled])


def _pool(
    features: Tensor, query_beta: Tensor, query_rel: Tensor, index: Tensor, weight: Tensor, seq_start: Tensor
) -> tuple[Tensor, Tensor]:
    """Eq. 22–26 for rows whose gathered features fit in memory."""
    width = query_beta.shape[1]
    index, weight = _without_padding(index, weight)
    position = seq_start[:, None] + index.clamp(min=0)
    # Embedding look-ups, because their backward adds up a key's many rows in a fixed order on every device;
    # one for each feature, because the backward of splitting a gathered [R, K, 2d + F] would copy it again.
    split = features.split([width, width, features.shape[1] - 2 * width], dim=-1)
    key_beta, key_rel, value = (F.embedding(position, x.contiguous()) for x in split)  # [R, K, ·]
    edge_gate = torch.sigmoid(_dot(query_beta, key_beta) * width**-0.5)
    relevance = torch.relu(_dot(query_rel, key_rel) * width**-0.5)
    prior = torch.where(index >= 0, weight, 0.0)
    route_score = prior * edge_gate * relevance
    score_sum = route_score.sum(-1)
    pooled = torch.bmm(route_score[:, None], value).squeeze(1)
    return pooled / (score_sum + ROUTE_EPSILON)[:, None], score_sum


def _without_padding(index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the trailing columns that are padding in every row."""
    used = (index >= 0).any(0).nonzero()
    count = int(used[-1]) + 1 if len(used) else 0
    return index[:, :count], weight[:, :count]


def _dot(query: Tensor, key: Tensor) -> Tensor:
    """⟨query_t, key_ti⟩: [R, d], [R, K, d] → [R, K]."""
    return torch.bmm(key, query[:, :, None]).squeeze(2)


def check_arguments(
    query_beta: Tensor, query_rel: Tensor, features: Tensor, index: Tensor, weight: Tensor, seq_start: Tensor
) -> None:
    """Raise ValueError where the arguments of `pool_history` do not fit together."""
    num_rows, width = query_beta.shape
    if query_rel.shape != query_beta.shape or features.dim() != 2 or features.shape[1] <= 2 * width:
        shapes = [list(x.shape) for x in (query_beta, query_rel, features)]
        raise ValueError(f"queries and features {shapes} are not [R, d], [R, d], [T, 2d + F]")
    if index.shape != weight.shape or len(index) != num_rows or seq_start.shape != (num_rows,):
        shapes = [list(x.shape) for x in (index, weight, seq_start)]
        raise ValueError(f"top-K and starts {shapes} are not [R, K], [R, K], [R] with R = {num_rows}")
