"""Runs into which NaN is injected, on 2 pipeline stages; prints what happened as JSON.

Usage: nonfinite.py CONFIG; run folders are named after the cases.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from comppo_mcore.config.load import load
from comppo_mcore.errors import UserError
from comppo_mcore.model import checkpoint
from comppo_mcore.model.optimizer import PolicyOptimizer
from comppo_mcore.rollout.embedded import EmbeddedEngine
from comppo_mcore.trainer import loop, update
from comppo_mcore.trainer.session import TrainSession
from tests.observed_runs import Observer, join, run

Fault = Callable[[Observer, Callable[..., Any]], Callable[..., Any]]
TRANSIENT = {2: "weight", 3: "engine", 5: "loss", 7: "critic", 8: "gradient"}  # by step


@contextmanager
def not_a_number(parameter: torch.Tensor) -> Iterator[None]:
    """One entry is NaN inside the block."""
    entry = parameter.data.view(-1)[:1]
    kept = entry.clone()
    entry.fill_(math.nan)
    yield
    entry.copy_(kept)


def in_behavior_pass(critic: bool) -> Fault:
    """A weight of the first stage, or of the critic on the last, is NaN during the behaviour pass."""

    def fault(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any) -> Any:
            named = observer.session.policy.named_parameters()
            mine = [p for name, p in named if name.startswith("critic.") == critic and p.numel() > 1]
            with ExitStack() as stack:
                if mine and dist.get_rank() == int(critic):
                    stack.enter_context(not_a_number(mine[0]))
                return original(*arguments)

        return faulty

    return fault


def in_engine(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
    """The last log-prob of rank 1's last completion."""

    def faulty(*arguments: Any) -> Any:
        completions = original(*arguments)
        if dist.get_rank() == 1:
            last = completions[-1]
            completions[-1] = replace(last, logprobs=(*last.logprobs[:-1], math.nan))
        return completions

    return faulty


def in_loss(from_minibatch: int) -> Fault:
    """The loss and its record, on the last stage, from a minibatch of a step on."""

    def fault(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*arguments: Any, **keywords: Any) -> Any:
            loss, record = original(*arguments, **keywords)
            if observer.minibatches_made() < from_minibatch:
                return loss, record
            return loss * math.nan, record * math.nan

        return faulty

    return fault


def in_gradient(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
    """One entry of one gradient of the first stage; the loss is sound."""

    def faulty(optimizer: PolicyOptimizer, rates: Any) -> Any:
        if dist.get_rank() == 0:
            next(iter(observer.session.ddp.parameters())).main_grad.view(-1)[0] = math.nan
        return original(optimizer, rates)

    return faulty


def in_applied_step(observer: Observer, original: Callable[..., Any]) -> Callable[..., Any]:
    """A weight of the first stage, for good, after the fourth and last optimizer step of a training step."""

    def faulty(optimizer: PolicyOptimizer, rates: Any) -> Any:
        result = original(optimizer, rates)
        if dist.get_rank() == 0 and observer.minibatches_made() == 3:
            next(iter(observer.session.ddp.parameters())).data.view(-1)[0] = math.inf
        return result

    return faulty


FAULTS: Mapping[str, tuple[Any, str, Fault]] = {
    "weight": (loop, "behavior_pass", in_behavior_pass(critic=False)),
    "critic": (loop, "behavior_pass", in_behavior_pass(critic=True)),
    "engine": (EmbeddedEngine, "generate", in_engine),
    "loss": (update, "objective", in_loss(from_minibatch=1)),
    "gradient": (PolicyOptimizer, "step", in_gradient),
    "applied step": (PolicyOptimizer, "step", in_applied_step),
}


@contextmanager
def going_wrong(observer: Observer, schedule: Mapping[int, str]) -> Iterator[None]:
    """Faults by step; a step without one is left alone."""
    with ExitStack() as stack:
        for name in set(schedule.values()):
            owner, attribute, fault = FAULTS[name]
            original = getattr(owner, attribute)
            faulty = fault(observer, original)

            def chosen(*arguments: Any, _: Any = (name, original, faulty), **keywords: Any) -> Any:
                name, original, faulty = _
                function = faulty if schedule.get(observer.now) == name else original
                return function(*arguments, **keywords)

            stack.enter_context(mock.patch.object(owner, attribute, chosen))
        yield


def case(config: str, name: str, schedule: Mapping[int, str], *overrides: str) -> dict[str, Any]:
    observer = Observer()
    with observer.watching(), going_wrong(observer, schedule):
        end = run(load(config, [f"run.name={name}", *overrides]))
    return {"end": end, "minibatches": observer.minibatches, "saved": save(observer.session, config, name)}


def save(session: TrainSession, config: str, name: str) -> str:
    """What a save of the weights that the run ended with says; "" where they are sound."""
    if checkpoint.is_finite(session.ddp, session.optimizer, session.layout):
        return ""
    folder = Path(load(config).run.dir) / name / "checkpoints"
    try:
        checkpoint.save(folder, 99, session.ddp, session.optimizer, session.layout, {})
    except UserError as error:
        return str(error)
    return "saved"


def main(config: str) -> None:
    warnings.simplefilter("ignore")
    join()
    always_loss = dict.fromkeys(range(2, 9), "loss")
    cases = {
        "transient": case(config, "transient", TRANSIENT, "train.steps=9", "train.save_every=0"),
        "persistent": case(config, "persistent", always_loss, "train.steps=8", "train.max_bad_steps=2"),
        "spoiled": case(config, "spoiled", {2: "applied step"}, "train.steps=8", "train.max_bad_steps=2"),
    }
    for name in ("persistent", "spoiled"):
        cases[f"{name}, relaunched"] = case(config, name, {}, "train.steps=3", "train.max_bad_steps=2")
    print(json.dumps(cases))


if __name__ == "__main__":
    main(sys.argv[1])
