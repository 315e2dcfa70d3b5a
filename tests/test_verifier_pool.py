"""Workers that hang, crash, eat memory or raise cost one verdict each, and nobody else's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from comppo_mcore.config.schema import RewardConfig
from comppo_mcore.data.problems import Problem
from comppo_mcore.errors import UserError
from comppo_mcore.reward.pool import Answer, Grader, Verdict

HOOKS = "verifier_hooks:make_grader"


@pytest.fixture(autouse=True)
def _workers_find_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def _answers(*commands: str, truth: str = "7") -> list[Answer]:
    problem = Problem("p", messages=(), answer=truth, source="test")
    texts = (f"<think>so</think><answer>{command}</answer>" for command in commands)
    return [Answer(problem, text, finished=True, think_open=False) for text in texts]


def _grade(*commands: str, workers: int, timeout_s: float = 60.0) -> list[Verdict]:
    with Grader(RewardConfig(workers=workers, timeout_s=timeout_s), HOOKS) as grader:
        return grader.grade(_answers(*commands))


def _descendants() -> set[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


@pytest.fixture
def no_child_left() -> Iterator[None]:
    before = _descendants()
    yield
    assert _descendants() == before


@pytest.mark.usefixtures("no_child_left")
@pytest.mark.parametrize("workers", [1, 3])
def test_a_timeout_stalls_nobody(workers: int) -> None:
    verdicts = _grade("7", "sleep", "8", "7", "sleep", "7", workers=workers, timeout_s=3.0)
    assert [v.kind for v in verdicts] == ["correct", "timeout", "wrong", "correct", "timeout", "correct"]
    assert verdicts[1].answer == "sleep"


@pytest.mark.usefixtures("no_child_left")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_crash_a_hog_and_an_exception_cost_one_answer_each(workers: int) -> None:
    verdicts = _grade("7", "crash", "7", "hog", "raise", "7", workers=workers)
    assert [v.kind for v in verdicts] == ["correct", "error", "correct", "error", "error", "correct"]
    assert verdicts[1].reason == f"worker ended with status {-signal.SIGABRT}"
    assert verdicts[3].reason == "memory limit"
    assert verdicts[4].reason == "KeyError"


def test_results_do_not_depend_on_the_number_of_workers() -> None:
    truths = ["1/2", r"\sqrt{8}", "3, 5", "x=2", "(B)", "5 cm", r"\frac{n(n+1)}{2}"]
    given = ["0.5", r"2\sqrt2", "5,3", "2", "B", "5", r"\frac{n^2+n}{2}"]
    answers = [
        answer for i, truth in enumerate(truths) for answer in _answers(given[i], given[i - 1], truth=truth)
    ]
    results = []
    for workers in (1, 3):
        with Grader(RewardConfig(workers=workers, timeout_s=60.0)) as grader:
            results.append(grader.grade(answers))
    assert results[0] == results[1]
    assert [v.correct for v in results[0]] == [True, False] * len(truths)


def test_an_answer_that_algebra_chokes_on_times_out() -> None:
    slow, quick = _answers(r"\sin^{900}x", truth=r"\cos^{900}x"), _answers("7.0")
    with Grader(RewardConfig(workers=1, timeout_s=3.0)) as grader:
        assert [v.kind for v in grader.grade(slow + quick)] == ["timeout", "correct"]


def test_workers_are_started_when_needed_and_kept() -> None:
    with Grader(RewardConfig(workers=1, timeout_s=60.0), HOOKS) as grader:
        malformed = Answer(Problem("p", (), "7", "test"), "7", finished=True, think_open=False)
        before = _descendants()
        assert [v.kind for v in grader.grade([malformed])] == ["malformed"]
        assert _descendants() == before
        assert grader.grade([]) == []
        first, second = (grader.grade(_answers("pid"))[0].reason for _ in range(2))
        assert first == second
        os.kill(int(first), signal.SIGKILL)
        assert grader.grade(_answers("pid", "7"))[1].kind == "correct"


def test_kinds_that_need_no_worker() -> None:
    cut = Answer(Problem("p", (), "7", "test"), "<think>7", finished=False, think_open=False)
    with Grader(RewardConfig()) as grader:
        assert grader.grade([cut]) == [Verdict("truncated", None, "truncated")]


def test_a_worker_inherits_neither_torch_nor_sockets(tmp_path: Path) -> None:
    import torch.distributed

    meeting = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        with Grader(RewardConfig(workers=1, timeout_s=60.0)) as grader:
            before = _descendants()
            assert grader.grade(_answers("7"))[0].correct
            (pid,) = _descendants() - before
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
            targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            assert sum(target.startswith("socket:") for target in targets) == 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("no_child_left")
def test_bad_input_memory_limit_too_small_to_start() -> None:
    grader = Grader(RewardConfig(workers=1, memory_mb=64), "verifier_hooks:hungry")
    with pytest.raises(UserError, match=r"reward\.memory_mb is 64 .*MemoryError"):
        grader.grade(_answers("7"))


@pytest.mark.usefixtures("no_child_left")
def test_a_grader_that_cannot_be_imported_is_reported() -> None:
    grader = Grader(RewardConfig(workers=2), "verifier_hooks:cannot_start")
    with pytest.raises(UserError, match="ImportError"):
        grader.grade(_answers("7", "7"))
