"""Records that pass from one stage of a training step to the next.

All are frozen; arrays are packed as described in docs/design.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TOKEN_FLOATS = ("logprob", "engine_logprob", "entropy", "advantage", "credit")
_CRITIC_FLOATS = ("kappa", "value", "lambda_return")
_CRITIC_FLAGS = ("dead", "saturated")
_RESPONSE_FLOATS = ("reward", "reward_accuracy", "reward_format", "reward_length")
_RESPONSE_FLAGS = ("correct", "formatted", "truncated", "timed_out")


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTable:
    """Every response token of one step, over all data-parallel ranks, on the CPU, in trajectory order.

    B responses of N tokens in all. Floats are float32, flags bool; log-probs and entropy are in nats.
    The five arrays of the critic (κ, V, G and its flags) are None together for critic-free algorithms.

    Raises:
        ValueError: an array has the wrong length, dtype or device, or only some of the critic's are there.
    """

    cu_seqlens: Tensor  # int64 [B + 1], first token of each response
    mask: Tensor  # bool [N], false at gap tokens

    logprob: Tensor  # [N] of the behaviour policy θ⁻, scored by the trainer
    ref_logprob: Tensor | None  # [N] of the reference policy; None without one
    engine_logprob: Tensor  # [N] of θ⁻, as the rollout engine reported it
    entropy: Tensor  # [N]
    advantage: Tensor  # [N] A, before whitening
    credit: Tensor  # [N] Â, after whitening and clip

    kappa: Tensor | None  # [N] κ as used in the transport
    value: Tensor | None  # [N] V of the behaviour pass
    lambda_return: Tensor | None  # [N] G
    dead: Tensor | None  # bool [N], no routed evidence: h̄ stood in for h^G
    saturated: Tensor | None  # bool [N], V was clamped

    reward: Tensor  # [B] total
    reward_accuracy: Tensor  # [B] part
    reward_format: Tensor  # [B] part
    reward_length: Tensor  # [B] part
    correct: Tensor  # bool [B]
    formatted: Tensor  # bool [B]
    truncated: Tensor  # bool [B], cut by the length limit
    timed_out: Tensor  # bool [B], the verifier gave up

    def __post_init__(self) -> None:
        self._check_boundaries()
        n, b = self.num_tokens, self.num_responses
        for names, length, dtype in (
            (("mask", *_CRITIC_FLAGS), n, torch.bool),
            ((*_TOKEN_FLOATS, "ref_logprob", *_CRITIC_FLOATS), n, torch.float32),
            (_RESPONSE_FLOATS, b, torch.float32),
            (_RESPONSE_FLAGS, b, torch.bool),
        ):
            for name in names:
                self._check_array(name, length, dtype)
        present = {getattr(self, name) is not None for name in (*_CRITIC_FLOATS, *_CRITIC_FLAGS)}
        if len(present) > 1:
            raise ValueError(
                "kappa, value, lambda_return, dead and saturated are given together or not at all"
            )

    def _check_boundaries(self) -> None:
        cu = self.cu_seqlens
        if cu.dtype != torch.int64 or cu.dim() != 1 or len(cu) < 2:
            raise ValueError(f"cu_seqlens is {cu.dtype} {list(cu.shape)}, not int64 [B + 1] with B ≥ 1")
        if cu[0] != 0 or (cu.diff() < 0).any():
            raise ValueError("cu_seqlens must start at 0 and never fall")

    def _check_array(self, name: str, length: int, dtype: torch.dtype) -> None:
        array: Tensor | None = getattr(self, name)
        if array is None:
            if name not in ("ref_logprob", *_CRITIC_FLOATS, *_CRITIC_FLAGS):
                raise ValueError(f"{name} is missing")
        elif array.shape != (length,) or array.dtype != dtype or array.device.type != "cpu":
            found = f"{array.dtype} {list(array.shape)} on {array.device}"
            raise ValueError(f"{name} is {found}, not {dtype} [{length}] on cpu")

    @property
    def num_responses(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def has_critic(self) -> bool:
        return self.value is not None
