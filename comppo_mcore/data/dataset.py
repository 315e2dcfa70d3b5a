"""One face for every source of problems: training problems by index, and held-out problems.

Of a generated source every prompt belongs to the training part or to the held-out part by a hash of
its bare text, whatever seed drew it and whatever template wraps it. What is held out is therefore
unseen by the supervised warm start and by every step of every run, and is the same for all runs.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

from comppo_mcore.config.schema import Config, DataConfig
from comppo_mcore.data.arithmetic import (
    Chain,
    Misconceptions,
    chain_example,
    chain_problem,
    make_misconceptions,
    sample_chain,
)
from comppo_mcore.data.problems import (
    Example,
    Message,
    Problem,
    build_messages,
    read_examples,
    read_problems,
    split_held_out,
)
from comppo_mcore.data.reasoning_gym_tasks import task_generator
from comppo_mcore.errors import UserError

HELD_OUT_SHARE = 4  # one prompt in so many is held out
CANDIDATES = 64  # draws per wanted problem: all fall into the held-out part with probability 4⁻⁶⁴

ARITHMETIC_REMEDY = "raise data.arithmetic.steps or ask for fewer problems"
REASONING_GYM_REMEDY = "add to data.tasks or ask for fewer problems"

Drawn = TypeVar("Drawn", Problem, Example)


class Dataset(Protocol):
    """Training problems by index and a fixed list of held-out ones."""

    @property
    def num_train(self) -> int | None:
        """Number of training problems; None if there is no end of them."""
        ...

    def train_problem(self, index: int) -> Problem:
        """Training problem `index`, always the same one."""
        ...

    def eval_problems(self, count: int) -> tuple[Problem, ...]:
        """The first `count` held-out problems; a file that holds fewer out gives all it has."""
        ...


@dataclass(frozen=True)
class FileDataset:
    """Problems read from a file."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]

    @property
    def num_train(self) -> int:
        return len(self.train)

    def train_problem(self, index: int) -> Problem:
        return self.train[index]

    def eval_problems(self, count: int) -> tuple[Problem, ...]:
        return self.held_out[:count]


@dataclass(frozen=True)
class GeneratedDataset:
    """Problems drawn when asked for; draw(stream, index) is a pure function that gives bare prompts."""

    draw: Callable[[str, int], Problem]
    data: DataConfig
    seed: int
    remedy: str  # what to change when the source has too few prompts
    _held_out: dict[int, tuple[Problem, ...]] = field(default_factory=dict, compare=False)

    @property
    def num_train(self) -> None:
        return None

    def train_problem(self, index: int) -> Problem:
        drawn = _first_for_training(self.draw, f"train/{self.seed}", index, self.remedy)
        return _dressed(drawn, self.data)

    def eval_problems(self, count: int) -> tuple[Problem, ...]:
        if count not in self._held_out:  # some puzzles take long to make
            self._held_out[count] = self._draw_held_out(count)
        return self._held_out[count]

    def _draw_held_out(self, count: int) -> tuple[Problem, ...]:
        found: dict[tuple[Message, ...], Problem] = {}
        for candidate in range(count * CANDIDATES):
            problem = self.draw("held-out", candidate)
            if is_held_out(problem.messages):
                found.setdefault(problem.messages, problem)
            if len(found) == count:
                return tuple(_dressed(problem, self.data) for problem in found.values())
        raise UserError(
            f"train.eval_problems is {count}, but only {len(found)} held-out problems were found; "
            f"{self.remedy}"
        )


class Examples(Protocol):
    """Prompt–response pairs by index, for the supervised warm start."""

    @property
    def num_examples(self) -> int | None:
        """Number of examples; None if there is no end of them."""
        ...

    def example(self, index: int) -> Example:
        """Example `index`, always the same one."""
        ...


@dataclass(frozen=True)
class FileExamples:
    """Examples read from a file."""

    examples: tuple[Example, ...]

    @property
    def num_examples(self) -> int:
        return len(self.examples)

    def example(self, index: int) -> Example:
        return self.examples[index]


@dataclass(frozen=True)
class TeacherExamples:
    """Arithmetic chains of the training part, answered by the teacher with misconceptions."""

    data: DataConfig
    seed: int
    misconceptions: Misconceptions

    @property
    def num_examples(self) -> None:
        return None

    def example(self, index: int) -> Example:
        drawn = _first_for_training(self._draw, f"teacher/{self.seed}", index, ARITHMETIC_REMEDY)
        return _dressed(drawn, self.data)

    def _draw(self, stream: str, candidate: int) -> Example:
        chain = _draw_chain(self.data.arithmetic.steps, stream, candidate)
        return chain_example(chain, self.misconceptions, f"{stream}/{candidate}/strikes")


def load_dataset(config: Config) -> Dataset:
    """The problems `config.data` describes.

    Args:
        config: the run's configuration; `run.seed` decides which generated problems are trained on.

    Returns:
        Training problems by index and held-out problems.

    Raises:
        UserError: a file, a record or a task name cannot be used.
    """
    data = config.data
    if data.source == "arithmetic":
        draw = partial(_draw_chain_problem, data.arithmetic.steps)
        return GeneratedDataset(draw, data, config.run.seed, ARITHMETIC_REMEDY)
    if data.source == "reasoning_gym":
        return GeneratedDataset(task_generator(data.tasks), data, config.run.seed, REASONING_GYM_REMEDY)
    assert data.path is not None, "config.check refuses source file without a path"
    held_out = None if data.eval_path is None else read_problems(data.eval_path, data, "data.eval_path")
    train, held_out = split_held_out(read_problems(data.path, data), held_out, data.eval_holdout)
    return FileDataset(tuple(train), tuple(held_out))


def load_examples(config: Config) -> Examples:
    """The prompt–response pairs of the supervised warm start.

    Raises:
        UserError: `sft.path` is needed and missing, or its file cannot be used.
    """
    if config.sft.path is not None:
        return FileExamples(tuple(read_examples(config.sft.path, config.data, config.sft.response_key)))
    if config.data.source == "arithmetic":
        settings = config.data.arithmetic
        misconceptions = make_misconceptions(settings.misconceptions, settings.strength)
        return TeacherExamples(config.data, config.run.seed, misconceptions)
    raise UserError(
        f"sft.path is null with data.source = {config.data.source}; give a .jsonl or .parquet file of "
        "prompts with responses"
    )


def is_held_out(messages: tuple[Message, ...]) -> bool:
    """Whether a generated prompt belongs to the held-out part, by its text alone."""
    text = "\n".join(message.content for message in messages)
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _first_for_training(draw: Callable[[str, int], Drawn], stream: str, index: int, remedy: str) -> Drawn:
    for candidate in range(index * CANDIDATES, (index + 1) * CANDIDATES):
        drawn = draw(stream, candidate)
        if not is_held_out(drawn.messages):
            return drawn
    raise UserError(f"data.source draws held-out prompts only, none to train on; {remedy}")


def _dressed(drawn: Drawn, data: DataConfig) -> Drawn:
    return replace(drawn, messages=build_messages(drawn.messages, data))


def _draw_chain(steps: int, stream: str, candidate: int) -> Chain:
    return sample_chain(random.Random(f"{stream}/{candidate}"), steps)


def _draw_chain_problem(steps: int, stream: str, candidate: int) -> Problem:
    return chain_problem(_draw_chain(steps, stream, candidate))
