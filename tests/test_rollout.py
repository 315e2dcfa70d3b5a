"""The embedded engine against teacher forcing by transformers itself, and the engine-to-trainer gap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from comppo_mcore.errors import UserError
from comppo_mcore.rollout.embedded import EmbeddedEngine
from comppo_mcore.rollout.engine import Completion, Sampling
from comppo_mcore.rollout.gap import Gap, check_gap, engine_gap, merge_gaps
from tests.hf_folders import CASES, VOCAB, read_weights, write_folder

PROMPTS = [[5, 9, 2], [100], [7, 7, 3, 1, 0, 130, 64], [5, 9, 2], list(range(40, 60))]


@pytest.fixture(scope="module", params=["qwen3_untied", "llama_tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp(request.param), **CASES[request.param])


@pytest.fixture(scope="module")
def engine(folder: Path) -> EmbeddedEngine:
    return fed(EmbeddedEngine(folder, torch.float32, batch_size=3), folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def fed(engine: EmbeddedEngine, folder: Path, version: int = 1) -> EmbeddedEngine:
    engine.update_weights(iter(read_weights(folder).items()), version)
    return engine


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: list[int], tokens: tuple[int, ...]) -> np.ndarray:
    """float64 [T, V] logits that predict each response token, without padding or cache."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().numpy()


def log_softmax(z: np.ndarray) -> np.ndarray:
    peak = z.max(-1, keepdims=True)
    return z - peak - np.log(np.exp(z - peak).sum(-1, keepdims=True))


def logprob_error(model: PreTrainedModel, results: list[Completion], temperature: float) -> float:
    errors = []
    for prompt, result in zip(PROMPTS, results, strict=True):
        expected = log_softmax(teacher_forced(model, prompt, result.token_ids) / temperature)
        rows = range(len(result.token_ids))
        errors.append(np.abs(expected[rows, list(result.token_ids)] - np.array(result.logprobs)).max())
    return max(errors)


def test_greedy_is_the_teacher_forced_argmax(engine: EmbeddedEngine, reference: PreTrainedModel) -> None:
    results = engine.generate(PROMPTS, Sampling(max_tokens=12, greedy=True), seed=0)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert (
            list(result.token_ids) == teacher_forced(reference, prompt, result.token_ids).argmax(-1).tolist()
        )
        assert (result.finish, len(result.token_ids), result.weight_version) == ("length", 12, 1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [0.7, 1.0])
def test_logprobs_are_of_the_full_tempered_softmax(
    engine: EmbeddedEngine, reference: PreTrainedModel, temperature: float, top_p: float
) -> None:
    sampling = Sampling(max_tokens=12, temperature=temperature, top_p=top_p)
    assert logprob_error(reference, engine.generate(PROMPTS, sampling, seed=3), temperature) <= 1e-5


def test_greedy_logprobs_are_tempered_as_well(engine: EmbeddedEngine, reference: PreTrainedModel) -> None:
    results = engine.generate(PROMPTS, Sampling(max_tokens=5, temperature=0.7, greedy=True), seed=0)
    assert logprob_error(reference, results, 0.7) <= 1e-5


def test_top_p_keeps_to_the_nucleus(engine: EmbeddedEngine, reference: PreTrainedModel) -> None:
    results = engine.generate(PROMPTS, Sampling(max_tokens=40, temperature=1.5, top_p=0.7), seed=5)
    for prompt, result in zip(PROMPTS, results, strict=True):
        probs = np.exp(log_softmax(teacher_forced(reference, prompt, result.token_ids) / 1.5))
        chosen = probs[range(len(result.token_ids)), list(result.token_ids)]
        likelier = np.where(probs > chosen[:, None], probs, 0).sum(-1)
        assert (likelier < 0.7 + 1e-5).all()


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draws_follow_the_tempered_distribution(
    folder: Path, reference: PreTrainedModel, temperature: float
) -> None:
    draws = 3000
    engine = fed(EmbeddedEngine(folder, torch.float32, batch_size=draws), folder)
    results = engine.generate([[5, 9, 2]] * draws, Sampling(max_tokens=1, temperature=temperature), seed=1)
    counts = np.bincount([result.token_ids[0] for result in results], minlength=VOCAB)
    probs = np.exp(log_softmax(teacher_forced(reference, [5, 9, 2], (0,))[0] / temperature))
    chi_square = ((counts - draws * probs) ** 2 / (draws * probs)).sum()
    assert chi_square < (VOCAB - 1) + 5 * np.sqrt(2 * (VOCAB - 1))  # mean + 5 standard deviations


