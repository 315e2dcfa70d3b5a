"""Lines of csrc/cuda that the checks execute, by gcov.

python -m tests.emulator.coverage          prints the ones missed
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.emulator import build
from tests.emulator.checks import CHECKS

Lines = dict[str, dict[int, bool]]  # by file and line: executed


def measure() -> Lines:
    """Compiles every op with counters and runs all its checks once."""
    lines: Lines = {}
    with tempfile.TemporaryDirectory() as folder:

        def count(op: str) -> None:
            library = build.compile_library(op, flags=build.COVERAGE, cache=Path(folder) / op)
            command = [sys.executable, "-m", "tests.emulator.run_check", str(library), op, "all", "1"]
            subprocess.run(command, cwd=build.ROOT, check=True)

        with ThreadPoolExecutor(len(CHECKS)) as pool:
            list(pool.map(count, CHECKS))
        for counts in Path(folder).rglob("*.gcda"):
            _read(counts, lines)
    return lines


def _read(counts: Path, lines: Lines) -> None:
    command = ["gcov", "--json-format", "--stdout", str(counts)]
    done = subprocess.run(command, cwd=counts.parent, capture_output=True, text=True, check=True)
    for file in json.loads(done.stdout)["files"]:
        path = Path(file["file"])
        if not path.is_relative_to(build.CSRC / "cuda"):
            continue
        of_file = lines.setdefault(str(path.relative_to(build.CSRC)), {})
        for line in file["lines"]:  # a template has an entry per instance
            number = line["line_number"]
            of_file[number] = of_file.get(number, False) or line["count"] > 0


def share(lines: Lines) -> float:
    """Executed lines over all lines with code."""
    flags = [executed for of_file in lines.values() for executed in of_file.values()]
    return sum(flags) / len(flags)


def main() -> None:
    lines = measure()
    for name, of_file in sorted(lines.items()):
        missed = [number for number, executed in sorted(of_file.items()) if not executed]
        print(f"{name:40} {len(of_file) - len(missed):4} of {len(of_file):4} lines  missed: {missed}")
    print(f"{100 * share(lines):.1f} %")


if __name__ == "__main__":
    main()
