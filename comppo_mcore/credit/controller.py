"""Phase controller: monitored signals raise or lower a stability phase, and the phase sets the knobs.

Phases are stable, warning, strong and hard-stop (0–3). After step k `observe` takes the step's signals and
returns the next state; `knobs` reads the knobs of step k + 1 from it. Both are pure, a state is plain data.

Units, where the paper prints none: entropy is compared with its own mean over the first eight steps, KL is in
nats per token, the response-clip ratio is the share of responses cut by the length limit. The numbers as
printed are preset `paper_literal`.

Source: paper Table 14 and §C.2; the units and readings are listed in docs/paper_map.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeGuard

from comppo_mcore.credit.schedule import ramp
from comppo_mcore.errors import UserError

PHASES = ("stable", "warning", "strong", "hard-stop")
ENTROPY_WINDOW = 8
_TOLERANCE = 1e-9  # 0.60 − 0.56 is "at least 0.04", although not in binary


@dataclass(frozen=True)
class Knobs:
    """Factors on the launch values; `epochs` is a cap on the update epochs, None for no cap."""

    kl: float = 1.0
    clip: float = 1.0
    actor_lr: float = 1.0
    value_clip: float = 1.0
    critic_lr: float = 1.0
    advantage_clip: float = 1.0
    grad_clip: float = 1.0  # of the actor's norm and of the critic's
    epochs: int | None = None


KNOBS = (
    Knobs(epochs=2),
    Knobs(1.75, 0.8, 0.7, 0.8, 0.9, 0.8, 0.8, epochs=2),
    Knobs(2.25, 0.7, 0.5, 0.6, 0.7, 0.7, 0.7, epochs=2),
    Knobs(3.5, 0.45, 0.2, 0.4, 0.5, 0.5, 0.5, epochs=1),
)


@dataclass(frozen=True)
class Rule:
    """A reading and the values from which it asks for warning, strong, hard-stop; None: never that phase."""

    name: str
    thresholds: tuple[float | None, float | None, float | None]
    below: bool = False  # asks when the reading is below; else when it is at least the threshold
    of_baseline: bool = False  # thresholds are fractions of the entropy baseline


_COMMON_RULES = (
    Rule("clip_fraction", (0.14, 0.18, 0.25)),
    Rule("ppo_kl", (0.08, 0.12, 0.22)),
    Rule("grad_norm", (40.0, 80.0, None)),
    Rule("accuracy_drop", (0.04, 0.08, 0.20)),
    Rule("response_clip", (None, None, 0.65)),
)
RULES = {
    "off": (),
    "default": (
        *_COMMON_RULES,
        Rule("entropy", (0.7, 0.5, 0.3), below=True, of_baseline=True),
        Rule("entropy_drop", (None, 0.15, 0.30), of_baseline=True),
        Rule("kl_loss", (0.1, 0.2, 0.4)),
    ),
    "paper_literal": (
        *_COMMON_RULES,
        Rule("entropy", (8.0, 7.5, 6.5), below=True),
        Rule("entropy_drop", (None, 1.5, 3.0)),
        Rule("kl_loss", (2.85, 3.20, 4.00)),
    ),
}
RULE_NAMES = tuple(rule.name for rule in RULES["default"])
PAPER_LITERAL_WARNING = (
    "controller.preset paper_literal compares entropy with 8.0, 7.5 and 6.5 without a unit: "
    "taken in nats per token they keep a language model in hard-stop for the whole run"
)


@dataclass(frozen=True)
class ControllerSettings:
    """What a run's controller is made of; `controller_settings` builds it from the configuration."""

    rules: tuple[Rule, ...]
    disabled: tuple[str, ...] = ()
    knobs: tuple[Knobs, Knobs, Knobs, Knobs] = KNOBS
    ramp: tuple[int, int] | None = (25, 40)
    ema: float = 0.4  # weight of the newest value
    ema_entropy: float = 0.2
    steps_up: int = 2
    steps_down: int = 5
    warning: str | None = None  # to be shown when the run starts


