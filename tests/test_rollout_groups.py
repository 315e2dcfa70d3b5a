"""Groups of responses: broken off, continued, chosen; and grading beside generation."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from comppo_mcore.reward.pool import Answer, Verdict
from comppo_mcore.rollout import groups
from comppo_mcore.rollout.engine import Completion, EngineLost, Sampling
from comppo_mcore.rollout.groups import Group, Request, choose, generate_groups, joined
from comppo_mcore.trainer.grading import OverlappedGrading

SAMPLING = Sampling(max_tokens=6, temperature=0.5, stop_ids=(0,))


def completion(tokens: Sequence[int], version: int = 1, finish: Any = "stop") -> Completion:
    return Completion(
        token_ids=tuple(tokens),
        logprobs=tuple(-0.1 * t for t in tokens),
        finish=finish,
        versions=(version,) * len(tokens),
        supports=tuple((t, t + 1) for t in tokens),
    )


class ScriptedEngine:
    """Answers requests in a given order; what `enough` makes superfluous is aborted with one more token."""

    def __init__(self, order: Sequence[int], lost_after: int | None = None) -> None:
        self.order, self.lost_after = order, lost_after
        self.requests: list[Request] = []

    def run(self, requests: Any, enough: Any, max_wait_s: Any, heard: Any) -> list[Completion | None]:
        self.requests = list(requests)
        results: list[Completion | None] = [None] * len(requests)
        for count, i in enumerate(self.order):
            if count == self.lost_after:
                raise EngineLost("all gone", results)
            stopped = enough(results)
            results[i] = completion([100 + i], 2, "abort") if stopped else completion([100 + i, 0], 2)
            heard(i, results[i])
        return results


def play(
    engine: ScriptedEngine, begun: Sequence[Group], wanted: int
) -> tuple[list[Group], str | None, dict[tuple[int, int], Completion]]:
    done: dict[tuple[int, int], Completion] = {}

    def heard(g: int, i: int, response: Completion) -> None:
        assert (g, i) not in done, "a response was counted twice"
        done[g, i] = response

    prompts = [(7, 8 + g) for g in range(len(begun))]
    seeds = {(g, i): 10 * g + i for g in range(len(begun)) for i in range(2)}
    engine_: Any = engine
    after, lost = generate_groups(
        engine_, prompts, begun, wanted, SAMPLING, lambda g, i: seeds[g, i], None, heard
    )
    return after, lost, done


def test_the_first_groups_to_finish_count_and_the_others_keep_what_they_have() -> None:
    begun = [Group(prompt, (None, None)) for prompt in (5, 6, 7)]
    engine = ScriptedEngine(order=[2, 3, 4, 5, 0, 1])
    after, lost, done = play(engine, begun, wanted=2)
    assert lost is None
    assert [r.seed for r in engine.requests] == [0, 1, 10, 11, 20, 21]
    assert [group.complete for group in after] == [False, True, True]
    assert done.keys() == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert choose(after, 2) == ([1, 2], [0])
    assert [r.token_ids for r in after[0].responses if r] == [(100,), (101,)]
    assert after[0].restarted() == begun[0]


def test_a_continued_response_is_one_response_with_a_version_for_each_token() -> None:
    """What is left of the response is asked for, behind the prompt and what is there of it."""
    begun = [Group(3, (completion([1, 2], 1, "abort"), completion([4, 0], 1)))]
    engine = ScriptedEngine(order=[0])
    after, _, done = play(engine, begun, wanted=1)
    (request,) = engine.requests
    assert request.token_ids == (7, 8, 1, 2)
    assert request.sampling == Sampling(max_tokens=4, temperature=0.5, stop_ids=(0,))
    assert after[0].responses == (done[0, 0], begun[0].responses[1])
    assert done[0, 0] == Completion(
        token_ids=(1, 2, 100, 0),
        logprobs=(-0.1, -0.2, -10.0, 0.0),
        finish="stop",
        versions=(1, 1, 2, 2),
        supports=((1, 2), (2, 3), (100, 101), (0, 1)),
    )
    assert done[0, 1] == begun[0].responses[1], "one that was finished before is graded too"


def test_nothing_is_lost_with_the_engine() -> None:
    begun = [Group(prompt, (None, None)) for prompt in (5, 6)]
    after, lost, done = play(ScriptedEngine([3, 0, 1, 2], lost_after=2), begun, wanted=2)
    assert lost == "all gone"
    assert done.keys() == {(1, 1), (0, 0)}
    again, lost, done = play(ScriptedEngine([0, 1]), after, wanted=2)
    assert lost is None and all(group.complete for group in again)
    assert again[1].responses[1] == after[1].responses[1]
    assert len(done) == 4


def test_joined_takes_what_there_is() -> None:
    whole = completion([1])
    assert joined(None, whole) == joined(whole, None) == whole
    assert joined(None, None) is None


def test_choose_fills_up_with_groups_that_are_not_complete() -> None:
    done, open_ = (completion([1]),), (completion([1], finish="abort"),)
    made = [Group(0, open_), Group(1, done), Group(2, open_), Group(3, done)]
    assert choose(made, 3) == ([0, 1, 3], [2])


def test_groups_survive_a_checkpoint() -> None:
    made = (Group(3, (completion([1, 2], finish="abort"), None, completion([4]))), Group(9, (None,)))
    assert groups.from_json(json.loads(json.dumps(groups.to_json(made)))) == made


def test_arrays_of_a_completion_have_one_length() -> None:
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        Completion((1, 2), (-0.5,), "stop", (1, 1))


# ---------------------------------------------------------------- grading


def answer(text: str) -> Answer:
    problem: Any = None
    return Answer(problem, text, finished=True, think_open=False)


class SlowGrader:
    """Judges when it is let; counts its calls."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate, self.error, self.calls = threading.Event(), error, 0

    def grade(self, answers: Sequence[Answer]) -> list[Verdict]:
        assert self.gate.wait(10)
        self.calls += 1
        if self.error is not None:
            raise self.error
        return [Verdict("correct", a.text, "") for a in answers]


def graders(grader: Any) -> OverlappedGrading:
    return OverlappedGrading(grader)


def test_answers_are_graded_while_others_are_still_made() -> None:
    grader = SlowGrader()
    with graders(grader) as grading:
        for i in range(5):
            grading.put(i, lambda i=i: answer(str(i)))  # does not wait for the grader
        assert grader.calls == 0
        grader.gate.set()
        verdicts = grading.finish()
    assert {key: verdict.answer for key, verdict in verdicts.items()} == {i: str(i) for i in range(5)}


def test_an_error_of_the_grader_reaches_the_caller_and_no_thread_stays() -> None:
    grader = SlowGrader(RuntimeError("no verifier"))
    grader.gate.set()
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="no verifier"), graders(grader) as grading:
        grading.put(0, lambda: answer("x"))
        grading.finish()
    assert threading.active_count() == threads
    with pytest.raises(KeyError), graders(grader) as grading:
        raise KeyError
    assert threading.active_count() == threads
