"""Checkpoints that are damaged, or of another configuration or layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from comppo_mcore import cli
from comppo_mcore.config.load import load
from comppo_mcore.errors import UserError
from comppo_mcore.model import checkpoint, parallel
from comppo_mcore.trainer.files import read_metrics, without_machine_keys
from comppo_mcore.trainer.train import newest_checkpoint
from tests.bigram_policy import write_bigram_policy
from tests.dist import run_distributed

# The tiny top_p makes rollouts the same for every number of ranks, each of which has its own seed.
CONFIG = """
model: {{path: {folder}/model, dtype: fp32}}
parallel: {{pp: 2, last_stage_layers: 4, timeout_minutes: 2}}
data: {{source: arithmetic, arithmetic: {{steps: 2}}}}
rollout: {{prompts: 4, responses: 2, max_response_tokens: 12, top_p: 0.01}}
algo: {{minibatch: 4}}
critic: {{warmup_steps: 0, lr: 1e-3, width: 16, head_width: 16}}
optim: {{lr: 1e-3}}
reward: {{workers: 1}}
train: {{eval_every: 0, eval_problems: 4, save_every: 1, keep_best: false}}
log: {{tensorboard: false, progress: false}}
run: {{dir: {folder}/runs}}
"""
ONE_PROCESS = ("parallel.pp=1", "parallel.last_stage_layers=null", "run.allow_config_change=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_bigram_policy(folder / "model")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.fixture(scope="module")
def ends(folder: Path) -> list[dict[str, str]]:
    """How the runs of tests/workers/reshard.py ended, by rank; each went on from the base run's step 2."""
    arguments = [folder / "config.yaml", folder / "runs"]
    return [json.loads(out.splitlines()[-1]) for out in run_distributed("reshard.py", 2, arguments)]


@pytest.fixture
def run(folder: Path, ends: Any, request: pytest.FixtureRequest) -> Path:
    """A copy of the base run, with checkpoints of step 1 and 2."""
    assert ends[0]["base"] == ""
    return Path(shutil.copytree(folder / "runs" / "base", folder / "runs" / request.node.name))


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    yield
    parallel.shutdown()


def relaunch(folder: Path, run: Path, *overrides: str) -> int:
    """`comppo train` on that run folder, in this process."""
    config = str(folder / "config.yaml")
    return cli.main(["train", config, f"run.name={run.name}", *ONE_PROCESS, *overrides])


def truncate(path: Path) -> None:
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])


def flip_a_byte(path: Path) -> None:
    shard = path / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x10
    shard.write_bytes(data)


