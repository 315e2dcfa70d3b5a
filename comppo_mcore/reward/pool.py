"""Grade answers in worker processes that can be killed.

Computer algebra on text that a policy wrote can run for ever, exhaust the memory or crash the
interpreter. Each answer is therefore graded in another process under a wall-clock and a memory limit;
an answer that breaks a limit costs its worker and nobody else's verdict. Workers are fresh
interpreters, started when first needed: nothing of a process that holds a GPU or a
`torch.distributed` group is forked.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import comppo_mcore
from comppo_mcore.config.schema import RewardConfig
from comppo_mcore.errors import UserError
from comppo_mcore.reward.messages import Question, Reply
from comppo_mcore.reward.verifier import parse_response
from comppo_mcore.reward.worker import EXIT_MEMORY, READY

GRADER_FACTORY = "comppo_mcore.reward.grade:make_grader"
START_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 30  # of one message to or from a live worker

VerdictKind = Literal["correct", "wrong", "malformed", "truncated", "timeout", "error"]


class Checkable(Protocol):
    """What is needed of a problem to judge an answer to it."""

    @property
    def answer(self) -> str: ...
    @property
    def task(self) -> str | None: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Answer:
    """A response to judge."""

    problem: Checkable
    text: str  # without its stop token
    finished: bool  # ended with a stop token
    think_open: bool  # the prompt opened the thinking


@dataclass(frozen=True)
class Verdict:
    """The verifier's word on one response."""

    kind: VerdictKind
    answer: str | None  # None without a well-formed response
    reason: str  # the format rule broken, the grading rule that decided, or what stopped the worker

    @property
    def correct(self) -> bool:
        return self.kind == "correct"


@dataclass
class _Worker:
    """A process and what it is doing; `index` is the answer it grades, None while it starts or idles."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    index: int | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + START_TIMEOUT_S)


@dataclass
class _Batch:
    """The questions of one call, the indices of those nobody has yet, and the verdicts so far."""

    questions: Mapping[int, Question]
    pending: deque[int]
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    @property
    def num_open(self) -> int:
        return len(self.questions) - len(self.verdicts)


class Grader:
    """A pool of grading workers; use it as a context manager.

    Args:
        config: number of workers, wall-clock limit per answer, address space per worker.
        factory: `module:function` of a `messages.GraderFactory`, called in every worker.
    """

    def __init__(self, config: RewardConfig, factory: str = GRADER_FACTORY) -> None:
        self._config = config
        self._factory = factory
        self._workers: list[_Worker] = []

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def grade(self, answers: Sequence[Answer]) -> list[Verdict]:
        """Judge responses; the verdicts are in their order and do not depend on the number of workers.

        Raises:
            UserError: a worker cannot even start.
        """
        verdicts: dict[int, Verdict] = {}
        questions: dict[int, Question] = {}
        for index, answer in enumerate(answers):
            parsed = parse_response(answer.text, answer.finished, answer.think_open)
            if parsed.answer is not None:
                questions[index] = self._question(parsed.answer, answer.problem)
            elif parsed.malformed_reason == "truncated":
                verdicts[index] = Verdict("truncated", None, "truncated")
            else:
                verdicts[index] = Verdict("malformed", None, str(parsed.malformed_reason))
        verdicts |= self._ask(questions)
        return [verdicts[index] for index in range(len(answers))]

    def close(self) -> None:
        """End all workers; what they were doing is lost."""
        while self._workers:
            _end(self._workers.pop())

    def _question(self, answer: str, problem: Checkable) -> Question:
        return Question(answer, problem.answer, problem.task, problem.metadata, self._config.timeout_s)

    def _ask(self, questions: Mapping[int, Question]) -> dict[int, Verdict]:
        batch = _Batch(questions, deque(questions))
        tasks = tuple(sorted({question.task for question in questions.values() if question.task}))
        try:
            while batch.num_open:
                for _ in range(min(batch.num_open, self._config.workers) - len(self._workers)):
                    self._workers.append(_spawn(self._config.memory_mb, self._factory, tasks))
                self._assign(batch)
                self._collect(batch)
        except BaseException:
            self.close()  # a worker in the middle of an answer would reply to the next call
            raise
        return batch.verdicts

    def _assign(self, batch: _Batch) -> None:
        """Give every idle worker a question."""
        for worker in [w for w in self._workers if w.ready and w.index is None]:
            if not batch.pending:
                return
            worker.index = batch.pending.popleft()
            worker.deadline = time.monotonic() + self._config.timeout_s
            try:
                worker.connection.send(batch.questions[worker.index])
            except OSError:
                self._lose(worker, "error", batch)

    def _collect(self, batch: _Batch) -> None:
        """Wait for the next message or deadline, and deal with everything that is due."""
        busy = [w for w in self._workers if not w.ready or w.index is not None]
        if not busy:
            return
        patience = min(worker.deadline for worker in busy) - time.monotonic()
        talking = wait([worker.connection for worker in busy], timeout=max(0.0, patience))
        for worker in busy:
            if worker.connection in talking:
                self._receive(worker, batch)
            elif time.monotonic() >= worker.deadline:
                self._lose(worker, "timeout", batch)

    def _receive(self, worker: _Worker, batch: _Batch) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._lose(worker, "error", batch)
            return
        if worker.index is None:
            self._check_started(message)
            worker.ready = True
            return
        batch.verdicts[worker.index] = _verdict(message, batch.questions[worker.index].answer)
        worker.index = None

    def _lose(self, worker: _Worker, kind: Literal["timeout", "error"], batch: _Batch) -> None:
        """Give up a worker that is overdue or gone, and with it the answer it was grading."""
        self._workers.remove(worker)
        status = _end(worker, patience=0.0 if kind == "timeout" else 1.0)
        if worker.index is None:
            self._check_started(f"exit status {status}")
        assert worker.index is not None
        reason = "time-out" if kind == "timeout" else _cause_of_death(status)
        batch.verdicts[worker.index] = Verdict(kind, batch.questions[worker.index].answer, reason)

    def _check_started(self, message: str) -> None:
        if message != READY:
            raise UserError(
                f"reward.memory_mb is {self._config.memory_mb} and a verifier worker cannot start "
                f"({message}); if memory is short, raise it"
            )


def _spawn(memory_mb: int, factory: str, tasks: tuple[str, ...]) -> _Worker:
    ours, theirs = socket.socketpair()
    descriptor = theirs.fileno()
    arguments = [str(descriptor), str(memory_mb), factory, *tasks]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "comppo_mcore.reward.worker", *arguments],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env=_environment(),
        )
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", TRANSFER_TIMEOUT_S, 0))
    return _Worker(process, Connection(ours.detach()))


def _environment() -> dict[str, str]:
    """One thread per library (threads reserve address space), and sets in the same order everywhere."""
    package_root = str(Path(comppo_mcore.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return os.environ | single | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}


def _end(worker: _Worker, patience: float = 0.0) -> int:
    """Exit status of a worker, which is killed if it does not end by itself in time."""
    worker.connection.close()
    try:
        return worker.process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        worker.process.kill()
        return worker.process.wait(timeout=CLOSE_TIMEOUT_S)


def _verdict(reply: Reply, answer: str) -> Verdict:
    if reply.failed:
        return Verdict("error", answer, reply.rule)
    return Verdict("correct" if reply.correct else "wrong", answer, reply.rule)


def _cause_of_death(status: int) -> str:
    return "memory limit" if status == EXIT_MEMORY else f"worker ended with status {status}"
