"""Attention rows of packed sequences, solved by the book in float64. Imports nothing of the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

OPTIONAL = ("entropy_sum", "max_weight", "power_sum", "topk_mass")
SUMS = ("mass", "sum_squares", *OPTIONAL)
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
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *np.cumsum(self.lengths)])

    @property
    def rows(self) -> Tensor:
        cu = self.cu_seqlens.tolist()
        spans = zip(cu[:-1], self.prompts, self.lengths, strict=True)
        return torch.cat([torch.arange(c + p - 1, c + n) for c, p, n in spans if n])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """q and k of every packed position."""
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(self.lengths)
        q = 2 * torch.randn(total, self.heads, self.width, generator=generator)
        k = torch.randn(total, self.groups, self.width, generator=generator)
        return q.to(self.dtype), k.to(self.dtype)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `attention_statistics`, with every optional statistic."""
        return {
            "scale": self.width**-0.5,
            "history": self.history,
            "skip_first": self.skip_first,
            "window": self.window,
            "prompt_lengths": torch.tensor(self.prompts),
            "top_k": self.top_k,
            "wanted": OPTIONAL,
            "renyi_alpha": self.renyi_alpha,
            "mass_top_k": self.mass_top_k,
        }


def run(
    statistics: Callable[..., Any],
    case: Case,
    q: Tensor,
    k: Tensor,
    lse: Tensor | None = None,
    **changes: Any,
) -> Any:
    """`statistics` of the case's rows; q and k of every packed position."""
    rows = case.rows
    return statistics(q[rows], k, lse, rows, case.cu_seqlens, **{**case.arguments(), **changes})


PACKING: dict[str, Any] = {"lengths": (9, 0, 1, 70, 23, 0), "prompts": (3, 0, 1, 12, 22, 0)}
CASES = {
    "mha": Case(**PACKING, heads=2, groups=2),
    "gqa_4_2": Case(**PACKING),
    "gqa_9_3_width_80": Case(**PACKING, heads=9, groups=3, width=80, top_k=5),
    "gqa_32_8_width_16": Case(**PACKING, heads=32, groups=8, width=16),
    "gqa_7_1_width_256": Case(**PACKING, heads=7, groups=1, width=256),
    "mqa_width_96": Case(**PACKING, heads=5, groups=1, width=96),
    "width_128": Case(**PACKING, heads=8, groups=2, width=128),
    "width_5": Case(**PACKING, heads=6, groups=2, width=5),
    "response": Case(**PACKING, history="response"),
    "response_skip": Case(**PACKING, history="response", skip_first=14, top_k=3),
    "skip": Case(**PACKING, skip_first=4),
    "window": Case(**PACKING, window=7),
    "window_skip_response": Case(**PACKING, window=20, skip_first=2, history="response", top_k=20),
    "window_of_one": Case(**PACKING, window=1),
    "bf16": Case(**PACKING, dtype=torch.bfloat16),
    "fp16": Case(**PACKING, dtype=torch.float16, renyi_alpha=2.5, top_k=6, mass_top_k=40),
    "one_token": Case(lengths=(1,), prompts=(1,)),
    "no_top_k": Case(**PACKING, top_k=0),
    "several_blocks": Case(lengths=(150,), prompts=(2,), heads=2, groups=1, width=32),
}


# ---------------------------------------------------------------- the oracle


@dataclass(frozen=True)
class OracleRow:
    packed: int  # packed position
    weights: np.ndarray  # a over the visible keys, float64
    first: int  # position of the first visible key
    history: list[int]  # I_t
    lse: list[float]  # per head


def oracle_row(case: Case, q: np.ndarray, k: np.ndarray, packed: int) -> OracleRow:
    """Softmax per head over the visible keys, mean over heads, then I_t."""
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


def oracle_rows(case: Case, q: Tensor, k: Tensor) -> list[OracleRow]:
    return [oracle_row(case, q.double().numpy(), k.double().numpy(), row) for row in case.rows.tolist()]


@dataclass(frozen=True)
class Solved:
    """A case's tensors and what the oracle makes of them."""

    q: Tensor
    k: Tensor
    rows: list[OracleRow]

    @property
    def lse(self) -> Tensor:
        return torch.tensor([r.lse for r in self.rows], dtype=torch.float32).t()


@cache
def solved(case: Case) -> Solved:
    q, k = case.tensors()
    return Solved(q, k, oracle_rows(case, q, k))


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
    case: Case, q: Tensor, k: Tensor, rows: list[OracleRow], given_lse: bool
) -> list[np.ndarray]:
    """What materialised float32 attention in plain torch makes of the rows: the yardstick for rounding."""
    keys = k.float().repeat_interleave(case.heads // case.groups, dim=1)
    packed = torch.tensor([row.packed for row in rows])
    scores = torch.einsum("thd,ihd->hti", q[packed].float(), keys) * case.width**-0.5
    out = []
    for t, row in enumerate(rows):
        own = scores[:, t, row.packed - len(row.weights) + 1 : row.packed + 1]
        p = (own - torch.tensor(row.lse)[:, None]).exp() if given_lse else own.softmax(-1)
        out.append(p.mean(0).double().numpy())
    return out
