"""Running micro-batches through Megatron's pipeline schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from comppo_mcore.model.batch import MicroBatch
from comppo_mcore.model.critic import Routing, ValueParts
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import Pass, PolicyModel, PolicyOutput, policy_of
from comppo_mcore.model.shims import cuda_as_cpu

T = TypeVar("T")
Item = TypeVar("Item", bound="Work")


@dataclass(frozen=True)
class Work:
    """One micro-batch and the stored routing its values need; subclasses carry what their loss needs."""

    batch: MicroBatch
    routing: Routing | None = None


def forward_only(
    model: Any,
    work: Sequence[Work],
    request: Pass,
    layout: Layout,
    collect: Callable[[PolicyModel, PolicyOutput, Work], T],
) -> list[T]:
    """`collect` applied to every micro-batch's output, in order; empty but on the last pipeline stage."""
    policy = policy_of(model)

    def reduce(item: Work, out: Any) -> tuple[Tensor, Tensor, T]:
        return _nothing(layout), _no_tokens(layout), collect(policy, out[0], item)

    def step(items: Iterator[Work], chunk: Any) -> tuple[Any, Any]:
        item = next(items)
        return chunk(item.batch, request, item.routing), partial(reduce, item)

    with torch.no_grad():
        return _run(model, work, step, layout, forward_only=True)


def forward_backward(
    ddp: Any,
    work: Sequence[Item],
    request: Pass,
    layout: Layout,
    loss: Callable[[Item, PolicyOutput, ValueParts | None], tuple[Tensor, T]],
) -> list[T]:
    """Accumulate the gradient of Σ loss over micro-batches and reduce it over the data-parallel ranks.

    `loss` returns a scalar already divided by the minibatch's global denominator, and a record for the
    metrics; the records come back in order, on the last pipeline stage only.
    """
    config = policy_of(ddp).config
    config.no_sync_func = ddp.no_sync
    # Megatron would divide by a token count; our losses are normalised before they get here.
    config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(
        chunks, None, pg_collection=layout.groups
    )

    def reduce(item: Item, out: Any) -> tuple[Tensor, Tensor, T]:
        value, record = loss(item, *out)
        return value, _no_tokens(layout), record

    def step(items: Iterator[Item], chunk: Any) -> tuple[Any, Any]:
        item = next(items)
        return chunk(item.batch, request, item.routing), partial(reduce, item)

    ddp.zero_grad_buffer()
    return _run(ddp, work, step, layout, forward_only=False)


def _run(model: Any, work: Sequence[Any], step: Any, layout: Layout, *, forward_only: bool) -> list[Any]:
    pipelined = layout.pp_size > 1
    with cuda_as_cpu():
        records = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(work),
            model=[model],
            num_microbatches=len(work),
            seq_length=max(len(item.batch.tokens) for item in work),
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=P2PCommunicator(layout.groups.pp, policy_of(model).config)
            if pipelined
            else None,
            pg_collection=layout.groups,
        )
    return list(records) if layout.is_last_stage else []


def _nothing(layout: Layout) -> Tensor:
    return torch.zeros((), device=layout.device)


def _no_tokens(layout: Layout) -> Tensor:
    return torch.zeros((), dtype=torch.int32, device=layout.device)


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for a forward-only pass."""
    model.eval()
    try:
        yield
    finally:
        model.train()
