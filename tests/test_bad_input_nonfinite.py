"""NaN and infinities: the step is not applied, its batch is kept, a run that cannot recover stops whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from comppo_mcore import cli
from comppo_mcore.errors import UserError
from comppo_mcore.model import checkpoint, parallel
from comppo_mcore.trainer.files import read_metrics
from comppo_mcore.trainer.replay import load_bad_batch
from tests.bigram_policy import write_bigram_policy
from tests.dist import run_distributed

# Two epochs of two minibatches each.
CONFIG = """
model: {{path: {folder}/model, dtype: fp32}}
parallel: {{pp: 2, last_stage_layers: 4, timeout_minutes: 2}}
data: {{source: arithmetic, arithmetic: {{steps: 2}}}}
rollout: {{prompts: 4, responses: 2, max_response_tokens: 12, top_p: 1.0}}
algo: {{minibatch: 4}}
gate: {{drift_every: 0}}
critic: {{warmup_steps: 0, lr: 1e-3, width: 16, head_width: 16}}
optim: {{lr: 1e-2}}
reward: {{workers: 1}}
controller: {{preset: "off"}}
train: {{eval_every: 0, eval_problems: 4, save_every: 1, keep_best: false}}
log: {{tensorboard: false, progress: false}}
run: {{dir: {folder}/runs}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    write_bigram_policy(folder / "model")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[dict[str, Any]]:
    """What tests/workers/nonfinite.py found on each rank."""
    outputs = run_distributed("nonfinite.py", 2, [folder / "config.yaml"])
    return [json.loads(out.splitlines()[-1]) for out in outputs]


def records(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    return {r["step"]: r for r in read_metrics(folder / "runs" / name / "metrics.jsonl")}


def bad_steps(folder: Path, name: str) -> list[int]:
    return [step for step, record in records(folder, name).items() if "step/bad" in record]


def applied(case: dict[str, Any], step: int) -> list[bool]:
    return [done for at, done, _ in case["minibatches"] if at == step]


def test_a_run_survives_transient_faults(folder: Path, cases: list[dict[str, Any]]) -> None:
    assert [of_rank["transient"]["end"] for of_rank in cases] == ["", ""]
    assert list(records(folder, "transient")) == list(range(1, 10))
    assert bad_steps(folder, "transient") == [2, 3, 5, 7, 8]
    assert list(checkpoint.checkpoints(folder / "runs" / "transient" / "checkpoints")) == [9]


def test_an_optimizer_step_that_was_not_applied_changed_nothing(cases: list[dict[str, Any]]) -> None:
    """Neither weights nor moments nor step counts, on either rank, whichever rank had the NaN."""
    for of_rank in cases:
        for name, case in of_rank.items():
            assert case["minibatches"]
            assert all(done == changed for _, done, changed in case["minibatches"]), name


def test_a_bad_step_ends_at_the_first_minibatch_that_fails(cases: list[dict[str, Any]]) -> None:
    """Steps 2, 3 and 7 fail before the update, 5 in its second minibatch, 8 in its first."""
    for of_rank in cases:
        found = {step: applied(of_rank["transient"], step) for step in range(1, 10)}
        whole = [True] * 4
        assert found == {
            1: whole,
            2: [],
            3: [],
            4: whole,
            5: [True, False],
            6: whole,
            7: [],
            8: [False],
            9: whole,
        }


def test_the_engine_gets_what_a_bad_step_did_apply(folder: Path, cases: list[dict[str, Any]]) -> None:
    assert cases[0]["transient"]["end"] == ""
    for step, record in records(folder, "transient").items():
        if step not in (2, 3, 7):  # those stop before the gap is measured
            assert record["gap/mean"] < 1e-5


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (2, "log-probs or values of the behaviour pass are not finite"),
        (3, "log-probs of the engine are not finite"),
        (5, "loss or gradients are not finite"),
        (7, "log-probs or values of the behaviour pass are not finite"),
        (8, "loss or gradients are not finite"),
    ],
)
def test_the_batch_of_a_bad_step_is_kept(
    folder: Path, cases: list[dict[str, Any]], step: int, reason: str
) -> None:
    assert cases[0]["transient"]["end"] == ""
    batch = load_bad_batch(folder / "runs" / "transient" / "bad_batches" / f"step_{step:08d}.json")
    assert batch.reason == reason
    assert batch.step == step
    assert len(batch.samples) == len(batch.rewards) == 8
    assert all(s.prompt and 1 <= len(s.response) <= 12 for s in batch.samples)
    assert [len(x) for x in batch.engine_logprobs] == [len(s.response) for s in batch.samples]
    assert [math.isnan(x) for row in batch.engine_logprobs for x in row].count(True) == (step == 3)


def test_too_many_bad_steps_in_a_row_stop_the_run(folder: Path, cases: list[dict[str, Any]]) -> None:
    for of_rank in cases:
        assert of_rank["persistent"]["end"].startswith(
            "train.max_bad_steps is 2 and as many steps in a row gave NaN or inf: see "
        )
    assert bad_steps(folder, "persistent") == [] and list(records(folder, "persistent")) == [1, 2, 3]


def test_weights_that_are_lost_stop_the_run_at_once(cases: list[dict[str, Any]]) -> None:
    """Lost by the last optimizer step of step 2, which no loss and no gradient saw."""
    for of_rank in cases:
        assert of_rank["spoiled"]["end"].startswith("the weights hold NaN or inf at step 2: see ")
        assert [step for step, _, _ in of_rank["spoiled"]["minibatches"]] == [1] * 4 + [2] * 4


def test_weights_that_are_lost_are_never_saved(folder: Path, cases: list[dict[str, Any]]) -> None:
    """Only the first stage holds the infinity; both refuse, and write nothing."""
    for of_rank in cases:
        assert of_rank["spoiled"]["saved"].startswith("the weights after step 99 hold NaN or inf")
        assert of_rank["transient"]["saved"] == of_rank["persistent"]["saved"] == ""
    assert not list((folder / "runs" / "spoiled" / "checkpoints").glob("step_00000099*"))


@pytest.mark.parametrize("name", ["persistent", "spoiled"])
def test_the_last_good_checkpoint_goes_on(folder: Path, cases: list[dict[str, Any]], name: str) -> None:
    """Relaunched without the fault; the bad steps are made again and their records replaced."""
    for of_rank in cases:
        again = of_rank[f"{name}, relaunched"]
        assert again["end"] == ""
        assert [step for step, _, _ in again["minibatches"]] == [2] * 4 + [3] * 4
    assert list(checkpoint.checkpoints(folder / "runs" / name / "checkpoints")) == [2, 3]


def test_a_model_with_nan_is_refused_before_any_work(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_bigram_policy(tmp_path / "model")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    one_process = ("parallel.pp=1", "parallel.last_stage_layers=null", "run.name=broken")
    try:
        code = cli.main(["train", str(folder / "config.yaml"), f"model.path={broken}", *one_process])
    finally:
        parallel.shutdown()
    assert code == UserError.EXIT_CODE
    assert f"error: model.path is {broken}, whose weights hold NaN or inf" in capsys.readouterr().err
    assert not records(folder, "broken")
