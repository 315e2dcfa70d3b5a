"""What the pool and its workers say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    """Does `answer` meet `ground_truth`, or, for a problem with a task, that task's scorer?"""

    answer: str
    ground_truth: str
    task: str | None
    entry: Mapping[str, Any]  # what the scorer reads
    timeout_s: float


@dataclass(frozen=True)
class Reply:
    """What a worker found, and by which rule; `failed` means that grading raised an exception."""

    correct: bool
    rule: str
    failed: bool = False


GradeFunction = Callable[[Question], Reply]
GraderFactory = Callable[[tuple[str, ...]], GradeFunction]  # given the tasks to be ready for
