"""The behaviour pass: one forward pass of θ⁻ for log-probs, the gate's statistic, the top-K and the values.

All of it is detached and stored, and reused unchanged in every epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from comppo_mcore.config.algorithm import has_critic
from comppo_mcore.config.schema import Config, GateConfig
from comppo_mcore.credit.concentration import ACCUMULATORS, concentration, empty_history
from comppo_mcore.kernels.concentration import OPTIONAL_STATISTICS
from comppo_mcore.kernels.select import Kernels
from comppo_mcore.kernels.shards import gather_query_shards, gather_rows, owned_rows
from comppo_mcore.model.attention import AttentionInputs
from comppo_mcore.model.batch import MicroBatch, Sample, pack
from comppo_mcore.model.critic import Routing, ValueParts
from comppo_mcore.model.execution import Work, evaluating, forward_only
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import Pass, PolicyModel, PolicyOutput
from comppo_mcore.trainer.schedule import pack_micro_batches


@dataclass(frozen=True)
class Behavior:
    """What θ⁻ said of this data-parallel rank's trajectories, packed in their order.

    Arrays have a row for every response token, and, where `extra_row`, one more at the end of each response.
    """

    cu_rows: Tensor  # int64 [B + 1]
    extra_row: bool
    logprob: Tensor  # float32 [R], over the whole vocabulary
    ratio_logprob: Tensor  # float32 [R], the denominator of ratios (algo.ratio)
    entropy: Tensor  # float32 [R], nats
    concentration: Tensor | None  # c float32 [R]; None where no attention row was read
    other_concentration: Tensor | None  # c over the other history, for the log (gate.watch_other_history)
    empty: Tensor | None  # bool [R], no history or no mass: c was set to 1/2
    values: ValueParts | None  # None for critic-free algorithms
    routing: tuple[Routing, ...] | None  # by trajectory, this tensor-parallel rank's query rows

    def token_rows(self) -> Tensor:
        """Indices of the rows that predict a token (all but extra rows), int64 [N]."""
        keep = torch.ones(int(self.cu_rows[-1]), dtype=torch.bool)
        if self.extra_row:
            keep[self.cu_rows[1:] - 1] = False
        return keep.nonzero()[:, 0]


@dataclass(frozen=True)
class _Reading:
    """One micro-batch's part of a `Behavior`."""

    batch: MicroBatch
    rows: dict[str, Tensor]  # [R] each
    routing: Routing | None


def needs_row(config: Config) -> bool:
    """Whether the attention row is read: the aligned critic takes its top-K, the gate its concentration."""
    reads_gate = config.gate.mode in ("attention", "shuffled")
    return has_critic(config) and (config.critic.kind == "aligned" or reads_gate)


def micro_batches(samples: Sequence[Sample], config: Config, layout: Layout) -> list[MicroBatch]:
    """All samples packed into micro-batches of at most `train.micro_batch_tokens`."""
    cut = pack_micro_batches([s.num_tokens for s in samples], config.train.micro_batch_tokens)
    return [pack_for(config, layout, samples, index) for index in cut]


def pack_for(config: Config, layout: Layout, samples: Sequence[Sample], index: Sequence[int]) -> MicroBatch:
    multiple = layout.tp_size if config.parallel.sequence_parallel else 1
    extra = has_critic(config) and config.transport.bootstrap_on_truncation
    return pack(samples, index, layout.device, multiple_of=multiple, extra_row=extra)


def behavior_pass(
    model: Any, samples: Sequence[Sample], config: Config, layout: Layout, kernels: Kernels
) -> Behavior | None:
    """Run θ⁻ over this rank's trajectories; None but on the last pipeline stage."""
    batches = micro_batches(samples, config, layout)
    request = Pass(config.rollout.temperature, entropy=True, row=needs_row(config))
    read = partial(_read, config=config, kernels=kernels)
    with evaluating(model):
        readings = forward_only(model, [Work(b) for b in batches], request, layout, read)
    return _assemble(readings, config, layout, len(samples)) if layout.is_last_stage else None


def logprob_pass(
    model: Any, samples: Sequence[Sample], config: Config, layout: Layout, temperature: float | None = None
) -> Tensor | None:
    """Log-probs in trajectory order, float32 [N]; None but on the last stage.

    Args:
        temperature: default: the rollout's.
    """
    request = Pass(temperature or config.rollout.temperature)
    cut = pack_micro_batches([s.num_tokens for s in samples], config.train.micro_batch_tokens)
    multiple = layout.tp_size if config.parallel.sequence_parallel else 1
    batches = [pack(samples, index, layout.device, multiple_of=multiple) for index in cut]

    def read(policy: PolicyModel, out: PolicyOutput, work: Work) -> _Reading:
        return _Reading(work.batch, {"logprob": out.logprob}, None)

    with evaluating(model):
        readings = forward_only(model, [Work(b) for b in batches], request, layout, read)
    return _in_order(readings, len(samples), "logprob") if layout.is_last_stage else None


