"""The terminal reward and its parts."""

from __future__ import annotations

import pytest

from comppo_mcore.config.schema import Ramp, RewardConfig
from comppo_mcore.reward.pool import Verdict, VerdictKind
from comppo_mcore.reward.reward import Reward, terminal_reward


def _reward(kind: VerdictKind, num_tokens: int = 100, step: int = 0, **config: object) -> Reward:
    verdict = Verdict(kind, None, "")
    return terminal_reward(verdict, num_tokens, step=step, config=RewardConfig.model_validate(config))


@pytest.mark.parametrize(
    ("num_tokens", "step", "total"),
    [
        (16384, 0, 1.0),
        (16384, 19, 1.0),
        (1000, 20, 1 - 3e-5 * 1000),
        (1000, 40, 1 - 5.5e-5 * 1000),
        (1000, 60, 1 - 8e-5 * 1000),
        (1000, 999, 1 - 8e-5 * 1000),
        (12500, 60, 0.0),
        (16384, 60, 0.0),
    ],
)
def test_correct(num_tokens: int, step: int, total: float) -> None:
    reward = _reward("correct", num_tokens, step)
    assert reward.total == pytest.approx(total, abs=1e-12)
    assert (reward.correct, reward.formatted, reward.timed_out) == (True, True, False)
    assert (reward.accuracy, reward.format) == (1.0, 0.0)
    assert reward.length == pytest.approx(total - 1.0, abs=1e-12)


def test_without_the_floor_a_long_correct_answer_is_punished() -> None:
    reward = _reward("correct", 16384, 60, floor=False)
    assert reward.total == pytest.approx(1 - 8e-5 * 16384)
    assert reward.total < 0


@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize("kind", ["wrong", "timeout", "error"])
def test_wrong_has_no_length_penalty(kind: VerdictKind, wrong: int) -> None:
    reward = _reward(kind, 16384, 100, wrong=wrong)
    assert (reward.total, reward.accuracy, reward.format, reward.length) == (wrong, wrong, 0.0, 0.0)
    assert (reward.correct, reward.formatted, reward.timed_out) == (False, True, kind == "timeout")


@pytest.mark.parametrize(("step", "penalty"), [(0, 0.2), (20, 0.6), (40, 1.0), (200, 1.0)])
@pytest.mark.parametrize("kind", ["malformed", "truncated"])
def test_malformed(kind: VerdictKind, step: int, penalty: float) -> None:
    reward = _reward(kind, 16384, step)
    assert reward.total == reward.format == pytest.approx(-penalty)
    assert (reward.accuracy, reward.length) == (0.0, 0.0)
    assert (reward.correct, reward.formatted, reward.timed_out) == (False, False, False)


def test_truncated_may_count_as_wrong() -> None:
    reward = _reward("truncated", 100, 0, truncated_is_malformed=False, wrong=-1)
    assert (reward.total, reward.format, reward.formatted) == (-1.0, 0.0, True)


def test_bounded() -> None:
    steep = Ramp(start=7.0, end=7.0)
    assert _reward("malformed", 100, 0, format=steep).total == -1.0
    assert _reward("correct", 100, 0, length=steep, floor=False).total == -1.0
    assert _reward("correct", 100, 0, length=Ramp(start=-7.0, end=-7.0)).total == 1.0