def change_trainer_state(path: Path) -> None:
    """Another number, still JSON."""
    state = json.loads((path / "trainer.json").read_text())
    (path / "trainer.json").write_text(json.dumps(state | {"prompts_consumed": 0}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "__0_0.distcp is missing, short or altered": truncate,
    "__1_0.distcp is missing, short or altered": flip_a_byte,
    ".metadata is missing, short or altered": lambda path: (path / ".metadata").unlink(),
    "manifest.json is missing or unreadable": lambda path: (path / "manifest.json").unlink(),
    "manifest.json is missing or unreadable ": lambda path: (path / "manifest.json").write_text("{"),
    "trainer.json is missing, short or altered": lambda path: (path / "trainer.json").write_text("{"),
    "trainer.json is missing, short or altered ": change_trainer_state,
}


@pytest.mark.parametrize("problem", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_offered(
    folder: Path, run: Path, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run / "checkpoints" / "step_00000002"
    DAMAGES[problem](newest)
    kept = (run / "metrics.jsonl").read_bytes()
    assert relaunch(folder, run, "train.steps=3") == UserError.EXIT_CODE
    sentence = f"checkpoint {newest} is damaged ({problem.strip()}): remove it and relaunch to go on from "
    assert capsys.readouterr().err.splitlines()[-1] == f"comppo: error: {sentence}step_00000001"
    assert (run / "metrics.jsonl").read_bytes() == kept
    assert list(checkpoint.checkpoints(run / "checkpoints")) == [1, 2]


def test_after_the_remedy_the_checkpoint_before_goes_on(folder: Path, run: Path) -> None:
    truncate(run / "checkpoints" / "step_00000002")
    assert relaunch(folder, run, "train.steps=2") == UserError.EXIT_CODE
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    whole = read_metrics(run / "metrics.jsonl")
    parallel.shutdown()
    assert relaunch(folder, run, "train.steps=2") == 0
    assert list(checkpoint.checkpoints(run / "checkpoints")) == [1, 2]
    assert_close(read_metrics(run / "metrics.jsonl"), whole)


def test_the_only_checkpoint_damaged_means_to_start_over(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    (run / "checkpoints" / "step_00000002" / "trainer.json").unlink()
    assert relaunch(folder, run) == UserError.EXIT_CODE
    assert capsys.readouterr().err.endswith("remove it and relaunch to start over\n")


def test_damage_that_one_rank_finds_stops_all_ranks(ends: list[dict[str, str]]) -> None:
    for of_rank in ends:
        assert "is damaged (__1_0.distcp is missing, short or altered): remove it" in of_rank["damaged"]


@pytest.mark.parametrize("change", ["standard_critic", "other_width", "no_critic"])
def test_another_model_is_refused_on_every_rank(ends: list[dict[str, str]], change: str) -> None:
    """A critic that the checkpoint does not hold is never left at its initialisation in silence."""
    for of_rank in ends:
        assert (
            "step_00000002 holds other tensors than the configured model: set model.path" in of_rank[change]
        )


def test_a_changed_configuration_is_refused_with_the_fields(
    folder: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ("optim.lr=5e-4", "controller.ramp=[3, 9]", "run.allow_config_change=false")
    assert relaunch(folder, run, *changed, "train.steps=9") == UserError.EXIT_CODE
    (sentence,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("comppo: error"))
    assert f"{run} holds a run with another configuration (" in sentence
    for difference in (
        "parallel.pp was 2 and is 1",
        "parallel.last_stage_layers was 4 and is None",
        "optim.lr was 0.001 and is 0.0005",
        "controller.ramp was [25, 40] and is [3, 9]",
    ):
        assert difference in sentence
    assert "train.steps" not in sentence
    assert sentence.endswith("or run.allow_config_change=true to go on with the new one")


def test_free_fields_may_change(folder: Path, run: Path) -> None:
    free = ("train.steps=50", "train.save_every=7", "train.keep_last=9", "log.progress=true")
    config = load(folder / "config.yaml", ["run.name=base", *free])
    assert newest_checkpoint(run, config) == run / "checkpoints" / "step_00000002"


def test_a_configuration_of_another_version_is_refused(folder: Path, run: Path) -> None:
    newest = run / "checkpoints" / "step_00000002"
    state = json.loads((newest / "trainer.json").read_text())
    state["config"]["optim"]["momentum"] = 0.9
    (newest / "trainer.json").write_text(json.dumps(state))
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["trainer.json"] = checkpoint._checksum(newest / "trainer.json")
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="has 1 configuration fields that this version does not know"):
        newest_checkpoint(run, load(folder / "config.yaml"))


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_another_layout_goes_on_with_the_same_numbers(
    folder: Path, ends: list[dict[str, str]], layout: str
) -> None:
    assert ends[0]["pp2"] == ends[0][layout] == ""
    first, second = (read_metrics(folder / "runs" / name / "metrics.jsonl") for name in ("pp2", layout))
    assert [r["step"] for r in first] == [1, 2, 3]
    assert_close(second, first)


def test_one_process_goes_on_from_two_stages_with_the_same_numbers(folder: Path, run: Path) -> None:
    assert relaunch(folder, run, "train.steps=3") == 0
    records = read_metrics(run / "metrics.jsonl")
    assert_close(records, read_metrics(folder / "runs" / "pp2" / "metrics.jsonl"))


def assert_close(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(records) == len(expected)
    for record, other in zip(
        map(without_machine_keys, records), map(without_machine_keys, expected), strict=True
    ):
        assert record.keys() == other.keys()
        for key, value in record.items():
            assert value == pytest.approx(other[key], rel=1e-4, abs=1e-4), key


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.dist, "barrier", lambda: None)
    for name in ("step_00000003", "step_00000006", "step_00000009", "step_00000012.partial"):
        (tmp_path / name / "shards").mkdir(parents=True)
        (tmp_path / name / "shards" / "0").touch()
    checkpoint.prune(tmp_path, 1, {3}, FirstRank())  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000009"]


def test_half_deleted_checkpoints_are_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it prunes: what it was deleting no longer counts."""
    monkeypatch.setattr(
        checkpoint.shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    for name in ("step_00000003", "step_00000006"):
        (tmp_path / name).mkdir()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.prune(tmp_path, 1, set(), FirstRank())  # type: ignore[arg-type]
    assert list(checkpoint.checkpoints(tmp_path)) == [6]


class FirstRank:
    rank = 0
