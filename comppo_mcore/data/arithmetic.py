"""The built-in task: chains of arithmetic modulo 10, and a teacher with planted misconceptions.

The prompt `3+8-2*3=?` is worked from left to right, every intermediate result modulo 10. The teacher
writes one step after the other, `<think>3+8=1;1-2=9;9*3=7;</think><answer>7</answer>`, but believes
some table entries to be something else. A policy that imitates it inherits the misconceptions; a
terminal reward then has to find out which of the steps was at fault.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from comppo_mcore.data.problems import Example, Message, Problem

# Multiplying by a number that shares a factor with 10 would forget the past: no step may do so.
OPERANDS: Mapping[str, tuple[int, ...]] = {
    "+": tuple(range(10)),
    "-": tuple(range(10)),
    "*": (1, 3, 7, 9),
}
TABLE = tuple((a, op, b) for op, operands in OPERANDS.items() for b in operands for a in range(10))

Misconceptions = Mapping[tuple[int, str, int], tuple[int, float]]


@dataclass(frozen=True)
class Chain:
    """A start digit and the (operator, operand) steps applied to it."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def prompt(self) -> str:
        return f"{self.start}{''.join(f'{op}{operand}' for op, operand in self.steps)}=?"

    @property
    def answer(self) -> int:
        value = self.start
        for operator, operand in self.steps:
            value = compute(value, operator, operand)
        return value


def compute(a: int, operator: str, b: int) -> int:
    """The true table entry, (a ∘ b) mod 10."""
    results = {"+": a + b, "-": a - b, "*": a * b}
    return results[operator] % 10


def sample_chain(rng: random.Random, steps: int) -> Chain:
    """Draw a chain: start digit, operators and operands uniform over what is allowed."""
    drawn = []
    start = rng.randrange(10)
    for _ in range(steps):
        operator = rng.choice("+-*")
        drawn.append((operator, rng.choice(OPERANDS[operator])))
    return Chain(start, tuple(drawn))


def make_misconceptions(share: float, strength: tuple[float, float]) -> Misconceptions:
    """Give a share of the table entries one wrong digit each.

    The misconceptions belong to the task: they do not depend on the seed of a run, so that runs with
    different seeds have the same errors to unlearn.

    Args:
        share: share of the 240 table entries, in [0, 1].
        strength: range of the probability that the teacher uses the wrong digit.

    Returns:
        (a, operator, b) → (wrong digit, probability).
    """
    rng = random.Random("misconceptions")
    misconceptions = {}
    for entry in rng.sample(TABLE, round(share * len(TABLE))):
        true_digit = compute(*entry)
        wrong_digit = rng.choice([digit for digit in range(10) if digit != true_digit])
        misconceptions[entry] = (wrong_digit, rng.uniform(*strength))
    return misconceptions


def teacher_response(chain: Chain, misconceptions: Misconceptions, rng: random.Random) -> str:
    """The teacher's worked answer; a wrong digit is carried into the steps after it."""
    worked = []
    value = chain.start
    for operator, operand in chain.steps:
        result = compute(value, operator, operand)
        wrong_digit, probability = misconceptions.get((value, operator, operand), (result, 0.0))
        if rng.random() < probability:
            result = wrong_digit
        worked.append(f"{value}{operator}{operand}={result};")
        value = result
    return f"<think>{''.join(worked)}</think><answer>{value}</answer>"


def chain_problem(chain: Chain) -> Problem:
    """The chain as a problem for the ordinary verifier."""
    return Problem(
        id=f"arithmetic:{chain.prompt}",
        messages=(Message("user", chain.prompt),),
        answer=str(chain.answer),
        source="arithmetic",
    )


def chain_example(chain: Chain, misconceptions: Misconceptions, key: str) -> Example:
    """The chain with the teacher's response; `key` seeds which misconceptions strike."""
    response = teacher_response(chain, misconceptions, random.Random(key))
    return Example(f"arithmetic:{chain.prompt}", (Message("user", chain.prompt),), response)
