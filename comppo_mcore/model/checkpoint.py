"""Checkpoints of everything a run needs to go on, through Megatron's `dist_checkpointing`.

A checkpoint is a folder `step_00000012` holding Megatron's shards (model, critic, distributed optimizer,
reshardable over TP and PP), `trainer.json` (all other state) and `manifest.json` (size and CRC-32 of every
file, written last). It is written under a temporary name, synced and renamed: a folder without the suffix
is whole. Every random draw of the trainer is a function of (seed, step, purpose): the step is the RNG state.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from comppo_mcore.errors import UserError
from comppo_mcore.model.optimizer import PolicyOptimizer
from comppo_mcore.model.parallel import Layout, any_rank, gather_objects
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
    """Write a checkpoint; collective over the world. `trainer` is JSON state, equal on every rank.

    Raises:
        UserError: a weight or a moment of the optimizer is NaN or infinite; nothing is written.
    """
    if not is_finite(ddp, optimizer, layout):
        raise UserError(
            f"the weights after step {step} hold NaN or inf and are not saved: relaunch to go on from the "
            f"last checkpoint in {folder}, with lower optim.lr and critic.lr if that does not help"
        )
    final = folder / f"step_{step:08d}"
    with whole_or_not_at_all(final, layout) as partial:
        with cuda_as_cpu(), optimizer.uniform_steps() as steps:
            dist_checkpointing.save(_sharded_state(ddp, optimizer, layout, loading=False), str(partial))
        if layout.rank == 0:
            (partial / "trainer.json").write_text(json.dumps({"optimizer_steps": steps, **trainer}))
    return final


@contextlib.contextmanager
def whole_or_not_at_all(final: Path, layout: Layout) -> Iterator[Path]:
    """A folder that every rank may write into and that is named `final` once it is whole; collective.

    An error inside the block, on any rank, leaves nothing behind.
    """
    partial = final.with_name(final.name + _PARTIAL)
    if layout.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        yield partial
        dist.barrier()
        checks = _checksums(partial, layout)
        if layout.rank == 0:
            (partial / "manifest.json").write_text(json.dumps(checks))
            for path in (*partial.rglob("*"), partial):
                _sync(path)
            os.rename(partial, final)
            _sync(final.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    dist.barrier()


def load(path: Path, ddp: Any, optimizer: PolicyOptimizer, layout: Layout) -> dict[str, Any]:
    """Restore model and optimizer in place and return the trainer's state; collective over the world.

    Raises:
        UserError: the checkpoint is damaged, or holds other tensors than the model and its optimizer.
    """
    verify(path, layout)
    with cuda_as_cpu(), optimizer.uniform_steps():
        state = _read(_sharded_state(ddp, optimizer, layout, loading=True), path, layout)
        _module(ddp).load_state_dict(state["model"])
        optimizer.megatron.load_state_dict(state["optimizer"])
    trainer = read_trainer_state(path)
    optimizer.set_steps(trainer["optimizer_steps"])
    return trainer


def _read(wanted: dict[str, Any], path: Path, layout: Layout) -> Any:
    """The tensors of a checkpoint, which must be those wanted: none more, none less, of the same shapes."""
    state, problem = None, None
    try:
        state = dist_checkpointing.load(wanted, str(path), strict=StrictHandling.RAISE_ALL)
    except (CheckpointingException, CheckpointException) as error:  # of a shape: on its ranks alone
        problem = error
    if any_rank(problem is not None, layout.device):
        raise UserError(
            f"checkpoint {path} holds other tensors than the configured model: set model.path, critic and "
            "algo.name back to what the run began with, or run.name to start another run"
        ) from problem
    return state


def is_finite(ddp: Any, optimizer: PolicyOptimizer, layout: Layout) -> bool:
    """Whether every weight and every moment of the optimizer is a number, on all ranks; collective."""
    mine = all(bool(torch.isfinite(x).all()) for x in (*ddp.parameters(), *optimizer.tensors()))
    return not any_rank(not mine, layout.device)


def read_trainer_state(path: Path) -> dict[str, Any]:
    """The trainer's part of a checkpoint, on this rank alone.

    Raises:
        UserError: it is damaged.
    """
    expected = _manifest(path)
    problem = "manifest.json is missing or unreadable"
    if expected is not None:
        problem = _problem(path, "trainer.json", expected.get("trainer.json"))
    if problem is not None:
        raise UserError(_damaged(path, problem))
    return json.loads((path / "trainer.json").read_text())


def verify(path: Path, layout: Layout) -> None:
    """Check every file against the manifest, the work shared by the ranks; collective over the world.

    Raises:
        UserError: a file is missing, short or altered; names the checkpoint to use instead, on every rank.
    """
    problem = first_problem(path, layout)
    if problem is not None:
        raise UserError(_damaged(path, problem))


def _damaged(path: Path, problem: str) -> str:
    others = [p for p in checkpoints(path.parent).values() if p != path]
    then = f"go on from {others[-1].name}" if others else "start over"
    return f"checkpoint {path} is damaged ({problem}): remove it and relaunch to {then}"


def first_problem(path: Path, layout: Layout) -> str | None:
    """What of a checkpoint differs from its manifest, None if nothing; collective over the world."""
    expected = _manifest(path)
    mine = "manifest.json is missing or unreadable"
    if expected is not None:
        share = sorted(expected.items())[layout.rank :: layout.world_size]
        problems = (_problem(path, name, check) for name, check in share)
        mine = next((p for p in problems if p is not None), None)
    return next((p for p in gather_objects(mine) if p is not None), None)


def _manifest(path: Path) -> dict[str, list[int]] | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _problem(path: Path, name: str, check: list[int] | None) -> str | None:
    whole = (path / name).is_file() and _checksum(path / name) == check
    return None if whole else f"{name} is missing, short or altered"


def prune(folder: Path, keep_last: int, keep: set[int], layout: Layout) -> None:
    """Delete partial checkpoints and all whole ones but the newest `keep_last` and the steps in `keep`.

    Called after a save, so that what a run was resumed from goes only once a newer one is whole.
    """
    if layout.rank == 0 and folder.is_dir():
        whole = checkpoints(folder)
        for step in list(whole)[:-keep_last]:
            if step not in keep:  # renamed first: a name without the suffix stands for a whole checkpoint
                os.rename(whole[step], whole[step].with_name(whole[step].name + _PARTIAL))
        for path in folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def _sharded_state(ddp: Any, optimizer: PolicyOptimizer, layout: Layout, *, loading: bool) -> dict[str, Any]:
    metadata = {"dp_cp_group": layout.groups.dp_cp, **_SHARDING}
    model = _module(ddp).sharded_state_dict(prefix="", metadata=metadata)
    return {
        "model": model,
        "optimizer": optimizer.megatron.sharded_state_dict(model, is_loading=loading, metadata=metadata),
    }


def _module(ddp: Any) -> Any:
    return unwrap_model(ddp)


def _checksums(folder: Path, layout: Layout) -> dict[str, list[int]]:
    """{file: [size, CRC-32]}, the work shared by the ranks."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    mine = {name: _checksum(folder / name) for name in names[layout.rank :: layout.world_size]}
    return {name: check for part in gather_objects(mine) for name, check in part.items()}


def _checksum(path: Path) -> list[int]:
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's names, outlive the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def assert_critic_fp32(ddp: Any) -> None:
    """Critic weights are fp32 in a model of any precision; Float16Module or a load could undo it."""
    critic = _module(ddp).critic
    if critic is None:
        return
    wrong = {name: p.dtype for name, p in critic.named_parameters() if p.dtype != torch.float32}
    assert not wrong, f"critic parameters must be fp32: {wrong}"
