"""The evaluations of a run and the four endpoints the paper reports of them (its section 6.1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

LAST = 20  # evaluations in Last-20


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the held-out problems. Accuracies are shares in [0, 1]."""

    step: int  # optimizer state after this many training steps; 0 is the start
    accuracy: float  # greedy pass@1
    num_problems: int
    majority: float | None = None  # accuracy of the majority answer of k samples, when asked for


History = tuple[Evaluation, ...]  # by rising step


@dataclass(frozen=True)
class Endpoints:
    """What is kept of a history. `aulc` is None for a single evaluation, which spans no steps."""

    best: float
    best_step: int
    final: float
    last_20: float
    aulc: float | None


def extended(history: History, evaluation: Evaluation) -> History:
    """The history with one more evaluation.

    Raises:
        ValueError: its step does not come after the last one, or its accuracy is not in [0, 1].
    """
    if history and evaluation.step <= history[-1].step:
        raise ValueError(f"evaluation at step {evaluation.step} follows one at step {history[-1].step}")
    if not 0 <= evaluation.accuracy <= 1:
        raise ValueError(f"accuracy {evaluation.accuracy} is not in [0, 1]")
    return (*history, evaluation)


def is_best(history: History) -> bool:
    """Whether the last evaluation beats all before it; a tie does not, so Best keeps its earliest step."""
    return bool(history) and all(e.accuracy < history[-1].accuracy for e in history[:-1])


def endpoints(history: History) -> Endpoints:
    """Best, Final, Last-20 and AULC of the greedy accuracy.

    Best = maxᵢ aᵢ;  Final = a_n;  Last-20 = mean of the last min(20, n) evaluations, an evaluation standing
    for the paper's "checkpoint";  AULC = Σᵢ ½ (aᵢ + aᵢ₊₁)(sᵢ₊₁ − sᵢ) / (s_n − s_1), the trapezoid rule over
    training steps divided by the observed step range.

    Args:
        history: at least one evaluation.

    Returns:
        The endpoints; `best_step` is the earliest step that reached Best.

    Raises:
        ValueError: the history is empty.

    Source: section 6.1.
    """
    if not history:
        raise ValueError("an empty history has no endpoints")
    best = max(history, key=lambda e: e.accuracy)  # the first of equals
    tail = [e.accuracy for e in history[-LAST:]]
    return Endpoints(
        best=best.accuracy,
        best_step=best.step,
        final=history[-1].accuracy,
        last_20=sum(tail) / len(tail),
        aulc=area_under_learning_curve(history),
    )


def area_under_learning_curve(history: History) -> float | None:
    """AULC: the mean height of the accuracy curve over the observed steps; None when they span no range."""
    if len(history) < 2:
        return None
    area = sum((a.accuracy + b.accuracy) / 2 * (b.step - a.step) for a, b in pairwise(history))
    return area / (history[-1].step - history[0].step)


def endpoint_metrics(history: History) -> dict[str, float]:
    """The newest evaluation and the endpoints so far, as entries of the step's record."""
    ends = endpoints(history)
    newest = history[-1]
    entries = {
        "eval/accuracy": newest.accuracy,
        "eval/majority": newest.majority,
        "eval/problems": float(newest.num_problems),
        "eval/best": ends.best,
        "eval/best_step": float(ends.best_step),
        "eval/last_20": ends.last_20,
        "eval/aulc": ends.aulc,
    }
    return {key: value for key, value in entries.items() if value is not None}


def to_json(history: History) -> list[dict[str, Any]]:
    """The history as plain JSON values."""
    return [asdict(evaluation) for evaluation in history]


def from_json(values: list[dict[str, Any]]) -> History:
    """The inverse of `to_json`.

    Raises:
        ValueError: the steps do not rise or an accuracy is not in [0, 1].
        TypeError: an evaluation has a missing or unknown entry.
    """
    history: History = ()
    for value in values:
        history = extended(history, Evaluation(**value))
    return history
