"""Problems from reasoning-gym, for the tasks whose scorers are safe and exact.

A scorer is given text that a policy wrote, and a policy that is paid for its score finds every
leniency. A task is on the allow-list only if its scorer (1) neither evaluates the answer as Python nor
hands it to sympy's evaluating parser, and (2) gives 1.0 to right answers alone. Rule 1 leaves out
binary_matrix, bitwise_arithmetic, countdown, the integration tasks, n_queens, number_sorting,
polynomial_multiplication, puzzle24, spiral_matrix and string_insertion; rule 2 leaves out, among
others, game_of_life (extra cells pass), game_of_life_halting (any text counts as true),
power_function (three digits suffice), decimal_arithmetic, number_format and coin_flip (tolerances).
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

from comppo_mcore.data.problems import Message, Problem
from comppo_mcore.errors import UserError

ALLOWED_TASKS = (
    "ab",
    "aiw",
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "binary_alternation",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "circuit_logic",
    "color_cube_rotation",
    "count_bits",
    "count_primes",
    "course_schedule",
    "cryptarithm",
    "decimal_chain_sum",
    "dice",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "isomorphic_strings",
    "jugs",
    "kakurasu",
    "knights_knaves",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "mahjong_puzzle",
    "manipulate_matrix",
    "maze",
    "mini_sudoku",
    "modulo_grid",
    "needle_haystack",
    "number_filtering",
    "number_sequence",
    "path_star",
    "prime_factorization",
    "products",
    "quantum_lock",
    "ransom_note",
    "rectangle_count",
    "rotate_matrix",
    "rotten_oranges",
    "self_reference",
    "sentence_reordering",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "spell_backward",
    "string_manipulation",
    "string_splitting",
    "string_synthesis",
    "sudoku",
    "survo",
    "syllogism",
    "tower_of_hanoi",
    "tsumego",
    "word_sequence_reversal",
    "word_sorting",
    "zebra_puzzles",
)


def check_tasks(tasks: tuple[str, ...]) -> None:
    """Refuse task names that are not on the allow-list.

    Raises:
        UserError: names `data.tasks`, the task and the nearest allowed names.
    """
    for name in tasks:
        if name not in ALLOWED_TASKS:
            nearest = difflib.get_close_matches(name, ALLOWED_TASKS, n=3, cutoff=0.0)
            raise UserError(
                f"data.tasks names '{name}', which is not an allowed reasoning-gym task; "
                f"the nearest allowed names are {', '.join(nearest)}"
            )


def task_generator(tasks: tuple[str, ...]) -> Callable[[str, int], Problem]:
    """Make the function that draws problem `index` of a stream, the tasks taking turns.

    Args:
        tasks: at least one name.

    Returns:
        draw(stream, index): a pure function of its arguments and of `tasks`.

    Raises:
        UserError: see `check_tasks`.
    """
    check_tasks(tasks)

    def draw(stream: str, index: int) -> Problem:
        row, column = divmod(index, len(tasks))
        return _draw(tasks[column], stream, row)

    return draw


def _draw(task: str, stream: str, index: int) -> Problem:
    entry = _dataset(task, stream)[index]
    return Problem(
        id=f"{task}:{stream}:{index}",
        messages=(Message("user", entry["question"]),),
        answer=str(entry["answer"]),
        source="reasoning_gym",
        task=task,
        metadata=entry,
    )


@cache
def _dataset(task: str, stream: str) -> Any:
    # reasoning-gym seeds item i with seed + i, so that neighbouring seeds share items: hash the stream.
    from reasoning_gym.factory import create_dataset

    digest = hashlib.sha256(f"{task}/{stream}".encode()).digest()
    return create_dataset(task, seed=int.from_bytes(digest[:4]) >> 1, size=2**31)
