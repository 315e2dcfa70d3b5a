"""One small training step under any layout, packing, variant and planted fault, with all its numbers kept.

Every process of a layout runs the same case on the same tokens and rewards; what it then holds of the
result, its `Finding`, must be what one process finds.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from comppo_mcore.config.algorithm import fill_algorithm, has_critic
from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.config.schema import Config
from comppo_mcore.credit.concentration import RowStats
from comppo_mcore.credit.controller import Knobs
from comppo_mcore.kernels import select
from comppo_mcore.kernels.concentration import TopK, attention_statistics
from comppo_mcore.kernels.select import Kernels
from comppo_mcore.kernels.shards import owned_rows
from comppo_mcore.model import execution, parallel
from comppo_mcore.model.batch import Sample
from comppo_mcore.model.factory import build_policy, torch_dtype
from comppo_mcore.model.hf import import_hf
from comppo_mcore.model.hf_table import assemble, held
from comppo_mcore.model.optimizer import PolicyOptimizer, Rates, StepResult, wrap
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.trainer import transport
from comppo_mcore.trainer.behavior import Behavior, behavior_pass, logprob_pass
from comppo_mcore.trainer.schedule import owned
from comppo_mcore.trainer.state import initial_state
from comppo_mcore.trainer.transport import Credit, Evidence
from comppo_mcore.trainer.update import token_targets, update
from tests.hf_folders import VOCAB, read_weights, write_folder

LR = 1e-2  # of actor and critic
CLIP = 0.1  # of both norms, in the variants whose clips bind

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2, "last_stage_layers": 4},
    "dp2": {},
    "tp2_pp2": {"tp": 2, "pp": 2, "last_stage_layers": 4},
}
PACKINGS = {
    "wide": 4096,
    "narrow": 40,
}  # train.micro_batch_tokens: all in one, and one or two trajectories each
BASE: dict[str, dict[str, Any]] = {
    "run": {"seed": 5},
    "model": {"dtype": "fp32", "backend": "local"},
    "kernels": {"mode": "reference"},
    "critic": {"layers": 4, "top_k": 8, "width": 16, "head_width": 32, "lr": LR, "grad_clip": 1e9},
    "optim": {"name": "sgd", "lr": LR, "grad_clip": 1e9},
    "algo": {"minibatch": 4, "kl": {"coef": 0.05}},
    "rollout": {"temperature": 0.8},
}
_BINDING = {"critic": {"grad_clip": CLIP}, "optim": {"grad_clip": CLIP}}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "comppo": {},
    "clipped": _BINDING,
    "clipped_bf16": {**_BINDING, "model": {"dtype": "bf16"}},
    "grpo": {"algo": {"name": "grpo"}},  # sequence aggregation
    "ppo": {"algo": {"name": "ppo"}, "transport": {"gamma": 0.97}, "critic": {"backbone_grad": "full"}},
    "shuffled": {
        "gate": {"mode": "shuffled"},
        "critic": {"backbone_grad": "full"},
        "transport": {"bootstrap_on_truncation": True},
        "algo": {"importance_cap": 1.5},
    },
}

# (prompt, response) tokens; after a short prompt the first rows have n_t ≤ K keys.
SIZES = (
    *((3, 9), (7, 1), (1, 14), (12, 5)),
    *((5, 21), (9, 4), (2, 6), (16, 11)),
    *((6, 17), (4, 2), (11, 8), (8, 13)),
)
GAPS = {4: (6, 7), 7: (10,)}  # trajectory → tokens that a tool wrote; the second one ends its response
GROUP = 4  # responses to a prompt


@dataclass(frozen=True)
class Case:
    layout: str
    variant: str
    packing: str
    fault: str = "none"

    def __str__(self) -> str:
        return "/".join((self.layout, self.variant, self.packing, self.fault))

    @staticmethod
    def parse(text: str) -> Case:
        return Case(*text.split("/"))


class TopHistory(NamedTuple):
    index: Tensor  # int32 [K], −1 padding
    weight: Tensor  # float32 [K]


@dataclass(frozen=True)
class Finding:
    """What one process holds of a case's result; tensors are full ones under their HF names."""

    tokens: dict[str, dict[int, Tensor]]  # quantity → trajectory → [T]
    top: dict[tuple[int, int], TopHistory]  # (trajectory, row)
    steps: list[dict[str, Any]]  # losses and norms of every optimizer step
    gradients: dict[str, Tensor]  # reduced, before clipping, of the first optimizer step
    weights: tuple[dict[str, Tensor], ...]  # before, after the first and after the last optimizer step

    def change(self, first: bool = False) -> dict[str, Tensor]:
        """Weight deltas over all steps, or over the first one."""
        before, after = self.weights[0], self.weights[1 if first else -1]
        return {name: after[name] - before[name] for name in before}


