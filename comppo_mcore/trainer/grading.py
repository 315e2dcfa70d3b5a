"""Grading while other responses are still being generated."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from types import TracebackType

from comppo_mcore.reward.pool import Answer, Grader, Verdict


class OverlappedGrading:
    """Verdicts of answers put in from any thread; one thread of its own is the grader's only user meanwhile.

    As a context manager it leaves no thread behind, whatever happens.
    """

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._queue: queue.SimpleQueue[tuple[Hashable, Callable[[], Answer]] | None] = queue.SimpleQueue()
        self._verdicts: dict[Hashable, Verdict] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="comppo-grading", daemon=True)

    def __enter__(self) -> OverlappedGrading:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def put(self, key: Hashable, answer: Callable[[], Answer]) -> None:
        """Have an answer graded; it is made in the grading thread."""
        self._queue.put((key, answer))

    def finish(self) -> dict[Hashable, Verdict]:
        """All verdicts, once they are there.

        Raises:
            Whatever the grader raised.
        """
        self._end()
        if self._error is not None:
            raise self._error
        return self._verdicts

    def _end(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        open_ = True
        while open_:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            open_ = None not in batch
            items = [item for item in batch if item is not None]
            try:
                verdicts = self._grader.grade([answer() for _, answer in items])
            except BaseException as error:  # for the thread that waits in `finish`
                self._error = error
                return
            self._verdicts |= zip((key for key, _ in items), verdicts, strict=True)
