"""Which implementation a run gets, what the compiled one registers, and that its instruction sets agree."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comppo_mcore.errors import UserError
from comppo_mcore.kernels import compiled, concentration, extension, pooling, select
from tests.attention_cases import CASES

ROOT = Path(__file__).parents[1]
PATH = os.pathsep.join([*sys.path, str(ROOT)])  # a child sees the packages that this process sees


# ---------------------------------------------------------------- choice


def test_compiled_ops_are_used_where_installed() -> None:
    for mode in ("auto", "require"):
        kernels = select.select(mode)
        assert kernels.attention_statistics is compiled.attention_statistics
        assert kernels.pool_history is compiled.pool_history and kernels.comp_gae is compiled.comp_gae
        assert "compiled" in kernels.describe() and "cpu" in kernels.describe()
    assert replace(kernels, origin="x").describe() == "kernels: x"


def test_reference_on_request() -> None:
    kernels = select.select("reference")
    assert kernels.attention_statistics is concentration.attention_statistics
    assert kernels.pool_history is pooling.pool_history
    assert "kernels.mode is reference" in kernels.describe()


@pytest.fixture(params=["missing", "cpu_only"])
def obstacle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What keeps the compiled ops from this machine, and what is said about it."""
    if request.param == "missing":
        monkeypatch.setattr(extension, "load", lambda: None)
        return "not installed"
    monkeypatch.setattr(extension, "load", lambda: "cpu avx2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return "without CUDA kernels"


def test_auto_falls_back_aloud(obstacle: str) -> None:
    kernels = select.select("auto")
    assert kernels.attention_statistics is concentration.attention_statistics
    assert "reference" in kernels.describe() and obstacle in kernels.describe()


def test_bad_input_kernels_mode_require(obstacle: str) -> None:
    with pytest.raises(UserError, match=rf"kernels\.mode is 'require'.*{obstacle}.*'auto'"):
        select.select("require")


def test_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None where there is no library; one that is there but broken raises."""
    monkeypatch.setattr(extension, "LIBRARY", tmp_path / "_ops.so")
    assert extension.load.__wrapped__() is None
    (tmp_path / "_ops.so").write_text("not a library")
    with pytest.raises(OSError, match="_ops"):
        extension.load.__wrapped__()


# ---------------------------------------------------------------- registration


def op_arguments() -> dict[str, tuple[Any, ...]]:
    case = CASES["gqa_4_2"]
    q, k = case.tensors()
    plan = compiled.make_plan(
        case.rows,
        case.cu_seqlens,
        torch.tensor(case.prompts),
        len(k),
        history="all",
        skip_first=0,
        window=None,
    )
    tables = (plan.rows, plan.items, plan.blocks)
    lse = torch.full((4, len(case.rows)), 5.0)
    index = torch.tensor([[0, 2], [1, -1], [3, 0]], dtype=torch.int32)
    start, weight = torch.tensor([0, 0, 2]), torch.rand(3, 2)
    learned = (torch.randn(3, 4), torch.randn(3, 4), torch.randn(6, 13))
    pooled, total = torch.ops.comppo.pool_history(*learned, index, weight, start, 1e-8)
    transposed = torch.ops.comppo.transpose_edges(index, start, 6)
    saved = (*learned, index, weight, start, pooled, total, *transposed, 1e-8)
    tokens, cu, mask = (torch.rand(3, 9)), torch.tensor([0, 4, 9]), torch.rand(9) < 0.7
    return {
        "attention_statistics": (q[case.rows], k, lse, *tables, 0.1, 5, 0b11111, 2.0, 3, 0.1, 0.9, 4.0),
        "pool_history": (*(x.requires_grad_() for x in learned), index, weight, start, 1e-8),
        "transpose_edges": (index, start, 6),
        "pool_history_backward": (
            torch.ones(3, 5),
            torch.ones(3),
            *(x.detach() if torch.is_tensor(x) else x for x in saved),
        ),
        "comp_gae": (*tokens, cu, mask, None, 0.9, True),
    }


@pytest.mark.parametrize(
    "name", ["attention_statistics", "pool_history", "transpose_edges", "pool_history_backward", "comp_gae"]
)
def test_opcheck(name: str) -> None:
    """Schema, fake kernel, autograd registration and tracing, by torch's own checks."""
    assert extension.load()
    torch.library.opcheck(getattr(torch.ops.comppo, name), op_arguments()[name])


def test_transposed_edges_of_every_device_agree() -> None:
    """The counting sort of the CPU is the stable sort that CUDA tensors get."""
    assert extension.load()
    generator = torch.Generator().manual_seed(5)
    index = torch.randint(-1, 7, (700, 3), generator=generator, dtype=torch.int32)
    start = torch.randint(0, 5, (700,), generator=generator)
    ours = torch.ops.comppo.transpose_edges(index, start, 12)
    by_sort = extension.transpose_edges(index, start, 12)
    used = int(ours[1][-1])
    assert used == int((index >= 0).sum()) and torch.equal(ours[0][:used], by_sort[0][:used])
    assert torch.equal(ours[1], by_sort[1]) and torch.equal(ours[2], by_sort[2])


# ---------------------------------------------------------------- instruction sets


@pytest.fixture(scope="module")
def by_instruction_set(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("isa")
    best = torch.backends.cpu.get_cpu_capability().lower()
    names = ["portable", *(x for x in ("avx2", "avx512") if x in best or (x == "avx2" and "avx512" in best))]
    for name in names:
        subprocess.run(
            [sys.executable, ROOT / "tests/workers/kernels_isa.py", folder / name],
            env={
                **os.environ,
                "COMPPO_CPU_ISA": name,
                "PYTHONPATH": PATH,
            },
            check=True,
        )
    return {name: torch.load(folder / name) for name in names}


def test_instruction_sets_agree(by_instruction_set: dict[str, dict[str, Any]]) -> None:
    """All code paths that this machine can run give the same numbers to rounding, and the same top-K."""
    portable = by_instruction_set["portable"]
    for name, found in by_instruction_set.items():
        assert found["built"].startswith(f"cpu {name}")
        assert torch.equal(found["index"], portable["index"])
        for ours, theirs in zip(found["results"], portable["results"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_unknown_instruction_set_is_refused(tmp_path: Path) -> None:
    code = "from comppo_mcore.kernels import extension; extension.load()"
    environment = {
        **os.environ,
        "COMPPO_CPU_ISA": "abacus",
        "PYTHONPATH": PATH,
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0 and "COMPPO_CPU_ISA is 'abacus'" in done.stderr
