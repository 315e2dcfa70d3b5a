"""Algorithm 1: the training loop.

A step reads from top to bottom in the order of the paper: roll out with θ⁻ and reward, read the behaviour
policy, transport credit, update for some epochs. Around it, the controller observes and the engine gets the
new weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from comppo_mcore.config.algorithm import has_critic
from comppo_mcore.config.schema import Config
from comppo_mcore.credit.controller import ControllerSettings, Knobs, Signals, knobs, observe
from comppo_mcore.credit.gate import attention_gate
from comppo_mcore.model.checkpoint import is_finite
from comppo_mcore.model.optimizer import Rates
from comppo_mcore.model.parallel import Layout, any_rank, from_last_stage, gather_objects
from comppo_mcore.rollout.gap import Gap, check_gap
from comppo_mcore.trainer.behavior import Behavior, behavior_pass, logprob_pass
from comppo_mcore.trainer.experience import Clock, Experience
from comppo_mcore.trainer.measure import measure
from comppo_mcore.trainer.metrics import MinibatchSums, UpdateStats, controller_metrics, gate_drift
from comppo_mcore.trainer.replay import save_bad_batch
from comppo_mcore.trainer.rollouts import Rollouts
from comppo_mcore.trainer.schedule import minibatches, owned, owned_columns, step_seed
from comppo_mcore.trainer.session import TrainSession
from comppo_mcore.trainer.state import RunState
from comppo_mcore.trainer.transport import Credit, calibrated, transport
from comppo_mcore.trainer.update import token_targets, update


@dataclass(frozen=True)
class StepOutcome:
    """One training step, applied or bad; equal on every rank."""

    state: RunState
    metrics: dict[str, float]
    signals: Signals | None  # None: the step was bad and the controller does not see it


@dataclass(frozen=True)
class Read:
    """What was read of θ⁻ and the reference for this rank's trajectories; None but on the last stage."""

    behavior: Behavior | None
    ref_logprob: Tensor | None


def train_step(
    session: TrainSession,
    rollouts: Rollouts,
    state: RunState,
    settings: ControllerSettings,
    clock: Clock,
    folder: Path,
) -> StepOutcome:
    """Algorithm 1, lines 3–25, for one rollout batch."""
    config, layout = session.config, session.layout
    step = state.step + 1
    factors = knobs(state.controller, step, settings)

    experience, state = rollouts.collect(state, clock)
    mine = owned(len(experience.graded), config.algo.minibatch, layout.dp_size, layout.dp_rank)
    read = read_policies(session, experience, mine, clock)
    state = replace(state, step=step)
    if (reason := unusable(read, experience, layout)) is not None:
        return _bad(state, experience, reason, folder, layout.rank)
    state = with_calibration(state, read, experience, session)
    # Measuring is a collective, so that the clock of the first stage sees the last one's work.
    with clock("transport"):
        credit = transport_credit(session, read, experience, mine, state, factors)
        metrics = measure(
            experience, read.behavior, read.ref_logprob, credit, state.gate.envelope, config, layout
        )
    if (gap := _gap(metrics)).tokens:
        check_gap(gap, config.rollout.gap_limit)
    metrics |= controller_metrics(state.controller, factors)

    with clock("update"):
        results, drift = optimize(session, experience, mine, read, credit, state, factors)
    stats = UpdateStats.merge(results)
    metrics |= stats.metrics() | drift
    if (reason := spoiled(session, stats)) is not None:
        return _bad(state, experience, reason, folder, layout.rank, metrics)
    signals = Signals(
        clip_fraction=stats.clip_fraction,
        ppo_kl=stats.approx_kl,
        kl_loss=stats.kl_loss,
        grad_norm=stats.actor_grad_norm,
        entropy=metrics.get("policy/entropy"),
        response_clip=metrics.get("response/truncated"),
    )
    return StepOutcome(replace(state, bad_steps=0), metrics, signals)