# ---------------------------------------------------------------------------- the problem


def write_folders(root: Path) -> None:
    """`root/policy`, a tied Qwen3 whose last layer attends sharply, and `root/reference` near it."""
    generator = torch.Generator().manual_seed(1)
    for name in ("policy", "reference"):
        write_folder(root / name, family="qwen3", head_dim=32, tied=True, layers=5)
        weights = read_weights(root / name)
        for key, weight in weights.items():
            if key == "model.layers.4.self_attn.q_norm.weight":
                weight.mul_(3)
            if name == "reference":
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
        save_file(weights, root / name / "model.safetensors", metadata={"format": "pt"})


def configuration(case: Case, root: Path) -> Config:
    variant = VARIANTS[case.variant]
    sections = {key: BASE.get(key, {}) | variant.get(key, {}) for key in BASE.keys() | variant.keys()}
    sections["algo"] = BASE["algo"] | sections["algo"]
    sections["model"] |= {"path": str(root / "policy")}
    sections["parallel"] = LAYOUTS[case.layout]
    sections["train"] = {"micro_batch_tokens": PACKINGS[case.packing]}
    return fill_algorithm(Config.model_validate(sections))


def trajectories() -> list[Sample]:
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (count,), generator=generator).tolist())

    return [Sample(tokens(prompt), tokens(response)) for prompt, response in SIZES]


