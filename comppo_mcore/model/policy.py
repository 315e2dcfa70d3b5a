"""The policy: Megatron's GPTModel with a critic on its last pipeline stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.utils import unwrap_model
from torch import Tensor

from comppo_mcore.model.attention import AttentionInputs
from comppo_mcore.model.batch import MicroBatch
from comppo_mcore.model.critic import Critic, Routing, ValueParts


@dataclass(frozen=True)
class Pass:
    """What one forward pass is asked for beside log-probs."""

    temperature: float = 1.0
    entropy: bool = False
    row: bool = False  # keep the last layer's attention inputs
    values: bool = False


@dataclass(frozen=True)
class PolicyOutput:
    """The last stage's answer for the rows of a micro-batch."""

    logprob: Tensor  # float32 [R], log_softmax(z / T) of the row's target
    ratio_logprob: Tensor  # float32 [R], what ratios compare: over the row's support where it was recorded
    entropy: Tensor | None  # float32 [R], nats
    row: AttentionInputs | None
    features: tuple[Tensor, ...]  # L' × [t, H] residual stream, whole sequence on every TP rank
    final_hidden: Tensor  # [t, H] after the final norm


class PolicyModel(GPTModel):
    """GPTModel whose last stage also answers with what the estimator reads, and holds the critic.

    The critic is a submodule, so that DDP buffers, the distributed optimizer and the checkpoint cover it.
    """

    critic: Critic | None

    def __init__(self, *args: Any, num_features: int = 0, true_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_features = num_features
        self.true_vocab_size = true_vocab_size
        self.register_module("critic", None)

    def attach_critic(self, critic: Critic) -> None:
        self.critic = critic

    def forward(  # type: ignore[override]
        self, batch: MicroBatch, request: Pass, routing: Routing | None = None
    ) -> Any:
        """Hidden states on inner pipeline stages; on the last one the output and, if asked, the values.

        With `request.values` the critic reads the behaviour policy's stored `routing`; in the behaviour
        pass itself routing is not known yet, and the caller evaluates the critic on the output.
        """
        layers = self.config.num_layers
        extract = set(range(layers - self.num_features, layers)) if self.post_process else set()
        with self._exposing(request.row):
            out: Any = super().forward(
                batch.tokens[None],
                batch.positions[None],
                cast(Any, None),  # packed attention needs no mask
                packed_seq_params=batch.packed_seq_params(),
                extra_block_kwargs={"extract_layer_indices": extract} if extract else {},
                output_processor=cast(Any, _Head(self, batch, request)),
            )
        if not self.post_process:
            return out
        values = self.critic_values(out, batch, routing) if request.values else None
        return out, values

    def critic_values(self, out: PolicyOutput, batch: MicroBatch, routing: Routing | None) -> ValueParts:
        assert self.critic is not None
        return self.critic(out.features, out.final_hidden, batch, routing)

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        out: list[Any] = list(super()._preprocess(input_ids, position_ids, *args, **kwargs))
        # One rotary row per packed token: Megatron then rotates the pack in one call, not by sequence.
        out[1] = out[1][position_ids[0]]
        return tuple(out)

    @contextlib.contextmanager
    def _exposing(self, on: bool) -> Iterator[None]:
        if not (on and self.post_process):
            yield
            return
        core = self._last_core_attention()
        core.exposing = True
        try:
            yield
        finally:
            core.exposing = False

    def take_row(self) -> AttentionInputs:
        return self._last_core_attention().take_row()

    def _last_core_attention(self) -> Any:
        layer: Any = self.decoder.layers[-1]
        return layer.self_attention.core_attention


def policy_of(model: Any) -> PolicyModel:
    """The policy inside Megatron's DDP and Float16Module."""
    return cast(PolicyModel, unwrap_model(model))


@dataclass(frozen=True)
class _Head:
    """Megatron's `output_processor`: runs on the last stage with the decoder's output."""

    model: PolicyModel
    batch: MicroBatch
    request: Pass

    def __call__(
        self, *, hidden_states: Any, output_layer: Any, output_weight: Any, **_: Any
    ) -> PolicyOutput:
        model, rows = self.model, self.batch.rows
        hidden, features = hidden_states if isinstance(hidden_states, tuple) else (hidden_states, [])
        if model.config.sequence_parallel:  # the output layer gathers by itself; every row passes through it
            logits = output_layer(hidden, weight=output_weight)[0][rows]
        else:
            logits = output_layer(hidden[rows], weight=output_weight)[0]
        logits = self._scale_and_mask(logits)
        targets = self.batch.targets[:, None]
        entropy = None
        if self.request.entropy:
            entropy = vocab_parallel_entropy(logits[:, 0], model.pg_collection.tp)
        logprob = -vocab_parallel_cross_entropy(logits.clone(), targets, tp_group=model.pg_collection.tp)[
            :, 0
        ]
        ratio = logprob
        if self.batch.supports is not None:
            ratio = support_logprob(logits[:, 0], targets[:, 0], self.batch.supports, model.pg_collection.tp)
        return PolicyOutput(
            logprob=logprob,
            ratio_logprob=ratio,
            entropy=entropy,
            row=model.take_row() if self.request.row else None,
            features=tuple(self._whole(x) for x in features),
            final_hidden=self._whole(hidden),
        )

    def _scale_and_mask(self, logits: Tensor) -> Tensor:
        """z / T in fp32, the padding of the vocabulary made impossible."""
        logits = logits.float() / self.request.temperature
        local = logits.shape[-1]
        first_padding = self.model.true_vocab_size - local * self.model.pg_collection.tp.rank()
        if first_padding < local:
            padding = torch.arange(local, device=logits.device) >= first_padding
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
        return logits

    def _whole(self, hidden: Tensor) -> Tensor:
        """[t/tp or t, 1, H] → [t, H]."""
        model = self.model
        if model.config.sequence_parallel:
            trains = model.critic is not None and model.critic.options.backbone_grad == "full"
            hidden = gather_from_sequence_parallel_region(
                hidden if trains else hidden.detach(),
                tensor_parallel_output_grad=trains,
                group=model.pg_collection.tp,
            )
        return hidden[:, 0]


def support_logprob(logits: Tensor, targets: Tensor, supports: Tensor, tp_group: Any) -> Tensor:
    """log of the softmax over a row's support alone: z_y − log Σ_{i ∈ S} e^{z_i}.

    Args:
        logits: float32 [R, V / tp], this rank's part of the vocabulary.
        targets: int64 [R], each in its row's support.
        supports: int64 [R, M], distinct ids, −1 behind them.

    Returns:
        float32 [R], nats.
    """
    size = logits.shape[1]
    local = supports - size * tp_group.rank()
    held = (supports >= 0) & (local >= 0) & (local < size)
    picked = logits.gather(1, local.clamp(0, size - 1)).masked_fill(~held, 0.0)
    if tp_group.size() > 1:
        picked = reduce_from_tensor_model_parallel_region(picked, group=tp_group)
    picked = picked.masked_fill(supports < 0, -torch.inf)
    target = picked.masked_fill(supports != targets[:, None], 0.0).sum(-1)
    return target - picked.logsumexp(-1)


@torch.no_grad()
def vocab_parallel_entropy(logits: Tensor, tp_group: Any) -> Tensor:
    """H = log Σ e^z − Σ p z over a vocabulary sharded over `tp_group`, float32 [R] in nats."""
    peak = logits.amax(-1)
    if tp_group.size() > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=tp_group)
    z = logits - peak[:, None]
    weight = z.exp()
    sums = torch.stack((weight.sum(-1), (weight * z).sum(-1)))
    if tp_group.size() > 1:
        dist.all_reduce(sums, group=tp_group)
    return sums[0].log() - sums[1] / sums[0]
