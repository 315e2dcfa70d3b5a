"""What the trainer asks of anything that generates: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from comppo_mcore.model.hf_table import Manifest, Stream


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Top-p truncates softmax(z/T); `greedy` takes the argmax instead."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    greedy: bool = False
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"need max_tokens ≥ 1, temperature > 0 and 0 < top_p ≤ 1, got {self}")


@dataclass(frozen=True)
class Completion:
    """One response. A response that ends with a stop token keeps it, with its log-prob."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, log_softmax(z/T) over the whole vocabulary, before top-p
    finish: Literal["stop", "length", "abort"]
    weight_version: int


class Engine(Protocol):
    """A generator whose weights come from the trainer alone."""

    @property
    def manifest(self) -> Manifest:
        """The tensors `update_weights` takes: HF names, shapes and the engine's dtype."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Completion]:
        """One completion per prompt, in order; repeat a prompt for several responses."""
        ...

    def update_weights(self, stream: Stream, version: int) -> None:
        """Take every tensor of the manifest exactly once; until that is done, refuse to generate."""
        ...
