"""Runs a command for as long as the process lives that wanted it.

    python guard.py PARENT_PID COMMAND...

A script of its own, run by path, so that it imports nothing but the standard library. It leads the process
group of the command's whole tree. PR_SET_PDEATHSIG would not do: it follows the thread that forked, not the
process, and reaches one child only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

PERIOD_S = 0.5
GRACE_S = 5.0


def main(parent: int, command: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # the group's is meant for the command
    child = subprocess.Popen(command)  # in which the handler does not survive
    while child.poll() is None:
        if os.getppid() != parent:
            end_group(child)
        time.sleep(PERIOD_S)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def end_group(child: subprocess.Popen[bytes]) -> None:
    os.killpg(0, signal.SIGTERM)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        print(f"guard: the command ignores SIGTERM for {GRACE_S:g} s", file=sys.stderr)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
