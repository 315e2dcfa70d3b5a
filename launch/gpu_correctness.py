"""The compiled ops on fresh random problems, against float64: a part of launch/gpu_check.sh.

python launch/gpu_correctness.py [--tiny] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comppo_mcore.credit import transport
from comppo_mcore.kernels import compiled, concentration, extension, pooling

ULP = 2.0**-23
TOP_K = 64
POOL_WIDTH, POOL_OUT = 128, 256


@contextmanager
def without_wgmma(active: bool) -> Iterator[None]:
    """Inside, sm_90 devices run the mma.sync kernels too (csrc/cuda/attention_statistics.cu)."""
    if active:
        os.environ["COMPPO_NO_WGMMA"] = "1"
    yield
    os.environ.pop("COMPPO_NO_WGMMA", None)


# ---------------------------------------------------------------- op A


@dataclass(frozen=True)
class Case:
    """Packed sequences of random queries and keys, every response row wanted."""

    name: str
    lengths: tuple[int, ...] = (300, 1, 700, 65)
    prompts: tuple[int, ...] = (20, 1, 333, 64)
    heads: int = 8
    groups: int = 2
    width: int = 128
    dtype: torch.dtype = torch.bfloat16
    history: str = "all"
    skip_first: int = 0
    window: int | None = None
    given_lse: bool = True


CASES = [
    Case("bf16 4×"),
    Case("bf16 4× d 64", width=64),
    Case("bf16 8× own lse", heads=16, given_lse=False),
    Case("bf16 3× d 80", heads=6, width=80),
    Case("bf16 1× d 256", heads=2, width=256),
    Case("bf16 5000 keys", (5000,), (4000,), groups=1, heads=4),
    Case("fp16 4× window", dtype=torch.float16, window=150, given_lse=False),
    Case("fp32 4×", dtype=torch.float32),
    Case("fp32 2× response", dtype=torch.float32, heads=4, history="response", skip_first=3),
]
TINY = [
    Case("tiny bf16", (70, 5), (10, 2)),
    Case("tiny fp32", (70, 5), (10, 2), dtype=torch.float32, given_lse=False),
]


class Posed:
    """A case's tensors, with which keys its rows see and which of those are their history: bool [R, T]."""

    def __init__(self, case: Case, device: str) -> None:
        total = sum(case.lengths)
        self.case, self.scale = case, case.width**-0.5
        self.q = torch.randn(total, case.heads, case.width, device=device).mul_(1.5).to(case.dtype)
        self.k = torch.randn(total, case.groups, case.width, device=device).to(case.dtype)
        self.prompts = torch.tensor(case.prompts, device=device)
        lengths = torch.tensor(case.lengths, device=device)
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        sequence = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        key = torch.arange(total, device=device)
        wanted = key - self.cu_seqlens[sequence] >= self.prompts[sequence] - 1
        self.rows, sequence = key[wanted], sequence[wanted]
        self.start = self.cu_seqlens[sequence]
        self.visible = (key >= self.start[:, None]) & (key <= self.rows[:, None])
        if case.window is not None:
            self.visible &= key > self.rows[:, None] - case.window
        first = torch.full_like(self.start, case.skip_first)
        if case.history == "response":
            first = torch.maximum(first, self.prompts[sequence])
        self.history = self.visible & (key >= (self.start + first)[:, None])

    def scores(self, dtype: torch.dtype) -> Tensor:
        """[heads, rows, keys], materialised."""
        keys = self.k.to(dtype).repeat_interleave(self.case.heads // self.case.groups, 1)
        return torch.einsum("rhd,khd->hrk", self.q[self.rows].to(dtype), keys) * self.scale

    def lse(self) -> Tensor | None:
        if not self.case.given_lse:
            return None
        return self.scores(torch.float64).masked_fill(~self.visible, -torch.inf).logsumexp(-1).float()

    def weights(self, lse: Tensor | None, dtype: torch.dtype) -> Tensor:
        """a of Eq. 18 over the history, 0 elsewhere: [rows, keys], computed in `dtype`."""
        scores = self.scores(dtype).masked_fill(~self.visible, -torch.inf)
        softmax = scores.softmax(-1) if lse is None else (scores - lse[..., None]).exp()
        return torch.where(self.history, softmax.mean(0), 0)

    def run(self, lse: Tensor | None) -> tuple[concentration.RowStats, concentration.TopK]:
        arguments: dict[str, Any] = {
            "scale": self.scale,
            "history": self.case.history,
            "skip_first": self.case.skip_first,
            "window": self.case.window,
            "prompt_lengths": self.prompts,
            "top_k": TOP_K,
        }
        return compiled.attention_statistics(
            self.q[self.rows], self.k, lse, self.rows, self.cu_seqlens, **arguments
        )


def attention_error(case: Case, path: str, device: str) -> str | None:
    """What is wrong, or None. The sums to four times the error of float32 plus 8 ulp; the top-K to 1e-6."""
    posed = Posed(case, device)
    lse = posed.lse()
    with without_wgmma(path == "mma.sync"):
        (stats, top), (again, top_again) = posed.run(lse), posed.run(lse)
    same = [(stats.mass, again.mass), (top.index, top_again.index), (top.weight, top_again.weight)]
    if not all(torch.equal(a, b) for a, b in same):
        return "differs from run to run"
    want = posed.weights(lse, torch.float64)
    plain = posed.weights(lse, torch.float32).double()
    for name, power in (("mass", 1), ("sum_squares", 2)):
        right = want.pow(power).sum(-1)
        allowed = 4 * (plain.pow(power).sum(-1) - right).abs().max() + 8 * ULP * right
        excess = (getattr(stats, name) - right).abs() - allowed
        if not bool((excess <= 0).all()):
            return f"{name} is off by {float(excess.max()):.1e} more than allowed"
    return top_k_error(top, want, posed)


def top_k_error(top: concentration.TopK, want: Tensor, posed: Posed) -> str | None:
    history, present = posed.history, top.index >= 0
    at = (posed.start[:, None] + top.index).clamp(min=0)
    taken = torch.zeros_like(history, dtype=torch.int32).scatter_add_(1, at, present.int())
    if not torch.equal(present.sum(1), history.sum(1).clamp(max=TOP_K)):
        return "the top-K of a row has too few or too many entries"
    if bool((taken > history.int()).any()):
        return "the top-K of a row leaves its history or repeats a key"
    smallest = torch.where(taken > 0, want, torch.inf).amin(1)
    largest_left = torch.where(history & (taken == 0), want, 0).amax(1)
    excess = float((largest_left / smallest)[history.any(1)].max()) - 1
    return f"the top-K leaves out a weight {excess:.1e} larger" if excess > 1e-6 else None


# ---------------------------------------------------------------- ops B and C


def pooling_inputs(num_rows: int, device: str) -> tuple[Tensor, ...]:
    """A sequence whose first key is in every row's top-K, as attention sinks make it."""
    position = torch.arange(num_rows, device=device)
    index = (torch.rand(num_rows, TOP_K, device=device) * (position[:, None] + 1)).int()
    index[:, 0] = 0
    index[position[:, None] < torch.arange(TOP_K, device=device)] = -1
    weight = torch.rand(num_rows, TOP_K, device=device) * (index >= 0)
    shapes = (num_rows, POOL_WIDTH), (num_rows, POOL_WIDTH), (num_rows, 2 * POOL_WIDTH + POOL_OUT)
    tensors = [torch.randn(*shape, device=device).requires_grad_() for shape in shapes]
    return (*tensors, index, weight, torch.zeros(num_rows, dtype=torch.int64, device=device))


def pooling_error(num_rows: int, device: str) -> str | None:
    """Results and gradients to four times the error of eager float32 plus 16 ulp of the largest."""
    inputs = pooling_inputs(num_rows, device)
    grad = torch.randn(num_rows, POOL_OUT, device=device)
    results = []
    for op, dtype in (
        (compiled.pool_history, torch.float32),
        (pooling.pool_history, torch.float64),
        (pooling.pool_history, torch.float32),
    ):
        tensors = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
        pooled, score_sum = op(*tensors, inputs[3], inputs[4].to(dtype), inputs[5])
        loss = (pooled * grad.to(dtype)).sum() + score_sum.sum()
        results.append([pooled, score_sum, *torch.autograd.grad(loss, tensors)])
    names = ("pooled", "score_sum", "∂q^β", "∂q^r", "∂features")
    for name, got, want, plain in zip(names, *results, strict=True):
        allowed = 4 * (plain - want).abs().max() + 16 * ULP * want.abs().max()
        if not bool(((got - want).abs() <= allowed).all()):
            return f"{name} is off by {float((got - want).abs().max()):.1e}"
    return None


def gae_inputs(lengths: list[int], device: str, share_of_gaps: float) -> tuple[Tensor, ...]:
    n = sum(lengths)
    rewards, values = torch.randn(2, n, device=device)
    kappa = torch.rand(n, device=device) * 0.6 + 0.4
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=device)
    return rewards, values, kappa, cu_seqlens, torch.rand(n, device=device) >= share_of_gaps


