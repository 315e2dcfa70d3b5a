"""Gathering one step's tokens on rank 0 and measuring them there; every rank receives the numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comppo_mcore.config.schema import Config
from comppo_mcore.credit.gate import Envelope, attention_gate
from comppo_mcore.model.parallel import Layout, from_rank0, gather_objects
from comppo_mcore.trainer import gate_table
from comppo_mcore.trainer.behavior import Behavior
from comppo_mcore.trainer.experience import Experience
from comppo_mcore.trainer.metrics import other_history, step_metrics
from comppo_mcore.trainer.records import TokenTable
from comppo_mcore.trainer.transport import Credit

_CRITIC = ("kappa", "value", "lambda_return", "dead", "saturated")


def measure(
    experience: Experience,
    behavior: Behavior | None,
    ref_logprob: Tensor | None,
    credit: Credit | None,
    envelope: Envelope,
    config: Config,
    layout: Layout,
) -> dict[str, float]:
    """Everything the step's tokens say before the update, on every rank; collective over the world."""
    part = None
    if behavior is not None and credit is not None and layout.tp_rank == 0:
        part = _part(behavior, ref_logprob, credit, envelope)
    parts = [p for p in gather_objects((layout.dp_rank, part)) if p[1] is not None]
    metrics: dict[str, float] = {}
    if layout.rank == 0:
        in_order = [p for _, p in sorted(parts, key=lambda p: p[0])]
        empty = torch.cat([p.pop("empty") for p in in_order]) if "empty" in in_order[0] else None
        others = [p.pop("other_kappa") for p in in_order if "other_kappa" in p]
        table = token_table(experience, in_order)
        metrics = step_metrics(
            table, group_size=config.rollout.responses, lam=envelope.lam, gaps=config.transport.gaps
        )
        if others:
            metrics |= other_history(torch.cat(others), table)
        if empty is not None:
            metrics["gate/empty_rows"] = float(empty[table.mask].double().mean())
        if table.kappa is not None and config.gate.mode == "attention":
            metrics |= gate_table.position_entries(table.kappa, table.cu_seqlens, table.mask)
    return from_rank0(metrics)


def _part(
    behavior: Behavior, ref_logprob: Tensor | None, credit: Credit, envelope: Envelope
) -> dict[str, Tensor]:
    """This data-parallel rank's token arrays, on the CPU."""
    rows = behavior.token_rows().to(credit.mask.device)
    part = {
        "mask": credit.mask,
        "logprob": behavior.logprob[rows],
        "ref_logprob": ref_logprob,
        "entropy": behavior.entropy[rows],
        "advantage": credit.advantage,
        "credit": credit.credit,
        "kappa": credit.kappa,
        "value": credit.value,
        "lambda_return": credit.lambda_return,
    }
    if behavior.empty is not None:
        part["empty"] = behavior.empty[rows]
    if behavior.other_concentration is not None:
        part["other_kappa"] = attention_gate(behavior.other_concentration[rows], envelope)
    if behavior.values is not None and credit.value is not None:
        part["dead"] = behavior.values.dead[rows]
        part["saturated"] = credit.value.abs() >= 1  # the clamp's bound: nothing else lands there
    return {name: x.detach().cpu() for name, x in part.items() if x is not None}


def token_table(experience: Experience, parts: list[dict[str, Tensor]]) -> TokenTable:
    """The step's table from the parts of all data-parallel ranks, in their order."""
    everything = torch.arange(len(experience.graded))
    lengths = torch.tensor([0, *(len(m) for m in experience.evidence.masks)])
    tokens: dict[str, Any] = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    tokens |= {name: None for name in ("ref_logprob", *_CRITIC) if name not in tokens}
    rewards = experience.rewards

    def floats(name: str) -> Tensor:
        return torch.tensor([getattr(r, name) for r in rewards], dtype=torch.float32)

    def flags(name: str) -> Tensor:
        return torch.tensor([getattr(r, name) for r in rewards], dtype=torch.bool)

    return TokenTable(
        cu_seqlens=lengths.cumsum(0),
        fresh=experience.fresh(),
        engine_logprob=experience.engine_logprobs(everything),
        reward=floats("total"),
        reward_accuracy=floats("accuracy"),
        reward_format=floats("format"),
        reward_length=floats("length"),
        correct=flags("correct"),
        formatted=flags("formatted"),
        timed_out=flags("timed_out"),
        truncated=experience.evidence.truncated,
        **tokens,
    )
