"""Cases of tests/invariance.py, one after another; rank r leaves its findings in OUT/<r>.pt.

Usage: invariance.py ROOT OUT CASE [CASE ...]; ROOT as `write_folders` fills it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from comppo_mcore.config.schema import ParallelConfig
from comppo_mcore.model import parallel
from tests.invariance import Case, run


def main(root: Path, out: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    layout = parallel.initialize(ParallelConfig(), seed=0)
    findings = {case: run(Case.parse(case), root) for case in cases}
    torch.save(findings, out / f"{layout.rank}.pt")
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