def read_policies(session: TrainSession, experience: Experience, mine: Tensor, clock: Clock) -> Read:
    """The behaviour pass and the reference pass over this rank's trajectories."""
    config, layout = session.config, session.layout
    samples = experience.samples(mine)
    with clock("behavior pass"):
        behavior = behavior_pass(session.ddp, samples, config, layout, session.kernels)
    if session.reference is None:
        return Read(behavior, None)
    with clock("reference pass"):
        return Read(behavior, logprob_pass(session.reference, samples, config, layout))


def unusable(read: Read, experience: Experience, layout: Layout) -> str | None:
    """Why nothing can be learned from a rollout batch; None for a sound one. Collective over the world."""
    everyone = torch.arange(len(experience.graded))
    if not bool(torch.isfinite(experience.engine_logprobs(everyone)).all()):
        return "log-probs of the engine are not finite"
    if any_rank(not _all_numbers(read), layout.device):
        return "log-probs or values of the behaviour pass are not finite"
    return None


def spoiled(session: TrainSession, stats: UpdateStats) -> str | None:
    """Why an update cannot count as done; None for a sound one. Collective over the world."""
    if stats.skipped:
        return "loss or gradients are not finite"
    if not is_finite(session.ddp, session.optimizer, session.layout):
        return "weights or optimizer state are not finite after the update"
    return None


def _all_numbers(read: Read) -> bool:
    """Whether everything stored of θ⁻ and the reference is finite."""
    if read.behavior is None:
        return True
    values = read.behavior.values
    arrays = [read.behavior.logprob, read.behavior.ratio_logprob, read.behavior.entropy]
    arrays += [read.behavior.concentration, read.ref_logprob]
    arrays += [] if values is None else [values.local, values.routed]
    return all(bool(torch.isfinite(x).all()) for x in arrays if x is not None)


def with_calibration(state: RunState, read: Read, experience: Experience, session: TrainSession) -> RunState:
    """Fit the envelope to the first rollout batch, once, where `gate.calibrate` asks for it."""
    if session.config.gate.calibrate is None or state.calibrated:
        return state
    layout = session.layout
    envelope = None
    if read.behavior is not None:
        envelope = calibrated(read.behavior, experience.evidence, session.config, layout)
    envelope = from_last_stage(envelope, layout)
    return replace(state, gate=replace(state.gate, envelope=envelope), calibrated=True)


def transport_credit(
    session: TrainSession, read: Read, experience: Experience, mine: Tensor, state: RunState, factors: Knobs
) -> Credit | None:
    """Gate, values, Comp-GAE and whitening on the last stage."""
    if read.behavior is None:
        return None
    config = session.config
    return transport(
        read.behavior,
        read.ref_logprob,
        experience.evidence,
        mine,
        config,
        state.gate,
        session.layout,
        session.kernels,
        advantage_clip=config.algo.advantage_clip * factors.advantage_clip,
        shuffle_seed=step_seed(config.run.seed, state.step, "shuffle"),
    )


def optimize(
    session: TrainSession,
    experience: Experience,
    mine: Tensor,
    read: Read,
    credit: Credit | None,
    state: RunState,
    factors: Knobs,
) -> tuple[list[MinibatchSums], dict[str, float]]:
    """All epochs over the rollout batch; the results of every optimizer step, and the gate's drift."""
    config, layout = session.config, session.layout
    samples = experience.samples(mine)
    engine_logprob = experience.engine_logprobs(mine).to(layout.device)
    epochs = min(config.algo.epochs, factors.epochs or config.algo.epochs)
    results: list[MinibatchSums] = []
    for epoch in range(epochs):
        if epoch and config.gate.recompute_per_epoch and has_critic(config):
            read = recomputed(session, samples, read)
            credit = transport_credit(session, read, experience, mine, state, factors)
        targets = None
        if read.behavior is not None and credit is not None:
            targets = token_targets(read.behavior, credit, read.ref_logprob, engine_logprob, config)
        results += update(
            session.ddp,
            session.optimizer,
            samples,
            mine,
            experience.evidence,
            read.behavior,
            targets,
            config,
            factors,
            rates(config, factors, state.step),
            layout,
            step=state.step,
            epoch=epoch,
        )
        if not results[-1].applied:
            return results, {}
    return results, measured_drift(session, samples, mine, len(experience.graded), read, state, epochs - 1)