def comp_gae_error(gaps: str, device: str) -> str | None:
    inputs = gae_inputs([1000, 0, 3, 5000, 512], device, 0.3)
    got = compiled.comp_gae(*inputs, 0.95, gaps=gaps)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    want = transport.comp_gae(*exact, 0.95, gaps=gaps)
    for name in ("delta", "advantage", "lambda_return"):
        error = float((getattr(got, name) - getattr(want, name)).abs().max())
        if not error <= 1e-5:
            return f"{name} is off by {error:.1e}"
    return None


def all_checks(device: str, tiny: bool) -> Iterator[tuple[str, Callable[[], str | None]]]:
    for case in TINY if tiny else CASES:
        for path in ("wgmma", "mma.sync"):  # the same kernel where wgmma does not apply
            yield f"A {case.name}, {path}", lambda c=case, p=path: attention_error(c, p, device)
    yield "B forward and backward", lambda: pooling_error(100 if tiny else 3000, device)
    for gaps in ("compact", "cut"):
        yield f"C {gaps}", lambda g=gaps: comp_gae_error(g, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small problems, for compute-sanitizer")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    if extension.load() is None:
        sys.exit("gpu_check: the compiled ops are not built")
    torch.backends.cuda.matmul.allow_tf32 = False
    seed = time.time_ns() % 2**31
    torch.manual_seed(seed)
    print(f"gpu_check: random seed {seed}")
    failed = 0
    for name, run in all_checks(arguments.device, arguments.tiny):
        problem = run()
        failed += problem is not None
        print(f"gpu_check: {name}: {problem or 'ok'}", flush=True)
    sys.exit(f"gpu_check: {failed} checks failed" if failed else 0)


if __name__ == "__main__":
    main()
