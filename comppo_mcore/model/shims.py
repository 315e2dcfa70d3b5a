"""What Megatron-Core 0.19.2 needs to run on a host without CUDA. Nothing here acts where CUDA is present.

Import this module before `megatron.core`; run Megatron code inside `cuda_as_cpu()`.
The redirection is scoped (a `TorchFunctionMode` and `mock.patch`), because replacing
`torch.zeros` and friends for good corrupts libraries that build on the meta device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_PAGED_STASH = "megatron.core.transformer.moe.ops.paged_stash"


def _seed_paged_stash() -> None:
    """Stand in for the one module on `import megatron.core`'s path that needs triton (MoE stash kernels)."""
    if importlib.util.find_spec("triton") is not None or _PAGED_STASH in sys.modules:
        return

    def needs_triton(*_: Any, **__: Any) -> None:
        raise RuntimeError("the MoE paged stash needs triton")

    module = types.ModuleType(_PAGED_STASH)
    vars(module).update(
        GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=needs_triton, paged_stash_pop_kernel=needs_triton
    )
    sys.modules[_PAGED_STASH] = module


_seed_paged_stash()


class _HostStream:
    """The part of `torch.cuda.Stream` that Megatron touches; on a host all is in order already."""

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _HostStream:
        return self


class _CudaAsCpu(torch.overrides.TorchFunctionMode):
    """Maps `device="cuda…"` to the CPU, makes `Tensor.cuda` the identity, and lets `Tensor.type()`
    report the CUDA type string, by which Megatron's optimizers sort parameters."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Run Megatron code with its hard-coded CUDA calls redirected to the CPU. Re-entrant."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random as tp_random

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        # torch's AdamW keeps `step` per parameter, and Megatron restores it from the parameter groups.
        tensors.setdefault("step", None)
        return original(self, model_param, tensors)

    def get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    replacements: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "current_stream", lambda *_: _HostStream()),
        (torch.cuda, "Stream", _HostStream),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", get_rng_state),
        (tp_random, "_get_cuda_rng_state", get_rng_state),
        (tp_random, "_set_cuda_rng_state", set_rng_state),
        (DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states),
        # The default is a manager process: 9–15 s a save on a small host.
        (filesystem_async, "_results_queue", queue.Queue()),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_CudaAsCpu())
        yield