def recomputed(session: TrainSession, samples: list, read: Read) -> Read:
    """Gate, top-K and values of the current weights; log-probs stay those of θ⁻, the ratio's denominator."""
    fresh = behavior_pass(session.ddp, samples, session.config, session.layout, session.kernels)
    if fresh is None or read.behavior is None:
        return read
    old = read.behavior
    kept = replace(fresh, logprob=old.logprob, ratio_logprob=old.ratio_logprob, entropy=old.entropy)
    return replace(read, behavior=kept)


def measured_drift(
    session: TrainSession,
    samples: list,
    mine: Tensor,
    num_trajectories: int,
    read: Read,
    state: RunState,
    epoch: int,
) -> dict[str, float]:
    """|κ_θ − κ_θ⁻| on the last minibatch of an epoch, every `gate.drift_every` steps."""
    config, layout = session.config, session.layout
    every = config.gate.drift_every
    reads_gate = has_critic(config) and config.gate.mode in ("attention", "shuffled")
    if not reads_gate or not every or state.step % every:
        return {}
    seed = step_seed(config.run.seed, state.step, "minibatches", epoch)
    last = minibatches(num_trajectories, config.algo.minibatch, seed)[-1]
    columns = owned_columns(config.algo.minibatch, layout.dp_size, layout.dp_rank)
    index = (last[columns] - mine[0]).tolist()
    fresh = behavior_pass(session.ddp, [samples[i] for i in index], config, layout, session.kernels)
    pairs: list[tuple[Tensor, Tensor]] = []
    if fresh is not None and read.behavior is not None:
        cu = read.behavior.cu_rows
        assert fresh.concentration is not None and read.behavior.concentration is not None
        stored = torch.cat([read.behavior.concentration[int(cu[i]) : int(cu[i + 1])] for i in index])
        envelope = state.gate.envelope
        kappas = (attention_gate(stored, envelope).cpu(), attention_gate(fresh.concentration, envelope).cpu())
        pairs = gather_objects(kappas, layout.groups.dp)
    metrics = {}
    if pairs:
        old, new = (torch.cat(part) for part in zip(*pairs, strict=True))
        metrics = gate_drift(old, new, torch.ones_like(old, dtype=torch.bool))
    return from_last_stage(metrics, layout)


def rates(config: Config, factors: Knobs, step: int) -> Rates:
    """Launch values times the phase's factors; the actor stands still while the critic warms up."""
    return Rates(
        actor_lr=config.optim.lr * factors.actor_lr,
        critic_lr=config.critic.lr * factors.critic_lr,
        actor_clip=config.optim.grad_clip * factors.grad_clip,
        critic_clip=config.critic.grad_clip * factors.grad_clip,
        weight_decay=config.optim.weight_decay,
        freeze_actor=has_critic(config) and step <= config.critic.warmup_steps,
    )


def observed(outcome: StepOutcome, accuracy: float | None, settings: ControllerSettings) -> RunState:
    """The state after the controller has seen the step; what it decides acts from the next one on."""
    if outcome.signals is None:
        return outcome.state
    signals = replace(outcome.signals, accuracy=accuracy)
    controller = observe(outcome.state.controller, signals, settings)
    return replace(outcome.state, controller=controller)


def _gap(metrics: dict[str, float]) -> Gap:
    tokens = int(metrics.get("gap/tokens", 0))
    mean = metrics.get("gap/mean", math.nan)
    return Gap(total=mean * tokens, tokens=tokens, largest=metrics.get("gap/max", math.nan))


def _bad(
    state: RunState,
    experience: Experience,
    reason: str,
    folder: Path,
    rank: int,
    metrics: dict[str, float] | None = None,
) -> StepOutcome:
    """Count the step as bad and keep its batch for replay."""
    if rank == 0:
        save_bad_batch(folder, state.step, experience, reason)
    metrics = (metrics or {}) | {"step/bad": 1.0}
    return StepOutcome(replace(state, bad_steps=state.bad_steps + 1), metrics, None)
