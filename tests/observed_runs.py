"""Training runs inside a test worker: several in one process group, and what each step of them changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import comppo_mcore.model  # noqa: F401  (prepares the import of megatron)
from comppo_mcore.config.schema import Config
from comppo_mcore.errors import UserError
from comppo_mcore.model import parallel
from comppo_mcore.model.optimizer import ROLES, PolicyOptimizer
from comppo_mcore.trainer import train, update
from comppo_mcore.trainer.session import TrainSession


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of every bit."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def everything(ddp: Any, optimizer: PolicyOptimizer) -> str:
    """Weights, fp32 main weights, moments and step counts."""
    return digest((*ddp.parameters(), *optimizer.tensors())) + str(optimizer.steps())


def of_roles(session: TrainSession) -> dict[str, str]:
    """The same for actor and critic apart."""
    digests = {}
    for role in ROLES:
        weights = [
            p for n, p in session.policy.named_parameters() if n.startswith("critic.") == (role == "critic")
        ]
        state = [
            x
            for inner, group in session.optimizer._groups(role)
            for p in group["params"]
            for x in (p, *inner.state[p].values())
        ]
        digests[role] = f"{digest(weights)} {digest(state)} {session.optimizer.steps()[role]}"
    return digests


@dataclass
class Observer:
    """Of one run: the step being made, and whether each optimizer step was applied and changed anything."""

    now: int = 0
    minibatches: list[tuple[int, bool, bool]] = field(default_factory=list)  # step, applied, changed
    roles: list[dict[str, str]] = field(default_factory=list)  # after each step, before the first one at [0]
    session: Any = None

    def minibatches_made(self) -> int:
        """In the present step."""
        return sum(step == self.now for step, _, _ in self.minibatches)

    def train_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def observed(session: TrainSession, grader: Any, state: Any, *rest: Any) -> Any:
            self.now, self.session = state.step + 1, session
            if not self.roles:
                self.roles.append(of_roles(session))
            outcome = original(session, grader, state, *rest)
            self.roles.append(of_roles(session))
            return outcome

        return observed

    def run_minibatch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def observed(ddp: Any, optimizer: PolicyOptimizer, *rest: Any) -> Any:
            before = everything(ddp, optimizer)
            sums = original(ddp, optimizer, *rest)
            self.minibatches.append((self.now, sums.applied, before != everything(ddp, optimizer)))
            return sums

        return observed

    @contextmanager
    def watching(self) -> Iterator[None]:
        with (
            mock.patch.object(train, "train_step", self.train_step(train.train_step)),
            mock.patch.object(update, "run_minibatch", self.run_minibatch(update.run_minibatch)),
        ):
            yield


def join() -> None:
    """One process group for all runs of this worker."""
    dist.init_process_group("gloo")
    parallel.shutdown = lambda: None


def run(config: Config) -> str:
    """Train to the end: "", or the user error it ended with. Megatron's groups then are free for another."""
    from megatron.core import parallel_state

    try:
        train.main(config)
    except UserError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return ""