def test_a_stop_token_ends_a_response_and_is_kept(engine: EmbeddedEngine) -> None:
    free = engine.generate(PROMPTS, Sampling(max_tokens=12, greedy=True), seed=0)
    stop = free[0].token_ids[4]
    stopped = engine.generate(PROMPTS, Sampling(max_tokens=12, greedy=True, stop_ids=(stop,)), seed=0)
    for before, after in zip(free, stopped, strict=True):
        cut = before.token_ids.index(stop) + 1 if stop in before.token_ids else 12
        assert after.token_ids == before.token_ids[:cut]
        assert after.logprobs == pytest.approx(before.logprobs[:cut], abs=1e-5)
        assert after.finish == ("stop" if stop in before.token_ids else "length")
    assert stopped[0].finish == "stop"


def test_a_stop_token_at_the_limit_counts_as_stop(engine: EmbeddedEngine) -> None:
    first = engine.generate([[100]], Sampling(max_tokens=1, greedy=True), seed=0)[0].token_ids[0]
    (result,) = engine.generate([[100]], Sampling(max_tokens=1, greedy=True, stop_ids=(first,)), seed=0)
    assert (result.finish, result.token_ids) == ("stop", (first,))


def test_only_the_asked_stop_tokens_stop(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, **CASES["qwen3_untied"])
    free = fed(EmbeddedEngine(folder, torch.float32, 1), folder).generate(
        [[100]], Sampling(max_tokens=8, greedy=True), seed=0
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": free[0].token_ids[2]}))
    engine = fed(EmbeddedEngine(folder, torch.float32, 1), folder)
    assert engine.generate([[100]], Sampling(max_tokens=8, greedy=True), seed=0) == free


def test_left_padding_and_batching_change_nothing(folder: Path, engine: EmbeddedEngine) -> None:
    sampling = Sampling(max_tokens=12, greedy=True)
    together = fed(EmbeddedEngine(folder, torch.float32, batch_size=64), folder)
    for results in (engine.generate(PROMPTS, sampling, 0), together.generate(PROMPTS, sampling, 0)):
        for prompt, result in zip(PROMPTS, results, strict=True):
            (alone,) = engine.generate([prompt], sampling, seed=0)
            assert result.token_ids == alone.token_ids
            assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_results_depend_on_the_seed_alone(engine: EmbeddedEngine) -> None:
    sampling = Sampling(max_tokens=12)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = engine.generate(PROMPTS, sampling, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert engine.generate(PROMPTS, sampling, seed=7) == first
    assert engine.generate(PROMPTS, sampling, seed=8) != first
    assert first[0].token_ids != first[3].token_ids  # the same prompt twice: two draws


def test_building_an_engine_leaves_the_random_state_alone(folder: Path) -> None:
    state = torch.get_rng_state()
    EmbeddedEngine(folder, torch.float32, batch_size=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_no_generation_without_weights(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="update_weights before generate"):
        EmbeddedEngine(folder, torch.float32, batch_size=1).generate([[1]], Sampling(max_tokens=1), seed=0)


def test_new_weights_change_logprobs_and_version(folder: Path, engine: EmbeddedEngine) -> None:
    sampling = Sampling(max_tokens=1, greedy=True)
    other = fed(EmbeddedEngine(folder, torch.float32, batch_size=3), folder)
    before = other.generate(PROMPTS, sampling, seed=0)
    weights = read_weights(folder)
    weights["model.layers.3.mlp.down_proj.weight"] *= 1.5
    other.update_weights(iter(weights.items()), version=2)
    after = other.generate(PROMPTS, sampling, seed=0)
    assert all(abs(a.logprobs[0] - b.logprobs[0]) > 1e-4 for a, b in zip(before, after, strict=True))
    assert {result.weight_version for result in after} == {2}


def broken_streams(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, list[tuple[str, torch.Tensor]]]]:
    items, norm = list(weights.items()), ("model.norm.weight", weights["model.norm.weight"])
    rest = [item for item in items if item[0] != norm[0]]
    yield "never sent: model.norm.weight", rest
    yield "model.norm.weight was sent twice", [norm, *items]
    yield "model.other.weight was not expected", [("model.other.weight", norm[1]), *items]
    yield "model.norm.weight is", [(norm[0], norm[1][:1]), *rest]
    yield "model.norm.weight is", [(norm[0], norm[1].double()), *rest]


def test_an_incomplete_or_wrong_update_is_refused_and_leaves_no_weights(folder: Path) -> None:
    engine = fed(EmbeddedEngine(folder, torch.float32, batch_size=1), folder)
    for message, stream in broken_streams(read_weights(folder)):
        with pytest.raises(ValueError, match=message):
            engine.update_weights(iter(stream), version=2)
        with pytest.raises(RuntimeError, match="no weights"):
            engine.generate([[1]], Sampling(max_tokens=1), seed=0)
    assert fed(engine, folder).generate([[1]], Sampling(max_tokens=1), seed=0)


def test_bf16_engine_is_close_and_reports_from_float32_softmax(
    folder: Path, reference: PreTrainedModel
) -> None:
    engine = EmbeddedEngine(folder, torch.bfloat16, batch_size=8)
    weights = ((name, tensor.bfloat16()) for name, tensor in read_weights(folder).items())
    engine.update_weights(weights, version=1)
    results = engine.generate(PROMPTS, Sampling(max_tokens=12), seed=0)
    assert 1e-5 < logprob_error(reference, results, 1.0) < 0.3


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1]])
def test_prompts_outside_the_vocabulary_are_refused(engine: EmbeddedEngine, prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="prompt 1"):
        engine.generate([[1], prompt], Sampling(max_tokens=1), seed=0)


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_sampling_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_tokens ≥ 1"):
        replace(Sampling(max_tokens=1), **wrong)


