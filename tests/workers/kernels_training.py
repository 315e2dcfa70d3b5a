"""One case of tests/invariance.py with the compiled ops; rank r leaves its finding in OUT/<r>.pt.

Usage: kernels_training.py ROOT OUT CASE; ROOT as `write_folders` fills it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from comppo_mcore.config.schema import ParallelConfig
from comppo_mcore.model import parallel
from tests import invariance


def main(root: Path, out: Path, case: str) -> None:
    warnings.simplefilter("ignore")
    invariance.BASE["kernels"] = {"mode": "require"}
    layout = parallel.initialize(ParallelConfig(), seed=0)
    torch.save(invariance.run(invariance.Case.parse(case), root), out / f"{layout.rank}.pt")
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
