"""Mistakes that only prompts, tokenizer, run folder or first rollout show: one sentence, exit code 2.

All but the last kind end before a process group, a model or a run folder is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from comppo_mcore import cli
from comppo_mcore.data.dataset import GeneratedDataset
from comppo_mcore.data.problems import Problem
from comppo_mcore.errors import UserError
from comppo_mcore.model import parallel
from comppo_mcore.trainer import session, sft
from comppo_mcore.trainer.files import read_metrics
from tests.demo_folder import write_small_demo_model

CONFIG = """
model: {{path: {folder}/model, weights: random, dtype: fp32}}
data: {{source: arithmetic, arithmetic: {{steps: 1}}}}
rollout: {{prompts: 4, responses: 2, max_response_tokens: 16, top_p: 1.0}}
critic: {{width: 16, head_width: 16}}
reward: {{workers: 1}}
train: {{steps: 1, micro_batch_tokens: 128, eval_every: 0, eval_problems: 4}}
log: {{tensorboard: false}}
run: {{dir: {folder}/runs}}
"""
LONG = "1" + "+1" * 20 + "=?"  # 43 tokens
SHORT = "9+9=?"  # 5 tokens


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration whose model has a context of 64 tokens."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write_small_demo_model(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    yield tmp_path
    parallel.shutdown()


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing after the checks may be reached."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("work was started")

    monkeypatch.setattr(session, "initialize", refuse)
    monkeypatch.setattr(parallel, "initialize", refuse)


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, command: str, *words: str) -> str:
    """The sentence with which a command ends."""
    assert cli.main([command, str(folder / "config.yaml"), *words]) == UserError.EXIT_CODE == 2
    printed = capsys.readouterr().err
    assert printed.startswith("comppo: error: ") and printed.count("\n") == 1, printed
    return printed.removeprefix("comppo: error: ").strip()


def problem_file(folder: Path, *prompts: str) -> str:
    """Records of these prompts, the last one held out."""
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return f"data={{source: file, path: {path}, eval_holdout: 1}}"


@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_tokenizer_larger_than_the_vocabulary(
    folder: Path, no_work: None, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    write_small_demo_model(folder / "model", vocab_size=20)
    sentence = refusal(capsys, folder, command)
    assert sentence == (
        f"model.path '{folder / 'model'}' has a tokenizer of 22 tokens but a model of vocab_size 20: "
        "give the tokenizer the model was made for"
    )
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("command", "prompts", "named"),
    [
        ("train", (SHORT, "2" + LONG, "2+2=?", "3+3=?"), "problems.jsonl:2"),
        ("train", (SHORT, "2+2=?", "3+3=?", "4" + LONG), "problems.jsonl:4"),  # held out
        ("eval", (SHORT, "2+2=?", "3+3=?", "4" + LONG), "problems.jsonl:4"),
    ],
)
def test_prompt_longer_than_the_context(
    folder: Path,
    no_work: None,
    capsys: pytest.CaptureFixture[str],
    command: str,
    prompts: tuple[str, ...],
    named: str,
) -> None:
    """A prompt of 44 tokens with 16 of response in a context of 59."""
    words = (problem_file(folder, *prompts), "model.max_context=59")
    assert refusal(capsys, folder, command, *words) == (
        f"prompt {named} has 44 tokens, but the context leaves 43 for a prompt; drop it from data.path, "
        "raise model.max_context or lower rollout.max_response_tokens"
    )
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("algorithm", ["comppo", "grpo"])
def test_prompt_and_response_over_a_micro_batch(
    folder: Path, no_work: None, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    """The last prompt of many, which would come up in the middle of a run."""
    prompts = [f"{a}+{b}=?" for a in range(9) for b in range(9)]
    words = (problem_file(folder, *prompts, LONG, SHORT), f"algo.name={algorithm}")
    assert refusal(capsys, folder, "train", *words, "train.micro_batch_tokens=58") == (
        "train.micro_batch_tokens is 58, but prompt problems.jsonl:82 has 43 tokens and "
        "rollout.max_response_tokens is 16: set it to at least their sum, 59"
    )
    assert not (folder / "runs").exists()


def test_first_prompts_of_an_endless_source_over_a_micro_batch(
    folder: Path, no_work: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(capsys, folder, "train", "train.micro_batch_tokens=20")
    assert sentence.startswith("train.micro_batch_tokens is 20, but prompt arithmetic:")
    assert sentence.endswith(
        "has 5 tokens and rollout.max_response_tokens is 16: set it to at least their sum, 21"
    )


def test_prompts_that_just_fit_are_accepted(folder: Path, no_work: None) -> None:
    for words in (
        (problem_file(folder, SHORT, LONG, "2+2=?"), "model.max_context=59", "train.micro_batch_tokens=59"),
        ("train.micro_batch_tokens=21",),
    ):
        with pytest.raises(AssertionError, match="work was started"):
            cli.main(["train", str(folder / "config.yaml"), *words])


def test_held_out_problems_are_not_bound_by_the_micro_batch(folder: Path, no_work: None) -> None:
    words = (problem_file(folder, SHORT, "2+2=?", LONG), "train.micro_batch_tokens=40")
    with pytest.raises(AssertionError, match="work was started"):
        cli.main(["eval", str(folder / "config.yaml"), *words])


def test_of_an_endless_source_only_the_first_step_is_read(
    folder: Path, no_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    draw = GeneratedDataset.train_problem

    def counted(dataset: GeneratedDataset, index: int) -> Problem:
        read.append(index)
        return draw(dataset, index)

    monkeypatch.setattr(GeneratedDataset, "train_problem", counted)
    with pytest.raises(AssertionError, match="work was started"):
        cli.main(["train", str(folder / "config.yaml")])
    assert read == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["algo.name=grpo", "rollout.responses=1", "rollout.prompts=8"],
            "rollout.responses is 1 with algo.name = grpo",
        ),
        (["algo.kl.kind=k1"], "algo.kl.kind is k1 with algo.kl.where = loss"),
    ],
)
def test_objective_without_a_signal(
    folder: Path, no_work: None, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert refusal(capsys, folder, "train", *words).startswith(named)


def test_warm_start_under_the_name_of_a_training_run(
    folder: Path, no_work: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "runs" / "taken"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    monkeypatch.setattr(sft, "load_examples", lambda _: pytest.fail("work was started"))
    assert refusal(capsys, folder, "sft", "run.name=taken") == (
        f"run.name is taken, but {run} holds a training run with its checkpoints: choose another name"
    )
    assert read_metrics(run / "metrics.jsonl") == [{"step": 1}]


def test_infeasible_calibration_names_the_largest_feasible_reach(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.3ⁿ is below 1e-3 after 5 tokens; the reach that is named is one that the same run then takes."""
    words = ("run.name=calibrated", "transport.lam=0.3")
    sentence = refusal(capsys, folder, "train", *words, "gate.calibrate={reach: 1.0, keep: lam}")
    match = re.fullmatch(
        r"gate\.calibrate\.reach is 1\.0, but at transport\.lam 0\.3 the trace fades below 0\.001 sooner: "
        r"use at most (0\.\d+), raise transport\.lam, or set gate\.calibrate\.keep to free",
        sentence,
    )
    assert match, sentence
    reach = match[1]
    parallel.shutdown()
    config = str(folder / "config.yaml")
    assert cli.main(["train", config, *words, f"gate.calibrate={{reach: {reach}, keep: lam}}"]) == 0
    (record,) = read_metrics(folder / "runs" / "calibrated" / "metrics.jsonl")
    assert record["gate/kappa_mean"] > 0.5
