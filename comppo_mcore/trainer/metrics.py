"""What is measured on every step: a flat record of floats under slash-separated keys.

Pure functions of the stage records; sums run in float64 over valid tokens (`mask`) only. An entry that a step
does not define (no incorrect response, returns without variance, no critic, NaN in a bad step) is absent from
the record. Shares are in [0, 1], log-probs, KL and entropy in nats per token, lengths in valid tokens.

`gate/` κ · `credit/` reach and advantages · `critic/` fit of V to G · `policy/`, `kl/`, `loss/`, `grad/`,
`optimizer/` the update · `gap/` engine against trainer, over tokens of the present weights and of older
ones · `reward/`, `response/`, `group/`, `rollout/` the rollout · `controller/` phase and knobs. `time/`,
`tokens/` and `memory/` come from trainer.logging, `eval/` from trainer.history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from torch import Tensor

from comppo_mcore.credit import packed
from comppo_mcore.credit.controller import ControllerState, Knobs
from comppo_mcore.credit.objective import kl_estimate
from comppo_mcore.credit.packed import Gaps
from comppo_mcore.credit.reach import LOW_REACH, MIN_WEIGHT, credit_reach, share_beyond_reach
from comppo_mcore.credit.transport import trace_weights
from comppo_mcore.rollout.gap import engine_gap
from comppo_mcore.trainer.records import TokenTable

Entries = dict[str, float | None]  # None and NaN: not defined in this step


def step_metrics(table: TokenTable, *, group_size: int, lam: float, gaps: Gaps) -> dict[str, float]:
    """Everything that a step's tokens say, before the update.

    Args:
        table: all trajectories of the step.
        group_size: responses per prompt; those of a prompt are neighbours.
        lam: λ of the transport.
        gaps: gap rule of the transport.

    Returns:
        The defined entries.

    Raises:
        ValueError: the group size does not divide the number of responses.
    """
    return _defined(
        {
            **_gate(table),
            **_credit(table, lam, gaps),
            **_critic(table),
            **_policy(table),
            **_rewards(table),
            **_responses(table),
            **_groups(table, group_size),
        }
    )


def _defined(entries: Mapping[str, float | None]) -> dict[str, float]:
    return {key: float(value) for key, value in entries.items() if value is not None and math.isfinite(value)}


def _gate(table: TokenTable) -> Entries:
    """κ over all valid tokens, by thirds of the response, and by its outcome."""
    if table.kappa is None:
        return {}
    kappa = table.kappa[table.mask].double()
    correct = packed.broadcast(table.correct, table.cu_seqlens)[table.mask]
    q05, q25, q50, q75, q95 = _quantiles(kappa, (0.05, 0.25, 0.5, 0.75, 0.95))
    return {
        "gate/kappa_mean": _mean(kappa),
        "gate/kappa_median": q50,
        "gate/kappa_iqr": q75 - q25,
        "gate/kappa_q05": q05,
        "gate/kappa_q25": q25,
        "gate/kappa_q75": q75,
        "gate/kappa_q95": q95,
        **_thirds("gate/kappa", kappa, table),
        "gate/kappa_correct": _mean(kappa[correct]),
        "gate/kappa_incorrect": _mean(kappa[~correct]),
    }


def other_history(kappa: Tensor, table: TokenTable) -> dict[str, float]:
    """What κ, float32 [N], would be over the history that is not in use: mean, by thirds of the response."""
    valid = kappa[table.mask].double()
    return _defined({"gate/other_kappa_mean": _mean(valid), **_thirds("gate/other_kappa", valid, table)})


def _thirds(name: str, valid: Tensor, table: TokenTable) -> Entries:
    """Means of a number of every valid token, float64 [M]."""
    third = response_thirds(table.cu_seqlens, table.mask)
    return {f"{name}_third_{i + 1}": _mean(valid[third == i]) for i in range(3)}


def response_thirds(cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """⌊3 j / N⌋ of the j-th of a response's N valid tokens: int64 [M] of 0, 1, 2, over all valid tokens."""
    valid = packed.compact(cu_seqlens, mask).cu_seqlens
    return 3 * packed.positions(valid) // packed.broadcast(packed.lengths(valid), valid)


def _credit(table: TokenTable, lam: float, gaps: Gaps) -> Entries:
    """Advantages, and how far back the gates carry the last reward."""
    mask = table.mask
    advantage = table.advantage[mask].double()
    entries: Entries = {
        "credit/advantage_mean": _mean(advantage),
        "credit/advantage_std": _std(advantage),
        "credit/abs_mean": _mean(table.credit[mask].double().abs()),
        "credit/abs_max": _max(table.credit[mask].abs()),
    }
    if table.kappa is None:
        return entries
    trace = trace_weights(table.kappa, table.cu_seqlens, mask, lam, gaps)
    value = trace_weights(table.kappa, table.cu_seqlens, mask, 1.0, gaps)
    return entries | {
        "credit/trace_reach": credit_reach(trace, mask),
        "credit/value_reach": credit_reach(value, mask),
        "credit/beyond_reach": share_beyond_reach(table.credit, trace, mask),
    }


