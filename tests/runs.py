"""Runs of the `comppo` command in processes of their own, with time-outs, SIGKILL and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
COMMAND = "comppo_mcore.cli"
FAULTY = "tests.workers.faulty"  # the same command with one thing going wrong


@dataclass(frozen=True)
class Finished:
    code: int
    output: str  # of all processes, both streams

    @property
    def error(self) -> str:
        """The sentence of a user error; "" without one."""
        mark = "comppo: error: "
        lines = [line.removeprefix(mark) for line in self.output.splitlines() if line.startswith(mark)]
        return "\n".join(lines)


class Running:
    """A command that was started; as a context manager it never outlives its block."""

    def __init__(self, *words: object, module: str = COMMAND, log: Path, **environment: str) -> None:
        self._log = log.open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"} | environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def wait(self, timeout: float) -> Finished:
        try:
            return Finished(self.process.wait(timeout), self.output)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s\n{self.output[-4000:]}") from None

    def wait_until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Return while the command still runs, as soon as `condition` holds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended before its time\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"nothing after {timeout:g} s\n{self.output[-4000:]}"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL to the whole tree, stopped first so that it cannot grow meanwhile; none is left."""
        if self.process.poll() is None:
            tree = _stopped_tree(psutil.Process(self.process.pid))
            for process in tree:
                process.kill()
            self.process.wait()
            deadline = time.monotonic() + 10
            while alive := [p for p in tree if _is_alive(p)]:
                assert time.monotonic() < deadline, f"left behind: {alive}"
                time.sleep(0.01)


def comppo(
    *words: object, log: Path, timeout: float = 150.0, module: str = COMMAND, **environment: str
) -> Finished:
    """Run the command to its end."""
    with Running(*words, module=module, log=log, **environment) as running:
        return running.wait(timeout)


def _stopped_tree(root: psutil.Process) -> set[psutil.Process]:
    stopped: set[psutil.Process] = set()
    while new := {root, *root.children(recursive=True)} - stopped:
        for process in new:
            process.suspend()
        stopped |= new
    return stopped


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
