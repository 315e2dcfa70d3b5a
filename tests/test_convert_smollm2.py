"""SmolLM2-135M-Instruct: the dequantised folder, its way through Megatron and back, logits and text."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from comppo_mcore import cli
from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.data.problems import Message
from comppo_mcore.data.tokenizer import load_tokenizer, render, stop_token_ids
from comppo_mcore.model import parallel, weights
from comppo_mcore.model.batch import Sample, pack
from comppo_mcore.model.execution import Work, forward_only
from comppo_mcore.model.parallel import Layout
from comppo_mcore.model.policy import Pass, PolicyModel
from tests.policies import new_policy, parallel_config
from tests.runs import ROOT, comppo

pytestmark = pytest.mark.sglang  # of the long suite: it takes a minute

FOLDER = ROOT / "models" / "smollm2_135m"
QUESTIONS = ("What is the capital of France?", "How many days are in a week?", "Who wrote Romeo and Juliet?")
NUM_TOKENS = 12
ENGLISH = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named "
    "after the engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Logits reach 38, where sums in another order already differ by 1e-4 in fp32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder() -> Path:
    if not FOLDER.exists():
        subprocess.run(["bash", "launch/smollm2.sh"], cwd=ROOT, check=True)
    return FOLDER


@pytest.fixture(scope="module")
def checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Written by two pipeline stages; half a gigabyte, which pytest would keep."""
    root = tmp_path_factory.mktemp("smollm2")
    done = comppo("convert", folder, root / "megatron", "--to", "megatron", "--pp", 2, log=root / "log")
    assert (done.code, done.error) == (0, "")
    yield root / "megatron"
    shutil.rmtree(root / "megatron")


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    yield parallel.initialize(parallel_config(), seed=0)
    parallel.shutdown()


@pytest.fixture(scope="module")
def policy(folder: Path, checkpoint: Path, layout: Layout) -> PolicyModel:
    policy = new_policy(folder, layout).eval()
    weights.load(policy, layout, checkpoint)
    return policy


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    texts = [render(tokenizer, [Message("user", question)]) for question in QUESTIONS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def megatron_logits(policy: PolicyModel, layout: Layout, sequences: list[list[int]]) -> list[Tensor]:
    """float32 [tokens, V] of each sequence, by Megatron's own output layer."""
    batch = pack(
        [Sample(tuple(s[:1]), tuple(s[1:])) for s in sequences], range(len(sequences)), layout.device
    )

    def logits(model: PolicyModel, out: object, _: Work) -> Tensor:
        weight = model.shared_embedding_or_output_weight()
        return model.output_layer(out.final_hidden[:, None], weight=weight)[0][:, 0]  # type: ignore[attr-defined]

    (packed,) = forward_only(policy, [Work(batch)], Pass(), layout, logits)
    return list(packed.split([len(s) for s in sequences]))


def greedy(policy: PolicyModel, layout: Layout, prompts: list[list[int]]) -> list[list[int]]:
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(NUM_TOKENS):
        for sequence, logits in zip(sequences, megatron_logits(policy, layout, sequences), strict=True):
            sequence.append(int(logits[-1].argmax()))
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


@torch.no_grad()
def reference_greedy(reference: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Without a stop token, as `greedy`."""
    sequence = list(prompt)
    for _ in range(NUM_TOKENS):
        sequence.append(int(reference(torch.tensor([sequence])).logits[0, -1].argmax()))
    return sequence[len(prompt) :]


def test_folder(folder: Path) -> None:
    shape, tokenizer = read_model_shape(folder), load_tokenizer(folder)
    assert (shape.family, shape.num_layers, shape.hidden_size, shape.ffn_size) == ("llama", 30, 576, 1536)
    assert (shape.num_heads, shape.num_kv_groups, shape.head_dim) == (9, 3, 64)
    assert (shape.vocab_size, shape.tied, shape.rope_theta, shape.norm_eps) == (49152, True, 1e5, 1e-5)
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens(stop_token_ids(folder, tokenizer)) == ["<|im_end|>"]
    assert tokenizer.tokenize("1887 to") == ["1", "8", "8", "7", "Ġto"]
    for text in (ENGLISH, "naïve — 日本\n\tif x == 10:", "<|im_start|>user\nHi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_it_knows_english(folder: Path, reference: torch.nn.Module) -> None:
    ids = torch.tensor([load_tokenizer(folder).encode(ENGLISH)])
    with torch.no_grad():
        perplexity = reference(ids, labels=ids).loss.exp().item()
    assert perplexity < 10


def test_round_trip_is_exact(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert cli.main(["convert", str(checkpoint), str(tmp_path / "again"), "--to", "hf"]) == 0
    parallel.shutdown()
    with (
        safe_open(folder / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "again" / "model.safetensors", "pt") as after,
    ):
        assert set(before.keys()) == set(after.keys())
        for name in before.keys():  # noqa: SIM118 (not a dict)
            assert torch.equal(before.get_tensor(name), after.get_tensor(name)), name
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    shutil.rmtree(tmp_path / "again")


def test_logits_are_those_of_transformers(
    policy: PolicyModel, layout: Layout, reference: torch.nn.Module, prompts: list[list[int]]
) -> None:
    for prompt, ours in zip(prompts, megatron_logits(policy, layout, prompts), strict=True):
        with torch.no_grad():
            theirs = reference(torch.tensor([prompt])).logits[0]
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-4


def test_greedy_text_is_that_of_transformers(
    policy: PolicyModel, layout: Layout, folder: Path, reference: torch.nn.Module, prompts: list[list[int]]
) -> None:
    ours = greedy(policy, layout, prompts)
    assert ours == [reference_greedy(reference, prompt) for prompt in prompts]
    texts = [load_tokenizer(folder).decode(tokens) for tokens in ours]
    assert texts[0].startswith("The capital of France is Paris.")
    assert "7 days" in texts[1]
    assert "William Shakespeare" in texts[2]
