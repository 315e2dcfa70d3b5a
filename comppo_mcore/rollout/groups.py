"""The responses to one prompt, some of them perhaps not begun or broken off, from one step to the next.

What a policy of long tails does to on-policyness is in docs/rollouts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from comppo_mcore.rollout.engine import Completion, Engine, EngineLost, Sampling


@dataclass(frozen=True)
class Request:
    """One response to generate, or the rest of one."""

    token_ids: tuple[int, ...]  # the prompt, and what is there of the response
    sampling: Sampling
    seed: int


Enough = Callable[[Sequence[Completion | None]], bool]  # results so far: may the others be broken off?
Heard = Callable[[int, Completion], None]  # number of the request, what it gave


class GroupEngine(Engine, Protocol):
    """An engine that can break off what nobody waits for."""

    def run(
        self, requests: Sequence[Request], enough: Enough, max_wait_s: float | None, heard: Heard
    ) -> list[Completion | None]:
        """Results in order. Once `enough`, or after `max_wait_s`, what still runs is aborted.

        Aborted requests give the tokens they have, with finish "abort", or None if they have none. `heard` is
        called once for each request that has a token, from any thread.

        Raises:
            EngineLost: nothing is left that generates.
        """
        ...


def is_open(response: Completion | None) -> bool:
    """Not begun, or broken off."""
    return response is None or response.finish == "abort"


def all_finished(results: Sequence[Completion | None]) -> bool:
    """The rule of who waits for everything."""
    return not any(map(is_open, results))


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    prompt: int  # its number among the training problems
    responses: tuple[Completion | None, ...]  # None: not begun; finish "abort": to be continued

    @property
    def complete(self) -> bool:
        return all_finished(self.responses)

    def restarted(self) -> Group:
        """Without anything that older weights generated."""
        return replace(self, responses=(None,) * len(self.responses))


def joined(begun: Completion | None, rest: Completion | None) -> Completion | None:
    """A response and its continuation, as one; each token keeps the version of its weights."""
    if begun is None or rest is None:
        return rest or begun
    supports = None
    if begun.supports is not None and rest.supports is not None:
        supports = begun.supports + rest.supports
    return Completion(
        token_ids=begun.token_ids + rest.token_ids,
        logprobs=begun.logprobs + rest.logprobs,
        finish=rest.finish,
        versions=begun.versions + rest.versions,
        supports=supports,
    )


def generate_groups(
    engine: GroupEngine,
    prompts: Sequence[tuple[int, ...]],
    groups: Sequence[Group],
    wanted: int,
    sampling: Sampling,
    seeds: Callable[[int, int], int],
    max_wait_s: float | None,
    done: Callable[[int, int, Completion], None],
) -> tuple[list[Group], str | None]:
    """Go on with all groups until `wanted` are complete or the time is up.

    Args:
        prompts: token ids, a group each.
        seeds: (group, response) → seed.
        done: hears of each finished response: group, response, the whole of it.

    Returns:
        The groups, in order, and how the engine was lost on the way, if it was.
    """
    open_ = [(g, i) for g, group in enumerate(groups) for i, r in enumerate(group.responses) if is_open(r)]
    requests = [_request(prompts[g], groups[g].responses[i], sampling, seeds(g, i)) for g, i in open_]
    for g, group in enumerate(groups):
        for i, response in enumerate(group.responses):
            if response is not None and response.finish != "abort":
                done(g, i, response)

    def whole(at: int, rest: Completion | None) -> Completion | None:
        g, i = open_[at]
        return joined(groups[g].responses[i], rest)

    def heard(at: int, rest: Completion) -> None:
        if rest.finish != "abort":
            response = whole(at, rest)
            assert response is not None
            done(*open_[at], response)

    def enough(results: Sequence[Completion | None]) -> bool:
        unfinished = {g for (g, _), r in zip(open_, results, strict=True) if is_open(r)}
        return len(groups) - len(unfinished) >= wanted

    lost = None
    try:
        results = engine.run(requests, enough, max_wait_s, heard)
    except EngineLost as error:
        results, lost = error.results, str(error)
    responses = [list(group.responses) for group in groups]
    for at, (g, i) in enumerate(open_):
        responses[g][i] = whole(at, results[at])
    return [replace(g, responses=tuple(r)) for g, r in zip(groups, responses, strict=True)], lost


def choose(groups: Sequence[Group], wanted: int) -> tuple[list[int], list[int]]:
    """Indices of the groups of this step, complete ones before others, and of those left, each in order."""
    by_merit = sorted(range(len(groups)), key=lambda g: (not groups[g].complete, g))
    return sorted(by_merit[:wanted]), sorted(by_merit[wanted:])


def to_json(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": group.prompt,
            "responses": [None if r is None else vars(r) for r in group.responses],
        }
        for group in groups
    ]


def from_json(records: Sequence[dict[str, Any]]) -> tuple[Group, ...]:
    """Inverse of `to_json`."""
    return tuple(
        Group(
            record["prompt"],
            tuple(None if r is None else _completion(r) for r in record["responses"]),
        )
        for record in records
    )


def _completion(record: dict[str, Any]) -> Completion:
    supports = record["supports"]
    return Completion(
        token_ids=tuple(record["token_ids"]),
        logprobs=tuple(record["logprobs"]),
        finish=record["finish"],
        versions=tuple(record["versions"]),
        supports=None if supports is None else tuple(tuple(ids) for ids in supports),
    )


def _request(prompt: tuple[int, ...], begun: Completion | None, sampling: Sampling, seed: int) -> Request:
    done = () if begun is None else begun.token_ids
    return Request((*prompt, *done), replace(sampling, max_tokens=sampling.max_tokens - len(done)), seed)
