"""Prompts → rollout → reward: graded responses, on every rank.

With an engine in every process, every rank generates and grades an equal share; the shares are then
exchanged, so that all ranks hold all tokens and rewards (a few bytes a token). With an engine that all share,
the first rank asks it for everything and grades what is finished while the rest is being generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from comppo_mcore.config.schema import Config
from comppo_mcore.data.problems import Problem
from comppo_mcore.data.tokenizer import EncodedPrompt, check_prompt_lengths, decode_response, encode_prompt
from comppo_mcore.errors import UserError
from comppo_mcore.model.batch import Sample
from comppo_mcore.model.parallel import Layout, gather_objects, on_first_rank
from comppo_mcore.reward.pool import Answer, Grader, Verdict
from comppo_mcore.reward.reward import Reward, terminal_reward
from comppo_mcore.rollout.engine import Completion, EngineLost, Sampling
from comppo_mcore.trainer.grading import OverlappedGrading
from comppo_mcore.trainer.session import Session, max_prompt_tokens, sync_weights
from comppo_mcore.trainer.transport import Evidence

T = TypeVar("T")
MAX_LOSSES = 3

Clock = Callable[[str], AbstractContextManager[None]]


def _no_clock(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Graded:
    """One response with the verifier's word on it."""

    prompt: EncodedPrompt
    completion: Completion
    verdict: Verdict

    @property
    def sample(self) -> Sample:
        return Sample(self.prompt.token_ids, self.completion.token_ids, self.completion.supports)

    @property
    def truncated(self) -> bool:
        return self.completion.finish != "stop"


@dataclass(frozen=True)
class Experience:
    """All trajectories of a step, the responses to a prompt side by side; equal on every rank."""

    graded: tuple[Graded, ...]
    rewards: tuple[Reward, ...]
    evidence: Evidence
    version: int  # of the trainer's weights

    def samples(self, index: Tensor) -> list[Sample]:
        return [self.graded[i].sample for i in index.tolist()]

    def engine_logprobs(self, index: Tensor) -> Tensor:
        """log_softmax(z/T) as the engine reported it, packed over trajectories, float32 [N]."""
        return torch.tensor([x for i in index.tolist() for x in self.graded[i].completion.logprobs])

    def fresh(self) -> Tensor:
        """Which tokens the trainer's present weights generated, packed over trajectories, bool [N]."""
        versions = [version for g in self.graded for version in g.completion.versions]
        return torch.tensor(versions) == self.version


def experience_of(graded: Sequence[Graded], config: Config, step: int) -> Experience:
    """Reward the responses of training step `step`, counted from 0."""
    count, repeats = config.rollout.prompts, config.rollout.responses
    rewards = tuple(
        terminal_reward(g.verdict, len(g.completion.token_ids), step=step, config=config.reward)
        for g in graded
    )
    evidence = Evidence(
        rewards=torch.tensor([r.total for r in rewards], dtype=torch.float32),
        groups=torch.arange(count).repeat_interleave(repeats),
        masks=tuple((True,) * len(g.completion.token_ids) for g in graded),
        truncated=torch.tensor([g.truncated for g in graded]),
    )
    return Experience(tuple(graded), rewards, evidence, version=step)


def sampling_of(session: Session, *, greedy: bool = False) -> Sampling:
    """As configured for training, or the argmax."""
    rollout = session.config.rollout
    sampling = Sampling(rollout.max_response_tokens, stop_ids=session.text.stop_ids, greedy=greedy)
    if greedy:
        return sampling
    recorded = session.config.algo.ratio == "mask"
    return replace(sampling, temperature=rollout.temperature, top_p=rollout.top_p, record_support=recorded)


def roll_out(
    session: Session,
    grader: Grader,
    problems: Sequence[Problem],
    sampling: Sampling,
    seed: int,
    clock: Clock = _no_clock,
) -> list[Graded]:
    """One graded response per problem, in order, on every rank; collective over the world.

    Args:
        problems: a problem comes once for each of its responses.
        seed: each rank draws with a seed of its own made from it.
    """
    if session.engine.shared:
        with clock("rollout"):
            return until_kept(session, lambda: _graded(session, grader, problems, sampling, seed))
    mine = [problems[i] for i in _share(len(problems), session.layout)]
    prompts = encode(session, mine)
    with clock("rollout"):
        token_ids = [prompt.token_ids for prompt in prompts]
        completions = session.engine.generate(token_ids, sampling, seed + session.layout.rank) if mine else []
    with clock("reward"):
        verdicts = grader.grade(
            [answer_of(session, *a) for a in zip(mine, prompts, completions, strict=True)]
        )
        graded = [Graded(*parts) for parts in zip(prompts, completions, verdicts, strict=True)]
        return [g for part in gather_objects(graded) for g in part]


@dataclass(frozen=True)
class Lost:
    """The shared engine was lost on the way to a result."""

    reason: str


def until_kept(session: Session, work: Callable[[], T | Lost]) -> T:
    """What `work` gives on the first rank, on every rank.

    If the engine is lost it gets the present weights anew, which brings back what can be brought back, and
    `work` is asked again.

    Raises:
        UserError: the engine is lost again and again, or no server can be brought back.
    """
    losses: list[str] = []
    while len(losses) < MAX_LOSSES:
        result = on_first_rank(work)
        if not isinstance(result, Lost):
            return result
        losses.append(result.reason)
        version = session.engine.weight_version
        assert version is not None
        sync_weights(session, version)
    raise UserError(
        f"rollout.engine: all servers were lost {MAX_LOSSES} times in a row while they generated for one "
        f"step, at last because {losses[-1]}; see their logs in the run folder"
    )


def _graded(
    session: Session, grader: Grader, problems: Sequence[Problem], sampling: Sampling, seed: int
) -> list[Graded] | Lost:
    """Responses from a shared engine, graded as they come."""
    prompts = encode(session, problems)
    with OverlappedGrading(grader) as grading:

        def done(i: int, completion: Completion) -> None:
            grading.put(i, lambda: answer_of(session, problems[i], prompts[i], completion))

        try:
            completions = session.engine.generate([p.token_ids for p in prompts], sampling, seed, done)
        except EngineLost as error:
            return Lost(str(error))
        verdicts = grading.finish()
    return [Graded(p, c, verdicts[i]) for i, (p, c) in enumerate(zip(prompts, completions, strict=True))]


def encode(session: Session, problems: Sequence[Problem]) -> list[EncodedPrompt]:
    """Prompts of problems, each short enough to leave the response its room."""
    prompts = [encode_prompt(session.text.tokenizer, problem) for problem in problems]
    check_prompt_lengths(prompts, max_prompt_tokens(session.config, session.shape))
    return prompts


def _share(count: int, layout: Layout) -> range:
    """This rank's contiguous part of `count` trajectories."""
    begin, end = (rank * count // layout.world_size for rank in (layout.rank, layout.rank + 1))
    return range(begin, end)


def answer_of(session: Session, problem: Problem, prompt: EncodedPrompt, completion: Completion) -> Answer:
    return Answer(
        problem=problem,
        text=decode_response(session.text.tokenizer, completion.token_ids, session.text.stop_ids),
        finished=completion.finish == "stop",
        think_open=prompt.think_open,
    )
