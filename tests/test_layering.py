"""Imports point down (docs/design.md), and Megatron is imported in one folder."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import comppo_mcore

PACKAGE = Path(comppo_mcore.__file__).parent
NAME = PACKAGE.name

# Part → the parts it may import besides itself, `errors` and the bare package, which import nothing of ours.
BELOW = {
    "__init__": set(),
    "errors": set(),
    "config": set(),
    "credit": set(),
    "kernels": {"credit"},
    "data": {"config"},
    "reward": {"config", "credit"},
    "model": {"kernels", "credit", "config"},
    "rollout": {"model", "config"},
    "trainer": {"config", "credit", "kernels", "data", "reward", "model", "rollout"},
    "processes": set(),
    "cli": {"trainer", "config", "processes"},
}


def part_of(dotted: str) -> str:
    """`comppo_mcore.credit.gate` → `credit`; the package itself → `__init__`."""
    return [*dotted.split("."), "__init__"][1]


def imports(path: Path, package: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, inside functions and type-checking blocks too."""
    location = [NAME, *path.relative_to(package).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = location[: len(location) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [alias.name for alias in node.names]
            yield from ([f"{module}.{name}" for name in names] if module == NAME else [module])


def violations(package: Path) -> list[str]:
    """`file imports name` for every arrow that points up and every import of Megatron outside `model`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        part = where.parts[0].removesuffix(".py")
        for name in imports(path, package):
            if name.split(".")[0] == "megatron":
                allowed = part == "model"
            elif name.split(".")[0] == NAME:
                target = part_of(name)
                known = target in BELOW
                allowed = not known or target in {part, "errors", "__init__"} | BELOW[part]
            else:
                allowed = True
            if not allowed:
                found.append(f"{where} imports {name}")
    return found


def test_every_part_is_in_the_table() -> None:
    assert {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")
    } <= BELOW.keys()


def test_imports_point_down() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        (
            "credit/gate.py",
            "from comppo_mcore.trainer.records import Rollout",
            "comppo_mcore.trainer.records",
        ),
        ("credit/gate.py", "from comppo_mcore import trainer", "comppo_mcore.trainer"),
        ("config/check.py", "import comppo_mcore.credit.gate", "comppo_mcore.credit.gate"),
        ("model/policy.py", "def f():\n    from ..rollout import engine", "comppo_mcore.rollout"),
        ("kernels/select.py", "from .. import model", "comppo_mcore.model"),
        ("trainer/loop.py", "if TYPE_CHECKING:\n    from comppo_mcore.cli import main", "comppo_mcore.cli"),
        ("trainer/loop.py", "import megatron.core as core", "megatron.core"),
        ("credit/gate.py", "from megatron.core import parallel_state", "megatron.core"),
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, file: str, line: str, name: str) -> None:
    copy = tmp_path / NAME
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    planted = copy / file
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    assert f"{file} imports {name}" in violations(copy)
