"""Scalars that follow the step count alone."""

from __future__ import annotations


def ramp(step: int, *, begin: int, stop: int, start: float, end: float, before: float | None = None) -> float:
    """Linear from `start` at step `begin` to `end` at step `stop`, and `end` from there on.

    The reward's format penalty is ramp(0, 40, 0.2, 1.0); its length penalty ramp(20, 60, 3e-5, 8e-5) with 0
    before (paper §C.2).

    Args:
      step: training step.
      begin: first step of the ramp.
      stop: last step of the ramp; equal to `begin` it is a jump to `end`.
      start: value at `begin`.
      end: value at `stop`.
      before: value until `begin`; None: `start`.

    Returns:
      the value at `step`.

    Raises:
      ValueError: when the ramp stops before it begins.
    """
    if stop < begin:
        raise ValueError(f"a ramp cannot stop at step {stop} before it begins at step {begin}")
    if step < begin:
        return start if before is None else before
    if step >= stop:
        return end
    return start + (end - start) * (step - begin) / (stop - begin)
