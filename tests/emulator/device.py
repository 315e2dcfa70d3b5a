"""The launchers of csrc/cuda on emulated devices, with numpy arrays in and out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = range(4)
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
OPTIONAL = ("entropy_sum", "max_weight", "power_sum", "topk_mass", "kappa")
SM80, SM90 = 80, 90
SHARED_LIMIT = {SM80: 163 << 10, 86: 99 << 10, SM90: 227 << 10}


class DeviceFault(Exception):
    """A launcher refused its arguments, or the emulator stopped a kernel."""


class CompGae(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32),
        *(
            (name, c_void_p)
            for name in ("rewards", "values", "kappa", "mask", "cu_seqlens", "bootstrap_values")
        ),
        ("num_tokens", c_int64),
        ("num_responses", c_int32),
        ("gaps", c_int32),
        ("lam", c_double),
        *((name, c_void_p) for name in ("delta", "advantage", "lambda_return")),
    ]


class PoolHistory(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32),
        ("query_beta", c_void_p),
        ("query_beta_stride", c_int64),
        ("query_rel", c_void_p),
        ("query_rel_stride", c_int64),
        ("key_features", c_void_p),
        ("key_features_stride", c_int64),
        *((name, c_void_p) for name in ("index", "weight", "seq_start")),
        *((name, c_int32) for name in ("num_rows", "num_keys", "top_k", "width", "out_width")),
        ("epsilon", c_double),
        ("pooled", c_void_p),
        ("score_sum", c_void_p),
    ]


class PoolHistoryBackward(ctypes.Structure):
    _fields_ = [
        ("forward", PoolHistory),
        *((name, c_void_p) for name in ("order", "key_offsets", "chunk_offsets")),
        *((name, c_void_p) for name in ("grad_pooled", "grad_score_sum")),
        *(
            (name, c_void_p)
            for name in ("grad_query_beta", "grad_query_rel", "grad_key_features", "workspace")
        ),
    ]


class AttentionStatistics(ctypes.Structure):
    _fields_ = [
        ("dtype", c_int32),
        ("q", c_void_p),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("k", c_void_p),
        ("k_row_stride", c_int64),
        ("k_head_stride", c_int64),
        ("lse", c_void_p),
        ("lse_head_stride", c_int64),
        ("lse_row_stride", c_int64),
        *((name, c_int32) for name in ("num_rows", "num_keys", "num_heads", "num_kv_heads", "head_dim")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("rows", "items", "blocks")),
        *((name, c_int32) for name in ("num_items", "num_blocks", "top_k", "mass_top_k")),
        *((name, c_float) for name in ("renyi_alpha", "kappa_lo", "kappa_hi", "tau")),
        *((name, c_void_p) for name in ("mass", "sum_squares", "entropy_sum", "max_weight", "power_sum")),
        *((name, c_void_p) for name in ("topk_mass", "kappa", "index", "weight", "workspace")),
    ]


@dataclass
class Memory:
    """Device memory of one call: inputs are read-only, everything ends at a guard page."""

    library: ctypes.CDLL
    taken: list[int] = field(default_factory=list)

    def room(self, num_bytes: int, alignment: int) -> int:
        address = self.library.emulator_allocate(num_bytes, alignment)
        self.taken.append(address)
        return address

    def input(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.room(array.nbytes, array.itemsize)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        self.library.emulator_make_read_only(address)
        return address

    def release(self) -> None:
        untouched = [self.library.emulator_release(address) for address in self.taken]
        if not all(untouched):
            raise DeviceFault("a kernel wrote beside a global array")


class Device:
    """One compiled library of `build.compile_library` and the device it believes to run on."""

    def __init__(self, library: Path, capability: int = SM90, seed: int = 0) -> None:
        self.library = ctypes.CDLL(str(library), mode=os.RTLD_LAZY)  # a library holds some of the launchers
        self.capability, self.seed = capability, seed
        self.library.emulator_allocate.restype = c_void_p
        self.library.emulator_allocate.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self.library.emulator_make_read_only.argtypes = [c_void_p]
        self.library.emulator_release.argtypes = [c_void_p]
        self.library.emulator_release.restype = ctypes.c_bool
        for struct, name in (
            (CompGae, "comp_gae"),
            (PoolHistoryBackward, "pool_history_backward"),
            (AttentionStatistics, "attention_statistics"),
        ):
            assert getattr(self.library, f"size_of_{name}")() == ctypes.sizeof(struct), name

    @contextmanager
    def memory(self) -> Iterator[Memory]:
        memory = Memory(self.library)
        yield memory
        memory.release()

    def call(self, name: str, op: ctypes.Structure) -> None:
        self.library.emulator_configure(
            ctypes.c_uint64(self.seed), self.capability, SHARED_LIMIT[self.capability]
        )
        launcher: Callable[..., bytes | None] = getattr(self.library, name)
        launcher.restype = ctypes.c_char_p
        error = launcher(ctypes.byref(op))
        if error is not None:
            raise DeviceFault(error.decode())

    def workspace(self, name: str, op: ctypes.Structure) -> int:
        size = getattr(self.library, f"{name}_workspace")
        size.restype = ctypes.c_uint64
        self.library.emulator_configure(
            ctypes.c_uint64(self.seed), self.capability, SHARED_LIMIT[self.capability]
        )
        return size(ctypes.byref(op))

    def comp_gae(
        self,
        rewards: np.ndarray,
        values: np.ndarray,
        kappa: np.ndarray,
        mask: np.ndarray,
        cu_seqlens: np.ndarray,
        *,
        lam: float,
        gaps: str,
        bootstrap: np.ndarray | None = None,
    ) -> Arrays:
        with self.memory() as memory:
            num_tokens = len(rewards)
            out = {name: memory.room(4 * num_tokens, 4) for name in ("delta", "advantage", "lambda_return")}
            op = CompGae(
                dtype=FLOAT32,
                rewards=memory.input(rewards),
                values=memory.input(values),
                kappa=memory.input(kappa),
                mask=memory.input(mask),
                cu_seqlens=memory.input(cu_seqlens),
                bootstrap_values=None if bootstrap is None else memory.input(bootstrap),
                num_tokens=num_tokens,
                num_responses=len(cu_seqlens) - 1,
                gaps=("compact", "cut").index(gaps),
                lam=lam,
                **out,
            )
            self.call("comp_gae", op)
            return {name: fetch(address, (num_tokens,), np.float32) for name, address in out.items()}

    def pool_history(self, inputs: Arrays, *, epsilon: float = 1e-8, grads: Arrays | None = None) -> Arrays:
        """pooled and score_sum; with `grads` of both, also the gradients of queries and features."""
        with self.memory() as memory:
            op, shapes = _pool_history(memory, inputs, epsilon)
            self.call("pool_history", op)
            dtype = inputs["key_features"].dtype
            results = {n: fetch(getattr(op, n), s, dtype) for n, s in shapes.items()}
            if grads is not None:
                for name in shapes:  # the backward takes them as inputs
                    setattr(op, name, memory.input(results[name]))
                results |= self._pool_history_backward(memory, op, inputs, grads)
            return results

    def _pool_history_backward(
        self, memory: Memory, op: PoolHistory, inputs: Arrays, grads: Arrays
    ) -> Arrays:
        dtype = inputs["key_features"].dtype
        shapes = {
            "grad_query_beta": inputs["query_beta"].shape,
            "grad_query_rel": inputs["query_rel"].shape,
            "grad_key_features": inputs["key_features"].shape,
        }
        out = {n: memory.room(dtype.itemsize * int(np.prod(s)), dtype.itemsize) for n, s in shapes.items()}
        edges = transpose_edges(inputs["index"], inputs["seq_start"], op.num_keys)
        backward = PoolHistoryBackward(
            forward=op,
            **{name: memory.input(array) for name, array in edges.items()},
            grad_pooled=memory.input(grads["pooled"]),
            grad_score_sum=memory.input(grads["score_sum"]),
            **out,
        )
        backward.workspace = memory.room(self.workspace("pool_history_backward", backward), 256)
        self.call("pool_history_backward", backward)
        return {name: fetch(out[name], shape, dtype) for name, shape in shapes.items()}

    def attention_statistics(
        self,
        x: AttentionInputs,
        *,
        top_k: int = 64,
        wanted: Sequence[str] = OPTIONAL,
        renyi_alpha: float = 3.0,
        mass_top_k: int = 8,
        envelope: tuple[float, float, float] = (0.1, 0.9, 4.0),
    ) -> Arrays:
        with self.memory() as memory:
            num_rows = len(x.rows)
            floats = ("mass", "sum_squares", "weight", *wanted)
            shapes = dict.fromkeys(floats, (num_rows,)) | dict.fromkeys(
                ("weight", "index"), (num_rows, top_k)
            )
            out = {name: memory.room(4 * int(np.prod(shape)), 4) for name, shape in shapes.items()}
            op = AttentionStatistics(
                dtype=DTYPES[x.dtype],
                **_strided(memory, "q", x.q, x.slack),
                **_strided(memory, "k", x.k, x.slack),
                num_rows=num_rows,
                num_keys=len(x.k),
                num_heads=x.q.shape[1],
                num_kv_heads=x.k.shape[1],
                head_dim=x.q.shape[2],
                scale=x.scale,
                rows=memory.input(x.plan.rows),
                items=memory.input(x.plan.items),
                blocks=memory.input(x.plan.blocks),
                num_items=len(x.plan.items),
                num_blocks=len(x.plan.blocks) - 1,
                top_k=top_k,
                mass_top_k=mass_top_k,
                renyi_alpha=renyi_alpha,
                **dict(zip(("kappa_lo", "kappa_hi", "tau"), envelope, strict=True)),
                **out,
            )
            if x.lse is not None:  # [rows, heads] in memory, seen as [heads, rows]
                op.lse, op.lse_head_stride, op.lse_row_stride = memory.input(x.lse.T), 1, x.lse.shape[0]
            op.workspace = memory.room(self.workspace("attention_statistics", op), 256)
            self.call("attention_statistics", op)
            return {
                name: fetch(out[name], shape, np.int32 if name == "index" else np.float32)
                for name, shape in shapes.items()
            }


def _strided(memory: Memory, name: str, x: np.ndarray, slack: int) -> dict[str, int]:
    """x [n, heads, d] in device memory, `slack` unused elements after every head and before the first."""
    n, heads, width = x.shape
    wide = np.full((n, heads, width + slack), 0xFFFF if x.dtype == np.uint16 else np.nan, x.dtype)
    wide[..., :width] = x
    flat = np.concatenate([np.full(slack, wide[:0].dtype.type(0)), wide.ravel()])
    return {
        name: memory.input(flat) + slack * x.itemsize,
        f"{name}_row_stride": heads * (width + slack),
        f"{name}_head_stride": width + slack,
    }


@dataclass(frozen=True)
class Plan:
    """`comppo/plan.h`: int32 [num_rows, 5], [num_items, 4] and [num_blocks + 1]."""

    rows: np.ndarray
    items: np.ndarray
    blocks: np.ndarray


@dataclass(frozen=True)
class AttentionInputs:
    """Packed sequences and the wanted rows; q and lse belong to these rows, in their order."""

    dtype: str  # float32, bfloat16 or float16; the 16-bit ones as uint16 arrays
    q: np.ndarray  # [num_rows, heads, d]
    k: np.ndarray  # [num_keys, kv heads, d]
    lse: np.ndarray | None  # float32 [heads, num_rows]
    rows: np.ndarray  # packed positions
    plan: Plan
    scale: float
    slack: int = 0


def make_plan(
    rows: np.ndarray,
    cu_seqlens: np.ndarray,
    history_from: np.ndarray,
    visible_from: np.ndarray,
    keys_per_item: int = 2048,
) -> Plan:
    """Blocks of up to 64 rows of a sequence, items of up to `keys_per_item` keys."""
    sequence = np.searchsorted(cu_seqlens, rows, side="right") - 1
    start = cu_seqlens[sequence]
    table = np.stack([np.arange(len(rows)), start, rows - start, visible_from, history_from], 1)
    table = table[np.argsort(rows, kind="stable")].astype(np.int32)
    items, blocks, first = [], [0], 0
    while first < len(table):
        same = (table[first : first + 64, 1] == table[first, 1]).sum()
        key, end = table[first, 3] // 128 * 128, table[first + same - 1, 2] + 1
        while key < end:
            stop = min(end, (key // keys_per_item + 1) * keys_per_item)
            items.append((first, same, key, stop))
            key = stop
        blocks.append(len(items))
        first += same
    return Plan(table, np.array(items, np.int32).reshape(-1, 4), np.array(blocks, np.int32))


def _pool_history(
    memory: Memory, x: Arrays, epsilon: float
) -> tuple[PoolHistory, dict[str, tuple[int, ...]]]:
    dtype = x["key_features"].dtype
    num_rows, width = x["query_beta"].shape
    out_width = x["key_features"].shape[1] - 2 * width
    shapes = {"pooled": (num_rows, out_width), "score_sum": (num_rows,)}
    op = PoolHistory(
        dtype=FLOAT64 if dtype == np.float64 else FLOAT32,
        **{name: memory.input(x[name]) for name in ("query_beta", "query_rel", "key_features")},
        query_beta_stride=width,
        query_rel_stride=width,
        key_features_stride=x["key_features"].shape[1],
        **{name: memory.input(x[name]) for name in ("index", "weight", "seq_start")},
        num_rows=num_rows,
        num_keys=len(x["key_features"]),
        top_k=x["index"].shape[1],
        width=width,
        out_width=out_width,
        epsilon=epsilon,
        **{n: memory.room(dtype.itemsize * int(np.prod(s)), dtype.itemsize) for n, s in shapes.items()},
    )
    return op, shapes


def transpose_edges(index: np.ndarray, seq_start: np.ndarray, num_keys: int, chunk: int = 256) -> Arrays:
    """`comppo::Transposed`: the edges by key, and how many chunks of `chunk` edges each key has."""
    used = index.ravel() >= 0
    key = np.where(used, (seq_start[:, None] + index).ravel(), num_keys)
    order = np.argsort(key, kind="stable").astype(np.int32)
    counts = np.bincount(key, minlength=num_keys + 1)[:num_keys]
    return {
        "order": order,
        "key_offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        "chunk_offsets": np.concatenate([[0], np.cumsum(-(-counts // chunk))]).astype(np.int32),
    }


def fetch(address: int | None, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A copy of device memory."""
    array = np.empty(shape, dtype)
    if array.size:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
    return array
