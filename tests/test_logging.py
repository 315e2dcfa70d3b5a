"""The sink of a run, its displays and writers, and the clock of a step."""

from __future__ import annotations

import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from comppo_mcore.config.schema import Config, LogConfig, RunConfig
from comppo_mcore.errors import UserError
from comppo_mcore.trainer.files import read_metrics
from comppo_mcore.trainer.logging import (
    BarDisplay,
    LineDisplay,
    Pace,
    StageClock,
    key_numbers,
    memory_metrics,
    open_sink,
    require_writers,
)

METRICS = {"reward/mean": 0.25, "gate/kappa_mean": 0.614, "credit/trace_reach": 0.05, "time/step_s": 2.0}


class Ticks:
    """A clock that a test sets by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _config(**log: Any) -> Config:
    return Config(run=RunConfig(name="r"), log=LogConfig(**{"tensorboard": False, **log}))


def test_rank_0_writes_and_the_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        sink = open_sink(_config(), tmp_path, rank=rank, steps=3)
        sink.stage("rollout")
        sink.note("[bold] stays as it is")
        sink.step(1, METRICS)
        sink.close()
        if rank == 1:
            assert list(tmp_path.iterdir()) == []
            assert capsys.readouterr().out == ""
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, **METRICS}]
    note, step = capsys.readouterr().out.splitlines()
    assert note == "[bold] stays as it is"
    assert step.startswith("step 1/3  reward 0.250  κ 0.61  reach 0.05  ETA ")


def test_no_progress_shows_notes_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = open_sink(_config(progress=False), tmp_path, rank=0, steps=3)
    sink.step(1, METRICS)
    sink.note("a warning")
    sink.close()
    assert capsys.readouterr().out == "a warning\n"
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_relaunch_continues_the_file_and_the_event_file(tmp_path: Path) -> None:
    for last_step, steps, shift in ((-1, (0, 1, 2, 3), 0.0), (1, (2, 3, 4), 10.0)):
        sink = open_sink(_config(tensorboard=True), tmp_path, rank=0, steps=4, last_step=last_step)
        for step in steps:
            sink.step(step, {"reward/mean": step + shift})
        sink.close()
    expected = [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert [(r["step"], r["reward/mean"]) for r in read_metrics(tmp_path / "metrics.jsonl")] == expected
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == expected


def test_a_terminal_gets_a_bar_with_stage_step_and_numbers() -> None:
    screen = io.StringIO()
    display = BarDisplay(20, 5, Console(file=screen, force_terminal=True, width=140))
    display.stage("behaviour pass")
    display.step(6, key_numbers(METRICS))
    display.note("a warning")
    display.close()
    text = screen.getvalue()
    for part in ("behaviour pass", "6/20", "reward 0.250", "κ 0.61", "reach 0.05", "ETA ", "a warning"):
        assert part in text


def test_a_pipe_gets_one_line_per_step() -> None:
    out = io.StringIO()
    display = LineDisplay(2, 0, Console(file=out, width=20))
    display.stage("rollout")
    display.step(1, "reward 0.250  κ 0.61  reach 0.05  length 1234")
    display.step(2, "reward 0.500")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/2  reward 0.250  κ 0.61  reach 0.05  length 1234  ETA ")
    assert lines[1].strip() == "step 2/2  reward 0.500"


def test_time_left_counts_only_steps_of_this_process() -> None:
    ticks = Ticks()
    pace = Pace(steps=100, first=90, now=ticks)
    assert pace.after(90) == ""
    ticks.now += 2 * 3600.0
    assert pace.after(92) == "ETA 8:00:00"
    assert pace.after(100) == ""


def test_key_numbers_leave_out_what_a_step_lacks() -> None:
    assert key_numbers({"reward/mean": 0.5, "reward/std": 1.0}) == "reward 0.500"
    assert key_numbers({}) == ""


def test_a_missing_writer_is_a_user_error_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for rank in (0, 1):
        with pytest.raises(UserError, match=r"^log\.wandb is true, but wandb is not installed"):
            open_sink(_config(wandb=True), tmp_path, rank=rank, steps=1)
    with pytest.raises(UserError, match=r"^log\.tensorboard is true"):
        require_writers(LogConfig())
    require_writers(LogConfig(tensorboard=False))


def test_wandb_gets_every_step_and_a_relaunch_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class FakeRun:
        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append((step, metrics))

        def finish(self) -> None:
            calls.append("finish")

    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]  # found by find_spec
    fake.init = lambda **options: calls.append(options) or FakeRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for last_step in (-1, 1):
        sink = open_sink(_config(wandb=True), tmp_path, rank=0, steps=2, last_step=last_step)
        sink.step(last_step + 2, {"reward/mean": 0.5})
        sink.close()
    first, second = calls[0], calls[3]
    assert calls[1:3] == [(1, {"reward/mean": 0.5}), "finish"]
    assert first["id"] == second["id"]
    assert (first["project"], first["name"], first["resume"]) == ("comppo", "r", "allow")
    assert first["config"]["algo"]["clip"] == 0.2


def test_clock_adds_up_parts_and_names_them() -> None:
    ticks, entered = Ticks(), []
    clock = StageClock(entered.append, now=ticks)
    for seconds in (1.5, 0.5):
        with clock("behaviour pass"):
            ticks.now += seconds
        clock.count("behaviour pass", 300)
    with pytest.raises(RuntimeError), clock("update"):
        ticks.now += 3.0
        raise RuntimeError
    ticks.now += 1.0
    assert entered == ["behaviour pass", "behaviour pass", "update"]
    assert clock.metrics() == {
        "time/behaviour_pass_s": 2.0,
        "time/update_s": 3.0,
        "time/step_s": 6.0,
        "tokens/behaviour_pass": 600.0,
        "time/behaviour_pass_tokens_per_s": 300.0,
    }


def test_peak_memory_is_in_gib() -> None:
    status = Path("/proc/self/status").read_text()
    (peak_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert memory_metrics()["memory/peak_rss_gib"] == pytest.approx(peak_kib / 2**20, rel=0.02)
