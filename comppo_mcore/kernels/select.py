"""Chooses between the compiled ops and their eager reference (`kernels.mode`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Literal

from comppo_mcore.credit.transport import comp_gae
from comppo_mcore.errors import UserError
from comppo_mcore.kernels.concentration import attention_statistics
from comppo_mcore.kernels.pooling import pool_history

KernelMode = Literal["auto", "require", "reference"]
EXTENSION = "comppo_mcore._C"


@dataclass(frozen=True)
class Kernels:
    """The ops of one run. Both implementations have the signatures of the eager reference."""

    origin: str  # where the ops come from and why, for people
    attention_statistics: Callable
    pool_history: Callable
    comp_gae: Callable

    def describe(self) -> str:
        """One line for the start of a run."""
        return f"kernels: {self.origin}"


def select(mode: KernelMode) -> Kernels:
    """The ops that `kernels.mode` asks for.

    Args:
        mode: `require` the compiled ops, use the eager `reference`, or (`auto`) the compiled ones where they
            are installed. `Kernels.describe` says which came out.

    Raises:
        UserError: `require` without the compiled ops.
    """
    if mode == "reference":
        return _reference("eager reference (kernels.mode is reference)")
    extension = _load_extension()
    if extension is not None:
        return Kernels(
            f"compiled ({EXTENSION})",
            extension.attention_statistics,
            extension.pool_history,
            extension.comp_gae,
        )
    if mode == "require":
        raise UserError(
            f"kernels.mode is 'require', but the compiled extension {EXTENSION} is not installed: "
            "build it, or set kernels.mode to 'auto' or 'reference'."
        )
    return _reference(f"eager reference (kernels.mode is auto and {EXTENSION} is not installed)")


def _reference(origin: str) -> Kernels:
    return Kernels(origin, attention_statistics, pool_history, comp_gae)


def _load_extension() -> ModuleType | None:
    """The compiled extension; None where it is not installed. One that is there but broken raises."""
    try:
        return import_module(EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != EXTENSION:
            raise
        return None
