"""Times the compiled ops on a CPU against plain torch, and checks the targets of docs/performance.md.

    python benchmarks/kernels.py [--check] [--json FILE]

One thread, float32, CPU seconds, median of interleaved repeats. Needs Linux, about 6 GiB and three minutes.
On a GPU: launch/gpu_check.sh.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comppo_mcore.kernels import compiled, extension, pooling

HEADS, KV_HEADS, WIDTH = 32, 8, 128  # Qwen3-4B
POOL_WIDTH, POOL_OUT, TOP_K = 128, 256, 64
LENGTHS = (1024, 2048, 4096)
MEMORY_LENGTHS = (8192, 16384, 32768)
CHUNK = 256  # rows of the chunked peer
GAE_SHAPE = (64, 4096)
SCALE = WIDTH**-0.5


@dataclass(frozen=True)
class Line:
    """One op at one size: seconds of ours and of each peer."""

    op: str
    size: str
    ours: float
    peers: dict[str, float]


@dataclass(frozen=True)
class Target:
    what: str
    value: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{'met   ' if self.met else 'MISSED'} {self.what}: {self.value:.2f} {sign} {self.limit}"


def cpu_seconds(runs: dict[str, Callable[[], Any]], repeats: int = 5) -> dict[str, float]:
    """Median CPU seconds of each, one repeat of all after another."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            begin = time.process_time()
            result = run()
            if repeat:  # the first one warms up
                times[name].append(time.process_time() - begin)
            del result
    return {name: statistics.median(seconds) for name, seconds in times.items()}


# ---------------------------------------------------------------- op A


