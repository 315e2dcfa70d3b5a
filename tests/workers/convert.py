"""On four ranks, TP = 2, PP = 2: writes a Megatron checkpoint of every case, and loads that of one process.

Usage: convert.py ROOT CASE [CASE ...]; ROOT/<case> is a HF folder and ROOT/<case>_1 the checkpoint that one
process made of it. Each rank prints by case, as JSON, its largest log-prob error against transformers and
Σ |w| over the rows that pad its vocabulary.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from comppo_mcore.model import parallel, weights
from comppo_mcore.trainer import convert
from tests.policies import (
    largest_difference,
    new_policy,
    parallel_config,
    policy_logprobs,
    probes,
    reference_logprobs,
)
from tests.workers.hf_export import padding_sum

SIZES = {"tp": 2, "pp": 2}


def main(root: Path, cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    sizes = parallel_config(**SIZES)
    layout = parallel.initialize(sizes, seed=1)
    found = {}
    for case in cases:
        folder = root / case
        convert.convert(convert.Conversion(folder, root / f"{case}_4", "megatron", sizes, None, None))
        policy = new_policy(folder, layout, **SIZES).eval()
        weights.load(policy, layout, root / f"{case}_1")
        ours = policy_logprobs(policy, layout, probes())
        error = largest_difference(ours, reference_logprobs(folder, probes())) if ours else 0.0
        found[case] = {"error": error, "padding": padding_sum(policy, layout)}
    print(json.dumps(found))
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
