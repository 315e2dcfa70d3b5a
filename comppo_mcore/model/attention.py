"""Local (non-TransformerEngine) modules: a norm that allows sequence parallelism, and core attention on
torch SDPA over packed sequences; and the mix-in by which the last layer exposes its attention row."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """What determines the last layer's attention row. Heads are this tensor-parallel rank's."""

    q: Tensor  # [t, heads/tp, d], after q-norm and RoPE
    k: Tensor  # [t, groups/tp, d], after k-norm and RoPE
    lse: Tensor | None  # float32 [heads/tp, t], natural log; None where the backend does not give it
    scale: float  # softmax scale


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron sums its gradient over sequence-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def packed_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], scale: float
) -> tuple[Tensor, Tensor | None]:
    """Causal attention within each packed sequence.

    Sequences of similar length go through one batched SDPA call: rows beyond a sequence's end are
    keys that no earlier row may see, so right-padding needs no mask.

    Args:
        q: [t, heads, d]; k, v: [t, groups, d].
        cu_seqlens: B + 1 offsets, ending at t.

    Returns:
        output [t, heads, d] and lse float32 [heads, t] (None where SDPA does not return it).
    """
    lengths = [b - a for a, b in pairwise(cu_seqlens)]
    outs, lses, positions = [], [], []
    for batch in _length_batches(lengths):
        index, valid = _padded_index([cu_seqlens[i] for i in batch], [lengths[i] for i in batch], q.device)
        q_bhsd, k_bhsd, v_bhsd = (x[index].transpose(1, 2) for x in (q, k, v))
        out, lse = _sdpa(q_bhsd, k_bhsd, v_bhsd, scale)
        outs.append(out.transpose(1, 2)[valid])
        lses.append(None if lse is None else lse.transpose(1, 2)[valid])
        positions.append(index[valid])
    order = torch.argsort(torch.cat(positions))
    has_lse = lses[0] is not None
    return torch.cat(outs)[order], torch.cat(lses)[order].t() if has_lse else None


def _length_batches(lengths: list[int], waste: float = 1.25) -> list[list[int]]:
    """Group sequences, longest first, so that padding adds at most `waste − 1` to any of them."""
    batches: list[list[int]] = []
    longest = 0
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if not batches or longest > waste * lengths[i]:
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches


def _padded_index(starts: list[int], lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Packed positions [b, s] of right-padded sequences (padding repeats the last one), and validity."""
    start, length = (torch.tensor(x, device=device)[:, None] for x in (starts, lengths))
    offset = torch.arange(max(lengths), device=device)[None]
    return start + torch.minimum(offset, length - 1), offset < length


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    """SDPA over [b, heads, s, d] with grouped keys; the CPU kernel also returns the LSE [b, heads, s]."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, attn_mask=None, scale=scale
        )
        return out, lse.detach()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out, None


class PackedAttention(MegatronModule):
    """Core attention for packed (THD) sequences; Megatron's local one refuses them."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5
        self.lse: Tensor | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[t, heads/tp, d] → [t, heads/tp · d]."""
        cu_seqlens = packed_seq_params.cu_seqlens_q.tolist()
        out, self.lse = packed_causal_attention(query, key, value, cu_seqlens, self.softmax_scale)
        return out.reshape(query.shape[0], -1)


class ExposesRow:
    """Mixed into the last layer's core attention only: keeps its detached inputs until `take_row`."""

    row: AttentionInputs | None = None
    exposing: bool = False  # set by the policy for the passes that need the row
    softmax_scale: float
    lse: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = super().forward(query, key, value, *args, **kwargs)  # type: ignore[misc]
        if self.exposing:
            self.row = AttentionInputs(query.detach(), key.detach(), self.lse, self.softmax_scale)
        self.lse = None
        return out

    def take_row(self) -> AttentionInputs:
        """Hand the row's inputs over and forget them."""
        assert self.row is not None, "the last layer ran without `exposing`"
        row, self.row = self.row, None
        return row


def exposing(base: type) -> type:
    """`base` (a core attention class of any backend) that exposes its row."""
    return type(f"Exposing{base.__name__}", (ExposesRow, base), {})
