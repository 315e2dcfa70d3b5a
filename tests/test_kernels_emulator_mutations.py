"""Every committed mutation of the CUDA kernels compiles, and the check it names notices it.

`build/emulator/mutations.txt` receives the report: mutation → what it breaks → how the check fails.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.emulator import build, coverage
from tests.emulator.checks import CHECKS
from tests.emulator.mutation import Mutation, all_mutations, run_checks, verdict

MUTATIONS = all_mutations()
Verdicts = dict[str, str | Exception | None]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    """Of all mutations by name; they are compiled and run on all cores."""
    folder = tmp_path_factory.mktemp("mutations")
    for op in CHECKS:  # what the mutations do not touch is compiled once
        build.compile_library(op)

    def attempt(mutation: Mutation) -> str | Exception | None:
        try:
            return verdict(mutation, folder / mutation.path.stem)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(attempt, MUTATIONS))
    lines = [
        f"{m.path.stem}: {m.what} → {m.op}/{m.check}: {outcome or 'NOT CAUGHT'}\n"
        for m, outcome in zip(MUTATIONS, outcomes, strict=True)
    ]
    (build.CACHE / "mutations.txt").write_text("".join(lines))
    return {m.path.stem: outcome for m, outcome in zip(MUTATIONS, outcomes, strict=True)}


@pytest.mark.parametrize("name", [m.path.stem for m in MUTATIONS])
def test_mutation_is_caught(verdicts: Verdicts, name: str) -> None:
    assert isinstance(verdicts[name], str), verdicts[name]


@pytest.mark.parametrize("op", CHECKS)
def test_control_without_mutation_passes(op: str) -> None:
    """The same checks, in the same way, on the sources as they are."""
    named = sorted({m.check for m in MUTATIONS if m.op == op})
    assert run_checks(build.compile_library(op), op, named) is None


def test_mutations_cover_all_ops() -> None:
    assert len(MUTATIONS) >= 12
    assert {m.op for m in MUTATIONS} == set(CHECKS)
    assert any("sm90" in m.path.read_text() for m in MUTATIONS)


def test_line_coverage_of_device_code() -> None:
    lines = coverage.measure()
    assert len(lines) >= 10
    assert coverage.share(lines) >= 0.95
