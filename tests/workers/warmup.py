"""Runs with a critic warm-up on 2 pipeline stages, in fp32 and bf16; prints what moved in each step as JSON.

Usage: warmup.py CONFIG
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

from comppo_mcore.config.load import load
from comppo_mcore.trainer.session import TrainSession
from tests.observed_runs import Observer, join, run


def main(config: str) -> None:
    warnings.simplefilter("ignore")
    join()
    print(json.dumps({dtype: case(config, dtype) for dtype in ("fp32", "bf16")}))


def case(config: str, dtype: str) -> dict[str, Any]:
    """Train to step 3, then go on from its checkpoint to step 4."""
    overrides = (f"run.name={dtype}", f"model.dtype={dtype}")
    first, second = Observer(), Observer()
    with first.watching():
        end = run(load(config, [*overrides, "train.steps=3"]))
    with second.watching():
        end += run(load(config, [*overrides, "train.steps=4"]))
    return {
        "end": end,
        "moved": [
            {role: before[role] != after[role] for role in before}
            for before, after in zip(first.roles[:-1], first.roles[1:], strict=True)
        ],
        "restored": first.roles[-1] == second.roles[0],
        "steps": second.session.optimizer.steps(),
        "dtypes": [dtypes(observer.session) for observer in (first, second)],
    }


def dtypes(session: TrainSession) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {"actor": set(), "critic": set(), "optimizer": set()}
    for name, parameter in session.policy.named_parameters():
        found["critic" if name.startswith("critic.") else "actor"].add(str(parameter.dtype))
    found["optimizer"] |= {str(x.dtype) for x in session.optimizer.tensors()}
    return {part: sorted(names) for part, names in found.items()}


if __name__ == "__main__":
    main(sys.argv[1])
