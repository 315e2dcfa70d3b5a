"""Checkpoints of a PP = 2 run under other layouts and damages, on 2 ranks; prints what ended each as JSON.

Usage: reshard.py CONFIG RUNS; afterwards RUNS/<name> holds the run continued under that layout.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

import comppo_mcore.model  # noqa: F401  (prepares the import of megatron)
from comppo_mcore.config.load import load
from comppo_mcore.errors import UserError
from comppo_mcore.model import parallel
from comppo_mcore.trainer import train

LAYOUTS = {
    "pp2": (),
    "tp2": ("parallel.pp=1", "parallel.last_stage_layers=null", "parallel.tp=2"),
    "dp2": ("parallel.pp=1", "parallel.last_stage_layers=null"),
    "standard_critic": ("critic.kind=standard",),
    "other_width": ("critic.width=8",),
    "no_critic": ("algo.name=grpo",),
    "damaged": (),
}


def run(config: str, *overrides: str) -> str:
    """ "" when the run came to its end, else the user error."""
    from megatron.core import parallel_state

    try:
        train.main(load(config, overrides))
    except UserError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return ""


def main(config: str, runs: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    parallel.shutdown = lambda: None  # one process group for all runs
    ends = {"base": run(config, "run.name=base", "train.steps=2")}
    for name, overrides in LAYOUTS.items():
        if dist.get_rank() == 0:
            shutil.copytree(runs / "base", runs / name)
            if name == "damaged":
                flip_last_byte(runs / name / "checkpoints" / "step_00000002" / "__1_0.distcp")
        dist.barrier()
        ends[name] = run(
            config, f"run.name={name}", "train.steps=3", "run.allow_config_change=true", *overrides
        )
    print(json.dumps(ends))


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
