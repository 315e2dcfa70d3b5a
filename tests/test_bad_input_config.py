"""A mistake in a configuration ends, before any work, in one sentence that helps, and with code 2."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from comppo_mcore import cli
from comppo_mcore.errors import UserError
from tests.configs import write_config, write_model

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be run or launched."""

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("work was started")

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(cli, "launch", refuse)
    for name, command in cli.COMMANDS.items():
        monkeypatch.setitem(cli.COMMANDS, name, replace(command, run=refuse))


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The sentence with which `comppo <words>` ends."""
    assert cli.main([str(word) for word in words]) == UserError.EXIT_CODE == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("comppo: error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err


# Overrides → what the sentence must name: field, value, remedy.
FIELDS = {
    "unknown key": (["gate.kapa_lo=0.2"], ["gate.kapa_lo", "0.2", "gate.kappa_lo"]),
    "unknown key without section": (["kappa_lo=0.2"], ["kappa_lo", "gate.kappa_lo"]),
    "unknown section": (["gates.mode=fixed"], ["gates", "gate"]),
    "text for a number": (["gate.tau='4'"], ["gate.tau", '"4"', "a number"]),
    "word for a number": (["train.steps=many"], ["train.steps", '"many"', "a whole number"]),
    "fraction for a whole number": (["train.steps=2.5"], ["train.steps", "2.5", "a whole number"]),
    "number for true or false": (["run.allow_config_change=1"], ["run.allow_config_change", "true or false"]),
    "null for a number": (["train.steps=null"], ["train.steps", "null", "a whole number"]),
    "out of range": (["gate.calibrate.reach=2"], ["gate.calibrate.reach", "2", "less than or equal to 1"]),
    "infinite": (["gate.tau=.inf"], ["gate.tau", ".inf", "a number"]),
    "not a choice": (["gate.mode=atention"], ["gate.mode", '"atention"', "'attention'", "'position'"]),
    "number for a section": (["gate=3"], ["gate", "3", "section"]),
    "section for a choice": (["gate.mode.x=3"], ["gate.mode", "'attention'"]),
    "number for a list": (["optim.betas=3"], ["optim.betas", "3", "a list"]),
    "short list": (["optim.betas=[0.9]"], ["optim.betas", "[0.9]", "a longer list"]),
    "long list": (["optim.betas=[0.9, 1, 2]"], ["optim.betas", "a list of 2"]),
    "wrong list item": (["data.tasks=[a, 1]"], ["data.tasks[1]", "1", "text"]),
    "several": (["train.steps=x", "gate.tau=y", "critic.width=0"], ["gate.tau", "and 2 more"]),
    "no value": (["train.steps"], ["'train.steps'", "key=value"]),
    "no key": (["=3"], ["'=3'", "key=value"]),
    "unreadable value": (["data.tasks=[a"], ["data.tasks", "YAML"]),
}

RULES = {
    "TP and heads": (["parallel.tp=3"], ["parallel.tp", "3", "attention heads (4)"]),
    "TP and KV groups": (["parallel.tp=4"], ["parallel.tp", "4", "key-value groups (2)"]),
    "SP without TP": (["parallel.sequence_parallel=true"], ["parallel.sequence_parallel", "parallel.tp = 1"]),
    "layers and PP": (["parallel.pp=3"], ["parallel.pp", "3", "4 layers", "last_stage_layers"]),
    "last stage alone": (["parallel.last_stage_layers=2"], ["last_stage_layers", "2", "parallel.pp = 1"]),
    "last stage takes all": (
        ["parallel.pp=2", "parallel.last_stage_layers=4"],
        ["parallel.last_stage_layers", "4", "leaves 0 of 4 layers"],
    ),
    "uneven rest": (
        ["parallel.pp=3", "parallel.last_stage_layers=1"],
        ["parallel.last_stage_layers", "1", "leaves 3 of 4 layers", "same number"],
    ),
    "critic on the last stage": (
        ["parallel.pp=2", "critic.layers=3"],
        ["critic.layers", "3", "holds 2", "at most 2", "parallel.last_stage_layers to at least 3"],
    ),
    "critic and model": (["critic.layers=5"], ["critic.layers", "5", "holds 4", "at most 4"]),
    "context parallel": (["parallel.cp=2"], ["parallel.cp", "2", "local", "transformer_engine"]),
    "world size": (["parallel.tp=2", "--nproc", "3"], ["parallel.tp", "2", "world size 3", "multiple of 2"]),
    "no processes": (["--nproc", "0"], ["--nproc", "0", "at least 1"]),
    "trajectories and minibatch": (
        ["algo.minibatch=5"],
        ["algo.minibatch", "5", "16 trajectories", "divisor"],
    ),
    "minibatch and DP": (
        ["--nproc", "3", "algo.minibatch=4"],
        ["algo.minibatch", "4", "size 3", "multiple of 3"],
    ),
    "GRPO alone": (
        ["algo.name=grpo", "rollout.responses=1"],
        ["rollout.responses", "1", "grpo", "2 or more"],
    ),
    "RLOO alone": (["algo.name=rloo", "rollout.responses=1"], ["rollout.responses", "1", "rloo"]),
    "k1 as a loss": (
        ["algo.kl.kind=k1"],
        ["algo.kl.kind", "k1", "expected gradient is zero", "k3", "reward"],
    ),
    "discount without PPO": (["transport.gamma=0.9"], ["transport.gamma", "0.9", "comppo", "leave it at 1"]),
    "envelope upside down": (
        ["gate.kappa_lo=0.8", "gate.kappa_hi=0.2"],
        ["gate.kappa_lo", "0.8", "gate.kappa_hi = 0.2"],
    ),
    "kappa_sup is 1": (["gate.kappa_lo=1", "gate.kappa_hi=1"], ["gate.kappa_lo", "1.0", "< 1"]),
    "kappa_sup rounds to 1": (["gate.kappa_hi=1", "gate.tau=100"], ["tau", "100.0", "< 1"]),
    "position without table": (["gate.mode=position"], ["gate.table", "null", "gate-table"]),
    "calibrating nothing": (
        ["gate.mode=fixed", "gate.calibrate={}"],
        ["gate.calibrate", "gate.mode = fixed", "null"],
    ),
    "lag of an embedded engine": (["rollout.lag=1"], ["rollout.lag", "embedded", "sglang"]),
    "mask of an embedded engine": (["algo.ratio=mask"], ["algo.ratio", "embedded", "sglang"]),
    "lag without correction": (
        ["rollout.engine=sglang", "rollout.lag=1"],
        ["rollout.lag", "algo.importance_cap", "null", "older weights"],
    ),
    "partial without correction": (
        ["rollout.engine=sglang", "rollout.partial=true"],
        ["rollout.partial", "algo.importance_cap", "null"],
    ),
    "lag where servers rest": (
        [
            "rollout.engine=sglang",
            "rollout.lag=1",
            "algo.importance_cap=2",
            "rollout.sglang.placement=colocated",
        ],
        ["rollout.lag", "colocated", "disaggregated"],
    ),
    "address": (
        ["rollout.engine=sglang", "rollout.sglang.urls=[10.0.0.7:30000]"],
        ["rollout.sglang.urls", "10.0.0.7:30000", "http://"],
    ),
    "address twice": (
        ["rollout.engine=sglang", "rollout.sglang.urls=[http://a:1, http://a:1]"],
        ["rollout.sglang.urls", "twice"],
    ),
    "betas": (["optim.betas=[0.9, 1]"], ["optim.betas", "[0.9, 1.0]", "below 1"]),
    "reward ramp": (["reward.length.stop=10"], ["reward.length.stop", "10", "reward.length.begin = 20"]),
    "controller ramp": (["controller.ramp=[40, 25]"], ["controller.ramp", "[40, 25]", "rising"]),
    "file without path": (["data.source=file"], ["data.path", "null", ".jsonl or .parquet"]),
    "no tasks": (["data.source=reasoning_gym"], ["data.tasks", "empty", "spell_backward"]),
    "strength": (
        ["data.arithmetic.strength=[0.8, 0.3]"],
        ["data.arithmetic.strength", "[0.8, 0.3]", "lowest"],
    ),
    "context": (["model.max_context=1024"], ["model.max_context", "1024", "512"]),
    "response and context": (
        ["rollout.max_response_tokens=512"],
        ["rollout.max_response_tokens", "512", "context of 512"],
    ),
    "micro-batch": (
        ["train.micro_batch_tokens=64"],
        ["train.micro_batch_tokens", "64", "at least their sum"],
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_field(config_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    words, expected = FIELDS[case]
    sentence = refusal(capsys, "train", config_path, *words)
    assert [part for part in expected if part not in sentence] == [], sentence


@pytest.mark.parametrize("case", RULES)
def test_rule(config_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    words, expected = RULES[case]
    sentence = refusal(capsys, "train", config_path, *words)
    assert [part for part in expected if part not in sentence] == [], sentence


@pytest.mark.parametrize(
    "words",
    [
        ["algo.kl.kind=k1", "algo.kl.where=reward"],
        ["algo.name=grpo", "critic.layers=9"],
        ["critic.kind=standard", "parallel.pp=2"],
        ["parallel.pp=2", "critic.layers=3", "parallel.last_stage_layers=3"],
        ["gate.mode=fixed", "gate.fixed_kappa=1"],
        ["algo.name=ppo", "transport.gamma=0.9"],
        ["--nproc", "2"],
        ["rollout.engine=sglang", "rollout.lag=1", "algo.importance_cap=2"],
        ["rollout.engine=sglang", "rollout.oversample=2", "rollout.max_wait_s=5", "algo.ratio=mask"],
    ],
)
def test_neighbours_of_the_rules_are_accepted(config_path: Path, words: list[str]) -> None:
    assert cli.main(["train", str(config_path), "--dry-run", *words]) == 0


def test_tensor_parallel_divides_the_mlp(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(config_path.parent / "model", intermediate_size=255)
    assert "MLP width (255)" in refusal(capsys, "train", config_path, "parallel.tp=2")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sft.batch=9", "--nproc", "2"], ["sft.batch", "9", "multiple of 2"]),
        (["data.source=file"], ["sft.path", "null", "data.source = file"]),
        (["parallel.tp=3"], ["parallel.tp", "3", "attention heads"]),
    ],
)
def test_warm_start(
    config_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: list[str]
) -> None:
    sentence = refusal(capsys, "sft", config_path, *words)
    assert [part for part in expected if part not in sentence] == [], sentence


def test_warm_start_needs_no_problem_file(config_path: Path) -> None:
    assert cli.main(["sft", str(config_path), "--dry-run", "data.source=file", "sft.path=pairs.jsonl"]) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {steps: 1, steps: 2}", ["steps stands twice", "line 1"]),
        ("train: [1", ["not readable as YAML", "line 1"]),
        ("- train", ["no sections"]),
        ("gate:\n", ["gate", "null", "section"]),
        ("train: {steps: 1}\nlearning_rate: 1e-6", ["learning_rate", "1e-06", "nearest known key"]),
        ("extends: absent.yaml", ["absent.yaml", "No such file"]),
        ("extends: bad.yaml", ["bad.yaml", "extends itself"]),
    ],
)
def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    sentence = refusal(capsys, "train", path)
    assert [part for part in expected if part not in sentence] == [], sentence


def test_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such file" in refusal(capsys, "train", tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: caf\xe9}")
    assert "UTF-8" in refusal(capsys, "train", tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt2"}, ["gpt2", "qwen3", "llama"]),
        ({"hidden_size": None}, ["hidden_size", "null", "whole number"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"hidden_act": "gelu"}, ["hidden_act", '"gelu"', '"silu"']),
        ({"attention_bias": True}, ["attention_bias", "true", "false"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "true"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rotary scaling", "yarn", "llama3"]),
    ],
)
def test_model_folder(
    config_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: list[str]
) -> None:
    write_model(config_path.parent / "model", **changes)
    sentence = refusal(capsys, "train", config_path)
    assert [part for part in ["model.path", *expected] if part not in sentence] == [], sentence


def test_model_folder_that_cannot_be_read(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no config.json" in refusal(capsys, "train", config_path, "model.path=elsewhere")
    assert "model.path is empty" in refusal(capsys, "train", config_path, "model.path=")
    config_json = config_path.parent / "model" / "config.json"
    config_json.write_text("{")
    assert "unreadable config.json" in refusal(capsys, "train", config_path)
    config_json.write_text("[]")
    assert "not a JSON object" in refusal(capsys, "train", config_path)


def test_unknown_option(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(config_path), "--step", "3"])
    assert ended.value.code == 2 and "--step" in capsys.readouterr().err


# ---------------------------------------------------------------------------- real processes


def run(*command: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *(str(word) for word in command)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_command_ends_with_code_2_before_torch_is_imported(config_path: Path) -> None:
    ended = run("-X", "importtime", "-m", "comppo_mcore.cli", "train", config_path, "parallel.tp=3")
    said = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert ended.returncode == 2 and ended.stdout == ""
    assert len(said) == 1 and said[0].startswith("comppo: error: parallel.tp is 3")
    assert "pydantic" in imported and not imported & {"torch", "megatron", "transformers"}


def test_error_of_one_rank_is_all_that_is_said() -> None:
    ended = run("-m", "tests.workers.user_error")
    assert ended.returncode == 2
    # What C++ may say of gloo's threads at a rank's end, when no Python is left to prevent it.
    gloo = "terminate called without an active exception"
    said = [line for line in ended.stderr.splitlines() if line != gloo]
    assert said == ["comppo: error: data.path is 'gone.jsonl', which is not there; give a file"]


def test_error_of_a_rank_under_torchrun_is_said_once() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = run(*launcher, "-m", "tests.workers.user_error")
    assert ended.returncode != 0
    assert ended.stderr.count("comppo: error: data.path is 'gone.jsonl'") == 1
    assert "Connection closed by peer" not in ended.stderr