@dataclass(frozen=True)
class Signals:
    """What one step measured; None or a non-finite number: not measured.

    clip_fraction: share of tokens; ppo_kl, kl_loss: nats per token, the latter before its coefficient;
    grad_norm: of the actor, before clipping; entropy: nats per token; response_clip: share of responses cut
    by the length limit; accuracy: of the development set, in [0, 1].
    """

    clip_fraction: float | None = None
    ppo_kl: float | None = None
    kl_loss: float | None = None
    grad_norm: float | None = None
    entropy: float | None = None
    response_clip: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class ControllerState:
    """After `step` observed steps.

    phase: in force from step + 1; requested: by the rules at `step`; num_higher, num_clear: consecutive steps
    that asked for more, for less; smoothed: averages, the latest accuracy, the step's own response_clip;
    entropy_window: latest entropies, oldest first; entropy_baseline: mean of the first eight.
    """

    step: int = 0
    phase: int = 0
    requested: int = 0
    num_higher: int = 0
    num_clear: int = 0
    smoothed: Signals = Signals()
    entropy_window: tuple[float, ...] = ()
    entropy_baseline: float | None = None
    best_accuracy: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A record of JSON types."""
        return {**asdict(self), "entropy_window": list(self.entropy_window)}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> ControllerState:
        """Inverse of `to_dict`, also after a trip through JSON.

        Raises:
          ValueError: when keys are missing or unknown.
        """
        expected = {field.name for field in fields(ControllerState)}
        if set(record) != expected:
            raise ValueError(f"controller state has keys {sorted(record)}, expected {sorted(expected)}")
        return ControllerState(
            **{
                **record,
                "smoothed": Signals(**record["smoothed"]),
                "entropy_window": tuple(record["entropy_window"]),
            }
        )


def controller_settings(
    preset: Literal["off", "default", "paper_literal"],
    disabled_rules: Sequence[str] = (),
    ramp_steps: tuple[int, int] | None = (25, 40),
) -> ControllerSettings:
    """Settings by preset.

    Args:
      preset: `off` leaves every knob at its launch value.
      disabled_rules: names of rules that never ask for a phase.
      ramp_steps: steps over which phase 0 moves from stable to warning knobs; None: it does not.

    Raises:
      UserError: naming `controller.disabled_rules` or `controller.ramp`.
    """
    for name in disabled_rules:
        if name not in RULE_NAMES:
            raise UserError(f"controller.disabled_rules has {name!r}: the rules are {', '.join(RULE_NAMES)}")
    if ramp_steps is not None and ramp_steps[0] >= ramp_steps[1]:
        raise UserError(f"controller.ramp is {list(ramp_steps)}: its first step must come before its last")
    if preset == "off":
        return ControllerSettings(rules=(), knobs=(Knobs(), Knobs(), Knobs(), Knobs()), ramp=None)
    return ControllerSettings(
        rules=RULES[preset],
        disabled=tuple(disabled_rules),
        ramp=ramp_steps,
        warning=PAPER_LITERAL_WARNING if preset == "paper_literal" else None,
    )


def _measured(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _average(old: float | None, new: float | None, weight: float) -> float | None:
    """Exponential average from the first value on; a value not measured leaves it as it is."""
    if not _measured(new):
        return old
    return new if old is None else weight * new + (1 - weight) * old


def _smooth(old: Signals, new: Signals, settings: ControllerSettings) -> Signals:
    return Signals(
        clip_fraction=_average(old.clip_fraction, new.clip_fraction, settings.ema),
        ppo_kl=_average(old.ppo_kl, new.ppo_kl, settings.ema),
        kl_loss=_average(old.kl_loss, new.kl_loss, settings.ema),
        grad_norm=_average(old.grad_norm, new.grad_norm, settings.ema),
        entropy=_average(old.entropy, new.entropy, settings.ema_entropy),
        response_clip=new.response_clip if _measured(new.response_clip) else None,
        # Held between evaluations: they are rarer than the two steps in a row that a rise takes.
        accuracy=_average(old.accuracy, new.accuracy, 1.0),
    )


def _absorb(state: ControllerState, signals: Signals, settings: ControllerSettings) -> ControllerState:
    """Takes the step's signals into averages, window, baseline and best accuracy."""
    window, baseline, best = state.entropy_window, state.entropy_baseline, state.best_accuracy
    smoothed = _smooth(state.smoothed, signals, settings)
    if _measured(signals.entropy):
        window = (*window, signals.entropy)[-ENTROPY_WINDOW:]
        if baseline is None and len(window) == ENTROPY_WINDOW:
            baseline = sum(window) / ENTROPY_WINDOW
    if smoothed.accuracy is not None:
        best = smoothed.accuracy if best is None else max(best, smoothed.accuracy)
    return replace(
        state,
        step=state.step + 1,
        smoothed=smoothed,
        entropy_window=window,
        entropy_baseline=baseline,
        best_accuracy=best,
    )


