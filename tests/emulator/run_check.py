"""Runs checks on warp orders 0 … SEEDS − 1.

python -m tests.emulator.run_check LIBRARY OP CHECK,…|all SEEDS
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.emulator.checks import CHECKS
from tests.emulator.device import Device


def run_check(device: Device, op: str, name: str, num_seeds: int) -> None:
    """One check under several warp orders.

    Raises:
        AssertionError: it fails, or two orders give different bits.
        DeviceFault: the emulator stops a kernel.
    """
    first = None
    for seed in range(num_seeds):
        device.seed = seed
        results = CHECKS[op][name](device)
        first = results if first is None else first
        for key, array in results.items():
            assert array.tobytes() == first[key].tobytes(), f"{key} depends on the order of warps"


def main() -> None:
    library, op, names, num_seeds = sys.argv[1:]
    device = Device(Path(library))
    for check in CHECKS[op] if names == "all" else names.split(","):
        run_check(device, op, check, int(num_seeds))


if __name__ == "__main__":
    main()
