"""What `comppo convert` refuses: one sentence, exit code 2, and nothing written."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from comppo_mcore import cli
from comppo_mcore.model import parallel
from tests.hf_folders import CASES, read_weights, write_folder

ERROR = "comppo: error: "


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    parallel.shutdown()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refused")
    for name in ("qwen3_tied", "llama", "qwen3_moe"):
        write_folder(root / name, **CASES[name])
    assert cli.main(["convert", str(root / "qwen3_tied"), str(root / "megatron"), "--to", "megatron"]) == 0
    return root


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs a conversion to `tmp_path/out/x`, which must fail leaving nothing behind; returns the sentence."""

    def run(source: Path, to: str, *options: object) -> str:
        (tmp_path / "out").mkdir(exist_ok=True)
        words = ["convert", source, tmp_path / "out" / "x", "--to", to, *options]
        assert cli.main([str(word) for word in words]) == 2
        parallel.shutdown()
        assert list((tmp_path / "out").iterdir()) == []
        (line,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith(ERROR))
        return line.removeprefix(ERROR)

    return run


Refused = Callable[..., str]


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "qwen3_tied", tmp_path / "folder"))


@pytest.fixture
def damaged(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "megatron", tmp_path / "damaged"))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_weights(folder: Path, changed: dict[str, torch.Tensor]) -> None:
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


# ---------------------------------------------------------------------------- Hugging Face folders


def test_missing_and_unexpected_names(folder: Path, refused: Refused) -> None:
    weights = read_weights(folder)
    weights["model.layers.0.mlp.extra.weight"] = weights.pop("model.norm.weight")
    change_weights(folder, weights)
    assert refused(folder, "megatron") == (
        f"SOURCE '{folder}' does not hold the weights of its config.json "
        "(missing: model.norm.weight; unexpected: model.layers.0.mlp.extra.weight)"
    )


def test_a_missing_expert(root: Path, tmp_path: Path, refused: Refused) -> None:
    folder = Path(shutil.copytree(root / "qwen3_moe", tmp_path / "moe"))
    weights = read_weights(folder)
    del weights["model.layers.2.mlp.experts.3.up_proj.weight"]
    change_weights(folder, weights)
    assert "(missing: model.layers.2.mlp.experts.3.up_proj.weight)" in refused(folder, "megatron")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "gemma3"}, "a model of type 'gemma3'; supported are qwen3, llama, qwen3_moe"),
        ({"attention_bias": True}, "has attention_bias = true in config.json; only false is supported"),
        ({"decoder_sparse_step": 2}, "has decoder_sparse_step = 2 in config.json; only 1 is supported"),
        ({"mlp_only_layers": [0]}, "has mlp_only_layers = [0] in config.json; only [] is supported"),
        ({"num_hidden_layers": 0}, "has num_hidden_layers = 0 in config.json; it must be"),
    ],
)
def test_other_models(folder: Path, refused: Refused, changes: dict[str, Any], sentence: str) -> None:
    change_config(folder, **changes)
    found = refused(folder, "megatron")
    assert found.startswith("SOURCE ")
    assert sentence in found


def test_folders_without_readable_weights(folder: Path, refused: Refused) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors, which cannot be read" in refused(folder, "megatron")
    weights.unlink()
    assert f"SOURCE '{folder}' holds neither model.safetensors" in refused(folder, "megatron")
    (folder / "config.json").unlink()
    assert f"SOURCE '{folder}' holds no config.json" in refused(folder, "megatron")


def test_dtypes_that_a_checkpoint_cannot_keep(folder: Path, refused: Refused) -> None:
    halves = {name: tensor.half() for name, tensor in read_weights(folder).items()}
    change_weights(folder, halves)
    expected = f"--dtype is not given and SOURCE '{folder}' holds weights in F16: set it to fp32 or bf16"
    assert refused(folder, "megatron") == expected
    change_weights(folder, halves | {"model.norm.weight": halves["model.norm.weight"].float()})
    assert "holds weights in F16, F32" in refused(folder, "megatron")


# ---------------------------------------------------------------------------- checkpoints


def test_no_checkpoint(folder: Path, root: Path, refused: Refused) -> None:
    sentence = f"'{folder}' is not a Megatron checkpoint with .metadata and metadata.json"
    assert refused(folder, "hf") == sentence
    assert refused(root / "nowhere", "hf").startswith(f"'{root / 'nowhere'}' is not a Megatron checkpoint")
    assert refused(root, "hf").endswith(f"; did you mean '{root / 'megatron'}'?")


