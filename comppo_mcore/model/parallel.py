"""Process groups: initialisation, this rank's coordinates, and the collectives the trainer needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from comppo_mcore.config.schema import ParallelConfig
from comppo_mcore.model.shims import cuda_as_cpu

HEARTBEAT_S = 5.0  # between signs of life while the first rank works alone


@dataclass(frozen=True)
class Layout:
    """This rank's place in the TP × PP × DP grid, and Megatron's groups, passed explicitly from here on."""

    groups: Any  # megatron.core.process_groups_config.ProcessGroupCollection
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def tp_size(self) -> int:
        return self.groups.tp.size()

    @property
    def tp_rank(self) -> int:
        return self.groups.tp.rank()

    @property
    def pp_size(self) -> int:
        return self.groups.pp.size()

    @property
    def pp_rank(self) -> int:
        return self.groups.pp.rank()

    @property
    def dp_size(self) -> int:
        return self.groups.dp.size()

    @property
    def dp_rank(self) -> int:
        return self.groups.dp.rank()

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def last_stage_rank(self) -> int:
        """Global rank of this rank's pipeline's last stage."""
        return dist.get_global_rank(self.groups.pp, self.pp_size - 1)


def initialize(config: ParallelConfig, seed: int) -> Layout:
    """Join the process group (gloo without CUDA, else NCCL) and build Megatron's groups.

    A plain `python` run without torchrun's environment is a world of one.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    timeout = timedelta(minutes=config.timeout_minutes)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        _join(device, timeout)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            context_parallel_size=config.cp,
            distributed_timeout_minutes=max(1, round(config.timeout_minutes)),
            create_gloo_process_groups=False,
        )
    with cuda_as_cpu():
        # Dropout is 0 throughout, so the tracker's official inference flavour is enough and needs no CUDA.
        model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(seed)
    return Layout(ProcessGroupCollection.use_mpu_process_groups(), device)


def _join(device: torch.device, timeout: timedelta) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def shutdown() -> None:
    """Leave Megatron's groups and the process group, so that a later `initialize` may choose anew."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def regroup(config: ParallelConfig, seed: int) -> Layout:
    """Change the layout inside a running process group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return initialize(config, seed)


def all_reduce_sum(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Sum over a group (default: the world), out of place."""
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if true on one."""
    x = torch.tensor([int(flag)], dtype=torch.int32, device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return bool(x.item())


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Every rank's picklable value, in rank order, on every rank of the group."""
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out


def from_rank0(value: Any) -> Any:
    """Rank 0's picklable value on every rank of the world."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first_rank(work: Callable[[], Any]) -> Any:
    """The picklable result of `work`, which rank 0 alone does, on every rank; collective over the world.

    However long it takes: the ranks that wait hear from rank 0 every few seconds, so that no collective times
    out. `work` runs in a thread of its own and must not communicate through torch.

    Raises:
        Whatever `work` raised, on rank 0; the others' broken collective is its echo.
    """
    if dist.get_world_size() == 1:
        return work()
    if dist.get_rank() != 0:
        while not from_rank0(None):
            pass
        return from_rank0(None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while not wait([future], timeout=HEARTBEAT_S).done:
            from_rank0(False)
    result = future.result()
    from_rank0(True)
    return from_rank0(result)


def from_last_stage(value: Any, layout: Layout) -> Any:
    """The last pipeline stage's picklable value on every stage."""
    box = [value]
    if layout.pp_size > 1:
        dist.broadcast_object_list(box, src=layout.last_stage_rank, group=layout.groups.pp)
    return box[0]


def parameter_counts(model: Any, layout: Layout) -> tuple[int, int]:
    """(critic, policy) parameters of the whole model, shared ones counted once; collective."""
    counts = torch.zeros(2, dtype=torch.int64, device=layout.device)
    for name, p in model.named_parameters():
        if getattr(p, "shared", False):  # the last stage's copy of a tied embedding
            continue
        shards = layout.tp_size if getattr(p, "tensor_model_parallel", False) else 1
        counts[0 if name.startswith("critic.") else 1] += p.numel() * shards
    dist.all_reduce(counts, group=layout.groups.pp)
    critic, policy = counts.tolist()
    return critic, policy
