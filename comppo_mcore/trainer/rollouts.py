"""Which prompts a step trains on, and when their responses are generated: now, before, or ahead of time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

from comppo_mcore.data.problems import Problem
from comppo_mcore.data.sampler import prompt_indices
from comppo_mcore.model.parallel import on_first_rank
from comppo_mcore.reward.pool import Grader
from comppo_mcore.rollout.engine import Completion, EngineLost
from comppo_mcore.rollout.groups import (
    Group,
    GroupEngine,
    Request,
    all_finished,
    choose,
    generate_groups,
    is_open,
)
from comppo_mcore.trainer.experience import (
    Clock,
    Experience,
    Graded,
    Lost,
    answer_of,
    encode,
    experience_of,
    roll_out,
    sampling_of,
    until_kept,
)
from comppo_mcore.trainer.grading import OverlappedGrading
from comppo_mcore.trainer.schedule import step_seed
from comppo_mcore.trainer.session import Session
from comppo_mcore.trainer.state import RunState


@dataclass(frozen=True)
class Plan:
    """What a step's rollout begins with."""

    step: int  # counted from 1
    groups: tuple[Group, ...]  # carried ones first
    drawn: int  # prompts taken from the data for it


@dataclass(frozen=True)
class Collected:
    """What a step's rollout ends with."""

    graded: tuple[Graded, ...]
    left: tuple[Group, ...]


class Rollouts:
    """The rollouts of a run, one step after another; lives on every rank.

    With `rollout.lag` the next step's responses are generated while a step trains.
    """

    def __init__(self, session: Session, grader: Grader) -> None:
        self._session = session
        self.grader = grader
        self._pool = ThreadPoolExecutor(1, "comppo-rollout")
        # On the first rank only:
        self._ahead: tuple[int, Future[Collected | Lost]] | None = None  # step and its rollout
        self._begun: Plan | None = None  # how far a rollout had come whose engine was lost

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is being generated; the engine has been closed."""
        if self._ahead is not None:
            with suppress(Exception):  # the run is over: what it would have said no longer matters
                self._ahead[1].result()
        self._pool.shutdown()

    def collect(self, state: RunState, clock: Clock) -> tuple[Experience, RunState]:
        """Graded responses for step `state.step + 1`, and the state with what it used up and left."""
        plan, session = self._plan(state), self._session
        if session.engine.shared:
            with clock("rollout"):
                collected = until_kept(session, lambda: self._result(plan))
        else:
            collected = self._from_every_rank(plan, clock)
        consumed = state.prompts_consumed + plan.drawn
        state = replace(state, prompts_consumed=consumed, carried=collected.left)
        if session.config.rollout.lag:
            self._look_ahead(replace(state, step=plan.step))
        else:
            session.engine.rest()
        return experience_of(collected.graded, session.config, plan.step - 1), state

    def settle(self) -> None:
        """Wait until nothing is being generated, because weights are about to change; collective."""
        if self._session.config.rollout.lag:
            on_first_rank(self._wait_for_ahead)

    def _wait_for_ahead(self) -> None:
        if self._ahead is not None:
            wait([self._ahead[1]])

    def _plan(self, state: RunState) -> Plan:
        rollout, dataset = self._session.config.rollout, self._session.text.dataset
        carried = state.carried if rollout.partial else tuple(g.restarted() for g in state.carried)
        drawn = max(0, rollout.prompts + rollout.oversample - len(carried))
        seed = self._session.config.run.seed
        fresh = prompt_indices(seed, state.prompts_consumed, drawn, dataset.num_train)
        begun = (*carried, *(Group(i, (None,) * rollout.responses) for i in fresh))
        return Plan(state.step + 1, begun, drawn)

    def _look_ahead(self, state: RunState) -> None:
        if state.step < self._session.config.train.steps and self._session.layout.rank == 0:
            plan = self._plan(state)
            self._ahead = (plan.step, self._pool.submit(self._generate, plan))

    def _result(self, plan: Plan) -> Collected | Lost:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == plan.step:
            return ahead[1].result()
        begun, self._begun = self._begun, None
        return self._generate(begun or plan)

    def _generate(self, plan: Plan) -> Collected | Lost:
        """From the shared engine, graded as they come; what there is when it is lost will be gone on with."""
        session, wanted = self._session, self._session.config.rollout.prompts
        problems = self._problems(plan)
        prompts = encode(session, problems)
        with OverlappedGrading(self.grader) as grading:

            def done(g: int, i: int, completion: Completion) -> None:
                grading.put((g, i), lambda: answer_of(session, problems[g], prompts[g], completion))

            groups, lost = generate_groups(
                cast(GroupEngine, session.engine),
                [prompt.token_ids for prompt in prompts],
                plan.groups,
                wanted,
                sampling_of(session),
                lambda g, i: self._seed(plan, plan.groups[g], i),
                session.config.rollout.max_wait_s,
                done,
            )
            if lost is not None:
                self._begun = replace(plan, groups=tuple(groups))
                return Lost(lost)
            chosen, left = choose(groups, wanted)
            try:
                closed = {g: self._closed(plan, groups[g], prompts[g].token_ids) for g in chosen}
            except EngineLost as error:
                self._begun = replace(plan, groups=tuple(groups))
                return Lost(str(error))
            for g, responses in closed.items():
                for i, response in enumerate(responses):
                    if is_open(groups[g].responses[i]):
                        done(g, i, response)
            verdicts = grading.finish()
        graded = [
            Graded(prompts[g], response, verdicts[g, i])
            for g, responses in closed.items()
            for i, response in enumerate(responses)
        ]
        return Collected(tuple(graded), tuple(groups[g] for g in left))

    def _closed(self, plan: Plan, group: Group, prompt: tuple[int, ...]) -> list[Completion]:
        """The group's responses as they are; one that the clock left without a token gets one."""
        engine = cast(GroupEngine, self._session.engine)
        sampling = replace(sampling_of(self._session), max_tokens=1)
        missing = [i for i, response in enumerate(group.responses) if response is None]
        requests = [Request(prompt, sampling, self._seed(plan, group, i)) for i in missing]
        one_token = engine.run(requests, all_finished, None, lambda at, completion: None) if missing else []
        responses = [*group.responses]
        for i, response in zip(missing, one_token, strict=True):
            responses[i] = response
        return cast(list[Completion], responses)

    def _seed(self, plan: Plan, group: Group, i: int) -> int:
        return step_seed(self._session.config.run.seed, plan.step, "rollout", group.prompt, i)

    def _from_every_rank(self, plan: Plan, clock: Clock) -> Collected:
        """From the engine in every process."""
        session = self._session
        repeats = session.config.rollout.responses
        problems = [problem for problem in self._problems(plan) for _ in range(repeats)]
        seed = step_seed(session.config.run.seed, plan.step, "rollout")
        graded = roll_out(session, self.grader, problems, sampling_of(session), seed, clock)
        return Collected(tuple(graded), ())

    def _problems(self, plan: Plan) -> list[Problem]:
        return [self._session.text.dataset.train_problem(group.prompt) for group in plan.groups]