def evidence() -> Evidence:
    count = len(SIZES)
    rewards = torch.rand(count, generator=torch.Generator().manual_seed(3)) * 2 - 1
    masks = tuple(tuple(t not in GAPS.get(i, ()) for t in range(n)) for i, (_, n) in enumerate(SIZES))
    truncated = torch.arange(count) % 5 == 4
    return Evidence(rewards, torch.arange(count) // GROUP, masks, truncated)


def engine_logprob(index: list[int]) -> Tensor:
    """As if every engine had sampled from the uniform distribution, for the importance weights."""
    return torch.full((sum(SIZES[i][1] for i in index),), -float(torch.tensor(VOCAB).log()))


def randomise(policy: PolicyModel) -> None:
    """Give the critic's parameters that start at zero a value, so that V ≠ 0 and no layer weighs the same."""
    if policy.critic is None:
        return
    group = policy.critic.tp_group
    for name, parameter in policy.critic.named_parameters():
        if parameter.any():
            continue
        sharded = name in policy.critic._sharded
        size = parameter.numel() * (group.size() if sharded else 1)
        full = 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        mine = full.chunk(group.size())[group.rank()] if sharded else full
        parameter.data.copy_(mine.view_as(parameter))


# ---------------------------------------------------------------------------- one case


def run(case: Case, root: Path) -> Finding:
    """Behaviour pass, transport and one epoch of three SGD steps; collective over the process group."""
    config = configuration(case, root)
    layout = parallel.regroup(config.parallel, config.run.seed)
    with FAULTS[case.fault]():
        return _trained(config, layout, root)


def _trained(config: Config, layout: Layout, root: Path) -> Finding:
    kernels = select.select(config.kernels.mode)
    policy = _policy(config, layout, kernels, root / "policy", with_critic=has_critic(config))
    randomise(policy)
    reference = _policy(config, layout, kernels, root / "reference", with_critic=False)
    reference = reference.to(torch_dtype(config.model.dtype))
    ddp = wrap(policy, layout, torch_dtype(config.model.dtype))
    optimizer = Recorder(policy, ddp, config, layout)

    everything, known = trajectories(), evidence()
    mine = owned(len(everything), config.algo.minibatch, layout.dp_size, layout.dp_rank)
    samples = [everything[i] for i in mine.tolist()]
    behavior = behavior_pass(ddp, samples, config, layout, kernels)
    ref_logprob = logprob_pass(reference, samples, config, layout)
    credit = targets = None
    if behavior is not None:
        gate = initial_state(config, None).gate
        clip = config.algo.advantage_clip
        credit = transport.transport(
            behavior,
            ref_logprob,
            known,
            mine,
            config,
            gate,
            layout,
            kernels,
            advantage_clip=clip,
            shuffle_seed=1,
        )
        engine = engine_logprob(mine.tolist())
        targets = token_targets(behavior, credit, ref_logprob, engine, config)
    rates = Rates(config.optim.lr, config.critic.lr, config.optim.grad_clip, config.critic.grad_clip)
    steps = update(
        ddp,
        optimizer,
        samples,
        mine,
        known,
        behavior,
        targets,
        config,
        Knobs(),
        rates,
        layout,
        step=1,
        epoch=0,
    )
    return Finding(
        tokens={} if behavior is None else _tokens(behavior, credit, ref_logprob, mine.tolist()),
        top={} if behavior is None else _top(behavior, layout, mine.tolist()),
        steps=[asdict(s) for s in steps],
        gradients=optimizer.gradients,
        weights=(*optimizer.weights, optimizer.masters()),
    )


def _policy(
    config: Config, layout: Layout, kernels: Kernels, folder: Path, *, with_critic: bool
) -> PolicyModel:
    policy = build_policy(config, read_model_shape(folder), layout, kernels, with_critic=with_critic)
    import_hf(policy, folder)
    return policy


def _tokens(
    behavior: Behavior, credit: Credit | None, ref_logprob: Tensor | None, mine: list[int]
) -> dict[str, dict[int, Tensor]]:
    assert credit is not None
    rows = behavior.token_rows()
    arrays = {
        "logprob": behavior.logprob[rows],
        "ref_logprob": ref_logprob,
        "entropy": behavior.entropy[rows],
        "kappa": credit.kappa,
        "value": credit.value,
        "advantage": credit.advantage,
        "credit": credit.credit,
        "lambda_return": credit.lambda_return,
    }
    lengths = credit.cu_seqlens.diff().tolist()
    return {
        name: dict(zip(mine, x.detach().split(lengths), strict=True))
        for name, x in arrays.items()
        if x is not None
    }


def _top(behavior: Behavior, layout: Layout, mine: list[int]) -> dict[tuple[int, int], TopHistory]:
    if behavior.routing is None:
        return {}
    top = {}
    lengths = behavior.cu_rows.diff().tolist()
    for trajectory, length, routing in zip(mine, lengths, behavior.routing, strict=True):
        rows = owned_rows(length, layout.tp_size, layout.tp_rank).tolist()
        for row, index, weight in zip(rows, routing.index, routing.weight, strict=True):
            top[trajectory, row] = TopHistory(index, weight)
    return top


# ---------------------------------------------------------------------------- gradients and weights


class Recorder(PolicyOptimizer):
    """Keeps the gradient that the first step is given, and the weights before and after it."""

    def __init__(self, policy: PolicyModel, ddp: Any, config: Config, layout: Layout) -> None:
        super().__init__(ddp, config.optim, config.critic.lr, torch_dtype(config.model.dtype), layout)
        self.policy = policy
        self.gradients: dict[str, Tensor] = {}
        self.weights = [self.masters()]

    def step(self, rates: Rates) -> StepResult:
        first = not self.gradients
        if first:
            self.gradients = full_tensors(self.policy, self._reduced_gradient)
        result = super().step(rates)
        if first:
            self.weights.append(self.masters())
        return result

    def masters(self) -> dict[str, Tensor]:
        """The fp32 weights that the optimizer steps."""

        def master(p: torch.nn.Parameter) -> Tensor:
            if p.dtype == torch.float32:
                return p.detach().clone()
            return self._joined(p, p.main_param)  # type: ignore[attr-defined]

        return full_tensors(self.policy, master)

    def _span(self, p: torch.nn.Parameter) -> slice:
        """The entries of the flattened parameter that this data-parallel rank reduces and steps."""
        for part in self._parts():
            if p in part.model_param_gbuf_map:
                span = part._get_model_param_range_map(p)["param"]
                return slice(span.start, span.end)
        return slice(0, 0)

    def _reduced_gradient(self, p: torch.nn.Parameter) -> Tensor:
        gradient = p.main_grad  # type: ignore[attr-defined]
        return self._joined(p, gradient.detach().flatten()[self._span(p)])

    def _joined(self, p: torch.nn.Parameter, shard: Tensor | None) -> Tensor:
        """The tensor from the shards of all data-parallel ranks."""
        flat = torch.zeros(p.numel())
        if shard is not None:
            flat[self._span(p)] = shard.flatten()
        dist.all_reduce(flat, group=self.layout.groups.dp)
        return flat.view(p.shape)


@torch.no_grad()
def full_tensors(policy: PolicyModel, part: Callable[[torch.nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """`part` of every parameter of this stage, in full. Of what several ranks hold (norms, biases, both ends
    of a tied embedding) each gives its own copy, so that all are compared."""
    out: dict[str, Tensor] = {}
    for entry in held(policy):
        shards = _shards(policy, part(entry.parameter), entry.rule.axis is not None)
        for name, tensor in zip(entry.names, assemble(entry, shards, policy.config), strict=True):
            if entry.rule.padded:
                assert not tensor[policy.true_vocab_size :].any(), f"padding of {name} is not zero"
                tensor = tensor[: policy.true_vocab_size]
            out[name] = tensor.clone()
    if policy.critic is not None:
        for name, parameter in policy.critic.named_parameters():
            shards = _shards(policy, part(parameter), name in policy.critic._sharded)
            out[f"critic.{name}"] = torch.cat(shards) if len(shards) > 1 else shards[0].clone()
    return out


def _shards(policy: PolicyModel, own: Tensor, sharded: bool) -> list[Tensor]:
    group = policy.pg_collection.tp
    if not sharded or group.size() == 1:
        return [own]
    shards = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(shards, own.contiguous(), group=group)
    return shards


# ---------------------------------------------------------------------------- planted faults


def _critic_not_reduced() -> AbstractContextManager[Any]:
    """The critic keeps the gradient of its own data-parallel rank's rows."""
    finalize = execution.finalize_model_grads

    def faulty(chunks: list[Any], *args: Any, **kwargs: Any) -> None:
        critic = [p for c in chunks for name, p in c.named_parameters() if ".critic." in name]
        own = [p.main_grad.clone() for p in critic]  # type: ignore[attr-defined]
        finalize(chunks, *args, **kwargs)
        for p, gradient in zip(critic, own, strict=True):
            p.main_grad.copy_(gradient)  # type: ignore[attr-defined]

    return mock.patch.object(execution, "finalize_model_grads", faulty)


def _whitened_per_shard() -> AbstractContextManager[Any]:
    """Mean and deviation of this data-parallel rank's advantages alone."""
    whiten = transport.whiten

    def faulty(advantage: Tensor, mask: Tensor, *, clip: float, all_reduce: Any) -> Tensor:
        return whiten(advantage, mask, clip=clip)

    return mock.patch.object(transport, "whiten", faulty)


def _squared_before_the_mean() -> AbstractContextManager[Any]:
    """H = mean over heads of Σ p², in place of Σ (mean over heads of p)²."""

    def faulty(q: Tensor, k: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> tuple[RowStats, TopK]:
        stats, top = attention_statistics(q, k, lse, *args, **kwargs)
        group = q.shape[1] // k.shape[1]
        squares = [
            attention_statistics(
                q[:, h : h + 1], k[:, h // group : h // group + 1], lse[h : h + 1], *args, **kwargs
            )[0].sum_squares
            for h in range(q.shape[1])
        ]
        return replace(stats, sum_squares=torch.stack(squares).mean(0)), top

    return mock.patch.object(select, "attention_statistics", faulty)


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": _nothing,
    "critic_dp": _critic_not_reduced,
    "shard_whitening": _whitened_per_shard,
    "square_first": _squared_before_the_mean,
}
