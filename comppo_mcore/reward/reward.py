"""The terminal reward of a response (paper §C.2): correctness, format penalty, length penalty."""

from __future__ import annotations

from dataclasses import dataclass

from comppo_mcore.config.schema import Ramp, RewardConfig
from comppo_mcore.credit.schedule import ramp
from comppo_mcore.reward.pool import Verdict


@dataclass(frozen=True)
class Reward:
    """A terminal reward in [−1, 1], its parts, and what they were decided by.

    Before the bound, total = accuracy + format + length.
    """

    total: float
    accuracy: float  # 1, or `reward.wrong`; 0 for a malformed response
    format: float  # −f for a malformed response, else 0
    length: float  # −ℓ·n for a correct response, never below −accuracy with the floor
    correct: bool
    formatted: bool
    timed_out: bool


def terminal_reward(verdict: Verdict, num_tokens: int, step: int, config: RewardConfig) -> Reward:
    """Reward of one response: max(0, 1 − ℓ·n) if correct, `wrong` if not, −f if malformed.

    A response cut by the length limit counts as malformed, or as wrong if the configuration says so; a
    time-out or an error of the verifier counts as wrong.

    Args:
        verdict: the verifier's word.
        num_tokens: n, valid response tokens with EOS.
        step: training step, which sets ℓ (per token) and f.
        config: the reward section.
    """
    formatted = verdict.kind != "malformed" and not (
        verdict.kind == "truncated" and config.truncated_is_malformed
    )
    accuracy = format_part = length = 0.0
    if verdict.correct:
        accuracy = 1.0
        penalty = _at(config.length, step) * num_tokens
        length = -min(penalty, accuracy) if config.floor else -penalty
    elif formatted:
        accuracy = float(config.wrong)
    else:
        format_part = -_at(config.format, step)
    total = min(1.0, max(-1.0, accuracy + format_part + length))
    timed_out = verdict.kind == "timeout"
    return Reward(total, accuracy, format_part, length, verdict.correct, formatted, timed_out)


def _at(coefficient: Ramp, step: int) -> float:
    return ramp(step, **coefficient.model_dump())
