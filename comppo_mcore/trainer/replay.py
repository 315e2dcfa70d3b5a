"""Batches that produced NaN or inf, kept so that the step can be run again under a debugger."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from comppo_mcore.model.batch import Sample
from comppo_mcore.trainer.experience import Experience
from comppo_mcore.trainer.files import read_json, write_json_atomic


@dataclass(frozen=True)
class BadBatch:
    """The rollout batch of a bad step, in the order of its trajectories."""

    step: int
    reason: str
    samples: tuple[Sample, ...]
    engine_logprobs: tuple[tuple[float, ...], ...]  # nats, NaN and infinities kept
    rewards: tuple[float, ...]  # total of each


def save_bad_batch(folder: Path, step: int, experience: Experience, reason: str) -> Path:
    """Write `<folder>/bad_batches/step_<step>.json`: the reason and every trajectory of the step.

    With the checkpoint before `step`, the seed and the configuration this is all that the step read.
    """
    path = folder / "bad_batches" / f"step_{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    trajectories = [
        {
            "problem": graded.prompt.problem_id,
            "prompt": list(graded.prompt.token_ids),
            "response": list(graded.completion.token_ids),
            "engine_logprobs": [repr(x) for x in graded.completion.logprobs],  # JSON has no NaN
            "finish": graded.completion.finish,
            "reward": asdict(reward),
        }
        for graded, reward in zip(experience.graded, experience.rewards, strict=True)
    ]
    write_json_atomic(path, {"step": step, "reason": reason, "trajectories": trajectories})
    return path


def load_bad_batch(path: Path) -> BadBatch:
    """What `save_bad_batch` wrote."""
    record = read_json(path)
    trajectories = record["trajectories"]
    return BadBatch(
        step=record["step"],
        reason=record["reason"],
        samples=tuple(Sample(tuple(t["prompt"]), tuple(t["response"])) for t in trajectories),
        engine_logprobs=tuple(tuple(map(float, t["engine_logprobs"])) for t in trajectories),
        rewards=tuple(t["reward"]["total"] for t in trajectories),
    )
