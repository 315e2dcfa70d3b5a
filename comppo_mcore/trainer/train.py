"""`comppo train`: start or continue a run."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from comppo_mcore.config.algorithm import has_critic
from comppo_mcore.config.load import diff, dump
from comppo_mcore.config.schema import Config
from comppo_mcore.credit.controller import ControllerSettings, controller_settings
from comppo_mcore.credit.gate import PositionTable
from comppo_mcore.errors import UserError
from comppo_mcore.model import checkpoint, parallel
from comppo_mcore.model.hf import save_hf
from comppo_mcore.reward.pool import Grader
from comppo_mcore.trainer import history
from comppo_mcore.trainer.evaluate import evaluate
from comppo_mcore.trainer.files import read_metrics, write_text_atomic
from comppo_mcore.trainer.logging import Sink, StageClock, memory_metrics, open_sink
from comppo_mcore.trainer.loop import observed, train_step
from comppo_mcore.trainer.metrics import reach_warning
from comppo_mcore.trainer.rollouts import Rollouts
from comppo_mcore.trainer.session import TrainSession, build_train_session, run_folder, sync_weights
from comppo_mcore.trainer.state import RunState, from_json, initial_state
from comppo_mcore.trainer.update import needs_reference


def main(config: Config) -> None:
    """Train until `train.steps`, from the newest checkpoint of the run folder where there is one.

    The finished policy is written to `<run folder>/hf` as a Hugging Face folder.

    Raises:
        UserError: the folder holds another run's checkpoint, a damaged one, or training cannot go on.
    """
    folder = run_folder(config)
    newest = newest_checkpoint(folder, config)
    state = initial_state(config, read_table(config))
    session = build_train_session(config)
    if newest is not None:
        state = from_json(checkpoint.load(newest, session.ddp, session.optimizer, session.layout))
    checkpoint.assert_critic_fp32(session.ddp)
    if session.layout.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(folder / "config.yaml", dump(config))
    last = -1 if newest is None else state.step
    sink = open_sink(config, folder, rank=session.layout.rank, steps=config.train.steps, last_step=last)
    try:
        with (
            Grader(config.reward) as grader,
            Rollouts(session, grader) as rollouts,
            closing(session.engine),  # first of the three: the others may be waiting for it
        ):
            announce(session, state, sink)
            state = train(session, rollouts, state, sink, folder)
        save_hf(session.policy, config.model.path, folder / "hf")
        if session.layout.rank == 0:
            sink.note(summary(state, folder))
    finally:
        sink.close()
    parallel.shutdown()


def train(session: TrainSession, rollouts: Rollouts, state: RunState, sink: Sink, folder: Path) -> RunState:
    """Steps until `train.steps`, with evaluations and checkpoints between them."""
    config = session.config
    controller = config.controller
    settings = controller_settings(controller.preset, controller.disabled_rules, controller.ramp)
    if settings.warning is not None:
        sink.note(settings.warning)
    if not checkpoint.is_finite(session.ddp, session.optimizer, session.layout):
        raise UserError(
            f"model.path is {config.model.path}, whose weights hold NaN or inf: give a sound model"
        )
    sync_weights(session, state.step)
    if state.step == 0 and config.train.eval_every and not state.history:
        sink.stage("evaluation")
        state = evaluated(session, rollouts.grader, state)
        sink.step(0, history.endpoint_metrics(state.history))
    first = True
    while state.step < config.train.steps:
        state, metrics = one_step(session, rollouts, state, settings, sink, folder)
        if first and (warning := reach_warning(metrics)):
            sink.note(warning)
        first = False
        if state.bad_steps:
            stop_if_hopeless(session, state, folder)
        save_if_due(session, state, folder)
    return state


def stop_if_hopeless(session: TrainSession, state: RunState, folder: Path) -> None:
    """After a bad step: go on only if the weights are still numbers and not too many went wrong in a row.

    Raises:
        UserError: the run stops; its last checkpoint was made after a sound step.
    """
    limit = session.config.train.max_bad_steps
    remedy = (
        f"see {folder / 'bad_batches'}, and relaunch to go on from the last checkpoint, "
        "with a lower optim.lr and run.allow_config_change=true if that does not help"
    )
    if not checkpoint.is_finite(session.ddp, session.optimizer, session.layout):
        raise UserError(f"the weights hold NaN or inf at step {state.step}: {remedy}")
    if state.bad_steps >= limit:
        raise UserError(
            f"train.max_bad_steps is {limit} and as many steps in a row gave NaN or inf: {remedy}"
        )


def one_step(
    session: TrainSession,
    rollouts: Rollouts,
    state: RunState,
    settings: ControllerSettings,
    sink: Sink,
    folder: Path,
) -> tuple[RunState, dict[str, float]]:
    """A training step, the weight sync and evaluation after it, its record."""
    config = session.config
    clock = StageClock(sink.stage)
    outcome = train_step(session, rollouts, state, settings, clock, folder)
    metrics, accuracy, state = outcome.metrics, None, outcome.state
    with clock("rollout"):
        rollouts.settle()
    with clock("weight sync"):  # also after a bad step: the minibatches before the bad one were applied
        sync_weights(session, state.step)
    if outcome.signals is not None and is_evaluation_step(config, state.step):
        with clock("evaluation"):
            state = evaluated(session, rollouts.grader, state)
        accuracy = state.history[-1].accuracy
        metrics |= history.endpoint_metrics(state.history)
    for incident in session.engine.incidents():
        sink.note(f"a rollout server was lost: {incident}")
    state = observed(replace(outcome, state=state), accuracy, settings)
    count_tokens(clock, config, metrics)
    sink.step(state.step, metrics | clock.metrics() | memory_metrics())
    return state, metrics


def count_tokens(clock: StageClock, config: Config, metrics: dict[str, float]) -> None:
    """Response tokens that each part of the step worked on, for its throughput."""
    tokens = int(metrics.get("response/tokens", 0))
    for part in ("rollout", "behavior pass", "transport"):
        clock.count(part, tokens)
    if needs_reference(config):
        clock.count("reference pass", tokens)
    epochs = min(config.algo.epochs, int(metrics.get("controller/epochs", config.algo.epochs)))
    clock.count("update", tokens * epochs)


def evaluated(session: TrainSession, grader: Grader, state: RunState) -> RunState:
    evaluation = evaluate(session, grader, state.step)
    return replace(state, history=history.extended(state.history, evaluation))


def is_evaluation_step(config: Config, step: int) -> bool:
    every = config.train.eval_every
    return step == config.train.steps or (every > 0 and step % every == 0)


def save_if_due(session: TrainSession, state: RunState, folder: Path) -> None:
    """Save on schedule, at the end, and at a new best; never a state that a bad step left behind."""
    config, every = session.config.train, session.config.train.save_every
    at_best = config.keep_best and bool(state.history) and state.history[-1].step == state.step
    at_best = at_best and history.is_best(state.history)
    due = state.step == config.steps or (every > 0 and state.step % every == 0)
    if state.bad_steps or not (due or at_best):
        return
    path = folder / "checkpoints"
    checkpoint.save(
        path, state.step, session.ddp, session.optimizer, session.layout, state.to_json(session.config)
    )
    keep = {history.endpoints(state.history).best_step} if config.keep_best and state.history else set()
    checkpoint.prune(path, config.keep_last, keep, session.layout)


def newest_checkpoint(folder: Path, config: Config) -> Path | None:
    """The checkpoint to go on from, made under this configuration.

    Raises:
        UserError: its configuration differs in a field that shapes the run.
    """
    whole = checkpoint.checkpoints(folder / "checkpoints")
    if not whole:
        return None
    path = list(whole.values())[-1]
    differing = diff(saved_config(path), config)
    if differing and not config.run.allow_config_change:
        fields = "; ".join(f"{d.field} was {d.first} and is {d.second}" for d in differing)
        raise UserError(
            f"{folder} holds a run with another configuration ({fields}): set run.name to start another run, "
            "or run.allow_config_change=true to go on with the new one"
        )
    return path


def saved_config(path: Path) -> Config:
    """The configuration a checkpoint was made under."""
    saved = checkpoint.read_trainer_state(path)["config"]
    try:
        return Config.model_validate_json(json.dumps(saved))
    except ValidationError as error:
        raise UserError(
            f"checkpoint {path} has {error.error_count()} configuration fields that this version does not "
            "know: go on with the version that wrote it, or set run.name to start another run"
        ) from error


def read_table(config: Config) -> PositionTable | None:
    """The frozen table of gate.mode position."""
    if config.gate.mode != "position" or not has_critic(config):
        return None
    assert config.gate.table is not None
    try:
        text = Path(config.gate.table).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"gate.table is {config.gate.table}, which cannot be read ({error}): write one with "
            "`comppo gate-table`"
        ) from error
    return PositionTable.from_json(text, config.gate.table)


def announce(session: TrainSession, state: RunState, sink: Sink) -> None:
    """What a person wants to know before the first step."""
    sink.note(session.kernels.describe())
    if has_critic(session.config):
        sink.note(critic_share(session))
    if state.step:
        sink.note(f"resumed after step {state.step}")


def critic_share(session: TrainSession) -> str:
    """The critic's parameters beside the policy's; a warning where the paper's half per cent is exceeded."""
    critic, policy = parallel.parameter_counts(session.policy, session.layout)
    share = critic / policy
    line = f"critic: {critic:,} parameters, {share:.2%} of the policy's {policy:,}"
    return line if share < 0.005 else f"{line} (above 0.5 %, which only toy models need)"


