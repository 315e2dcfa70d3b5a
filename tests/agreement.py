"""By how much the findings of one case differ from those of one process, in multiples of what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.invariance import Finding, TopHistory

PER_TOKEN = 1e-5  # absolute: log-probs, κ, values, advantages
LOSS = 1e-5  # absolute
GRADIENT = 1e-5  # of the tensor's largest entry, and of the norm
DELTA = 1e-4  # of the largest change in the tensor, beside the rounding of the weights themselves
TIE = 1e-6  # of the K-th weight
ULP = 2.0**-23


def broken(reference: Finding, findings: Sequence[Finding]) -> dict[str, float]:
    """What differs by more than allowed on some rank: quantity → multiple of the tolerance, worst first."""
    worst: dict[str, float] = {}
    for finding in findings:
        for name, error in _errors(reference, finding):
            worst[name] = max(worst.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return {name: e for name, e in sorted(worst.items(), key=lambda item: -item[1]) if e > 1}


def missing(reference: Finding, findings: Sequence[Finding]) -> set[Any]:
    """What the reference has and no rank does."""

    def names(finding: Finding) -> set[Any]:
        tokens = {(name, trajectory) for name, arrays in finding.tokens.items() for trajectory in arrays}
        return tokens | finding.top.keys() | finding.gradients.keys() | finding.weights[0].keys()

    return names(reference).difference(*map(names, findings))


def _errors(reference: Finding, finding: Finding) -> Iterator[tuple[str, float]]:
    for name, arrays in finding.tokens.items():
        for trajectory, x in arrays.items():
            yield name, largest(x - reference.tokens[name][trajectory]) / PER_TOKEN
    for key, top in finding.top.items():
        yield "top-K", 0.0 if same_top(reference.top[key], top) else math.inf
    for mine, theirs in zip(finding.steps, reference.steps, strict=True):
        yield from _step_errors(mine, theirs)
    for name, gradient in finding.gradients.items():
        expected = reference.gradients[name]
        yield f"gradient {name}", largest(gradient - expected) / (GRADIENT * largest(expected))
    change, expected_change = finding.change(), reference.change()
    for name, delta in change.items():
        expected = expected_change[name]
        allowed = DELTA * largest(expected) + rounding(finding.weights[0][name], len(finding.steps))
        yield f"delta {name}", largest(delta - expected) / allowed


def _step_errors(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[tuple[str, float]]:
    yield "tokens", 0.0 if mine["applied"] and mine["tokens"] == theirs["tokens"] else math.inf
    for name in ("policy_loss", "value_loss", "kl_loss"):
        if theirs[name] is not None:
            scale = theirs["tokens"] if name == "kl_loss" else 1.0  # that one is a sum
            yield name, abs(mine[name] - theirs[name]) / scale / LOSS
    for name in ("actor_grad_norm", "critic_grad_norm"):
        if theirs[name] is not None:
            yield name, abs(mine[name] - theirs[name]) / (GRADIENT * theirs[name])


def same_top(a: TopHistory, b: TopHistory) -> bool:
    """The same keys, but for those whose weight is that of the K-th."""
    ours, theirs = _keys(a), _keys(b)
    smallest = min(ours.values(), default=0.0)
    weights = ours | theirs
    return len(ours) == len(theirs) and all(
        abs(weights[i] - smallest) <= TIE * smallest for i in ours.keys() ^ theirs.keys()
    )


def _keys(top: TopHistory) -> dict[int, float]:
    return {i: w for i, w in zip(top.index.tolist(), top.weight.tolist(), strict=True) if i >= 0}


def joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all ranks, each name once."""
    return {name: x for part in parts for name, x in part.items()}


def by_role(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The actor's and the critic's, each flattened into one vector, float64."""
    roles: dict[str, list[Tensor]] = {}
    for name, x in sorted(tensors.items()):
        roles.setdefault("critic" if name.startswith("critic.") else "actor", []).append(x.double().flatten())
    return {role: torch.cat(parts) for role, parts in roles.items()}


def largest(x: Tensor) -> float:
    return float(x.abs().max())


def rounding(weight: Tensor, steps: int) -> float:
    """What `steps` additions to a float32 weight may round off on the two sides of a comparison."""
    return steps * ULP * largest(weight)