def statistics_of(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ a² and the top-K of rows from the attention weights of all heads, [heads, rows, keys]."""
    a = weights.mean(0)
    top = a.topk(min(TOP_K, a.shape[1]))
    return a.square().sum(-1), top.values, top.indices


def eager(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Every weight of every head, as the eager attention of transformers returns them; q, k [heads, T, d]."""
    length = q.shape[1]
    keys = k[:, None].expand(-1, HEADS // KV_HEADS, -1, -1).reshape(q.shape)
    scores = torch.matmul(q, keys.transpose(1, 2)) * SCALE
    mask = torch.full((length, length), torch.finfo(scores.dtype).min).triu(1)
    return statistics_of((scores + mask).softmax(-1))


def thrifty(q: Tensor, k: Tensor, first_row: int = 0) -> tuple[Tensor, ...]:
    """The same without a temporary that could be spared, for the rows from `first_row` on."""
    keys = k.repeat_interleave(HEADS // KV_HEADS, 0)
    scores = (q @ keys.transpose(1, 2)).mul_(SCALE)
    rows = torch.arange(first_row, first_row + q.shape[1])[:, None]
    return statistics_of(scores.masked_fill_(torch.arange(k.shape[1]) > rows, -torch.inf).softmax(-1))


def chunked(q: Tensor, k: Tensor) -> list[tuple[Tensor, ...]]:
    """The rows in chunks, each with the keys up to its end."""
    return [thrifty(q[:, t : t + CHUNK], k[:, : t + CHUNK], t) for t in range(0, q.shape[1], CHUNK)]


def attention_line(length: int) -> Line:
    q, k = torch.randn(length, HEADS, WIDTH) * 1.5, torch.randn(length, KV_HEADS, WIDTH)
    head_q, head_k = (x.transpose(0, 1).contiguous() for x in (q, k))

    def sdpa() -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            head_q[None], head_k[None], head_k[None], 0.0, True
        )

    lse = sdpa()[1][0]
    rows, cu_seqlens, prompt = torch.arange(length), torch.tensor([0, length]), torch.tensor([1])

    def ours(lse: Tensor | None) -> Any:
        options: dict[str, Any] = {"history": "all", "skip_first": 0, "window": None, "top_k": TOP_K}
        return compiled.attention_statistics(
            q, k, lse, rows, cu_seqlens, scale=SCALE, prompt_lengths=prompt, **options
        )

    seconds = cpu_seconds(
        {
            "ours": lambda: ours(lse),
            "ours, no LSE": lambda: ours(None),
            "materialised eager": lambda: eager(head_q, head_k),
            "materialised, in place": lambda: thrifty(head_q, head_k),
            "chunked causal eager": lambda: chunked(head_q, head_k),
            "SDPA-CPU forward": sdpa,
        },
        repeats=15 if length <= 1024 else 5,
    )
    return Line("A statistics + top-64", f"T {length}", seconds.pop("ours"), seconds)


def extra_megabytes(length: int) -> float:
    """What a fresh process needs beyond its inputs for one call of op A."""
    command = [sys.executable, __file__, "--memory-of", str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_extra_megabytes(length: int) -> None:
    extension.load()
    q, k = torch.randn(length, HEADS, WIDTH), torch.randn(length, KV_HEADS, WIDTH)
    lse = torch.full((HEADS, length), 9.0)
    plan = compiled.make_plan(
        torch.arange(length),
        torch.tensor([0, length]),
        torch.tensor([1]),
        length,
        history="all",
        skip_first=0,
        window=None,
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    before = peak_kibibytes()
    compiled.planned_statistics(q, k, lse, plan, scale=SCALE, top_k=TOP_K)
    print((peak_kibibytes() - before) / 1024)


def peak_kibibytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


# ---------------------------------------------------------------- op B


def routing(length: int) -> tuple[Tensor, Tensor]:
    """Top-K as attention has it: the first token, the latest ones, and others anywhere before."""
    position = torch.arange(length)[:, None]
    index = (torch.rand(length, TOP_K) * (position + 1)).int()
    index[:, 0] = 0
    index[:, 1:17] = (position - torch.arange(16)).clamp(min=0)
    index = torch.where(torch.arange(TOP_K) <= position, index, -1).int()
    return index, torch.rand(length, TOP_K) * (index >= 0)


def pooling_lines(length: int) -> list[Line]:
    learned = [torch.randn(length, POOL_WIDTH) for _ in range(2)]
    learned.append(torch.randn(length, 2 * POOL_WIDTH + POOL_OUT))
    for x in learned:
        x.requires_grad_()
    routed = (*routing(length), torch.zeros(length, dtype=torch.int64))
    grads = torch.randn(length, POOL_OUT), torch.randn(length)
    ops = {"ours": compiled.pool_history, "eager": pooling.pool_history}

    def forward(op: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return op(*learned, *routed)

    graphs = {name: op(*learned, *routed) for name, op in ops.items()}

    def backward(outputs: Any) -> Any:
        return torch.autograd.grad(outputs, learned, grads, retain_graph=True)

    forwards = cpu_seconds({name: lambda op=op: forward(op) for name, op in ops.items()})
    backwards = cpu_seconds({name: lambda out=out: backward(out) for name, out in graphs.items()})
    size = f"T {length}"
    return [
        Line("B pooling forward", size, forwards.pop("ours"), forwards),
        Line("B pooling backward", size, backwards.pop("ours"), backwards),
    ]


# ---------------------------------------------------------------- op C


def python_loop(rewards: Tensor, values: Tensor, kappa: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """A and G of padded responses [B, T], a step of Python for every column."""
    advantages = torch.empty_like(rewards)
    advantage = next_value = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + kappa[:, t] * next_value - values[:, t]
        advantage = delta + lam * kappa[:, t] * advantage
        advantages[:, t] = advantage
        next_value = values[:, t]
    return advantages, advantages + values


def gae_line() -> Line:
    rewards, values, kappa = (torch.rand(GAE_SHAPE) for _ in range(3))
    flat = [x.flatten() for x in (rewards, values, kappa)]
    cu_seqlens = torch.arange(GAE_SHAPE[0] + 1) * GAE_SHAPE[1]
    mask = torch.ones(rewards.numel(), dtype=torch.bool)
    seconds = cpu_seconds(
        {
            "ours": lambda: compiled.comp_gae(*flat, cu_seqlens, mask, 0.95),
            "Python loop": lambda: python_loop(rewards, values, kappa, 0.95),
        }
    )
    return Line("C Comp-GAE", f"{list(GAE_SHAPE)}", seconds.pop("ours"), seconds)


# ---------------------------------------------------------------- report


def targets(lines: list[Line], megabytes: dict[int, float]) -> list[Target]:
    out = []

    def speedup(line: Line, peer: str, limit: float) -> None:
        what = f"{line.op}, {line.size}: {peer} / ours"
        out.append(Target(what, line.peers[peer] / line.ours, limit, at_least=True))

    def share(line: Line, ours: float, of: str, peer: float, limit: float) -> None:
        out.append(Target(f"{line.op}, {line.size}: {of}", ours / peer, limit, at_least=False))

    for line in lines:
        if line.op.startswith("A"):
            speedup(line, "materialised eager", 8)
            speedup(line, "chunked causal eager", 2.5)
            share(line, line.ours, "ours / SDPA-CPU forward", line.peers["SDPA-CPU forward"], 0.6)
            share(line, line.peers["ours, no LSE"], "ours without LSE / with", line.ours, 1.2)
        elif line.op.startswith("C"):
            speedup(line, "Python loop", 50)
        else:
            speedup(line, "eager", 4 if "forward" in line.op else 3)
    for short, long in pairwise(MEMORY_LENGTHS):
        growth = math.log2(megabytes[long] / megabytes[short])
        what = f"A memory, T {short} → {long} ({megabytes[long]:.0f} MiB): exponent of T"
        out.append(Target(what, growth, 1.1, at_least=False))
    return out


def table(lines: list[Line]) -> str:
    rows = ["| op | size | ours, ms | peer | peer, ms | peer / ours |", "|---|---|---|---|---|---|"]
    for line in lines:
        for peer, seconds in line.peers.items():
            ours, ratio = 1e3 * line.ours, seconds / line.ours
            rows.append(
                f"| {line.op} | {line.size} | {ours:.1f} | {peer} | {1e3 * seconds:.1f} | {ratio:.2f} |"
            )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.memory_of:
        print_extra_megabytes(arguments.memory_of)
        return 0
    built = extension.load()
    if built is None:
        sys.exit(f"{extension.LIBRARY} is not there: build it with `pip install --no-build-isolation -e .`")
    print(f"torch {torch.__version__}, {built}, one thread", flush=True)
    lines = [attention_line(length) for length in LENGTHS]
    lines += [line for length in LENGTHS for line in pooling_lines(length)]
    lines.append(gae_line())
    megabytes = {length: extra_megabytes(length) for length in MEMORY_LENGTHS}
    checked = targets(lines, megabytes)
    print(table(lines), *checked, sep="\n")
    if arguments.json:
        content = {
            "built": built,
            "lines": [asdict(line) for line in lines],
            "extra_mebibytes": megabytes,
            "targets": [asdict(target) | {"met": target.met} for target in checked],
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(arguments.check and not all(target.met for target in checked))


if __name__ == "__main__":
    sys.exit(main())
