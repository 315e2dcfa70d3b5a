"""Evaluation on held-out problems: greedy pass@1 and majority@k; `comppo eval`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing

from comppo_mcore.config.schema import Config
from comppo_mcore.model import parallel
from comppo_mcore.reward.pool import Grader
from comppo_mcore.trainer.experience import Graded, roll_out, sampling_of
from comppo_mcore.trainer.history import Evaluation
from comppo_mcore.trainer.schedule import step_seed
from comppo_mcore.trainer.session import Session, build_session, sync_weights


def evaluate(session: Session, grader: Grader, step: int) -> Evaluation:
    """Accuracy of the engine's present weights; collective over the world.

    Majority@k draws k answers at the rollout's temperature and top-p and asks whether the most frequent one
    is right.
    """
    config = session.config
    problems = session.text.dataset.eval_problems(config.train.eval_problems)
    graded = roll_out(session, grader, problems, sampling_of(session, greedy=True), seed=0)
    accuracy = sum(g.verdict.correct for g in graded) / len(graded)
    k, majority = config.train.eval_majority, None
    if k:
        repeated = [problem for problem in problems for _ in range(k)]
        seed = step_seed(config.run.seed, step, "majority")
        votes = roll_out(session, grader, repeated, sampling_of(session), seed)
        groups = [votes[i : i + k] for i in range(0, len(votes), k)]
        majority = sum(majority_is_correct(group) for group in groups) / len(groups)
    return Evaluation(step, accuracy, len(graded), majority)


def majority_is_correct(votes: Sequence[Graded]) -> bool:
    """Whether the most frequent answer is right.

    All right answers count as one, malformed responses do not vote, a tie goes to the answer that came first.
    """
    ballots = [
        "correct" if v.verdict.correct else f"wrong: {v.verdict.answer}"
        for v in votes
        if v.verdict.answer is not None
    ]
    return bool(ballots) and Counter(ballots).most_common(1)[0][0] == "correct"


def main(config: Config) -> None:
    """Print the accuracy of the model at `model.path` on the held-out problems."""
    session = build_session(config)
    with Grader(config.reward) as grader, closing(session.engine):
        sync_weights(session, 0)
        result = evaluate(session, grader, 0)
    if session.layout.rank == 0:
        print(f"greedy pass@1: {result.accuracy:.4f} on {result.num_problems} held-out problems", flush=True)
        if result.majority is not None:
            print(f"majority@{config.train.eval_majority}: {result.majority:.4f}", flush=True)
    parallel.shutdown()
