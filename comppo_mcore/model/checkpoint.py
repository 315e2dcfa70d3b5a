"""Checkpoints of everything a run needs to go on, through Megatron's `dist_checkpointing`.

A checkpoint is a folder `step_00000012` holding Megatron's shards (model, critic, distributed optimizer,
reshardable over TP and PP), `trainer.json` (all other state) and `manifest.json` (size and CRC-32 of every
file, written last). It is written under a temporary name, synced and renamed: a folder without the suffix
is whole. Every random draw of the trainer is a function of (seed, step, purpose), so the step is the RNG state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model

from comppo_mcore.errors import UserError
from comppo_mcore.model.optimizer import PolicyOptimizer
from comppo_mcore.model.parallel import Layout, gather_objects
from comppo_mcore.model.shims import cuda_as_cpu

_NAME = re.compile(r"step_(\d{8})")
_PARTIAL = ".partial"
# Megatron's default sharding of the distributed optimizer cannot be loaded at another layout.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def checkpoints(folder: Path) -> dict[int, Path]:
    """Whole checkpoints by step, ascending."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): p for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))}
    return dict(sorted(found.items()))


def save(
    folder: Path, step: int, ddp: Any, optimizer: PolicyOptimizer, layout: Layout, trainer: dict[str, Any]
) -> Path:
    """Write a checkpoint; collective over the world. `trainer` is JSON state, equal on every rank."""
    final = folder / f"step_{step:08d}"
    partial = final.with_name(final.name + _PARTIAL)
    if layout.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    with cuda_as_cpu(), optimizer.uniform_steps() as steps:
        dist_checkpointing.save(_sharded_state(ddp, optimizer, layout, loading=False), str(partial))
    dist.barrier()
    if layout.rank == 0:
        (partial / "trainer.json").write_text(json.dumps({"optimizer_steps": steps, **trainer}))
    dist.barrier()
    checks = _checksums(partial, layout)
    if layout.rank == 0:
        (partial / "manifest.json").write_text(json.dumps(checks))
        for path in partial.iterdir():
            _fsync(path)
        _fsync(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        _fsync(folder)
    dist.barrier()
    return final


def load(path: Path, ddp: Any, optimizer: PolicyOptimizer, layout: Layout) -> dict[str, Any]:
    """Restore model and optimizer in place and return the trainer's state; collective over the world."""
    verify(path, layout)
    with cuda_as_cpu(), optimizer.uniform_steps():
        state = dist_checkpointing.load(_sharded_state(ddp, optimizer, layout, loading=True), str(path))
        unwrap_model(ddp).load_state_dict(state["model"], strict=False)
        optimizer.megatron.load_state_dict(state["optimizer"])
    trainer = read_trainer_state(path)
    optimizer.set_steps(trainer["optimizer_steps"])
    return trainer


def read_trainer_state(path: Path) -> dict[str, Any]:
    return json.loads((path / "trainer.json").read_text())


def verify(path: Path, layout: Layout) -> None:
    """Raise on every rank if a file is missing, short or altered, and name the checkpoint to use instead."""
    problem = _first_problem(path, layout)
    if problem is None:
        return
    others = [p for step, p in checkpoints(path.parent).items() if p != path]
    remedy = (
        f"remove {path} and relaunch to go on from {others[-1].name}"
        if others
        else f"remove {path} and relaunch to start over"
    )
    raise UserError(f"checkpoint {path} is damaged ({problem}): {remedy}")


def _first_problem(path: Path, layout: Layout) -> str | None:
    try:
        expected: dict[str, list[int]] | None = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        expected = None
    if expected is None:
        mine = "manifest.json is missing or unreadable"
    else:
        mine = next(
            (
                f"{name} is missing, short or altered"
                for name, check in sorted(expected.items())[layout.rank :: layout.world_size]
                if not (path / name).is_file() or _checksum(path / name) != check
            ),
            None,
        )
    return next((p for p in gather_objects(mine) if p is not None), None)


def prune(folder: Path, keep_last: int, keep: set[int], layout: Layout) -> None:
    """Delete partial checkpoints and all whole ones but the newest `keep_last` and the steps in `keep`."""
    if layout.rank == 0 and folder.is_dir():
        for path in folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)
        whole = checkpoints(folder)
        for step in list(whole)[:-keep_last]:
            if step not in keep:
                shutil.rmtree(whole[step], ignore_errors=True)
    dist.barrier()


def _sharded_state(ddp: Any, optimizer: PolicyOptimizer, layout: Layout, *, loading: bool) -> dict[str, Any]:
    metadata = {"dp_cp_group": layout.groups.dp_cp, **_SHARDING}
    model = unwrap_model(ddp).sharded_state_dict(prefix="", metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer.megatron.sharded_state_dict(model, is_loading=loading, metadata=metadata),
    }


def _checksums(folder: Path, layout: Layout) -> dict[str, list[int]]:
    """{file: [size, CRC-32]}, the work shared by the ranks."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    mine = {name: _checksum(folder / name) for name in names[layout.rank :: layout.world_size]}
    return {name: check for part in gather_objects(mine) for name, check in part.items()}


def _checksum(path: Path) -> list[int]:
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def assert_critic_fp32(ddp: Any) -> None:
    """Critic weights are fp32 whatever the model's precision; Float16Module and loading could undo it silently."""
    critic = unwrap_model(ddp).critic
    if critic is None:
        return
    wrong = {name: p.dtype for name, p in critic.named_parameters() if p.dtype != torch.float32}
    assert not wrong, f"critic parameters must be fp32: {wrong}"
