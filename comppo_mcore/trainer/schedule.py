"""Which trajectory is trained when, and by whom: seeds, minibatches, ownership, micro-batches."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from comppo_mcore.errors import UserError


def step_seed(run_seed: int, step: int, purpose: str, *extra: int) -> int:
    """Seed of one use of randomness: the first 63 bits of SHA-256 over everything that names the use.

    The same in every process and on every machine, and independent of how often random numbers were drawn
    before, so that a resumed run draws what the uninterrupted one would have.
    """
    name = ":".join([str(run_seed), str(step), purpose, *map(str, extra)])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def minibatches(num_trajectories: int, minibatch: int, epoch_seed: int) -> Tensor:
    """Trajectories of every optimizer step of one epoch.

    The n trajectories are cut into m strata, stratum c = [c·n/m, (c+1)·n/m); column c is a permutation of it.
    Every row thus takes one trajectory of each stratum, every trajectory comes once, and a rank that owns
    whole strata finds its part of every minibatch in its own columns.

    Args:
        num_trajectories: n, of the rollout, over all data-parallel ranks.
        minibatch: m, trajectories per optimizer step, over all data-parallel ranks.
        epoch_seed: from `step_seed`, different for every epoch.

    Returns:
        int64 [n / m, m], a row per optimizer step.

    Raises:
        ValueError: m does not divide n.
    """
    stratum = _stratum(num_trajectories, minibatch)
    generator = torch.Generator().manual_seed(epoch_seed)
    columns = [c * stratum + torch.randperm(stratum, generator=generator) for c in range(minibatch)]
    return torch.stack(columns, dim=1)


def owned_columns(minibatch: int, dp_size: int, dp_rank: int) -> slice:
    """Columns of `minibatches` that a data-parallel rank owns: m / dp neighbouring ones.

    Raises:
        ValueError: the data-parallel size does not divide m, or there is no such rank.
    """
    if minibatch % dp_size or not 0 <= dp_rank < dp_size:
        raise ValueError(f"rank {dp_rank} of {dp_size} has no equal share of minibatch {minibatch}")
    share = minibatch // dp_size
    return slice(dp_rank * share, (dp_rank + 1) * share)


def owned(num_trajectories: int, minibatch: int, dp_size: int, dp_rank: int) -> Tensor:
    """Trajectories of the strata that a data-parallel rank owns: int64 [n / dp], a contiguous range.

    Raises:
        ValueError: m does not divide n, or the data-parallel size does not divide m.
    """
    stratum = _stratum(num_trajectories, minibatch)
    columns = owned_columns(minibatch, dp_size, dp_rank)
    return torch.arange(columns.start * stratum, columns.stop * stratum)


def pack_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut trajectories into micro-batches of at most `max_tokens` tokens and nearly even size.

    Longest first, each to the micro-batch with the fewest tokens, for the smallest number of micro-batches
    (from ⌈Σ lengths / max_tokens⌉ up) with which that fits. Ties go to the earlier one, so every rank that is
    given the same lengths cuts alike.

    Args:
        lengths: tokens of prompt + response of each trajectory, at least 1.
        max_tokens: most tokens of a micro-batch.

    Returns:
        Indices into `lengths`, each once, rising within a micro-batch; micro-batches by their first index.

    Raises:
        UserError: one trajectory alone is longer than `max_tokens`.
    """
    if not lengths:
        return []
    if max(lengths) > max_tokens:
        raise UserError(
            f"train.micro_batch_tokens is {max_tokens}, but a trajectory has {max(lengths)} tokens: "
            "it must be at least the longest prompt + response."
        )
    num_batches = -(-sum(lengths) // max_tokens)
    while (batches := _spread(lengths, num_batches, max_tokens)) is None:
        num_batches += 1
    return sorted(sorted(batch) for batch in batches)


def _spread(lengths: Sequence[int], num_batches: int, max_tokens: int) -> list[list[int]] | None:
    """Longest-first, least-loaded assignment to `num_batches` bins; None when one overflows."""
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    load = [(0, b) for b in range(num_batches)]  # a heap
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, b = load[0]
        if tokens + lengths[i] > max_tokens:
            return None
        heapq.heapreplace(load, (tokens + lengths[i], b))
        batches[b].append(i)
    return batches


def _stratum(num_trajectories: int, minibatch: int) -> int:
    if num_trajectories < minibatch or num_trajectories % minibatch:
        raise ValueError(f"minibatch {minibatch} does not divide {num_trajectories} trajectories")
    return num_trajectories // minibatch