def test_damaged_checkpoint(damaged: Path, refused: Refused) -> None:
    (shard,) = damaged.glob("*.distcp")
    flip_a_byte(shard)
    assert refused(damaged, "hf") == (
        f"checkpoint '{damaged}' is damaged ({shard.name} is missing, short or altered): "
        "give another, or make it again"
    )
    shard.unlink()
    assert "is damaged" in refused(damaged, "hf")
    (damaged / "manifest.json").write_text("{")
    assert "is damaged (manifest.json is missing or unreadable)" in refused(damaged, "hf")


def test_damage_without_a_manifest_to_tell(damaged: Path, folder: Path, refused: Refused) -> None:
    """As in a checkpoint of Megatron-LM."""
    (damaged / "manifest.json").unlink()
    shutil.rmtree(damaged / "hf")
    (shard,) = damaged.glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    assert f"checkpoint '{damaged}' cannot be read: " in refused(damaged, "hf", "--template", folder)
    (damaged / ".metadata").write_bytes(b"no pickle")
    assert f"checkpoint '{damaged}' has an unreadable .metadata: " in refused(damaged, "hf")


def test_another_family_as_template(root: Path, refused: Refused) -> None:
    sentence = refused(root / "megatron", "hf", "--template", root / "llama")
    assert "holds other weights than config.json says (missing: output_layer.weight; " in sentence
    assert "unexpected: decoder.layers.self_attention.k_layernorm.weight, decoder.layers.self_att" in sentence
    assert "missing: decoder.layers.mlp.experts.experts.linear_fc1.weight" in refused(
        root / "megatron", "hf", "--template", root / "qwen3_moe"
    )


def test_a_template_of_another_size(root: Path, folder: Path, refused: Refused) -> None:
    change_config(folder, num_hidden_layers=3, layer_types=None)
    assert "wrong shape: decoder.layers.mlp.linear_fc1" in refused(
        root / "megatron", "hf", "--template", folder
    )
    change_config(folder, num_hidden_layers=4, vocab_size=140)
    assert "(wrong shape: embedding.word_embeddings.weight)" in refused(
        root / "megatron", "hf", "--template", folder
    )


def test_a_template_that_is_gone(root: Path, refused: Refused) -> None:
    sentence = refused(root / "megatron", "hf", "--template", root / "gone")
    assert sentence.startswith(f"--template '{root / 'gone'}' holds no config.json")


# ---------------------------------------------------------------------------- the command line


def test_out_exists(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    for source, to in ((root / "llama", "megatron"), (root / "megatron", "hf")):
        assert cli.main(["convert", str(source), str(tmp_path), "--to", to]) == 2
        assert f"OUT '{tmp_path}' exists: remove it or name another" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"


@pytest.mark.parametrize("options", [["--tp", "0"], ["--pp", "two"], ["--dtype", "fp16"], ["surplus"]])
def test_options(root: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["convert", str(root / "llama"), str(tmp_path / "x"), "--to", "megatron", *options])
    assert ended.value.code == 2
    assert options[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tp", 3], "--tp is 3, which does not divide the model's attention heads (4)"),
        (
            ["--pp", 3],
            "--pp is 3, which does not divide the model's 4 layers; choose another, or set --",
        ),
        (["--pp", 2, "--last-stage-layers", 4], "--last-stage-layers is 4, which leaves 0 of 4 layers"),
    ],
)
def test_layouts_that_do_not_fit(
    root: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch, options: list[object], sentence: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")  # as in a rank, which finds it out before it joins the others
    assert refused(root / "llama", "megatron", *options).startswith(sentence)


@pytest.mark.parametrize(("source", "to"), [("llama", "megatron"), ("megatron", "hf")])
def test_disk_full(root: Path, tmp_path: Path, refused: Refused, source: str, to: str) -> None:
    """A limit on file size stands in for the disk: a write fails in the middle of the weights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        sentence = refused(root / source, to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"'{tmp_path / 'out' / 'x'}' could not be written" in sentence
    assert ("MiB are free there" if to == "megatron" else "File too large") in sentence


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_experts_are_not_trained(
    root: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(f"model: {{path: {root / 'qwen3_moe'}}}\ndata: {{source: arithmetic}}\n")
    assert cli.main([command, str(tmp_path / "c.yaml")]) == 2
    error = capsys.readouterr().err
    assert "model.path names a mixture of experts (qwen3_moe), which `comppo convert` takes but " in error
