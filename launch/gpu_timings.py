"""The table of docs/performance.md, measured on this machine's GPU: a part of launch/gpu_check.sh."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from gpu_correctness import POOL_OUT, TOP_K, gae_inputs, pooling_inputs, without_wgmma
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from comppo_mcore.kernels import compiled, concentration, extension, pooling

HEADS, KV_HEADS, WIDTH = 32, 8, 128  # Qwen3-4B
LAYERS, HIDDEN, MLP, VOCABULARY = 36, 2560, 9728, 151936
LAM = 0.95


def milliseconds(run: Callable[[], Any], repeats: int = 15) -> float:
    """Median over repeats, by CUDA events."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@dataclass(frozen=True)
class Line:
    """A measured op beside a peer; `target` is the largest share of the peer's time it should take."""

    what: str
    ours: float
    peer: str
    theirs: float
    target: float | None = None

    def __str__(self) -> str:
        ratio = self.ours / self.theirs
        verdict, target = "", ""
        if self.target is not None:
            verdict, target = "met" if ratio <= self.target else "MISSED", f"{self.target:.3f}"
        numbers = f"{self.theirs:9.3f} | {ratio:7.3f} | {target:6} | {verdict:6} |"
        return f"| {self.what:24} | {self.ours:9.3f} | {self.peer:30} | {numbers}"


COLUMNS = {"op": 24, "ours, ms": 9, "peer": 30, "peer, ms": 9, "ratio": 7, "target": 6, "": 6}
HEADER = "\n".join(
    (
        "|".join(["", *(f" {name:{width}} " for name, width in COLUMNS.items()), ""]),
        "|".join(["", *("-" * (width + 2) for width in COLUMNS.values()), ""]),
    )
)


# ---------------------------------------------------------------- op A


def fastest_sdpa(length: int) -> tuple[float, str]:
    """Milliseconds of the fastest causal SDPA forward of the shape, and its backend."""
    q = torch.randn(1, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, KV_HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    times = []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend), torch.no_grad():
                times.append((milliseconds(attend), backend.name.split("_")[0].lower()))
        except RuntimeError as error:
            print(f"gpu_check: no {backend.name} here: {str(error).splitlines()[0]}")
    if not times:
        sys.exit("gpu_check: torch has neither cuDNN nor flash attention here")
    return min(times)