def reach_warning(metrics: Mapping[str, float]) -> str | None:
    """What to tell when the trace reach is below 0.1, else None.

    Args:
        metrics: of `step_metrics`.
    """
    reach = metrics.get("credit/trace_reach")
    if reach is None or reach >= LOW_REACH:
        return None
    beyond = metrics.get("credit/beyond_reach")
    noise = "" if beyond is None else f", and {beyond:.0%} of |Â| lies on the others"
    return (
        f"credit/trace_reach is {reach:.2g}: the last reward arrives at {reach:.1%} of the tokens with a "
        f"weight above {MIN_WEIGHT:g}{noise}; gate.calibrate fits the envelope to a wished reach"
    )


def _critic(table: TokenTable) -> Entries:
    """How well V fits its target G, and where its output is not what the heads computed."""
    if table.value is None or table.lambda_return is None or table.dead is None or table.saturated is None:
        return {}
    mask = table.mask
    value, target = table.value[mask].double(), table.lambda_return[mask].double()
    return {
        "critic/value_mean": _mean(value),
        "critic/return_mean": _mean(target),
        "critic/explained_variance": explained_variance(value, target),
        "critic/spearman": spearman(value, target),
        "critic/mae": _mean((value - target).abs()),
        "critic/saturation": _mean(table.saturated[mask]),
        "critic/dead_rows": _mean(table.dead[mask]),
    }


def explained_variance(value: Tensor, target: Tensor) -> float | None:
    """EV = 1 − Var(G − V) / Var(G), population variances; None when the targets are all equal.

    Args:
        value: float64 [M], V.
        target: float64 [M], G.
    """
    if not _varies(target):
        return None
    return 1 - float((target - value).var(correction=0) / target.var(correction=0))


def spearman(x: Tensor, y: Tensor) -> float | None:
    """Rank correlation ρ_s: Pearson's of the ranks, ties at their average rank; None when x or y is constant.

    Args:
        x, y: [M] each.
    """
    if not (_varies(x) and _varies(y)):
        return None
    a, b = _average_ranks(x), _average_ranks(y)
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.square().sum() * b.square().sum()).sqrt())


def _average_ranks(x: Tensor) -> Tensor:
    """Ranks from 1; a run of c equal entries that ends at rank e has e − (c − 1)/2: float64 [M]."""
    _, group, counts = x.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2.0).double()[group]


def _policy(table: TokenTable) -> Entries:
    """The behaviour policy: entropy, distance from the reference, distance from the engine's numbers."""
    mask = table.mask
    gap = engine_gap(table.engine_logprob, table.logprob, mask & table.fresh)
    stale = engine_gap(table.engine_logprob, table.logprob, mask & ~table.fresh)
    entries: Entries = {
        "policy/entropy": _mean(table.entropy[mask]),
        "gap/mean": gap.mean if gap.tokens else None,
        "gap/max": gap.largest if gap.tokens else None,
        "gap/tokens": gap.tokens or None,
        "gap/stale_mean": stale.mean if stale.tokens else None,
        "rollout/stale": stale.tokens / (gap.tokens + stale.tokens) if gap.tokens + stale.tokens else None,
    }
    if table.ref_logprob is not None:
        k3 = kl_estimate("k3", table.logprob.double(), table.ref_logprob.double(), mask)
        entries["kl/reference"] = _mean(k3[mask])
    return entries


def _rewards(table: TokenTable) -> Entries:
    """The reward with its parts, and what the verifier found."""
    return {
        "reward/mean": _mean(table.reward),
        "reward/std": _std(table.reward),
        "reward/accuracy_part": _mean(table.reward_accuracy),
        "reward/format_part": _mean(table.reward_format),
        "reward/length_part": _mean(table.reward_length),
        "reward/correct": _mean(table.correct),
        "reward/formatted": _mean(table.formatted),
        "reward/timed_out": _mean(table.timed_out),
    }


def _responses(table: TokenTable) -> Entries:
    length = packed.segment_count(table.cu_seqlens, table.mask)
    return {
        "response/length_mean": _mean(length),
        "response/length_max": _max(length),
        "response/length_correct": _mean(length[table.correct]),
        "response/length_incorrect": _mean(length[~table.correct]),
        "response/truncated": _mean(table.truncated),
        "response/tokens": float(length.sum()),
    }


def _groups(table: TokenTable, group_size: int) -> Entries:
    """Shares of prompts whose responses all earn the same (no group signal), are all right, all wrong."""
    if table.num_responses % group_size:
        raise ValueError(f"group size {group_size} does not divide {table.num_responses} responses")
    if group_size == 1:
        return {}
    reward, correct = table.reward.view(-1, group_size), table.correct.view(-1, group_size)
    return {
        "group/zero_variance": _mean((reward == reward[:, :1]).all(dim=1)),
        "group/all_correct": _mean(correct.all(dim=1)),
        "group/none_correct": _mean(~correct.any(dim=1)),
    }


