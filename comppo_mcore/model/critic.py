"""The value heads on the last pipeline stage: computation-aligned (Eq. 21–27) and standard.

Both are fp32 inside a model of any precision. Their projections are sharded over the actor's
tensor-parallel group by output column. Every rank holds all keys but pools only its own query rows
(`kernels.shards`), so values and gradients are those of one rank for any tensor-parallel size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from comppo_mcore.config.schema import CriticConfig
from comppo_mcore.credit.objective import clamp_value
from comppo_mcore.kernels.pooling import ROUTE_EPSILON
from comppo_mcore.model.batch import MicroBatch


@dataclass(frozen=True)
class Routing:
    """The behaviour policy's top-K history of this rank's query rows (detached, stored with the rollout)."""

    index: Tensor  # int32 [R_own, K], position inside the sequence, −1 padding
    weight: Tensor  # float32 [R_own, K], a_ti renormalised over I_t


@dataclass(frozen=True)
class ValueParts:
    """Both heads before mixture and clamp, so that a gate made later (shuffled, calibrated) can mix them."""

    local: Tensor  # V^L float32 [R]
    routed: Tensor | None  # V^G float32 [R]; None: the standard critic
    dead: Tensor  # bool [R], rows whose Σ s ≤ 1e-8


def mix(parts: ValueParts, kappa: Tensor, clamp_gradient: Literal["hard", "inward"]) -> Tensor:
    """V = clip(κ V^G + (1 − κ) V^L, −1, 1) (Eq. 27); the standard critic is clip(V^L)."""
    raw = parts.local if parts.routed is None else kappa * parts.routed + (1 - kappa) * parts.local
    return clamp_value(raw, clamp_gradient)


class Critic(MegatronModule):
    """What both critics share: fp32 for good, initialisation independent of TP, checkpoint sharding."""

    w1_local: Tensor  # [width/tp, H]
    b1_local: Tensor  # [width/tp]
    w2_local: Tensor  # [width/tp]
    b2_local: Tensor  # []

    def __init__(self, config: Any, critic: CriticConfig, tp_group: Any, seed: int) -> None:
        super().__init__(config=config)
        self.options = critic
        self.seed = seed
        self.tp_group = tp_group
        self._sharded: dict[str, int] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Float16Module casts the whole model; the critic follows it to the device, never to the dtype.
        def move_only(t: Tensor) -> Tensor:
            return t.to(fn(t.new_empty(0)).device) if t.is_floating_point() else fn(t)

        return super()._apply(move_only, recurse)

    def _column_parallel(self, name: str, rows: int, columns: int | None, std: float) -> None:
        """Register this rank's row block of a [rows, columns] weight (a [rows] vector if columns is None)."""
        size, rank = self.tp_group.size(), self.tp_group.rank()
        shape = (rows,) if columns is None else (rows, columns)
        full = _seeded_normal(f"{self.seed}.{name}", shape, std)
        parameter = torch.nn.Parameter(full.chunk(size)[rank].clone())
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.register_parameter(name, parameter)
        self._sharded[name] = 0

    def _replicated(self, name: str, value: Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(value))

    def _from_all_rows(self, name: str) -> Tensor:
        """A replicated parameter used on a share of the rows: its gradient is summed over the TP group."""
        return copy_to_tensor_model_parallel_region(getattr(self, name), group=self.tp_group)

    def _prepare(self, hidden: Tensor) -> Tensor:
        """[t, H] in any dtype → fp32, detached unless the critic may train the backbone."""
        if self.options.backbone_grad == "none":
            return hidden.detach().float()
        if not self.config.sequence_parallel:  # there, the gather's backward already sums over TP
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return hidden.float()

    def _reduce(self, partial: Tensor) -> Tensor:
        return reduce_from_tensor_model_parallel_region(partial, group=self.tp_group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            self._sharded,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class StandardCritic(Critic):
    """One tanh head on the final hidden state: V = clip(w₂ᵀ tanh(W₁ h + b₁) + b₂)."""

    def __init__(self, config: Any, critic: CriticConfig, tp_group: Any, seed: int) -> None:
        super().__init__(config, critic, tp_group, seed)
        hidden, width = config.hidden_size, critic.head_width
        self._column_parallel("w1_local", width, hidden, hidden**-0.5)
        self._column_parallel("b1_local", width, None, 0.0)
        self._column_parallel("w2_local", width, None, 0.0)
        self._replicated("b2_local", torch.zeros(()))

    def forward(
        self, features: Sequence[Tensor], final_hidden: Tensor, batch: MicroBatch, routing: Routing | None
    ) -> ValueParts:
        x = self._prepare(final_hidden)[batch.rows]
        partial = torch.tanh(F.linear(x, self.w1_local, self.b1_local)) @ self.w2_local
        value = self._reduce(partial) + self.b2_local
        return ValueParts(value, None, torch.zeros_like(value, dtype=torch.bool))


class AlignedCritic(Critic):
    """Cross-layer fusion, value-refined routing over the stored top-K, and the local and routed heads.

    V^G begins with a linear layer, so projected keys W₁h̄_i are pooled instead of hidden states:
    W₁ Σ w_i h̄_i = Σ w_i W₁ h̄_i.
    """

    b2_routed: Tensor  # []

    def __init__(
        self, config: Any, critic: CriticConfig, tp_group: Any, seed: int, pool_history: Callable[..., Any]
    ) -> None:
        super().__init__(config, critic, tp_group, seed)
        self.pool_history = pool_history
        hidden, width, d = config.hidden_size, critic.head_width, critic.width
        self._replicated("eta", torch.zeros(critic.layers))
        for name in ("beta_q", "beta_k", "rel_q", "rel_k"):
            self._column_parallel(name, d, hidden, hidden**-0.5)
        for head in ("local", "routed"):
            self._column_parallel(f"w1_{head}", width, hidden, hidden**-0.5)
            self._replicated(f"b2_{head}", torch.zeros(()))
        # The local head is sharded by hidden unit; the routed head's outer layer is replicated, because
        # a rank evaluates all of its units, but only for its own query rows.
        self._column_parallel("b1_local", width, None, 0.0)
        self._column_parallel("w2_local", width, None, 0.0)
        self._replicated("b1_routed", torch.zeros(width))
        self._replicated("w2_routed", torch.zeros(width))

    def forward(
        self, features: Sequence[Tensor], final_hidden: Tensor, batch: MicroBatch, routing: Routing | None
    ) -> ValueParts:
        """
        Args:
            features: L' tensors [t, H], the residual stream after each of the last L' layers.
            final_hidden: not used here (the standard critic's input).
            routing: the stored top-K of this rank's query rows.
        """
        assert routing is not None
        fused = self.fuse(features)
        own = batch.owned(self.tp_group.size(), self.tp_group.rank())
        routed, dead = self._routed_value(fused, batch, own, routing)
        row = fused[batch.rows]
        local = torch.tanh(F.linear(row, self.w1_local, self.b1_local)) @ self.w2_local
        parts = torch.stack((local, torch.zeros_like(local).index_put((own,), routed)))
        local, routed = self._reduce(parts)
        return ValueParts(local + self.b2_local, routed + self.b2_routed, self._share(dead, own, len(row)))

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """h̄_t = Σ_ℓ softmax(η)_ℓ h_t^(ℓ) (Eq. 21), each layer RMS-normalised first, float32 [t, H]."""
        weight = self._from_all_rows("eta").softmax(0)
        fused = None
        for w, hidden in zip(weight, features, strict=True):
            x = self._prepare(hidden)
            if self.options.normalize_features:
                x = F.rms_norm(x, (x.shape[-1],), eps=1e-6)
            fused = w * x if fused is None else fused + w * x
        assert fused is not None
        return fused

    def _routed_value(
        self, fused: Tensor, batch: MicroBatch, own: Tensor, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """V^G − b₂ and the dead flag of this rank's query rows (Eq. 22–26)."""
        beta_k, rel_k, value_k = self._project(fused, "beta_k", "rel_k", "w1_routed")
        own_rows = batch.rows[own]
        beta_q, rel_q = (x[own] for x in self._project(fused[batch.rows], "beta_q", "rel_q"))
        keys = torch.cat((beta_k, rel_k, value_k), -1)
        starts = batch.row_starts[own]
        pooled, score = self.pool_history(beta_q, rel_q, keys, routing.index, routing.weight, starts)
        dead = score.detach() <= ROUTE_EPSILON
        unit = torch.where(dead[:, None], value_k[own_rows], pooled) + self._from_all_rows("b1_routed")
        return torch.tanh(unit) @ self._from_all_rows("w2_routed"), dead

    def _project(self, x: Tensor, *names: str) -> list[Tensor]:
        """x Wᵀ for column-parallel weights, gathered over the TP group; the backward reduce-scatters."""
        weights = [getattr(self, name) for name in names]
        out = F.linear(x, torch.cat(weights))
        size = self.tp_group.size()
        if size > 1:
            out = all_gather_last_dim_from_tensor_parallel_region(out, group=self.tp_group)
        blocks = out.view(len(x), size, -1).split([len(w) for w in weights], -1)
        return [block.reshape(len(x), -1) for block in blocks]

    def _share(self, dead: Tensor, own: Tensor, num_rows: int) -> Tensor:
        flags = torch.zeros(num_rows, device=own.device).index_put((own,), dead.float())
        if self.tp_group.size() > 1:
            torch.distributed.all_reduce(flags, group=self.tp_group)
        return flags > 0


def _seeded_normal(name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """The full weight on every rank from its name alone, so that any TP slice of it agrees."""
    if std == 0.0:
        return torch.zeros(shape)
    seed = int.from_bytes(hashlib.sha256(f"critic.{name}".encode()).digest()[:7], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def build_critic(
    config: Any, critic: CriticConfig, tp_group: Any, seed: int, pool_history: Callable[..., Any]
) -> Critic:
    if critic.kind == "standard":
        return StandardCritic(config, critic, tp_group, seed)
    return AlignedCritic(config, critic, tp_group, seed, pool_history)
