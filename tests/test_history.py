"""Best, Final, Last-20 and AULC."""

from __future__ import annotations

import json

import numpy as np
import pytest

from comppo_mcore.trainer.history import (
    Evaluation,
    History,
    endpoint_metrics,
    endpoints,
    extended,
    from_json,
    is_best,
    to_json,
)


def _history(steps: list[int], accuracies: list[float]) -> History:
    history: History = ()
    for step, accuracy in zip(steps, accuracies, strict=True):
        history = extended(history, Evaluation(step=step, accuracy=accuracy, num_problems=500))
    return history


def test_endpoints_of_a_curve_worked_by_hand() -> None:
    ends = endpoints(_history([0, 10, 40], [0.2, 0.6, 0.4]))
    assert (ends.best, ends.best_step, ends.final) == (0.6, 10, 0.4)
    assert ends.last_20 == pytest.approx(0.4)
    # 10 steps at 0.4 on average, then 30 at 0.5.
    assert ends.aulc == pytest.approx((10 * 0.4 + 30 * 0.5) / 40)


def test_last_20_is_the_mean_of_the_last_twenty_evaluations() -> None:
    accuracies = [i / 100 for i in range(50)]
    ends = endpoints(_history(list(range(0, 500, 10)), accuracies))
    assert ends.last_20 == pytest.approx(np.mean(accuracies[30:]))


def test_aulc_is_the_trapezoid_rule_over_the_observed_range() -> None:
    rng = np.random.default_rng(0)
    steps = np.sort(rng.choice(np.arange(7, 400), size=31, replace=False))
    accuracies = rng.uniform(size=31)
    area = 0.0
    for i in range(30):
        area += 0.5 * (accuracies[i] + accuracies[i + 1]) * (steps[i + 1] - steps[i])
    ends = endpoints(_history(steps.tolist(), accuracies.tolist()))
    assert ends.aulc == pytest.approx(area / (steps[-1] - steps[0]), abs=1e-12)


def test_aulc_of_a_constant_curve_is_its_height_whatever_the_spacing() -> None:
    assert endpoints(_history([3, 4, 90], [0.7, 0.7, 0.7])).aulc == pytest.approx(0.7)


def test_a_single_evaluation_spans_no_steps() -> None:
    history = _history([0], [0.5])
    assert endpoints(history).aulc is None
    assert "eval/aulc" not in endpoint_metrics(history)
    with pytest.raises(ValueError, match="empty"):
        endpoints(())


def test_best_keeps_the_earliest_step_of_a_tie() -> None:
    history = _history([0, 10, 20], [0.2, 0.6, 0.6])
    assert endpoints(history).best_step == 10
    assert not is_best(history)
    assert is_best(history[:2])
    assert is_best(history[:1])


def test_history_survives_json_bit_for_bit() -> None:
    history = (*_history([0, 5], [1 / 3, 0.1 + 0.2]), Evaluation(9, 2 / 3, 500, majority=5 / 7))
    assert from_json(json.loads(json.dumps(to_json(history)))) == history


def test_what_is_out_of_order_or_range_is_refused() -> None:
    history = _history([10], [0.5])
    with pytest.raises(ValueError, match="step 10 follows one at step 10"):
        extended(history, Evaluation(10, 0.5, 500))
    with pytest.raises(ValueError, match=r"not in \[0, 1\]"):
        extended(history, Evaluation(11, 50.0, 500))


def test_metrics_of_an_evaluation() -> None:
    history = extended(_history([0, 10], [0.2, 0.6]), Evaluation(20, 0.4, 500, majority=0.55))
    metrics = endpoint_metrics(history)
    assert metrics["eval/accuracy"] == 0.4
    assert metrics["eval/majority"] == 0.55
    assert metrics["eval/best"] == 0.6
    assert metrics["eval/best_step"] == 10.0
    assert all(isinstance(value, float) for value in metrics.values())