def summary(state: RunState, folder: Path) -> str:
    """The endpoints of the run, and its gate and credit reach at its last step."""
    where = f"policy in {folder / 'hf'}"
    if not state.history:
        return f"finished after step {state.step}; {where}"
    ends = history.endpoints(state.history)
    aulc = "" if ends.aulc is None else f", AULC {ends.aulc:.3f}"
    lines = [
        f"finished after step {state.step}; {where}",
        f"held-out accuracy: {state.history[0].accuracy:.3f} at step {state.history[0].step}, "
        f"final {ends.final:.3f}, best {ends.best:.3f} (step {ends.best_step}), "
        f"last-20 {ends.last_20:.3f}{aulc}",
        *gate_lines(read_metrics(folder / "metrics.jsonl")[-1]),
    ]
    return "\n".join(lines)


def gate_lines(record: dict[str, float]) -> list[str]:
    """κ quantiles and credit reach of one step's record; nothing for algorithms without a gate."""
    if "gate/kappa_mean" not in record:
        return []
    quantiles = " / ".join(f"{record[f'gate/kappa_{q}']:.3f}" for q in ("q05", "q25", "median", "q75", "q95"))
    lines = [
        f"κ: mean {record['gate/kappa_mean']:.3f}, quantiles 5/25/50/75/95 %: {quantiles}",
        f"κ by thirds of the response: {_thirds(record)}",
        f"credit reach: trace {record['credit/trace_reach']:.3f}, value {record['credit/value_reach']:.3f}",
    ]
    if "gate/other_kappa_mean" in record:
        mean = record["gate/other_kappa_mean"]
        lines.append(f"κ over the other history: mean {mean:.3f}, by thirds {_thirds(record, 'other_')}")
    return lines


def _thirds(record: dict[str, float], which: str = "") -> str:
    return " / ".join(f"{record.get(f'gate/{which}kappa_third_{i}', math.nan):.3f}" for i in (1, 2, 3))
