"""Phase controller: rules, averages, hysteresis, knobs, presets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from comppo_mcore.credit import controller
from comppo_mcore.credit.controller import ControllerSettings, ControllerState, Knobs, Signals
from comppo_mcore.errors import UserError

DEFAULT = controller.controller_settings("default")
HOT = {0: 0.0, 1: 0.15, 2: 0.20, 3: 0.30}  # clip fractions that ask for each phase when held


def play(
    signals: list[Signals], settings: ControllerSettings = DEFAULT, state: ControllerState | None = None
) -> list[ControllerState]:
    """The state after each step."""
    states, state = [], state or ControllerState()
    for s in signals:
        state = controller.observe(state, s, settings)
        states.append(state)
    return states


def asked(*phases: int, state: ControllerState | None = None) -> list[int]:
    """The phase after each step, when steps ask for `phases` through a signal that is not averaged."""
    raw = replace(DEFAULT, rules=(controller.Rule("response_clip", (0.15, 0.20, 0.30)),))
    return [s.phase for s in play([Signals(response_clip=HOT[p]) for p in phases], raw, state)]


def phases(values: list[float], name: str, settings: ControllerSettings = DEFAULT) -> list[int]:
    return [s.phase for s in play([Signals(**{name: v}) for v in values], settings)]


def test_two_requests_in_a_row_raise_the_phase_to_the_request() -> None:
    assert asked(2, 2) == [0, 2]
    assert asked(3, 0, 3, 0, 3) == [0, 0, 0, 0, 0]
    assert asked(1, 1, 3, 3) == [0, 1, 1, 3]
    assert asked(1, 3) == [0, 3]  # both ask for more than phase 0: the second says how much


def test_five_clear_steps_lower_the_phase_by_one() -> None:
    down = asked(3, 3, *[0] * 16)
    assert down == [0, 3] + [3] * 4 + [2] * 5 + [1] * 5 + [0] * 2
    assert asked(2, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0)[-2:] == [2, 1]  # a request in between starts over
    assert asked(3, 3, *[1] * 15)[-5:] == [1] * 5  # down to what is still asked for, not below


def test_a_decision_acts_from_the_next_step() -> None:
    settings = replace(DEFAULT, ramp=None)
    states = play([Signals(clip_fraction=0.3)] * 2, settings)
    assert controller.knobs(states[0], 2, settings) == controller.KNOBS[0]
    assert controller.knobs(states[1], 3, settings) == controller.KNOBS[3]
    with pytest.raises(ValueError, match="step 2"):
        controller.knobs(states[1], 2, settings)


def test_averages_start_at_the_first_value() -> None:
    states = play([Signals(clip_fraction=0.1, entropy=2.0), Signals(clip_fraction=0.2, entropy=1.0)])
    assert states[0].smoothed.clip_fraction == 0.1
    assert states[1].smoothed.clip_fraction == pytest.approx(0.4 * 0.2 + 0.6 * 0.1)
    assert states[1].smoothed.entropy == pytest.approx(0.2 * 1.0 + 0.8 * 2.0)


@pytest.mark.parametrize(
    ("name", "thresholds"),
    [
        ("clip_fraction", (0.14, 0.18, 0.25)),
        ("ppo_kl", (0.08, 0.12, 0.22)),
        ("kl_loss", (0.1, 0.2, 0.4)),
        ("grad_norm", (40.0, 80.0, None)),
        ("response_clip", (None, None, 0.65)),
    ],
)
def test_each_signal_asks_from_its_threshold_on(name: str, thresholds: tuple[float | None, ...]) -> None:
    known = [(p, t) for p, t in enumerate(thresholds, start=1) if t is not None]
    assert phases([known[0][1] * 0.99] * 3, name)[-1] == 0
    for phase, threshold in known:
        assert phases([threshold] * 2, name)[-1] == phase


def test_entropy_is_compared_with_its_own_start() -> None:
    """Inactive for eight steps, then 0.7, 0.5 and 0.3 of their mean."""
    for share, phase in ((0.71, 0), (0.69, 1), (0.49, 2), (0.29, 3)):
        quiet = replace(DEFAULT, ema_entropy=1.0)
        states = play([Signals(entropy=0.4)] * 8 + [Signals(entropy=0.4 * share)] * 2, quiet)
        assert states[6].entropy_baseline is None
        assert states[7].entropy_baseline == pytest.approx(0.4)
        assert states[-1].phase == phase
    falling = play([Signals(entropy=2.0**-k) for k in range(7)])
    assert falling[-1].requested == 0  # down to a hundredth, but no baseline yet


def test_entropy_drop_counts_only_beside_clip_fraction_or_kl() -> None:
    """Oldest four against newest four of the last eight, in units of the baseline."""

    def run(**beside: float) -> dict[str, int]:
        steps = [1.0] * 8 + [0.8] * 4
        state = play([Signals(entropy=e, **beside) for e in steps])[-1]
        assert controller.readings(state)["entropy_drop"] == pytest.approx(0.2)
        return controller.requests(state, DEFAULT)

    assert "entropy_drop" not in run()
    assert "entropy_drop" not in run(ppo_kl=0.07)
    assert run(ppo_kl=0.08)["entropy_drop"] == 2
    assert run(clip_fraction=0.14)["entropy_drop"] == 2
    deep = play([Signals(entropy=e, ppo_kl=0.08) for e in [1.0] * 8 + [0.7] * 4])[-1]
    assert controller.requests(deep, DEFAULT)["entropy_drop"] == 3


def test_accuracy_drop_is_measured_from_the_best_and_held_between_evaluations() -> None:
    evaluated = [Signals(accuracy=0.50), Signals(accuracy=0.60), Signals(), Signals(accuracy=0.56)]
    states = play([*evaluated, Signals()])
    assert [s.requested for s in states] == [0, 0, 0, 1, 1]  # 0.60 − 0.56 counts as 0.04
    assert states[-1].phase == 1
    assert [s.phase for s in play([Signals(accuracy=0.6), Signals(accuracy=0.39), Signals()])][-1] == 3


def test_missing_and_non_finite_signals_ask_for_nothing() -> None:
    states = play([Signals()] * 12 + [Signals(grad_norm=float("nan"), clip_fraction=float("inf"))] * 3)
    assert {s.phase for s in states} == {0}
    assert states[-1].smoothed == Signals()
    assert states[-1].step == 15
    kept = play([Signals(grad_norm=10.0), Signals(grad_norm=float("nan"))])[-1]
    assert kept.smoothed.grad_norm == 10.0


@pytest.mark.parametrize("name", controller.RULE_NAMES)
def test_each_rule_can_be_switched_off(name: str) -> None:
    settings = controller.controller_settings("default", (name,))
    steps = [Signals(entropy=1.0, accuracy=0.9)] * 8 + [
        Signals(0.3, 0.3, 0.5, 90.0, entropy=0.05, response_clip=0.7, accuracy=0.5)
    ] * 8
    on, off = (controller.requests(play(steps, s)[11], s) for s in (DEFAULT, settings))
    assert set(on) == set(controller.RULE_NAMES)
    assert min(on.values()) >= 2
    assert off == {k: v for k, v in on.items() if k != name}


def test_bad_input_disabled_rules_and_ramp() -> None:
    with pytest.raises(UserError, match=r"controller\.disabled_rules has 'entropie': .*entropy"):
        controller.controller_settings("default", ("kl_loss", "entropie"))
    with pytest.raises(UserError, match=r"controller\.ramp is \[40, 25\]"):
        controller.controller_settings("default", (), (40, 25))


def test_knobs_of_table_14() -> None:
    kl = [k.kl * 0.002 for k in controller.KNOBS]
    assert kl == pytest.approx([0.0020, 0.0035, 0.0045, 0.0070])
    assert [k.clip * 0.2 for k in controller.KNOBS] == pytest.approx([0.20, 0.16, 0.14, 0.09])
    assert [k.actor_lr for k in controller.KNOBS] == [1.0, 0.7, 0.5, 0.2]
    assert [k.value_clip * 0.5 for k in controller.KNOBS] == pytest.approx([0.5, 0.4, 0.3, 0.2])
    assert [k.critic_lr for k in controller.KNOBS] == [1.0, 0.9, 0.7, 0.5]
    assert [k.advantage_clip * 5 for k in controller.KNOBS] == pytest.approx([5.0, 4.0, 3.5, 2.5])
    assert [k.grad_clip for k in controller.KNOBS] == [1.0, 0.8, 0.7, 0.5]
    assert [k.epochs for k in controller.KNOBS] == [2, 2, 2, 1]


def test_phase_zero_moves_to_warning_knobs_and_keeps_them() -> None:
    fresh = ControllerState()
    stable, warning = controller.KNOBS[:2]
    assert controller.knobs(fresh, 25, DEFAULT) == stable
    half = controller.knobs(fresh, 32, DEFAULT)
    assert half.kl == pytest.approx(1 + 0.75 * 7 / 15)
    assert half.actor_lr == pytest.approx(1 - 0.3 * 7 / 15)
    assert half.epochs == 2
    assert controller.knobs(fresh, 40, DEFAULT) == controller.knobs(fresh, 1000, DEFAULT) == warning
    assert controller.knobs(fresh, 1000, replace(DEFAULT, ramp=None)) == stable
    capped = replace(DEFAULT, knobs=(stable, replace(warning, epochs=1), *controller.KNOBS[2:]))
    assert [controller.knobs(fresh, step, capped).epochs for step in (39, 40)] == [2, 1]
    raised = ControllerState(phase=2)
    assert controller.knobs(raised, 32, DEFAULT) == controller.KNOBS[2]


def test_resumed_run_continues_as_the_uninterrupted_one() -> None:
    """Through JSON in the middle of the ramp, with a request pending."""
    steps = [
        Signals(0.01 * (k % 30), 0.004 * k, 0.01, 5.0, 1.0 / (1 + k), 0.1, 0.5 if k % 7 == 0 else None)
        for k in range(60)
    ]
    whole = play(steps)
    saved = json.loads(json.dumps(whole[29].to_dict()))
    resumed = play(steps[30:], state=ControllerState.from_dict(saved))
    assert resumed == whole[30:]
    assert len({s.phase for s in whole}) > 1
    assert [controller.knobs(s, s.step + 1, DEFAULT) for s in resumed] == [
        controller.knobs(s, s.step + 1, DEFAULT) for s in whole[30:]
    ]


def test_a_record_of_other_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="phase"):
        ControllerState.from_dict({"step": 3})


def test_preset_off_leaves_the_launch_values() -> None:
    off = controller.controller_settings("off")
    state = play([Signals(1.0, 1.0, 9.0, 900.0, 0.01, 1.0, 0.1)] * 50, off)[-1]
    assert state.phase == 0
    assert controller.knobs(state, 51, off) == Knobs()
    assert Knobs().epochs is None


def test_preset_paper_literal_keeps_a_language_model_in_hard_stop() -> None:
    literal = controller.controller_settings("paper_literal")
    assert literal.warning is not None
    assert "hard-stop" in literal.warning
    assert DEFAULT.warning is None
    assert phases([0.6] * 30, "entropy", literal) == [0] + [3] * 29
    assert phases([0.6] * 30, "entropy") == [0] * 30
    assert phases([2.9] * 2, "kl_loss", literal) == [0, 1]
    assert phases([8.5, 8.5, 7.9, 7.9], "entropy", replace(literal, ema_entropy=1.0)) == [0, 0, 0, 1]