def gate_drift(behavior_kappa: Tensor, kappa: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the gates of the current weights are from the stored ones: |κ_θ − κ_θ⁻|, mean and maximum.

    Args:
        behavior_kappa: float32 [N], of the behaviour pass, in use.
        kappa: float32 [N], of the current weights, for the same tokens.
        mask: bool [N].
    """
    drift = (kappa - behavior_kappa)[mask].double().abs()
    return _defined({"gate/drift_mean": _mean(drift), "gate/drift_max": _max(drift)})


def controller_metrics(state: ControllerState, knobs: Knobs) -> dict[str, float]:
    """The phase in force and the one requested (0 stable … 3 hard-stop); the factors on the launch values."""
    factors = {f"controller/{name}": factor for name, factor in asdict(knobs).items()}
    return _defined({"controller/phase": state.phase, "controller/requested": state.requested, **factors})


# The update


@dataclass(frozen=True, kw_only=True)
class MinibatchSums:
    """One optimizer minibatch, added up over its micro-batches and the data-parallel ranks.

    Sums over valid tokens where a field is a sum; `None` where the algorithm, the warm-up or the phase has no
    such number.
    """

    tokens: float  # valid tokens
    ratio: float  # Σ ρ
    ratio_max: float  # max ρ
    clipped: float  # tokens with |ρ − 1| > ε
    approx_kl: float  # Σ k3 of KL(π_θ⁻ ‖ π_θ), nats
    kl_loss: float | None  # Σ of the KL estimate against the reference, before its coefficient, nats
    policy_loss: float | None  # of the minibatch, as aggregated
    value_loss: float | None  # of the minibatch, as aggregated
    actor_grad_norm: float | None  # before clipping
    critic_grad_norm: float | None  # before clipping
    applied: bool  # the optimizer stepped; False for NaN or inf


@dataclass(frozen=True)
class UpdateStats:
    """The update of one step. Means run over the minibatches that were applied, each counting once."""

    ratio_mean: float | None
    ratio_max: float | None
    clip_fraction: float | None
    approx_kl: float | None  # nats per token
    kl_loss: float | None  # nats per token
    policy_loss: float | None
    value_loss: float | None
    actor_grad_norm: float | None
    actor_grad_norm_max: float | None
    critic_grad_norm: float | None
    critic_grad_norm_max: float | None
    applied: int
    skipped: int

    @staticmethod
    def merge(minibatches: Sequence[MinibatchSums]) -> UpdateStats:
        """Statistics of a step from those of its minibatches, all epochs.

        A minibatch that was not applied is counted and otherwise left out: its numbers are what made it bad.
        """
        applied = [m for m in minibatches if m.applied]
        with_tokens = [m for m in applied if m.tokens > 0]
        actor_norms = [m.actor_grad_norm for m in applied]
        critic_norms = [m.critic_grad_norm for m in applied]
        return UpdateStats(
            ratio_mean=_mean_known([m.ratio / m.tokens for m in with_tokens]),
            ratio_max=_max_known([m.ratio_max for m in with_tokens]),
            clip_fraction=_mean_known([m.clipped / m.tokens for m in with_tokens]),
            approx_kl=_mean_known([m.approx_kl / m.tokens for m in with_tokens]),
            kl_loss=_mean_known([m.kl_loss / m.tokens for m in with_tokens if m.kl_loss is not None]),
            policy_loss=_mean_known([m.policy_loss for m in applied]),
            value_loss=_mean_known([m.value_loss for m in applied]),
            actor_grad_norm=_mean_known(actor_norms),
            actor_grad_norm_max=_max_known(actor_norms),
            critic_grad_norm=_mean_known(critic_norms),
            critic_grad_norm_max=_max_known(critic_norms),
            applied=len(applied),
            skipped=len(minibatches) - len(applied),
        )

    def metrics(self) -> dict[str, float]:
        """The defined entries of the step's record."""
        return _defined(
            {
                "policy/ratio_mean": self.ratio_mean,
                "policy/ratio_max": self.ratio_max,
                "policy/clip_fraction": self.clip_fraction,
                "kl/behavior": self.approx_kl,
                "kl/loss": self.kl_loss,
                "loss/policy": self.policy_loss,
                "loss/value": self.value_loss,
                "grad/actor": self.actor_grad_norm,
                "grad/actor_max": self.actor_grad_norm_max,
                "grad/critic": self.critic_grad_norm,
                "grad/critic_max": self.critic_grad_norm_max,
                "optimizer/applied": self.applied,
                "optimizer/skipped": self.skipped,
            }
        )


# Statistics of what may be empty


def _mean(x: Tensor) -> float:
    return float(x.double().mean())  # NaN when empty


def _std(x: Tensor) -> float:
    return float(x.double().std(correction=0)) if len(x) else math.nan


def _max(x: Tensor) -> float:
    return float(x.max()) if len(x) else math.nan


def _quantiles(x: Tensor, q: Sequence[float]) -> list[float]:
    if not len(x):
        return [math.nan] * len(q)
    return np.quantile(x.numpy(), q).tolist()  # torch.quantile stops at 2²⁴ entries


def _varies(x: Tensor) -> bool:
    return len(x) > 0 and bool(x.min() < x.max())  # False with a NaN inside


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _max_known(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
