"""Chooses between the compiled ops and their eager reference (`kernels.mode`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from comppo_mcore.credit.transport import comp_gae
from comppo_mcore.errors import UserError
from comppo_mcore.kernels import compiled, extension
from comppo_mcore.kernels.concentration import attention_statistics
from comppo_mcore.kernels.pooling import pool_history

KernelMode = Literal["auto", "require", "reference"]


@dataclass(frozen=True)
class Kernels:
    """The ops of one run. Both implementations take the same arguments, but for a workspace limit."""

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
    built = extension.load()
    obstacle = _obstacle(built)
    if obstacle is None:
        return Kernels(
            f"compiled ({extension.LIBRARY.name}: {built})",
            compiled.attention_statistics,
            compiled.pool_history,
            compiled.comp_gae,
        )
    if mode == "require":
        raise UserError(
            f"kernels.mode is 'require', but {obstacle}: build the compiled ops with "
            "`pip install --no-build-isolation -e .`, or set kernels.mode to 'auto' or 'reference'."
        )
    return _reference(f"eager reference (kernels.mode is auto and {obstacle})")


def _obstacle(built: str | None) -> str | None:
    """Why the compiled ops cannot serve this machine."""
    if built is None:
        return f"{extension.LIBRARY.name} is not installed"
    if torch.cuda.is_available() and "cuda" not in built:
        return f"{extension.LIBRARY.name} was built without CUDA kernels"
    return None


def _reference(origin: str) -> Kernels:
    return Kernels(origin, attention_statistics, pool_history, comp_gae)
