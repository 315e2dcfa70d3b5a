"""The CUDA kernels, unchanged, on a SIMT emulator, against float64 oracles.

The emulator shows that a kernel computes the right thing whatever the order of its warps and of its copies;
it is no model of the hardware (tests/emulator/simt.hpp says what it leaves out).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import build
from tests.emulator.checks import CHECKS
from tests.emulator.device import AttentionStatistics, CompGae, Device, DeviceFault, PoolHistory
from tests.emulator.run_check import run_check

NUM_SEEDS = 3
NAMES = [(op, name) for op, checks in CHECKS.items() for name in checks]


@pytest.fixture(scope="module")
def devices() -> dict[str, Device]:
    return {op: Device(build.compile_library(op)) for op in CHECKS}


@pytest.mark.parametrize(("op", "name"), NAMES, ids=[f"{op}-{name}" for op, name in NAMES])
def test_kernel_matches_oracle(devices: dict[str, Device], op: str, name: str) -> None:
    """Right, and the same bits under every warp order."""
    run_check(devices[op], op, name, NUM_SEEDS)


def test_unsupported_types_are_refused(devices: dict[str, Device]) -> None:
    """A launcher that is handed what it cannot do says so instead of launching."""
    for op, struct, dtype, message in (
        ("comp_gae", CompGae, 1, "float32"),
        ("pool_history", PoolHistory, 2, "float32 or float64"),
        ("attention_statistics", AttentionStatistics, 1, "float32, bfloat16 or float16"),
    ):
        arguments = struct(dtype=dtype)
        if op == "attention_statistics":
            arguments.num_heads = arguments.num_kv_heads = 1
        with pytest.raises(DeviceFault, match=message):
            devices[op].call(op, arguments)
    with pytest.raises(DeviceFault, match="64 edges"):
        devices["pool_history"].call("pool_history", PoolHistory(dtype=0, top_k=65))


def test_emulator_catches_reads_past_an_input(devices: dict[str, Device]) -> None:
    """The checks' safety net: an offset beyond the array ends the launch with a fault."""
    n = 1024
    x = np.zeros(n, np.float32)
    beyond = np.array([0, n + 2048], np.int64)
    with pytest.raises(DeviceFault, match="global memory"):
        devices["comp_gae"].comp_gae(x, x, x, np.ones(n, bool), beyond, lam=1.0, gaps="cut")
