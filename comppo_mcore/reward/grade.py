"""Whether an answer equals the ground truth; runs inside a worker that can be killed.

The first rule that decides wins:

1. text: the normalised texts are equal;
2. assignment: `x = 5` answers `5` (and the reverse); `x = 5` does not answer `y = 5`, nor `x + 2 = 5` `5`;
3. unit: units that contradict each other differ, others are dropped; 50 % is 1/2 and, because a truth
   often leaves the sign out, 50; but 0.5 % is not 0.5;
4. exact: two rational numbers are compared exactly, see `exact`;
5. choice: `(B)`, `B.` and `(B) 12` answer the letter B;
6. words: a ground truth that is a word is compared as text, capitals aside;
7. case: a letter in capitals and in small is two symbols, which computer algebra here cannot tell apart;
8. hazard: what it would do wrongly or for ever is refused, see `algebra.hazard`;
9. math: math-verify decides, with corrections, see `algebra.algebraically_equal`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from comppo_mcore.reward.algebra import algebraically_equal, hazard
from comppo_mcore.reward.exact import NotExact, TooLarge, exact_value
from comppo_mcore.reward.messages import GradeFunction, Question, Reply
from comppo_mcore.reward.normalize import normalize
from comppo_mcore.reward.units import contradict, split_unit

Rule = Literal[
    "text", "assignment", "unit", "exact", "choice", "words", "case", "hazard", "math", "task", "unreadable"
]

MAX_RAW_LENGTH = 2_000  # characters of an answer that is normalised at all
MAX_LENGTH = 300  # characters of a mathematical expression
MAX_DEPTH = 20  # of nested brackets

_EQUALS = re.compile(r"(?<![<>])=")
_NAME = re.compile(r"(?:\\?[a-zA-Z]+)(?:_\{\w+\})?(?:\([a-zA-Z]\))?")
_CHOICE = re.compile(r"\(([A-J])\).*|\(([a-j])\)|([A-J])[.):]?|\\text(?:bf)?\{\(?([A-J])\)?\}.*", re.DOTALL)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_ONE_OR_MORE = re.compile(r"[1-9]\d*(?:\.\d+)?")
_WORD = re.compile(r"[A-Za-z][A-Za-z ]{3,}|(?i:yes|no)")


@dataclass(frozen=True)
class Grade:
    """A decision and the rule that took it."""

    correct: bool
    rule: Rule


def grade(answer: str, ground_truth: str) -> Grade:
    """Decide whether `answer` equals `ground_truth` by the rules above.

    Args:
        answer: what stood between the answer tags or in the box.
        ground_truth: the right answer.
    """
    if len(answer) > MAX_RAW_LENGTH:
        return Grade(answer.strip() == ground_truth.strip(), "text")
    literal = normalize(answer, join_thousands=False) == normalize(ground_truth, join_thousands=False)
    given, truth = normalize(answer), normalize(ground_truth)
    if literal or _squeezed(given) == _squeezed(truth):
        return Grade(True, "text")
    if max(len(given), len(truth)) > MAX_LENGTH or max(_depth(given), _depth(truth)) > MAX_DEPTH:
        return Grade(False, "hazard")
    try:
        sides = _without_assignment(given, truth)
        return Grade(False, "assignment") if sides is None else _grade_measured(*sides)
    except TooLarge:
        return Grade(False, "hazard")


def grade_task(answer: str, task: str, entry: Mapping[str, Any]) -> Grade:
    """Decide by the scorer of a reasoning-gym task; only a score of exactly 1 is right."""
    scorer = _task_scorer(task)
    try:
        return Grade(scorer(answer, dict(entry)) == 1.0, "task")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return Grade(False, "unreadable")  # not every scorer expects an answer of another form


def make_grader(tasks: tuple[str, ...]) -> GradeFunction:
    """The grader of a worker: a reasoning-gym scorer where the problem has a task, else `grade`.

    Args:
        tasks: whose scorers to load now, so that loading does not count as grading time.
    """
    for task in tasks:
        _task_scorer(task)
    return _answer_question


def _answer_question(question: Question) -> Reply:
    if question.task is not None:
        grading = grade_task(question.answer, question.task, question.entry)
    else:
        grading = grade(question.answer, question.ground_truth)
    return Reply(grading.correct, grading.rule)


@functools.cache
def _task_scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    from reasoning_gym.factory import get_score_answer_fn  # slow, and only these problems need it

    return cast("Callable[[str, dict[str, Any]], float]", get_score_answer_fn(task))


def _squeezed(text: str) -> str:
    """2 m is 2m, but 10 1 is not 101."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _without_assignment(given: str, truth: str) -> tuple[str, str] | None:
    """What is left to compare once names are taken off; None if that already decides against."""
    given_sides, truth_sides = _EQUALS.split(given), _EQUALS.split(truth)
    if "," in given + truth or len(given_sides) == len(truth_sides) == 1:
        return given, truth
    if len(given_sides) == 1 or len(truth_sides) == 1:
        sides = given_sides if len(given_sides) > 1 else truth_sides
        if not _defines(sides):
            return None
        return given_sides[-1], truth_sides[-1]
    if _NAME.fullmatch(given_sides[0]) and _NAME.fullmatch(truth_sides[0]):
        return (given_sides[-1], truth_sides[-1]) if given_sides[0] == truth_sides[0] else None
    return given, truth


def _defines(sides: list[str]) -> bool:
    """x = 5 defines and 2 + 3 = 5 computes its last side; x + 2 = 5 is an equation and does neither."""
    if _NAME.fullmatch(sides[0]):
        return True
    return _exactly_equal(sides[0], sides[-1]) is True


def _grade_measured(given: str, truth: str) -> Grade:
    given, given_unit = split_unit(given)
    truth, truth_unit = split_unit(truth)
    if contradict(given_unit, truth_unit):
        return Grade(False, "unit")
    given_percent, truth_percent = given.endswith("%"), truth.endswith("%")
    given, truth = given.removesuffix("%"), truth.removesuffix("%")
    if given_percent == truth_percent or (given == truth and _ONE_OR_MORE.fullmatch(given)):
        return _grade_plain(given, truth)
    if given_percent:
        return _grade_plain(rf"\frac{{{given}}}{{100}}", truth)
    return _grade_plain(given, rf"\frac{{{truth}}}{{100}}")


def _grade_plain(given: str, truth: str) -> Grade:
    if given == truth:
        return Grade(True, "text")
    equal = _exactly_equal(given, truth)
    if equal is not None:
        return Grade(equal, "exact")
    given_letter, truth_letter = _choice(given), _choice(truth)
    if given_letter and truth_letter:
        return Grade(given_letter == truth_letter, "choice")
    if _WORD.fullmatch(truth):
        return Grade(given.casefold() == truth.casefold(), "words")
    if _clash(given + truth):
        return Grade(False, "case")
    if hazard(given) or hazard(truth):
        return Grade(False, "hazard")
    return Grade(algebraically_equal(given, truth), "math")


def _exactly_equal(a: str, b: str) -> bool | None:
    try:
        return exact_value(a) == exact_value(b)
    except NotExact:
        return None


def _clash(texts: str) -> bool:
    """Whether a letter occurs in both cases; math-verify reads x and X as the same symbol."""
    letters = set("".join(re.findall("[a-zA-Z]", _COMMAND.sub("", texts))))
    return any(letter.upper() in letters for letter in letters if letter.islower())


def _choice(text: str) -> str | None:
    match = _CHOICE.fullmatch(text)
    return next(letter for letter in match.groups() if letter).upper() if match else None