def _entropy_drop(window: Sequence[float]) -> float | None:
    """Mean of the oldest four entropies of a full window minus that of the newest four."""
    if len(window) < ENTROPY_WINDOW:
        return None
    half = ENTROPY_WINDOW // 2
    return (sum(window[:half]) - sum(window[half:])) / half


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def readings(state: ControllerState) -> dict[str, float | None]:
    """What each rule looks at, by rule name; None: nothing known yet."""
    s = state.smoothed
    return {
        "clip_fraction": s.clip_fraction,
        "ppo_kl": s.ppo_kl,
        "kl_loss": s.kl_loss,
        "grad_norm": s.grad_norm,
        "entropy": s.entropy,
        "entropy_drop": _entropy_drop(state.entropy_window),
        "response_clip": s.response_clip,
        "accuracy_drop": _difference(state.best_accuracy, s.accuracy),
    }


def _severity(rule: Rule, reading: float | None, baseline: float | None) -> int:
    """The highest phase whose threshold the reading crosses, 0 for none."""
    scale = baseline if rule.of_baseline else 1.0
    if reading is None or not scale:
        return 0
    reached = 0
    for phase, threshold in enumerate(rule.thresholds, start=1):
        if threshold is not None and (reading >= threshold * scale - _TOLERANCE) != rule.below:
            reached = phase
    return reached


def requests(state: ControllerState, settings: ControllerSettings) -> dict[str, int]:
    """The phase each enabled rule asks for, by rule name.

    A fall of entropy counts only when clip fraction or PPO KL is in warning territory, whether or not their
    own rules are enabled.
    """
    read = readings(state)
    asked = {rule.name: _severity(rule, read[rule.name], state.entropy_baseline) for rule in settings.rules}
    if not (asked.get("clip_fraction") or asked.get("ppo_kl")):
        asked.pop("entropy_drop", None)
    return {name: phase for name, phase in asked.items() if name not in settings.disabled}


def observe(state: ControllerState, signals: Signals, settings: ControllerSettings) -> ControllerState:
    """The state after one more step: two requests in a row raise the phase, five clear steps lower it by one.

    A rise goes to the phase that the second step requests. A step is clear when it asks for less than the
    phase in force. A signal not measured leaves its average as it was; one never measured asks for nothing.

    Args:
      state: after the previous step.
      signals: of this step.
      settings: of the run.

    Returns:
      the state that rules from the next step on.
    """
    state = _absorb(state, signals, settings)
    requested = max(requests(state, settings).values(), default=0)
    phase = state.phase
    num_higher = state.num_higher + 1 if requested > phase else 0
    num_clear = state.num_clear + 1 if requested < phase else 0
    if num_higher >= settings.steps_up:
        phase, num_higher = requested, 0
    elif num_clear >= settings.steps_down:
        phase, num_clear = phase - 1, 0
    return replace(state, phase=phase, requested=requested, num_higher=num_higher, num_clear=num_clear)


def _interpolate(a: Knobs, b: Knobs, fraction: float) -> Knobs:
    if fraction >= 1:
        return b
    names = [field.name for field in fields(Knobs) if field.name != "epochs"]
    mixed = {name: (1 - fraction) * getattr(a, name) + fraction * getattr(b, name) for name in names}
    return Knobs(**mixed, epochs=a.epochs)


def knobs(state: ControllerState, step: int, settings: ControllerSettings) -> Knobs:
    """Knobs of a step (Table 14), from what was observed before it.

    In phase 0 they move from stable to warning over the ramp's steps and stay there.

    Args:
      state: after an earlier step.
      step: about to be taken, from 1.
      settings: of the run.

    Raises:
      ValueError: when `step` has been observed already, since a decision acts from the next step on.
    """
    if step <= state.step:
        raise ValueError(f"knobs of step {step} asked for after step {state.step} was observed")
    if state.phase > 0 or settings.ramp is None:
        return settings.knobs[state.phase]
    begin, stop = settings.ramp
    fraction = ramp(step, begin=begin, stop=stop, start=0.0, end=1.0)
    return _interpolate(settings.knobs[0], settings.knobs[1], fraction)
