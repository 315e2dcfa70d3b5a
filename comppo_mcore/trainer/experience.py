"""Prompts → rollout → reward: the trajectories of one step, on every rank.

Every rank generates and grades an equal share of the trajectories with its own engine; the shares are
then exchanged, so that all ranks hold all tokens and rewards (a few bytes a token).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from comppo_mcore.data.problems import Problem
from comppo_mcore.data.sampler import prompt_indices
from comppo_mcore.data.tokenizer import EncodedPrompt, check_prompt_lengths, decode_response, encode_prompt
from comppo_mcore.model.batch import Sample
from comppo_mcore.model.parallel import Layout, gather_objects
from comppo_mcore.reward.pool import Answer, Grader, Verdict
from comppo_mcore.reward.reward import Reward, terminal_reward
from comppo_mcore.rollout.engine import Completion, Sampling
from comppo_mcore.trainer.schedule import step_seed
from comppo_mcore.trainer.session import Session, max_prompt_tokens
from comppo_mcore.trainer.state import RunState
from comppo_mcore.trainer.transport import Evidence

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
        return Sample(self.prompt.token_ids, self.completion.token_ids)

    @property
    def truncated(self) -> bool:
        return self.completion.finish != "stop"


@dataclass(frozen=True)
class Experience:
    """All trajectories of a step, the responses to a prompt side by side; equal on every rank."""

    graded: tuple[Graded, ...]
    rewards: tuple[Reward, ...]
    evidence: Evidence

    def samples(self, index: Tensor) -> list[Sample]:
        return [self.graded[i].sample for i in index.tolist()]

    def engine_logprobs(self, index: Tensor) -> Tensor:
        """log_softmax(z/T) as the engine reported it, packed over trajectories, float32 [N]."""
        return torch.tensor([x for i in index.tolist() for x in self.graded[i].completion.logprobs])


def collect(session: Session, grader: Grader, state: RunState, clock: Clock) -> Experience:
    """Roll out and reward the prompts of step `state.step + 1`."""
    config, dataset = session.config, session.text.dataset
    count, repeats = config.rollout.prompts, config.rollout.responses
    indices = prompt_indices(config.run.seed, state.prompts_consumed, count, dataset.num_train)
    problems = [dataset.train_problem(i) for i in indices for _ in range(repeats)]
    sampling = Sampling(
        max_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        stop_ids=session.text.stop_ids,
    )
    seed = step_seed(config.run.seed, state.step + 1, "rollout")
    graded = roll_out(session, grader, problems, sampling, seed, clock)
    rewards = tuple(
        terminal_reward(g.verdict, len(g.completion.token_ids), step=state.step, config=config.reward)
        for g in graded
    )
    evidence = Evidence(
        rewards=torch.tensor([r.total for r in rewards], dtype=torch.float32),
        groups=torch.arange(count).repeat_interleave(repeats),
        masks=tuple((True,) * len(g.completion.token_ids) for g in graded),
        truncated=torch.tensor([g.truncated for g in graded]),
    )
    return Experience(tuple(graded), rewards, evidence)


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
    mine = [problems[i] for i in _share(len(problems), session.layout)]
    prompts = encode(session, mine)
    with clock("rollout"):
        token_ids = [prompt.token_ids for prompt in prompts]
        completions = session.engine.generate(token_ids, sampling, seed + session.layout.rank) if mine else []
    with clock("reward"):
        verdicts = grader.grade([_answer(session, *a) for a in zip(mine, prompts, completions, strict=True)])
        graded = [Graded(*parts) for parts in zip(prompts, completions, verdicts, strict=True)]
        return [g for part in gather_objects(graded) for g in part]


def encode(session: Session, problems: Sequence[Problem]) -> list[EncodedPrompt]:
    """Prompts of problems, each short enough to leave the response its room."""
    prompts = [encode_prompt(session.text.tokenizer, problem) for problem in problems]
    check_prompt_lengths(prompts, max_prompt_tokens(session.config, session.shape))
    return prompts


def _share(count: int, layout: Layout) -> range:
    """This rank's contiguous part of `count` trajectories."""
    begin, end = (rank * count // layout.world_size for rank in (layout.rank, layout.rank + 1))
    return range(begin, end)


def _answer(session: Session, problem: Problem, prompt: EncodedPrompt, completion: Completion) -> Answer:
    return Answer(
        problem=problem,
        text=decode_response(session.text.tokenizer, completion.token_ids, session.text.stop_ids),
        finished=completion.finish == "stop",
        think_open=prompt.think_open,
    )
