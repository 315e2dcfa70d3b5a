"""PPO on a transformers model in plain float64 torch, losses and all. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from tests import oracle


@dataclass(frozen=True)
class Trajectory:
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    valid: tuple[bool, ...]  # false at gap tokens
    reward: float  # of the whole response


@dataclass(frozen=True)
class Settings:
    gamma: float
    lam: float
    temperature: float
    clip: float
    value_clip: float
    advantage_clip: float
    trains_backbone: bool  # the value loss does
    actor_lr: float
    critic_lr: float
    actor_grad_clip: float
    critic_grad_clip: float
    adam: tuple[float, float, float] | None  # β₁, β₂, ε; None: SGD
    weight_decay: float  # of all but vectors, which is Megatron's rule


@dataclass(frozen=True)
class Read:
    """One trajectory: [T] each."""

    logprob: Tensor
    value: Tensor


@dataclass(frozen=True)
class Targets:
    """What the behaviour policy and the rewards leave to the losses of one trajectory: [T] each."""

    logprob: Tensor
    value: Tensor
    advantage: Tensor
    credit: Tensor  # whitened
    returns: Tensor
    valid: Tensor


def gae_with_gaps(
    trajectory: Trajectory, values: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """A and G where the valid tokens stand side by side and the last of them earns the reward; 0 at gaps."""
    at = [t for t, valid in enumerate(trajectory.valid) if valid]
    rewards = [0.0] * (len(at) - 1) + [trajectory.reward]
    advantage, returns = np.zeros(len(values)), np.zeros(len(values))
    advantage[at], returns[at] = oracle.gae(rewards, values[at].tolist(), gamma, lam)
    return advantage, returns


def whitened(advantages: list[np.ndarray], trajectories: list[Trajectory], clip: float) -> list[np.ndarray]:
    """Over the valid tokens of all trajectories; 0 at gaps."""
    pairs = list(zip(advantages, trajectories, strict=True))
    flat = [a for array, trajectory in pairs for a, v in zip(array, trajectory.valid, strict=True) if v]
    white = iter(oracle.whiten(flat, clip))
    return [np.array([next(white) if v else 0.0 for v in trajectory.valid]) for _, trajectory in pairs]


class PlainPPO:
    """A policy with one tanh head on its final hidden state, and a step over all trajectories at once."""

    def __init__(self, folder: Path, head: Mapping[str, Tensor], settings: Settings) -> None:
        self.settings = settings
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.head = {name: torch.nn.Parameter(x.detach().double()) for name, x in head.items()}
        self.optimizer = self._optimizer()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.head.items()

    def _optimizer(self) -> torch.optim.Optimizer:
        s, groups = self.settings, []
        for lr, parameters in (
            (s.actor_lr, list(self.model.parameters())),
            (s.critic_lr, list(self.head.values())),
        ):
            for decay, kept in ((s.weight_decay, lambda p: p.dim() != 1), (0.0, lambda p: p.dim() == 1)):
                groups.append({"params": list(filter(kept, parameters)), "lr": lr, "weight_decay": decay})
        if s.adam is None:
            return torch.optim.SGD(groups, lr=s.actor_lr)
        return torch.optim.AdamW(groups, lr=s.actor_lr, betas=s.adam[:2], eps=s.adam[2])

    def read(self, trajectory: Trajectory) -> Read:
        first, response = len(trajectory.prompt) - 1, trajectory.response
        tokens = torch.tensor([trajectory.prompt + response])
        hidden = self.model.model(tokens).last_hidden_state[0, first:-1]
        logits = self.model.lm_head(hidden) / self.settings.temperature
        logprob = logits.log_softmax(-1)[range(len(response)), list(response)]
        features = hidden if self.settings.trains_backbone else hidden.detach()
        unit = (features @ self.head["w1_local"].T + self.head["b1_local"]).tanh()
        value = unit @ self.head["w2_local"] + self.head["b2_local"]
        return Read(logprob, value.clamp(-1, 1))

    @torch.no_grad()
    def targets(self, trajectories: list[Trajectory]) -> list[Targets]:
        s, reads = self.settings, [self.read(trajectory) for trajectory in trajectories]
        moved = [
            gae_with_gaps(trajectory, read.value.numpy(), s.gamma, s.lam)
            for trajectory, read in zip(trajectories, reads, strict=True)
        ]
        credits = whitened([advantage for advantage, _ in moved], trajectories, s.advantage_clip)
        return [
            Targets(
                logprob=read.logprob,
                value=read.value,
                advantage=torch.tensor(advantage),
                credit=torch.tensor(credit),
                returns=torch.tensor(returns),
                valid=torch.tensor(trajectory.valid),
            )
            for trajectory, read, (advantage, returns), credit in zip(
                trajectories, reads, moved, credits, strict=True
            )
        ]

    def losses(self, trajectory: Trajectory, t: Targets) -> tuple[Tensor, Tensor]:
        """Sums of the policy and of the value loss over a trajectory's valid tokens."""
        s, now = self.settings, self.read(trajectory)
        ratio = (now.logprob - t.logprob).exp()
        policy = -torch.minimum(ratio * t.credit, ratio.clamp(1 - s.clip, 1 + s.clip) * t.credit)
        near = t.value + (now.value - t.value).clamp(-s.value_clip, s.value_clip)
        value = torch.maximum((now.value - t.returns) ** 2, (near - t.returns) ** 2) / 2
        return policy[t.valid].sum(), value[t.valid].sum()

    def step(self, trajectories: list[Trajectory], targets: list[Targets]) -> tuple[float, float]:
        """One optimizer step; the policy and the value loss before it, means over all valid tokens."""
        tokens = sum(int(t.valid.sum()) for t in targets)
        pairs = [self.losses(*pair) for pair in zip(trajectories, targets, strict=True)]
        policy, value = (sum(part, torch.zeros(())) / tokens for part in zip(*pairs, strict=True))
        self.optimizer.zero_grad()
        (policy + value).backward()
        clip_grad_norm_(self.model.parameters(), self.settings.actor_grad_clip)
        clip_grad_norm_(list(self.head.values()), self.settings.critic_grad_clip)
        self.optimizer.step()
        return policy.item(), value.item()
