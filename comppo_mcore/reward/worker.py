"""A worker process of `pool.Grader`: grade one answer after the other, until the connection closes.

Started as `python -m comppo_mcore.reward.worker FD MEMORY_MB FACTORY [TASK …]`, a bare interpreter that
imports what grading needs and nothing else: no torch, and none of its owner's threads, sockets or
signal handlers.
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import signal
import sys
from multiprocessing.connection import Connection

from comppo_mcore.reward.messages import GradeFunction, GraderFactory, Question, Reply

READY = "ready"
EXIT_MEMORY = 77
ALARM_GRACE_S = 30.0  # after a time-out that nobody enforced, because the owner is gone


def main(descriptor: int, memory_mb: int, factory: str, tasks: tuple[str, ...]) -> None:
    """Serve questions on a connection, after a first message: READY, or why the worker cannot start."""
    _silence()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(descriptor)
    try:
        grade = _load(factory, tasks)
    except Exception as error:
        connection.send(f"{type(error).__name__} while importing the grader")
        return
    connection.send(READY)
    while True:
        try:
            question = connection.recv()
        except (EOFError, ConnectionError):
            return
        connection.send(_reply(grade, question))


def _load(factory: str, tasks: tuple[str, ...]) -> GradeFunction:
    module, name = factory.split(":")
    make_grader: GraderFactory = getattr(importlib.import_module(module), name)
    return make_grader(tasks)


def _reply(grade: GradeFunction, question: Question) -> Reply:
    random.seed(0)  # a verdict may not depend on the answers graded before
    signal.setitimer(signal.ITIMER_REAL, question.timeout_s + ALARM_GRACE_S)
    try:
        return grade(question)
    except MemoryError:
        raise
    except Exception as error:  # whatever the text of a policy provokes costs this answer only
        return Reply(False, type(error).__name__, failed=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _silence() -> None:
    """Parsers print complaints about every odd answer."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], tuple(sys.argv[4:]))
    except MemoryError:
        os._exit(EXIT_MEMORY)
