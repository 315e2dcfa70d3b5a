"""Whole optimizer steps of PPO are those of plain torch in float64, and of CompPO with a gate fixed at γ.

Gaps, unequal lengths and a response of one token; SGD, and AdamW with both norms clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comppo_mcore.config.algorithm import fill_algorithm
from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.config.schema import Config, ParallelConfig
from comppo_mcore.credit.controller import Knobs
from comppo_mcore.kernels.select import select
from comppo_mcore.model import parallel
from comppo_mcore.model.batch import Sample
from comppo_mcore.model.factory import build_policy
from comppo_mcore.model.hf import export_hf, import_hf
from comppo_mcore.model.hf_table import hf_manifest
from comppo_mcore.model.optimizer import PolicyOptimizer, Rates, wrap
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.trainer.behavior import behavior_pass
from comppo_mcore.trainer.state import initial_state
from comppo_mcore.trainer.transport import Credit, Evidence, transport
from comppo_mcore.trainer.update import token_targets, update
from tests.hf_folders import VOCAB, write_folder
from tests.invariance import randomise
from tests.plain_ppo import PlainPPO, Settings, Trajectory

GAMMAS = (0.61, 0.97)
STEPS = 3  # from the second on, ratios are not 1
# (prompt, response) tokens, and the tokens that a tool wrote: amid a response, and at the end of one.
SIZES = ((3, 9), (7, 1), (1, 14), (12, 5))
GAPS = {2: (4, 5, 6), 3: (4,)}
REWARDS = (1.0, -0.5, 0.75, 0.0)

BASE: dict[str, dict[str, Any]] = {
    "model": {"dtype": "fp32", "backend": "local"},
    "kernels": {"mode": "reference"},
    "critic": {"head_width": 32, "lr": 1e-2, "value_clip": 0.02},
    "optim": {"lr": 1e-2, "grad_clip": 1e9},
    "algo": {"minibatch": len(SIZES), "clip": 0.02, "kl": {"coef": 0.0}},
    "transport": {"lam": 0.9},
    "rollout": {"temperature": 0.8},
    "train": {"micro_batch_tokens": 32},  # two micro-batches
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "sgd": {"optim": {"name": "sgd"}, "critic": {"grad_clip": 1e9, "backbone_grad": "full"}},
    "adamw": {  # an ε above the rounding errors of the gradients
        "optim": {"name": "adamw", "eps": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "grad_clip": 0.5},
        "critic": {"grad_clip": 0.1},
    },
}


@dataclass(frozen=True)
class Outcome:
    credit: Credit
    steps: list[dict[str, Any]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf") / "policy"
    return write_folder(path, family="qwen3", head_dim=16, tied=True, layers=2)


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    yield parallel.initialize(ParallelConfig(), seed=0)
    parallel.shutdown()


def trajectories() -> list[Trajectory]:
    generator = torch.Generator().manual_seed(2)
    made = []
    for i, (prompt, response) in enumerate(SIZES):
        tokens = tuple(torch.randint(VOCAB, (prompt + response,), generator=generator).tolist())
        valid = tuple(t not in GAPS.get(i, ()) for t in range(response))
        made.append(Trajectory(tokens[:prompt], tokens[prompt:], valid, REWARDS[i]))
    return made


def configuration(folder: Path, variant: str, **changes: dict[str, Any]) -> Config:
    sections = BASE | {"model": BASE["model"] | {"path": str(folder)}}
    for extra in (VARIANTS[variant], changes):
        sections |= {name: sections.get(name, {}) | fields for name, fields in extra.items()}
    return fill_algorithm(Config.model_validate(sections))


def ppo(folder: Path, gamma: float, variant: str) -> Config:
    return configuration(folder, variant, algo={"name": "ppo"}, transport={"gamma": gamma})


def fixed_gate(folder: Path, kappa: float, variant: str) -> Config:
    gate = {"mode": "fixed", "fixed_kappa": kappa}
    return configuration(folder, variant, gate=gate, critic={"kind": "standard"})


def trained(config: Config, layout: Layout) -> Outcome:
    """Behaviour pass, transport, and one optimizer step over all trajectories in each of `STEPS` epochs."""
    known, kernels = trajectories(), select(config.kernels.mode)
    samples, everyone = [Sample(t.prompt, t.response) for t in known], torch.arange(len(known))
    policy = _policy(config, layout)
    ddp = wrap(policy, layout, torch.float32)
    optimizer = PolicyOptimizer(ddp, config.optim, config.critic.lr, torch.float32, layout)
    before = weights(policy, config)
    behavior = behavior_pass(ddp, samples, config, layout, kernels)
    assert behavior is not None
    evidence = Evidence(
        rewards=torch.tensor(REWARDS),
        groups=torch.zeros_like(everyone),
        masks=tuple(t.valid for t in known),
        truncated=torch.zeros(len(known), dtype=torch.bool),
    )
    credit = transport(
        *(behavior, None, evidence, everyone, config, initial_state(config, None).gate, layout, kernels),
        advantage_clip=config.algo.advantage_clip,
        shuffle_seed=0,
    )
    targets = token_targets(behavior, credit, None, torch.zeros(len(credit.mask)), config)
    optim, critic = config.optim, config.critic
    rates = Rates(optim.lr, critic.lr, optim.grad_clip, critic.grad_clip, optim.weight_decay)
    trains = (ddp, optimizer, samples, everyone, evidence, behavior, targets, config, Knobs(), rates, layout)
    steps = [asdict(m) for epoch in range(STEPS) for m in update(*trains, step=1, epoch=epoch)]
    return Outcome(credit, steps, before, weights(policy, config))


def _policy(config: Config, layout: Layout) -> PolicyModel:
    shape, kernels = read_model_shape(config.model.path), select(config.kernels.mode)
    policy = build_policy(config, shape, layout, kernels, with_critic=True)
    import_hf(policy, config.model.path)
    randomise(policy)
    return policy


def weights(policy: PolicyModel, config: Config) -> dict[str, Tensor]:
    """Of the policy under their HF names, and of the critic."""
    assert policy.critic is not None
    named = dict(export_hf(policy, hf_manifest(config.model.path)))
    named |= {f"critic.{name}": p.detach() for name, p in policy.critic.named_parameters()}
    return {name: x.clone() for name, x in named.items()}


def settings(config: Config) -> Settings:
    optim = config.optim
    return Settings(
        gamma=config.transport.gamma,
        lam=config.transport.lam,
        temperature=config.rollout.temperature,
        clip=config.algo.clip,
        value_clip=config.critic.value_clip,
        advantage_clip=config.algo.advantage_clip,
        trains_backbone=config.critic.backbone_grad == "full",
        actor_lr=optim.lr,
        critic_lr=config.critic.lr,
        actor_grad_clip=optim.grad_clip,
        critic_grad_clip=config.critic.grad_clip,
        adam=(*optim.betas, optim.eps) if optim.name == "adamw" else None,
        weight_decay=optim.weight_decay,
    )


def largest(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_steps_are_those_of_plain_torch(folder: Path, layout: Layout, gamma: float, variant: str) -> None:
    config, known = ppo(folder, gamma, variant), trajectories()
    ours = trained(config, layout)
    head = {n.removeprefix("critic."): x for n, x in ours.before.items() if n.startswith("critic.")}
    plain = PlainPPO(folder, head, settings(config))
    targets = plain.targets(known)
    assert largest(ours.credit.advantage, torch.cat([t.advantage for t in targets])) <= 1e-5
    assert largest(ours.credit.credit, torch.cat([t.credit for t in targets])) <= 1e-5
    for found in ours.steps:
        policy_loss, value_loss = plain.step(known, targets)
        assert abs(found["policy_loss"] - policy_loss) <= 1e-5
        assert abs(found["value_loss"] - value_loss) <= 1e-5
    expected = dict(plain.weights())
    assert {name.removeprefix("critic.") for name in ours.after} == expected.keys()
    for name, mine in ours.after.items():
        assert largest(mine, expected[name.removeprefix("critic.")]) <= 1e-5, name
        assert largest(mine, ours.before[name]) > 1e-4, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_are_those_of_a_gate_fixed_at_gamma(folder: Path, layout: Layout, variant: str) -> None:
    one, other, another = (
        trained(config, layout)
        for config in (
            ppo(folder, GAMMAS[0], variant),
            fixed_gate(folder, GAMMAS[0], variant),
            fixed_gate(folder, GAMMAS[1], variant),
        )
    )
    for name, x in vars(one.credit).items():
        assert torch.equal(x, getattr(other.credit, name)), name
    assert one.steps == other.steps and len(one.steps) == STEPS
    assert {name for name, x in one.after.items() if not torch.equal(x, other.after[name])} == set()
    assert largest(one.credit.credit, another.credit.credit) > 0.1
    assert max(largest(x, another.after[name]) for name, x in one.after.items()) > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_are_worth_comparing(folder: Path, layout: Layout, variant: str) -> None:
    """Values are not 0; later ratios leave their range; norms are clipped where they shall be."""
    config = ppo(folder, GAMMAS[0], variant)
    outcome = trained(config, layout)
    first, *later = outcome.steps
    assert outcome.credit.value is not None and float(outcome.credit.value.abs().max()) > 0.01
    assert first["clipped"] == 0 and all(step["clipped"] > 0 for step in later)
    for norm, limit in (("actor", config.optim.grad_clip), ("critic", config.critic.grad_clip)):
        assert (first[f"{norm}_grad_norm"] > limit) == (variant == "adamw"), norm
