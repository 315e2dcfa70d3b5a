"""`comppo convert`: Hugging Face folders and Megatron checkpoints, bit for bit, at several layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comppo_mcore import cli
from comppo_mcore.config.schema import CriticConfig, OptimConfig, ParallelConfig
from comppo_mcore.model import checkpoint, parallel, weights
from comppo_mcore.model.batch import Sample
from comppo_mcore.model.hf import export_hf
from comppo_mcore.model.hf_table import hf_manifest
from comppo_mcore.model.optimizer import PolicyOptimizer, wrap
from tests.dist import run_distributed
from tests.hf_folders import CASES, VOCAB, read_weights, write_folder
from tests.policies import (
    imported_policy,
    largest_difference,
    new_policy,
    policy_logprobs,
    probes,
    reference_logprobs,
)
from tests.runs import comppo

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FOLDERS: dict[str, dict[str, Any]] = {
    "qwen3_tied": CASES["qwen3_tied"],
    "llama3": CASES["llama"] | {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 4096},
    "qwen3_moe": CASES["qwen3_moe"],
    "qwen3_moe_raw": CASES["qwen3_moe"] | {"norm_topk_prob": False, "tied": True},
}
FOUR_PROCESS_CASES = ("qwen3_tied", "llama3", "qwen3_moe")


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    parallel.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folders `<case>` and the checkpoints `<case>_1` that one process makes of them."""
    root = tmp_path_factory.mktemp("convert")
    for name, case in FOLDERS.items():
        write_folder(root / name, **case)
        (root / name / "tokenizer.json").write_text("{}")
        assert convert(root / name, root / f"{name}_1", to="megatron") == 0
    return root


@pytest.fixture(scope="module")
def on_four(root: Path) -> list[dict[str, dict[str, float]]]:
    """By rank, of tests/workers/convert.py, which also writes the checkpoints `<case>_4`."""
    outputs = run_distributed("convert.py", 4, [root, *FOUR_PROCESS_CASES])
    return [json.loads(out.splitlines()[-1]) for out in outputs]


def convert(source: Path, out: Path, *options: object, to: str) -> int:
    return cli.main(["convert", str(source), str(out), "--to", to, *map(str, options)])