def true_lse(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[heads, T], key head by key head and in chunks of rows."""
    lse = torch.empty(HEADS, len(q), device="cuda")
    group = HEADS // KV_HEADS
    key = torch.arange(len(k), device="cuda")
    for first in range(0, len(q), 1024):
        rows = slice(first, min(first + 1024, len(q)))
        hidden = key[None, :] > key[rows, None]
        for g in range(KV_HEADS):
            heads = slice(g * group, (g + 1) * group)
            scores = torch.einsum("rhd,kd->hrk", q[rows, heads].float(), k[:, g].float()) * scale
            lse[heads, rows] = scores.masked_fill_(hidden, -torch.inf).logsumexp(-1)
    return lse


def time_attention(length: int) -> list[Line]:
    q = torch.randn(length, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(length, KV_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(length, device="cuda")
    cu, prompts = torch.tensor([0, length], device="cuda"), torch.tensor([1], device="cuda")
    options: dict[str, Any] = {"history": "all", "skip_first": 0, "window": None}
    plan = compiled.make_plan(rows, cu, prompts, length, **options)
    common: dict[str, Any] = {"scale": WIDTH**-0.5, "top_k": TOP_K}
    lse = true_lse(q, k, common["scale"])

    def ours(given: Tensor | None) -> Any:
        return compiled.planned_statistics(q, k, given, plan, **common)

    def eager() -> Any:
        return concentration.attention_statistics(
            q, k, lse, rows, cu, prompt_lengths=prompts, max_bytes=1 << 30, **options, **common
        )

    sdpa, backend = fastest_sdpa(length)
    what, peer = f"A {length // 1024}K", f"SDPA forward ({backend})"
    wgmma = milliseconds(lambda: ours(lse))
    with without_wgmma(True):
        mma = milliseconds(lambda: ours(lse))
    lines = [
        Line(f"{what} wgmma", wgmma, peer, sdpa, 0.65),
        Line(f"{what} mma.sync", mma, peer, sdpa, 1.3),
        Line(f"{what} wgmma, no lse", milliseconds(lambda: ours(None)), peer, sdpa),
    ]
    if length <= 16384:
        lines.append(Line(f"{what} wgmma", wgmma, "chunked eager", milliseconds(eager, 3), 0.125))
    return lines


# ---------------------------------------------------------------- op B


def time_pooling(length: int) -> list[Line]:
    inputs = pooling_inputs(length, "cuda")
    grad = torch.ones(length, POOL_OUT, device="cuda")

    def both(op: Callable) -> tuple[float, float]:
        pooled = op(*inputs)[0]
        with torch.no_grad():
            forward = milliseconds(lambda: op(*inputs))
        backward = milliseconds(lambda: torch.autograd.grad(pooled, inputs[:3], grad, retain_graph=True))
        return forward, backward

    lines = []
    limits = (("forward", 0.5), ("backward", 1.5))
    ours, eager = both(torch_op), both(pooling.pool_history)
    for (what, limit), mine, theirs in zip(limits, ours, eager, strict=True):
        name = f"B {length // 1024}K {what}"
        lines += [Line(name, mine, "limit", limit, 1.0), Line(name, mine, "eager", theirs)]
    return lines


def torch_op(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The op without the checks of its arguments, which wait for the GPU."""
    return torch.ops.comppo.pool_history(*inputs, pooling.ROUTE_EPSILON)


# ---------------------------------------------------------------- op C and its peers


def python_loop(rewards: Tensor, values: Tensor, kappa: Tensor) -> Tensor:
    """Comp-GAE of [B, T] as a loop over columns, one small kernel after another."""
    advantage, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + kappa[:, t] * next_value - values[:, t]
        advantage = delta + LAM * kappa[:, t] * advantage
        next_value = values[:, t]
        columns.append(advantage)
    return torch.stack(columns[::-1], 1)


def toeplitz_chunks(delta: Tensor, discount: float, chunk: int = 128) -> Tensor:
    """A constant discount of [B, T] by products with a chunk × chunk matrix, which cannot express κ_t."""
    batch, length = delta.shape
    step = torch.arange(chunk, device=delta.device)
    distance = step[:, None] - step[None, :]
    powers = torch.where(distance >= 0, discount ** distance.clamp(min=0), 0.0)
    local = delta.view(batch, length // chunk, chunk) @ powers
    carry = torch.zeros(batch, device=delta.device)
    for c in reversed(range(length // chunk)):
        local[:, c] += carry[:, None] * discount ** (chunk - step)
        carry = local[:, c, 0]
    return local.view(batch, length)


def serial_thread() -> Callable | None:
    """One thread per response, token after token; None where triton is missing."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def kernel(rewards, values, kappa, advantages, length, lam):
        base = tl.program_id(0).to(tl.int64) * length
        advantage = 0.0
        next_value = 0.0
        for i in range(length):
            at = base + length - 1 - i
            gate, value = tl.load(kappa + at), tl.load(values + at)
            delta = tl.load(rewards + at) + gate * next_value - value
            advantage = delta + lam * gate * advantage
            next_value = value
            tl.store(advantages + at, advantage)

    return kernel


def time_comp_gae(batch: int, length: int) -> list[Line]:
    rewards, values, kappa, cu_seqlens, mask = gae_inputs([length] * batch, "cuda", 0.0)
    table = [x.contiguous().view(batch, length) for x in (rewards, values, kappa)]
    flat = [x.view(-1) for x in table]
    what, out = f"C [{batch}, {length}]", torch.empty(batch, length, device="cuda")
    ours = milliseconds(lambda: torch.ops.comppo.comp_gae(*flat, cu_seqlens, mask, None, LAM, False))
    toeplitz = milliseconds(lambda: toeplitz_chunks(table[0], LAM))
    lines = [
        Line(what, ours, "Python loop over columns", milliseconds(lambda: python_loop(*table), 3), 0.02),
        Line(what, ours, "Toeplitz chunks, constant κ", toeplitz),
    ]
    kernel = serial_thread()
    if kernel is None:
        print("gpu_check: no triton: the scan by one serial thread per response is left out")
    else:
        serial = milliseconds(lambda: kernel[(batch,)](*table, out, length, LAM, num_warps=1), 5)
        lines.append(Line(what, ours, "one serial thread per response", serial))
    return lines


# ---------------------------------------------------------------- the whole pass


def model_forward(length: int) -> float:
    """Milliseconds of the matrix products and the attention of a Qwen3-4B forward pass of one sequence."""
    shapes = (
        (HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH),
        (HEADS * WIDTH, HIDDEN),
        (HIDDEN, 2 * MLP),
        (MLP, HIDDEN),
    )
    layer = sum(time_linear(length, *shape) for shape in shapes) + fastest_sdpa(length)[0]
    return LAYERS * layer + 4 * time_linear(length, HIDDEN, VOCABULARY // 4)


def time_linear(length: int, fan_in: int, fan_out: int) -> float:
    x = torch.randn(length, fan_in, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(fan_out, fan_in, device="cuda", dtype=torch.bfloat16)
    return milliseconds(lambda: F.linear(x, weight), 5)


def main() -> None:
    built = extension.load()
    if built is None:
        sys.exit("gpu_check: the compiled ops are not built")
    torch.manual_seed(0)
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, ops {built}; medians\n\n{HEADER}")
    ours: dict[str, float] = {}
    parts: list[Callable[[], list[Line]]] = [
        *(lambda n=n: time_attention(n) for n in (4096, 16384, 32768)),
        lambda: time_pooling(16384),
        *(lambda b=b, n=n: time_comp_gae(b, n) for b, n in ((64, 4096), (1, 16384))),
    ]
    for part in parts:
        for line in part():
            ours[line.what] = line.ours
            print(line, flush=True)
        torch.cuda.empty_cache()
    total = ours["A 16K wgmma"] + ours["B 16K forward"] + ours["C [1, 16384]"]
    print(Line("A + B + C 16K", total, "Qwen3-4B behaviour pass", model_forward(16384), 0.03))


if __name__ == "__main__":
    main()
