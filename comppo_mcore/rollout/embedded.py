"""An engine inside the trainer's process, on `transformers`: no server, any device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
)

from comppo_mcore.model.hf_table import Manifest, Stream, check_stream, hf_manifest, read_config
from comppo_mcore.rollout.engine import Completion, Done, Sampling


class EmbeddedEngine:
    """`rollout.engine.Engine` over `model.generate`.

    Results depend on prompts, sampling, seed, `batch_size` and the weights only.
    """

    shared = False

    def __init__(
        self,
        source: str | Path | PretrainedConfig,
        dtype: torch.dtype,
        batch_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        config = read_config(source)
        self.manifest: Manifest = hf_manifest(config, dtype)
        self.weight_version: int | None = None
        self._batch_size = batch_size
        self._device = torch.device(device)
        with _own_random_state(self._device):  # drawing initial weights, which are never used, takes numbers
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self._model = model.to(self._device).eval()
        self._model.generation_config = GenerationConfig()  # the folder's own defaults must not leak in

    @torch.no_grad()
    def update_weights(self, stream: Stream, version: int) -> None:
        """Copy a full set of weights in; after an error there is no version, and `generate` refuses.

        Raises:
            ValueError: names, shapes or dtypes other than the manifest's.
        """
        self.weight_version = None
        parameters = dict(self._model.named_parameters())  # a tied head appears once, as the embedding
        for name, tensor in check_stream(stream, self.manifest):
            parameters[name].copy_(tensor)
        self.weight_version = version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """One completion per prompt, in order.

        Raises:
            RuntimeError: no complete weights yet.
            ValueError: an empty prompt or a token id outside the vocabulary.
        """
        if self.weight_version is None:
            raise RuntimeError("the engine has no weights: call update_weights before generate")
        self._check(prompts)
        completions: dict[int, Completion] = {}
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        with _own_random_state(self._device):
            torch.manual_seed(seed)
            for begin in range(0, len(prompts), self._batch_size):
                rows = by_length[begin : begin + self._batch_size]
                batch = self._generate_batch([prompts[i] for i in rows], sampling)
                completions.update(zip(rows, batch, strict=True))
                if done is not None:
                    for i in rows:
                        done(i, completions[i])
        return [completions[i] for i in range(len(prompts))]

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        logits = self._model(torch.tensor([token_ids], device=self._device)).logits[0, :-1].float()
        targets = torch.tensor(token_ids[1:], device=self._device)[:, None]
        return {"embedded": logits.log_softmax(-1).gather(1, targets)[:, 0].tolist()}

    def incidents(self) -> list[str]:
        return []

    def rest(self) -> None:
        """It lives in the trainer's process, and keeps its weights."""

    def close(self) -> None:
        """Nothing outlives the process."""

    def _check(self, prompts: Sequence[Sequence[int]]) -> None:
        size = self._model.config.vocab_size
        for i, prompt in enumerate(prompts):
            if not prompt or not 0 <= min(prompt) <= max(prompt) < size:
                raise ValueError(f"prompt {i} is empty or has a token id outside [0, {size})")

    def _generate_batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        ids, attention_mask = _left_padded(prompts, self._device)
        recorder = TemperedLogProbs(sampling.temperature)
        sequences = self._model.generate(
            ids,
            attention_mask=attention_mask,
            logits_processor=LogitsProcessorList([recorder]),
            generation_config=_generation_config(sampling),
        )
        tokens = sequences[:, ids.shape[1] :]
        logprobs = recorder.finish(tokens[:, -1])
        return [
            self._completion(row, values, sampling)
            for row, values in zip(tokens.tolist(), logprobs.tolist(), strict=True)
        ]

    def _completion(self, tokens: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        """Cut what `generate` filled in behind the first stop token."""
        assert self.weight_version is not None
        stop = next((t for t, token in enumerate(tokens) if token in sampling.stop_ids), None)
        length = len(tokens) if stop is None else stop + 1
        return Completion(
            token_ids=tuple(tokens[:length]),
            logprobs=tuple(logprobs[:length]),
            finish="length" if stop is None else "stop",
            versions=(self.weight_version,) * length,
        )


class TemperedLogProbs(LogitsProcessor):
    """First of the logits processors: z → log_softmax(z/T), remembering the sampled tokens' entries.

    Top-p, argmax and the final softmax give the same on log-probs as on logits. One step's
    distribution is kept at a time: at the next step the ids end with the token it gave.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._current: Tensor | None = None  # float32 [B, V]
        self._picked: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        if self._current is not None:
            self._pick(input_ids[:, -1])
        self._current = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        return self._current

    def finish(self, last_tokens: Tensor) -> Tensor:
        """float32 [B, T]: log-probs of all generated tokens, the last step's given here."""
        self._pick(last_tokens)
        return torch.stack(self._picked, dim=1)

    def _pick(self, tokens: Tensor) -> None:
        assert self._current is not None
        self._picked.append(self._current.gather(1, tokens[:, None])[:, 0])


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [B, P] ids (0 where padded) and attention mask."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _generation_config(sampling: Sampling) -> GenerationConfig:
    warpers = {} if sampling.greedy else {"top_p": sampling.top_p, "top_k": 0, "temperature": 1.0}
    return GenerationConfig(
        do_sample=not sampling.greedy,
        max_new_tokens=sampling.max_tokens,
        eos_token_id=list(sampling.stop_ids) or None,
        pad_token_id=sampling.stop_ids[0] if sampling.stop_ids else 0,  # behind a stop token; cut afterwards
        use_cache=True,
        **warpers,
    )


def _own_random_state(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
