"""Breaks the shipped kernels on purpose: do the emulator's checks notice?

Every file of tests/mutations is a patch to csrc/cuda that still compiles. Its first lines say what it breaks
and which check must fail:

    What: the pipeline refills a stage that other warps still read
    Caught by: attention_statistics/bfloat16

    python -m tests.emulator.mutation           runs them all and prints the report
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.emulator import build

MUTATIONS = build.ROOT / "tests" / "mutations"
SEEDS = 6  # warp orders to try
TIME_LIMIT = 240  # seconds of one check


@dataclass(frozen=True)
class Mutation:
    path: Path
    what: str
    op: str
    check: str

    @classmethod
    def read(cls, path: Path) -> Mutation:
        found = re.match(r"What: (.*)\nCaught by: (\w+)/(\w+)\n", path.read_text())
        if found is None:
            raise ValueError(f"{path.name} does not begin with 'What: …' and 'Caught by: op/check'")
        return cls(path, *found.groups())


def all_mutations() -> list[Mutation]:
    return [Mutation.read(path) for path in sorted(MUTATIONS.glob("*.patch"))]


def verdict(mutation: Mutation, folder: Path) -> str | None:
    """How the named check fails on the mutated sources; None where it passes.

    Raises:
        RuntimeError: the patch does not apply, or what it leaves does not compile.
    """
    csrc = folder / "csrc"
    for part in ("cuda", "include"):
        shutil.copytree(build.CSRC / part, csrc / part)
    applied = subprocess.run(
        ["patch", "-p1", "-d", str(folder), "-i", str(mutation.path)], capture_output=True, text=True
    )
    if applied.returncode:
        raise RuntimeError(f"{mutation.path.name} does not apply: {applied.stdout}")
    library = build.compile_library(mutation.op, csrc, cache=folder)
    return run_checks(library, mutation.op, [mutation.check])


def run_checks(library: Path, op: str, checks: list[str]) -> str | None:
    """The first failure of some checks in a process of their own, over several warp orders; or None."""
    names = ",".join(checks)
    command = [sys.executable, "-m", "tests.emulator.run_check", str(library), op, names, str(SEEDS)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT, cwd=build.ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"still running after {TIME_LIMIT} s"
    if done.returncode == 0:
        return None
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def main() -> None:
    missed = 0
    for mutation in all_mutations():
        with tempfile.TemporaryDirectory() as folder:
            outcome = verdict(mutation, Path(folder))
        missed += outcome is None
        print(
            f"{mutation.path.stem}: {mutation.what}\n    {mutation.check}: {outcome or 'NOT CAUGHT'}",
            flush=True,
        )
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