def test_no_prompts_give_no_completions(engine: EmbeddedEngine) -> None:
    assert engine.generate([], Sampling(max_tokens=1), seed=0) == []


def test_gap_counts_valid_tokens_only() -> None:
    engine = torch.tensor([-1.0, -2.0, float("nan"), -4.0])
    trainer = torch.tensor([-1.5, -2.0, -3.0, -3.0])
    gap = engine_gap(engine, trainer, torch.tensor([True, True, False, True]))
    assert (gap.total, gap.tokens, gap.largest, gap.mean) == (1.5, 3, 1.0, 0.5)
    assert merge_gaps([gap, Gap(0.5, 1, 0.5)]) == Gap(2.0, 4, 1.0)
    nothing = engine_gap(engine, trainer, torch.zeros(4, dtype=torch.bool))
    assert (nothing.mean, nothing.largest) == (0.0, 0.0)
    with pytest.raises(ValueError, match="shapes differ"):
        engine_gap(engine, trainer[:1], torch.ones(4, dtype=torch.bool))


def test_a_gap_above_the_limit_stops_the_run() -> None:
    check_gap(Gap(total=1.0, tokens=10, largest=0.9), limit=0.1)
    for gap in (Gap(total=2.0, tokens=10, largest=0.9), Gap(total=float("nan"), tokens=10, largest=0.9)):
        with pytest.raises(UserError, match=r"rollout.gap_limit is 0.1 .* 0.9 at most over 10 tokens"):
            check_gap(gap, limit=0.1)
