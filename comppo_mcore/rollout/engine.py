"""What the trainer asks of anything that generates: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    record_support: bool = False  # report the ids each token was drawn from

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature <= 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"need max_tokens ≥ 1, temperature > 0 and 0 < top_p ≤ 1, got {self}")


@dataclass(frozen=True)
class Completion:
    """One response. A response that ends with a stop token keeps it, with its log-prob."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats, log_softmax(z/T) over the whole vocabulary, before top-p
    finish: Literal["stop", "length", "abort"]
    versions: tuple[int, ...]  # of the weights, a token each
    supports: tuple[tuple[int, ...], ...] | None = None  # the ids each token was drawn from, where recorded

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.logprobs), len(self.versions)}
        if self.supports is not None:
            lengths.add(len(self.supports))
        if len(lengths) > 1:
            raise ValueError(f"a completion's arrays have lengths {sorted(lengths)}")

    @property
    def weight_version(self) -> int:
        """Of the last token; those before it can only be older."""
        return self.versions[-1]


class EngineLost(RuntimeError):
    """Nothing that generates is left; `update_weights` brings it back where that is possible.

    Attributes:
        results: what there was by then of each request.
    """

    def __init__(self, message: str, results: Sequence[Completion | None]) -> None:
        super().__init__(message)
        self.results = list(results)


Done = Callable[[int, Completion], None]  # index of the prompt, its completion; from any thread


class Engine(Protocol):
    """A generator whose weights come from the trainer alone."""

    @property
    def manifest(self) -> Manifest:
        """The tensors `update_weights` takes: HF names, shapes and the engine's dtype."""
        ...

    @property
    def shared(self) -> bool:
        """Whether one engine, asked by the first rank, serves all ranks."""
        ...

    @property
    def weight_version(self) -> int | None:
        """Of the last complete `update_weights`; None: none, or one failed."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """One completion per prompt, in order; repeat a prompt for several responses.

        Args:
            done: hears of every completion as soon as it is there.
        """
        ...

    def update_weights(self, stream: Stream, version: int) -> None:
        """Take every tensor of the manifest exactly once; until that is done, refuse to generate.

        Collective over the world.
        """
        ...

    def score(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """log_softmax(z) of every token but the first, nats, by name of each instance that generates.

        Raises:
            EngineLost: none answered.
        """
        ...

    def incidents(self) -> list[str]:
        """What went wrong, and was dealt with, since this was asked last."""
        ...

    def rest(self) -> None:
        """Nothing will be generated before the next `update_weights`: give memory back to training."""
        ...

    def close(self) -> None:
        """Give back what outlives the process."""
        ...
