"""A whole training step with the compiled ops gives the numbers of the eager reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comppo_mcore.config.schema import ParallelConfig
from comppo_mcore.kernels import compiled
from comppo_mcore.model import parallel
from tests import invariance
from tests.agreement import broken, missing
from tests.dist import run_distributed
from tests.invariance import Case, Finding, run, write_folders


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    write_folders(folder)
    return folder


@pytest.fixture
def process_group() -> Iterator[None]:
    parallel.initialize(ParallelConfig(), seed=0)
    yield
    parallel.shutdown()


def with_compiled_ops(case: Case, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Finding, set[str]]:
    """The finding, and which compiled ops the step called."""
    called = set()

    def counted(name: str) -> Callable[..., Any]:
        op = getattr(compiled, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return op(*args, **kwargs)

        return call

    for name in ("attention_statistics", "pool_history", "comp_gae"):
        monkeypatch.setattr(compiled, name, counted(name))
    monkeypatch.setitem(invariance.BASE, "kernels", {"mode": "require"})
    return run(case, root), called


@pytest.mark.parametrize("variant", ["comppo", "shuffled"])
def test_compiled_step_is_that_of_the_reference(
    process_group: None, root: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, κ, values, advantages, top-K, losses, gradients and weights, with bootstrapped rows too."""
    reference = run(Case("one", variant, "wide"), root)
    finding, called = with_compiled_ops(Case("one", variant, "narrow"), root, monkeypatch)
    assert called == {"attention_statistics", "pool_history", "comp_gae"}
    assert broken(reference, [finding]) == {} and missing(reference, [finding]) == set()


def test_compiled_step_on_two_tensor_parallel_ranks(process_group: None, root: Path, tmp_path: Path) -> None:
    reference = run(Case("one", "comppo", "wide"), root)
    run_distributed("kernels_training.py", 2, [root, tmp_path, Case("tp2", "comppo", "wide")])
    findings = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert broken(reference, findings) == {} and missing(reference, findings) == set()
