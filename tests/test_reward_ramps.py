"""The schedules of the format and the length penalty."""

from __future__ import annotations

import pytest

from comppo_mcore.credit.schedule import ramp


@pytest.mark.parametrize(
    ("step", "value"), [(0, 0.2), (10, 0.4), (20, 0.6), (40, 1.0), (41, 1.0), (500, 1.0)]
)
def test_format_penalty(step: int, value: float) -> None:
    assert ramp(step, begin=0, stop=40, start=0.2, end=1.0) == pytest.approx(value)


@pytest.mark.parametrize(
    ("step", "value"), [(0, 0.0), (19, 0.0), (20, 3e-5), (40, 5.5e-5), (60, 8e-5), (61, 8e-5)]
)
def test_length_penalty(step: int, value: float) -> None:
    assert ramp(step, begin=20, stop=60, start=3e-5, end=8e-5, before=0.0) == pytest.approx(value)


def test_before_is_the_start_by_default() -> None:
    assert ramp(3, begin=10, stop=20, start=0.5, end=1.0) == 0.5


def test_a_ramp_of_no_width_is_a_jump() -> None:
    assert [ramp(s, begin=5, stop=5, start=0.0, end=2.0, before=1.0) for s in (4, 5, 6)] == [1.0, 2.0, 2.0]


def test_a_ramp_that_stops_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match="step 5"):
        ramp(0, begin=10, stop=5, start=0.0, end=1.0)