def assert_same_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("case", FOLDERS)
def test_round_trip_is_exact(root: Path, tmp_path: Path, case: str) -> None:
    assert convert(root / f"{case}_1", tmp_path / "out", to="hf") == 0
    assert_same_weights(tmp_path / "out", read_weights(root / case))
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (root / case / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize("case", ["qwen3_tied", "qwen3_moe"])
def test_round_trip_in_bf16_is_exact(tmp_path: Path, case: str) -> None:
    folder = write_folder(tmp_path / "hf", **FOLDERS[case], dtype=torch.bfloat16)
    assert convert(folder, tmp_path / "megatron", to="megatron") == 0
    assert weights.dtype_of(tmp_path / "megatron") == torch.bfloat16
    assert convert(tmp_path / "megatron", tmp_path / "again", to="hf") == 0
    assert_same_weights(tmp_path / "again", read_weights(folder))
    assert (tmp_path / "again" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_dtype_is_changed_on_request_and_entered_into_the_config(root: Path, tmp_path: Path) -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in read_weights(root / "llama3").items()}
    assert convert(root / "llama3_1", tmp_path / "down", "--dtype", "bf16", to="hf") == 0
    assert_same_weights(tmp_path / "down", rounded)
    assert json.loads((tmp_path / "down" / "config.json").read_text())["dtype"] == "bfloat16"
    assert convert(tmp_path / "down", tmp_path / "megatron", "--dtype", "fp32", to="megatron") == 0
    assert convert(tmp_path / "megatron", tmp_path / "up", to="hf") == 0
    assert_same_weights(tmp_path / "up", {name: tensor.float() for name, tensor in rounded.items()})
    assert json.loads((tmp_path / "up" / "config.json").read_text())["dtype"] == "float32"


# ---------------------------------------------------------------------------- layouts and logits


def test_one_process_checkpoint_loads_on_four(on_four: list[dict[str, dict[str, float]]]) -> None:
    for of_rank in on_four:
        assert list(of_rank) == list(FOUR_PROCESS_CASES)
        assert all(found["error"] <= 1e-4 and found["padding"] == 0 for found in of_rank.values())
    assert any(found["error"] > 0 for of_rank in on_four for found in of_rank.values())


@pytest.mark.parametrize("case", FOUR_PROCESS_CASES)
def test_four_process_checkpoint_loads_on_one(
    root: Path, on_four: list[dict[str, dict[str, float]]], tmp_path: Path, case: str
) -> None:
    assert len(list((root / f"{case}_4").glob("*.distcp"))) == 4
    assert convert(root / f"{case}_4", tmp_path / "out", to="hf") == 0
    assert_same_weights(tmp_path / "out", read_weights(root / case))
    layout = parallel.initialize(ParallelConfig(), seed=1)
    policy = new_policy(root / case, layout).eval()
    weights.load(policy, layout, root / f"{case}_4")
    ours = policy_logprobs(policy, layout, probes())
    assert largest_difference(ours, reference_logprobs(root / case, probes())) <= 1e-4


@pytest.mark.parametrize("case", FOLDERS)
def test_logprobs_are_those_of_transformers(root: Path, case: str) -> None:
    layout = parallel.initialize(ParallelConfig(), seed=1)
    policy = new_policy(root / case, layout).eval()
    weights.load(policy, layout, root / f"{case}_1")
    for temperature in (1.0, 0.7):
        ours = policy_logprobs(policy, layout, probes(), temperature)
        assert largest_difference(ours, reference_logprobs(root / case, probes(), temperature)) <= 1e-4


def test_long_wavelengths_are_scaled_as_in_llama_3(root: Path, tmp_path: Path) -> None:
    tokens = torch.randint(VOCAB, (3000,), generator=torch.Generator().manual_seed(3)).tolist()
    long = [Sample(tuple(tokens[:-50]), tuple(tokens[-50:]))]
    layout = parallel.initialize(ParallelConfig(), seed=1)
    ours = policy_logprobs(imported_policy(root / "llama3", layout).eval(), layout, long)
    assert largest_difference(ours, reference_logprobs(root / "llama3", long)) <= 1e-4
    plain = Path(shutil.copytree(root / "llama3", tmp_path / "plain"))
    config = json.loads((plain / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": LLAMA3_ROPE["rope_theta"]}
    (plain / "config.json").write_text(json.dumps(config))
    assert largest_difference(ours, reference_logprobs(plain, long)) > 1e-2


def test_the_command_starts_the_ranks_itself(root: Path, tmp_path: Path) -> None:
    words = ("convert", root / "llama3", tmp_path / "megatron", "--tp", 2, "--to", "megatron")
    done = comppo(*words, log=tmp_path / "log")
    assert (done.code, done.error) == (0, "")
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == 2
    assert convert(tmp_path / "megatron", tmp_path / "out", to="hf") == 0
    assert_same_weights(tmp_path / "out", read_weights(root / "llama3"))


# ---------------------------------------------------------------------------- other checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_checkpoint_becomes_the_policy_without_its_critic(
    root: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = root / "qwen3_tied"
    layout = parallel.initialize(ParallelConfig(), seed=1)
    policy = imported_policy(folder, layout)
    if dtype == torch.bfloat16:
        policy.config.bf16, policy.config.params_dtype = True, dtype
    ddp = wrap(policy, layout, dtype)
    optimizer = PolicyOptimizer(ddp, OptimConfig(), CriticConfig().lr, dtype, layout)
    trainer = {"config": {"model": {"path": str(folder)}}}
    path = checkpoint.save(tmp_path / "checkpoints", 7, ddp, optimizer, layout, trainer)
    expected = dict(export_hf(policy, hf_manifest(folder, dtype)))
    parallel.shutdown()
    assert not any("critic" in name for name in weights.contents(path))
    assert convert(path, tmp_path / "out", to="hf") == 0
    assert_same_weights(tmp_path / "out", expected)
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_checkpoint_of_another_program_needs_a_template(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Path(shutil.copytree(root / "qwen3_moe_1", tmp_path / "bare"))
    shutil.rmtree(bare / "hf")
    (bare / "manifest.json").unlink()
    assert convert(bare, tmp_path / "out", to="hf") == 2
    assert "--template is not given" in capsys.readouterr().err
    assert convert(bare, tmp_path / "out", "--template", root / "qwen3_moe", to="hf") == 0
    assert_same_weights(tmp_path / "out", read_weights(root / "qwen3_moe"))


def test_grouped_experts_mean_the_same(root: Path) -> None:
    layout = parallel.initialize(ParallelConfig(), seed=1)
    policy = imported_policy(root / "qwen3_moe", layout)

    def grouped() -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in policy.named_parameters():
            block, found, rest = name.partition("local_experts.")
            index, _, rest = rest.partition(".")
            yield (f"{block}{rest}{index}" if found else name), parameter

    assert any(name.endswith("mlp.experts.linear_fc1.weight3") for name, _ in grouped())
    model: Any = SimpleNamespace(
        config=policy.config,
        pg_collection=policy.pg_collection,
        decoder=policy.decoder,
        share_embeddings_and_output_weights=False,
        named_parameters=grouped,
    )
    expected = read_weights(root / "qwen3_moe")
    received = list(export_hf(model, hf_manifest(root / "qwen3_moe")))
    assert {name for name, _ in received} == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in received)