def _read(policy: PolicyModel, out: PolicyOutput, work: Work, config: Config, kernels: Kernels) -> _Reading:
    batch = work.batch
    rows = {"logprob": out.logprob, "ratio_logprob": out.ratio_logprob}
    if out.entropy is not None:
        rows["entropy"] = out.entropy
    routing = None
    if out.row is not None:
        read = partial(read_attention, out.row, batch, config.gate, kernels, policy.pg_collection.tp)
        rows["concentration"], rows["empty"], routing = read(config.gate.history, config.critic.top_k)
        if config.gate.watch_other_history:
            other = "response" if config.gate.history == "all" else "all"
            rows["other_concentration"] = read(other, top_k=1)[0]
    if policy.critic is not None:
        parts = policy.critic_values(out, batch, routing)
        rows |= {"local": parts.local, "dead": parts.dead}
        if parts.routed is not None:
            rows["routed"] = parts.routed
    return _Reading(batch, rows, routing)


def read_attention(
    row: AttentionInputs,
    batch: MicroBatch,
    gate: GateConfig,
    kernels: Kernels,
    tp_group: Any,
    history: Literal["all", "response"],
    top_k: int,
) -> tuple[Tensor, Tensor, Routing]:
    """c of every row (Eq. 18–19), whether it had no history, and the top-K of this rank's query shard."""
    world, rank = tp_group.size(), tp_group.rank()
    rows_per_rank = [batch.rows[batch.owned(world, r)] for r in range(world)]
    q, k, lse = gather_query_shards(row.q, row.k, row.lse, rows_per_rank, tp_group)
    stats, top = kernels.attention_statistics(
        q,
        k,
        lse,
        rows_per_rank[rank],
        batch.cu_seqlens[: batch.num_samples + 1].to(torch.int64),
        scale=row.scale,
        history=history,
        skip_first=gate.skip_first,
        window=None,
        prompt_lengths=torch.tensor(batch.prompt_lengths, device=batch.rows.device),
        top_k=top_k,
        wanted=tuple({ACCUMULATORS[gate.statistic]} & set(OPTIONAL_STATISTICS)),
        renyi_alpha=gate.renyi_alpha,
        mass_top_k=gate.mass_top_k,
    )
    own = concentration(stats, gate.statistic, renyi_alpha=gate.renyi_alpha, mass_top_k=gate.mass_top_k)
    empty = gather_rows(empty_history(stats).float(), rows_per_rank, tp_group) > 0
    return gather_rows(own, rows_per_rank, tp_group), empty, Routing(top.index, top.weight)


def _assemble(readings: list[_Reading], config: Config, layout: Layout, count: int) -> Behavior:
    pick: Callable[[str], Tensor | None] = partial(_in_order, readings, count)
    local = pick("local")
    values = None
    if local is not None:
        dead = pick("dead")
        assert dead is not None
        values = ValueParts(local, pick("routed"), dead)
    lengths = _by_sample(readings, count, lambda r, i: r.batch.cu_rows[i + 1] - r.batch.cu_rows[i])
    logprob, ratio_logprob, entropy = pick("logprob"), pick("ratio_logprob"), pick("entropy")
    assert logprob is not None and ratio_logprob is not None and entropy is not None
    return Behavior(
        cu_rows=torch.tensor([0, *lengths]).cumsum(0),
        extra_row=has_critic(config) and config.transport.bootstrap_on_truncation,
        logprob=logprob,
        ratio_logprob=ratio_logprob,
        entropy=entropy,
        concentration=pick("concentration"),
        other_concentration=pick("other_concentration"),
        empty=pick("empty"),
        values=values,
        routing=_routing_by_sample(readings, layout, count),
    )


def _by_sample(readings: list[_Reading], count: int, value: Callable[[_Reading, int], Any]) -> list[Any]:
    out: list[Any] = [None] * count
    for reading in readings:
        for i, sample in enumerate(reading.batch.index):
            out[sample] = value(reading, i)
    return out


def _in_order(readings: list[_Reading], count: int, name: str) -> Tensor | None:
    """One packed array in trajectory order, whatever micro-batches it came from."""
    if name not in readings[0].rows:
        return None
    cut = _by_sample(readings, count, lambda r, i: r.rows[name][r.batch.cu_rows[i] : r.batch.cu_rows[i + 1]])
    return torch.cat(cut)


def _routing_by_sample(readings: list[_Reading], layout: Layout, count: int) -> tuple[Routing, ...] | None:
    if readings[0].routing is None:
        return None
    out: list[Any] = [None] * count
    for reading in readings:
        assert reading.routing is not None
        cu = reading.batch.cu_rows
        sizes = [len(owned_rows(b - a, layout.tp_size, layout.tp_rank)) for a, b in pairwise(cu)]
        parts = zip(reading.routing.index.split(sizes), reading.routing.weight.split(sizes), strict=True)
        for sample, (index, weight) in zip(reading.batch.index, parts, strict=True):
            out[sample] = Routing(index, weight)
    return tuple(out)


def concatenate_routing(routing: Sequence[Routing]) -> Routing:
    """The stored top-K of a micro-batch's trajectories, in its order."""
    return Routing(torch.cat([r.index for r in routing]), torch.cat([r.weight for r in routing]))
