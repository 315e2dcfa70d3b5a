"""Hugging Face names and layouts: import, export, saving, and the weight sync they feed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from comppo_mcore.errors import UserError
from comppo_mcore.model import parallel
from comppo_mcore.model.batch import Sample
from comppo_mcore.model.hf import export_hf, import_hf, save_hf
from comppo_mcore.model.hf_table import EMBEDDING, HEAD, TensorSpec, hf_manifest
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import PolicyModel
from comppo_mcore.rollout.embedded import EmbeddedEngine
from comppo_mcore.rollout.engine import Completion, Sampling
from comppo_mcore.rollout.gap import engine_gap
from tests.dist import run_distributed
from tests.hf_folders import CASES, read_weights, write_folder
from tests.policies import (
    imported_policy,
    largest_difference,
    parallel_config,
    policy_logprobs,
    probes,
    reference_logprobs,
)

TWO_PROCESS_CASES = (
    ("tp2", "qwen3_untied"),
    ("tp2", "qwen3_tied"),
    ("tp2", "llama"),
    ("pp2", "qwen3_tied"),
    ("pp2", "llama"),
    ("pp2_uneven", "qwen3_untied"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    for name, case in CASES.items():
        write_folder(root / name, **case)
    return root


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    yield parallel.initialize(parallel_config(), seed=0)
    parallel.shutdown()


@pytest.fixture
def tied(folders: Path, layout: Layout) -> PolicyModel:
    return imported_policy(folders / "qwen3_tied", layout)


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Path:
    """A tied folder of the test's own, to be damaged."""
    return Path(shutil.copytree(folders / "qwen3_tied", tmp_path / "copy"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove weights; `__` in a keyword stands for a dot."""
    weights = read_weights(folder)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("case", CASES)
def test_manifest_is_what_transformers_saves(folders: Path, case: str) -> None:
    weights = read_weights(folders / case)
    expected = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    assert hf_manifest(folders / case) == expected
    assert (HEAD in expected) == (not CASES[case]["tied"])
    as_bf16 = hf_manifest(AutoConfig.from_pretrained(folders / case), torch.bfloat16)
    assert as_bf16 == {name: TensorSpec(spec.shape, torch.bfloat16) for name, spec in expected.items()}


@pytest.mark.parametrize("case", CASES)
def test_round_trip_and_forward(folders: Path, layout: Layout, case: str) -> None:
    folder = folders / case
    policy, manifest, expected = imported_policy(folder, layout), hf_manifest(folder), read_weights(folder)
    received = list(export_hf(policy, manifest))
    assert [name for name, _ in received] == list(manifest)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in received)
    for temperature in (1.0, 0.7):
        ours = policy_logprobs(policy, layout, probes(), temperature)
        assert largest_difference(ours, reference_logprobs(folder, probes(), temperature)) <= 1e-4


def test_two_processes(folders: Path) -> None:
    arguments = [word for pair in TWO_PROCESS_CASES for word in pair]
    for stdout in run_distributed("hf_export.py", 2, [folders, *arguments]):
        findings = json.loads(stdout)
        assert list(findings) == [f"{layout} {case}" for layout, case in TWO_PROCESS_CASES]
        for found in findings.values():
            assert found["order"] and found["exact"] and found["saved"] and found["bf16"]
            assert found["logprob_error"] <= 1e-4
            assert found["padding"] == 0.0
            assert found["refused"].endswith("differ in model.extra.weight")
            assert found["engine_change"] > 1e-3


def test_exported_tensors_are_copies(tied: PolicyModel, folders: Path) -> None:
    manifest = hf_manifest(folders / "qwen3_tied")
    before = dict(export_hf(tied, manifest))
    kept = {name: tensor.clone() for name, tensor in before.items()}
    with torch.no_grad():
        for parameter in tied.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(before[name], kept[name]) for name in kept)


def test_transformer_engine_names_mean_the_same(tied: PolicyModel, folders: Path, layout: Layout) -> None:
    fused = {
        ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
        ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
    }

    def renamed() -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in tied.named_parameters():
            for local, transformer_engine in fused.items():
                name = name.replace(local, transformer_engine)
            yield name, parameter

    model: Any = SimpleNamespace(
        config=tied.config,
        pg_collection=tied.pg_collection,
        decoder=tied.decoder,
        share_embeddings_and_output_weights=True,
        named_parameters=renamed,
    )
    assert any("linear_fc1.layer_norm_weight" in name for name, _ in renamed())
    expected = read_weights(folders / "qwen3_tied")
    assert all(torch.equal(t, expected[n]) for n, t in export_hf(model, hf_manifest(folders / "qwen3_tied")))


def test_import_leaves_the_critic_alone(tied: PolicyModel, folders: Path) -> None:
    critic = {name: p.detach().clone() for name, p in tied.named_parameters() if "critic" in name}
    with torch.no_grad():
        for parameter in tied.parameters():
            parameter.add_(1.0)
    import_hf(tied, folders / "qwen3_tied")
    for name, parameter in tied.named_parameters():
        if "critic" in name:
            assert torch.equal(parameter, critic[name] + 1.0)
    assert critic


# ---------------------------------------------------------------------------- weight sync


def generated_samples(results: list[Completion], prompts: list[list[int]]) -> list[Sample]:
    return [Sample(tuple(p), r.token_ids) for p, r in zip(prompts, results, strict=True)]


@pytest.mark.parametrize("case", ["qwen3_untied", "llama_tied"])
def test_engine_agrees_with_the_trainer(folders: Path, layout: Layout, case: str) -> None:
    policy = imported_policy(folders / case, layout)
    engine = EmbeddedEngine(folders / case, torch.float32, batch_size=8)
    engine.update_weights(export_hf(policy, engine.manifest), version=3)
    prompts = [[1, 2, 3], [9] * 12, [130, 4]]
    results = engine.generate(prompts, Sampling(max_tokens=20, temperature=0.7, top_p=0.7), seed=0)
    trainer = policy_logprobs(policy, layout, generated_samples(results, prompts), temperature=0.7)
    ours, theirs = (
        torch.tensor([x for row in rows for x in row]) for rows in ([r.logprobs for r in results], trainer)
    )
    assert engine_gap(ours, theirs, torch.ones(60, dtype=torch.bool)).largest <= 1e-5
    assert {result.weight_version for result in results} == {3}


@pytest.mark.parametrize(
    "parameter",
    [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.2.mlp.linear_fc1.weight",
        "decoder.layers.3.self_attention.q_layernorm.weight",
        "decoder.final_layernorm.weight",
    ],
)
def test_invariance_engine_follows_a_trainer_weight_changed_by_hand(
    tied: PolicyModel, folders: Path, layout: Layout, parameter: str
) -> None:
    engine = EmbeddedEngine(folders / "qwen3_tied", torch.float32, batch_size=8)
    prompts, sampling = [[1, 2, 3], [7, 0, 0, 50]], Sampling(max_tokens=1, greedy=True)
    answers = []
    for version in range(3):
        engine.update_weights(export_hf(tied, engine.manifest), version)
        results = engine.generate(prompts, sampling, seed=0)
        trainer = policy_logprobs(tied, layout, generated_samples(results, prompts))
        assert largest_difference([list(r.logprobs) for r in results], trainer) <= 1e-5
        answers.append([result.logprobs for result in results])
        if version == 1:
            with torch.no_grad():
                dict(tied.named_parameters())[parameter][0] += 1.0
    assert answers[0] == answers[1]
    assert all(abs(a[0] - b[0]) > 1e-4 for a, b in zip(answers[1], answers[2], strict=True))


def test_export_refuses_another_models_manifest(tied: PolicyModel, folders: Path) -> None:
    manifest = hf_manifest(folders / "qwen3_tied")
    wrong_shape = {**manifest, "model.norm.weight": TensorSpec((65,), torch.float32)}
    for other, name in ((hf_manifest(folders / "qwen3_untied"), HEAD), (wrong_shape, "model.norm.weight")):
        with pytest.raises(ValueError, match=name):
            next(export_hf(tied, other))
    fewer = {name: spec for name, spec in manifest.items() if name != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        next(export_hf(tied, fewer))


# ---------------------------------------------------------------------------- saving


def test_saved_folder_is_a_hf_folder(tied: PolicyModel, copied: Path, tmp_path: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    (copied / "notes.txt").write_text("not the tokenizer's")
    out = tmp_path / "out"
    save_hf(tied, copied, out)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert "notes.txt" not in names
    expected = AutoModelForCausalLM.from_pretrained(copied).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        assert torch.equal(tensor, expected[name])
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "out"}


def test_saving_in_shards_and_replacing(tied: PolicyModel, copied: Path, layout: Layout) -> None:
    save_hf(tied, copied, copied, shard_bytes=100_000)
    files = sorted(copied.glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 110_000 for path in files)
    expected = dict(export_hf(tied, hf_manifest(copied)))
    loaded = AutoModelForCausalLM.from_pretrained(copied).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    again = imported_policy(copied, layout)
    assert all(torch.equal(t, expected[name]) for name, t in export_hf(again, hf_manifest(copied)))


def test_a_failed_save_keeps_the_folder_that_was_there(
    tied: PolicyModel, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("comppo_mcore.model.hf.save_file", full_disk)
    before = read_weights(copied)
    with pytest.raises(OSError, match="could not be written: No space left"):
        save_hf(tied, copied, copied)
    assert read_weights(copied).keys() == before.keys()


# ---------------------------------------------------------------------------- bad folders


def refused(policy: PolicyModel, folder: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        import_hf(policy, folder)
    assert str(caught.value).startswith("model.path")
    assert "\n" not in str(caught.value)


def test_bad_input_missing_unexpected_and_misshapen_names(tied: PolicyModel, copied: Path) -> None:
    rewrite(copied, model__norm__weight=None)
    refused(tied, copied, r"\(missing: model\.norm\.weight\)")
    rewrite(copied, model__norm__weight=torch.ones(64), model__extra=torch.ones(1))
    refused(tied, copied, r"\(unexpected: model\.extra\)")
    rewrite(copied, model__norm__weight=torch.ones(65), model__extra=None)
    refused(tied, copied, r"\(wrong shape: model\.norm\.weight\)")


def test_bad_input_a_long_list_of_names_is_shortened(tied: PolicyModel, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6, "layer_types": None}))
    refused(tied, copied, r"\(missing: model\.layers\.4\.\S+, (\S+, ){2}\S+ and 18 more\)")


def test_bad_input_weight_files(tied: PolicyModel, copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(tied, copied, r"model\.safetensors, which cannot be read")
    weights.unlink()
    refused(tied, copied, "holds neither model.safetensors nor model.safetensors.index.json")
    index = copied / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "model-00001-of-00002.safetensors"}}))
    refused(tied, copied, r"model-00001-of-00002\.safetensors, which cannot be read")
    index.write_text("[]")
    refused(tied, copied, "no index of weights")


def test_bad_input_config_with_biases(tied: PolicyModel, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(UserError, match="attention_bias"):
        import_hf(tied, copied)


def test_tied_folder_may_repeat_the_embedding_but_nothing_else(
    tied: PolicyModel, copied: Path, layout: Layout
) -> None:
    embedding = read_weights(copied)[EMBEDDING]
    rewrite(copied, lm_head__weight=embedding.clone())
    again = dict(export_hf(imported_policy(copied, layout), hf_manifest(copied)))
    assert torch.equal(again[EMBEDDING], embedding)
    rewrite(copied, lm_head__weight=embedding + 1.0)
    refused(tied, copied, r"an lm_head\.weight that differs from the embedding")


def test_derived_buffers_of_old_files_are_ignored(tied: PolicyModel, copied: Path) -> None:
    rewrite(copied, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16))
    import_hf(tied, copied)


def test_a_model_of_another_size_is_not_filled(folders: Path, layout: Layout) -> None:
    llama = imported_policy(folders / "llama", layout)
    with pytest.raises(ValueError, match="the model holds"):
        import_hf(llama, folders / "qwen3_untied")
