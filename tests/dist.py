"""Runs a worker script of tests/workers in several processes, as torchrun would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parent
TAIL_LINES = 40


def run_distributed(
    worker: str, nproc: int, args: Sequence[object] = (), timeout: float = 240.0
) -> list[str]:
    """Run `tests/workers/<worker>` under torchrun on this host.

    Returns:
        What each rank printed on stdout, in rank order.

    Raises:
        AssertionError: a rank failed, or `timeout` seconds passed, with the end of the stderr of the ranks
            that failed (of all ranks, if none shows a traceback). No process is left behind.
    """
    with tempfile.TemporaryDirectory() as logs:
        process = subprocess.Popen(
            _command(worker, nproc, args, logs),
            cwd=TESTS.parent,
            env=_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        headline = f"{worker} failed on {nproc} ranks"
        try:
            _, launcher_errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            headline, launcher_errors = f"{worker} was still running after {timeout:g} s", ""
        finally:
            _end(process)
        if process.returncode != 0:
            raise AssertionError(f"{headline}\n{_rank_errors(logs, nproc) or launcher_errors}")
        return [_log(logs, rank, "stdout") for rank in range(nproc)]


def _command(worker: str, nproc: int, args: Sequence[object], logs: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    # Ranks run in sessions of their own, which a kill of our group does not reach: the launcher ends them.
    options = [f"--log-dir={logs}", "--redirects=3", "--shutdown-timeout=3"]
    return [*launcher, *options, str(TESTS / "workers" / worker), *map(str, args)]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def _end(process: subprocess.Popen[str], grace: float = 20.0) -> None:
    """Ask the launcher to end its ranks and itself, then kill what is left of its group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=grace)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _rank_errors(logs: str, nproc: int) -> str:
    """The end of each rank's stderr: of those with a traceback, or of all if none has one."""
    errors = {rank: text for rank in range(nproc) if (text := _log(logs, rank, "stderr"))}
    shown = {rank: text for rank, text in errors.items() if "Traceback" in text} or errors
    tails = {rank: "\n".join(text.splitlines()[-TAIL_LINES:]) for rank, text in shown.items()}
    return "\n".join(f"--- rank {rank} ---\n{tail}" for rank, tail in tails.items())


def _log(logs: str, rank: int, stream: str) -> str:
    return "".join(path.read_text() for path in sorted(Path(logs).glob(f"*/attempt_0/{rank}/{stream}.log")))
