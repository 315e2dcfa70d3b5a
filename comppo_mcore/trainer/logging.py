"""What a run shows and keeps of itself: progress on the screen, metrics.jsonl, TensorBoard, Weights & Biases.

Everything goes through a `Sink`. Rank 0 has a `RunSink`, all other ranks a `NullSink`, so that no caller asks
which rank it is.
"""

from __future__ import annotations

import importlib.util
import resource
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from comppo_mcore.config.schema import Config, LogConfig
from comppo_mcore.errors import UserError
from comppo_mcore.trainer.files import MetricsFile, write_text_atomic

Metrics = Mapping[str, float]

# What a person watches, in this order: label, key, format.
KEY_NUMBERS = (
    ("loss", "loss/sft", ".3f"),
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "reward/correct", ".3f"),
    ("held-out", "eval/accuracy", ".3f"),
    ("κ", "gate/kappa_mean", ".2f"),
    ("reach", "credit/trace_reach", ".2f"),
    ("EV", "critic/explained_variance", ".2f"),
    ("length", "response/length_mean", ".0f"),
)


class Sink(Protocol):
    """Where a run reports to."""

    def stage(self, name: str) -> None:
        """The run now does `name`."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Step `step` is finished: keep its record, show its key numbers. Before its checkpoint is saved."""

    def note(self, text: str) -> None:
        """Show a line that stays on the screen, such as a warning."""

    def close(self) -> None:
        """Write out what is buffered and give the terminal back."""


class NullSink:
    """The sink of every rank but 0."""

    def stage(self, name: str) -> None:
        pass

    def step(self, step: int, metrics: Metrics) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class RunSink:
    """The sink of rank 0: one file that is always written, any number of writers, one display."""

    def __init__(self, file: MetricsFile, writers: list[Writer], display: Display) -> None:
        self._file, self._writers, self._display = file, writers, display

    def stage(self, name: str) -> None:
        self._display.stage(name)

    def step(self, step: int, metrics: Metrics) -> None:
        self._file.append(step, metrics)
        for writer in self._writers:
            writer.write(step, metrics)
        self._display.step(step, key_numbers(metrics))

    def note(self, text: str) -> None:
        self._display.note(text)

    def close(self) -> None:
        self._display.close()
        for writer in self._writers:
            writer.close()
        self._file.close()


def open_sink(config: Config, folder: Path, *, rank: int, steps: int, last_step: int = -1) -> Sink:
    """The sink of this rank.

    Args:
        config: the resolved config.
        folder: the run folder, which exists.
        rank: global rank of this process.
        steps: number of the last step of the run.
        last_step: last step the restored checkpoint covers; −1 for a fresh start. Later records are dropped.

    Raises:
        UserError: a writer that the config asks for is not installed (on every rank alike).
    """
    require_writers(config.log)
    if rank != 0:
        return NullSink()
    file = MetricsFile(folder / "metrics.jsonl", last_step)
    return RunSink(file, _writers(config, folder, last_step), _display(config.log, steps, max(last_step, 0)))


def require_writers(log: LogConfig) -> None:
    """Check that the writers a config asks for are installed, before any work is done.

    Raises:
        UserError: one is not.
    """
    if log.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "log.wandb is true, but wandb is not installed: run `pip install wandb` or set log.wandb=false."
        )
    if log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "log.tensorboard is true, but tensorboard is not installed: "
            "run `pip install tensorboard` or set log.tensorboard=false."
        )


# Writers


