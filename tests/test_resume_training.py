"""A run that is killed and relaunched is the uninterrupted run, bit for bit.

PP = 2, attention gate, critic warm-up, controller mid-ramp, checkpoints every 3 steps. One run is killed
twice: at step 5, and inside the save of step 6.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from comppo_mcore.trainer.files import read_metrics, without_machine_keys
from tests.bigram_policy import write_bigram_policy
from tests.runs import FAULTY, Finished, Running, comppo

STEPS = 8
CONFIG = """
model: {{path: {folder}/model, dtype: fp32}}
parallel: {{pp: 2, last_stage_layers: 4, timeout_minutes: 2}}
data: {{source: arithmetic, arithmetic: {{steps: 2}}}}
rollout: {{prompts: 4, responses: 2, max_response_tokens: 12, top_p: 0.9}}
algo: {{minibatch: 4}}
gate: {{mode: attention, drift_every: 2}}
critic: {{warmup_steps: 2, lr: 1e-3, width: 16, head_width: 16}}
optim: {{lr: 1e-3}}
reward: {{workers: 1}}
controller: {{ramp: [2, 8]}}
train: {{steps: 8, eval_every: 3, eval_problems: 16, save_every: 3}}
log: {{tensorboard: false}}
run: {{dir: {folder}/runs}}
"""


@dataclass(frozen=True)
class Interrupted:
    """What the run folder held at each kill, and the end of the third launch."""

    at_step_5: list[dict[str, Any]]
    partial: list[str]  # checkpoints when killed inside a save
    in_save: list[dict[str, Any]]
    finished: Finished


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_bigram_policy(folder / "model")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Path:
    result = comppo("train", folder / "config.yaml", "run.name=whole", log=folder / "whole.log")
    assert result.code == 0, result.output
    return folder / "runs" / "whole"


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> Iterator[Interrupted]:
    command = ("train", folder / "config.yaml", "run.name=killed")
    run, marker = folder / "runs" / "killed", folder / "in_save"
    metrics, checkpoints = run / "metrics.jsonl", run / "checkpoints"
    with Running(*command, log=folder / "first.log") as first:
        first.wait_until(lambda: any(r["step"] == 5 for r in read_metrics(metrics)), timeout=120)
        first.kill()
    at_step_5 = read_metrics(metrics)
    fault = f"stall_in_save:6:{marker}"
    with Running(*command, module=FAULTY, log=folder / "second.log", FAULT=fault) as second:
        second.wait_until(marker.exists, timeout=120)
        second.kill()
    partial, in_save = sorted(p.name for p in checkpoints.iterdir()), read_metrics(metrics)
    finished = comppo(*command, log=folder / "third.log")
    yield Interrupted(at_step_5, partial, in_save, finished)


def reproducible(records: list[dict[str, Any]]) -> list[str]:
    """Records as text, so that equal means equal bits."""
    return [json.dumps(without_machine_keys(record)) for record in records]


def test_killed_at_step_5_went_on_from_step_3(uninterrupted: Path, interrupted: Interrupted) -> None:
    whole = reproducible(read_metrics(uninterrupted / "metrics.jsonl"))
    assert [r["step"] for r in interrupted.at_step_5] == [0, 1, 2, 3, 4, 5]
    assert [r["step"] for r in interrupted.in_save] == [0, 1, 2, 3, 4, 5, 6]
    assert reproducible(interrupted.at_step_5) == whole[:6]
    assert reproducible(interrupted.in_save) == whole[:7]


def test_killed_inside_a_save_went_on_from_the_checkpoint_before(
    folder: Path, uninterrupted: Path, interrupted: Interrupted
) -> None:
    assert interrupted.partial == ["step_00000003", "step_00000006.partial"]
    assert interrupted.finished.code == 0, interrupted.finished.output
    assert "resumed after step 3" in interrupted.finished.output
    run = folder / "runs" / "killed"
    records = read_metrics(run / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(STEPS + 1))
    assert reproducible(records) == reproducible(read_metrics(uninterrupted / "metrics.jsonl"))
    assert not list((run / "checkpoints").glob("*.partial"))


def test_resumed_weights_are_the_uninterrupted_ones(
    folder: Path, uninterrupted: Path, interrupted: Interrupted
) -> None:
    assert interrupted.finished.code == 0, interrupted.finished.output
    resumed = folder / "runs" / "killed" / "hf" / "model.safetensors"
    assert resumed.read_bytes() == (uninterrupted / "hf" / "model.safetensors").read_bytes()


def test_resumed_run_is_worth_comparing(uninterrupted: Path) -> None:
    """Rewards vary, the controller is mid-ramp, the actor moves after the critic's warm-up."""
    records = read_metrics(uninterrupted / "metrics.jsonl")
    assert len({r["reward/mean"] for r in records[1:]}) > STEPS // 2
    assert any(r["reward/correct"] > 0 for r in records[1:])
    assert len({r["controller/actor_lr"] for r in records[3:]}) > 2
    assert ["grad/actor" in r for r in records[1:]] == [False] * 2 + [True] * (STEPS - 2)
    assert len({r["eval/accuracy"] for r in records if "eval/accuracy" in r}) > 1
