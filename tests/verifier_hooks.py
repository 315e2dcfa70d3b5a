"""Graders that misbehave on demand; the workers of the pool tests import this module by name."""

from __future__ import annotations

import os
import time

from comppo_mcore.reward.messages import GradeFunction, Question, Reply


def make_grader(tasks: tuple[str, ...]) -> GradeFunction:
    """Answers are commands: sleep, crash, hog, raise, pid; anything else is compared as text."""
    return _obey


def _obey(question: Question) -> Reply:
    command = question.answer
    if command == "sleep":
        time.sleep(3600)
    if command == "crash":
        os.abort()
    if command == "hog":
        return Reply(len(bytearray(1 << 40)) > 0, "hog")
    if command == "raise":
        raise KeyError(command)
    if command == "pid":
        return Reply(True, str(os.getpid()))
    return Reply(command == question.ground_truth, "text")


def cannot_start(tasks: tuple[str, ...]) -> GradeFunction:
    raise ImportError("no such library")


def hungry(tasks: tuple[str, ...]) -> GradeFunction:
    """Needs 100 MiB before it can start."""
    memory = bytearray(100 << 20)
    return lambda question: Reply(len(memory) > 0, "fed")