class Writer(Protocol):
    def write(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files under `folder`; points after `last_step`, of an interrupted run, are hidden."""

    def __init__(self, folder: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()  # a killed run has shown all it did

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A Weights & Biases run. Its id lies in the run folder, so that a relaunch continues it.

    The service keeps the first record it gets of a step, so steps done again after a crash show the numbers
    from before it; metrics.jsonl has those of the run that went on.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        id_file = folder / "wandb_run_id"
        if not id_file.exists():
            write_text_atomic(id_file, uuid.uuid4().hex)
        self._run = wandb.init(
            project=config.log.wandb_project,
            id=id_file.read_text(),
            name=config.run.name,
            dir=str(folder),
            resume="allow",
            config=config.model_dump(),
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _writers(config: Config, folder: Path, last_step: int) -> list[Writer]:
    writers: list[Writer] = []
    if config.log.tensorboard:
        writers.append(TensorBoardWriter(folder / "tensorboard", last_step))
    if config.log.wandb:
        writers.append(WandbWriter(config, folder))
    return writers


# Displays


class Display(Protocol):
    def stage(self, name: str) -> None: ...

    def step(self, step: int, numbers: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class LineDisplay:
    """A line per step, for files and pipes. Stages are not shown: a log of them would drown the steps."""

    def __init__(self, steps: int, first: int, console: Console) -> None:
        self._console, self._pace, self._steps = console, Pace(steps, first), steps

    def stage(self, name: str) -> None:
        pass

    def step(self, step: int, numbers: str) -> None:
        self.note(f"step {step}/{self._steps}  {numbers}  {self._pace.after(step)}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        pass


class QuietDisplay(LineDisplay):
    """Notes only."""

    def step(self, step: int, numbers: str) -> None:
        pass


class BarDisplay:
    """A progress bar on a terminal: stage, step i/n, time left, key numbers of the last step."""

    def __init__(self, steps: int, first: int, console: Console) -> None:
        self._pace = Pace(steps, first)
        self._progress = Progress(
            TextColumn("{task.fields[stage]:<15}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task(
            "run", total=steps, completed=first, stage="start", left="", numbers=""
        )
        self._progress.start()

    def stage(self, name: str) -> None:
        self._progress.update(self._task, stage=name)

    def step(self, step: int, numbers: str) -> None:
        self._progress.update(self._task, completed=step, numbers=numbers, left=self._pace.after(step))

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class Pace:
    """Time left, from the mean duration of the steps that this process has done.

    rich's own estimate looks back 30 seconds, less than one step of a large run.
    """

    def __init__(self, steps: int, first: int, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._first, self._now = steps, first, now
        self._start = now()

    def after(self, step: int) -> str:
        """The time left after `step` in words: "ETA 1:02:03"; "" when nothing can be said yet, or is left."""
        done, left = step - self._first, self._steps - step
        if done <= 0 or left <= 0:
            return ""
        seconds = round((self._now() - self._start) / done * left)
        return f"ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def key_numbers(metrics: Metrics) -> str:
    """The numbers a person watches, those that the step has."""
    return "  ".join(f"{label} {metrics[key]:{form}}" for label, key, form in KEY_NUMBERS if key in metrics)


def _display(log: LogConfig, steps: int, first: int) -> Display:
    console = Console(file=sys.stdout)
    if not log.progress:
        return QuietDisplay(steps, first, console)
    return BarDisplay(steps, first, console) if console.is_terminal else LineDisplay(steps, first, console)


# Time and memory


class StageClock:
    """Seconds and tokens of each part of one step.

        clock = StageClock(sink.stage)
        with clock("rollout"):
            …
        clock.count("rollout", tokens)
        record |= clock.metrics()

    A part that is entered again adds to what it had. On a GPU the clock waits for queued work at both ends of
    a part, or each part would be charged for the one before.
    """

    def __init__(self, on_enter: Callable[[str], None], now: Callable[[], float] = time.perf_counter) -> None:
        self._on_enter, self._now = on_enter, now
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._start = now()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._on_enter(part)
        _wait_for_gpu()
        start = self._now()
        try:
            yield
        finally:
            _wait_for_gpu()
            self._seconds[part] = self._seconds.get(part, 0.0) + self._now() - start

    def count(self, part: str, tokens: int) -> None:
        """Add tokens that a part has worked on."""
        self._tokens[part] = self._tokens.get(part, 0) + tokens

    def metrics(self) -> dict[str, float]:
        """`time/<part>_s`, `tokens/<part>`, `time/<part>_tokens_per_s`; `time/step_s` of all so far."""
        entries = {f"time/{_key(part)}_s": seconds for part, seconds in self._seconds.items()}
        entries["time/step_s"] = self._now() - self._start
        for part, tokens in self._tokens.items():
            entries[f"tokens/{_key(part)}"] = float(tokens)
            if (seconds := self._seconds.get(part, 0.0)) > 0:
                entries[f"time/{_key(part)}_tokens_per_s"] = tokens / seconds
        return entries


def memory_metrics() -> dict[str, float]:
    """Peak memory of this process so far, GiB: resident (`memory/peak_rss_gib`) and allocated on a GPU."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: bytes there, KiB on Linux
    entries = {"memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if torch.cuda.is_available():
        entries["memory/peak_cuda_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return entries


def _key(part: str) -> str:
    return part.replace(" ", "_")


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
