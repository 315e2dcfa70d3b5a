"""`comppo sft`, `train`, `eval` and `gate-table` as a user runs them, each on what the one before left."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from comppo_mcore import cli
from comppo_mcore.config.load import load
from comppo_mcore.config.schema import Config
from comppo_mcore.credit.gate import POSITION_BINS, PositionTable
from comppo_mcore.data.tokenizer import load_tokenizer
from comppo_mcore.model import parallel
from comppo_mcore.trainer import train
from comppo_mcore.trainer.files import read_metrics
from comppo_mcore.trainer.logging import StageClock
from tests.demo_folder import write_small_demo_model
from tests.runs import Finished, comppo

CONFIG = """
model: {{path: {folder}/model, dtype: fp32}}
parallel: {{timeout_minutes: 5}}
data: {{source: arithmetic, arithmetic: {{steps: 1}}}}
rollout: {{prompts: 8, responses: 4, max_response_tokens: 16, top_p: 1.0}}
algo: {{minibatch: 16}}
critic: {{warmup_steps: 1, lr: 1e-3, width: 16, head_width: 16}}
gate: {{drift_every: 1}}
optim: {{lr: 1e-4}}
reward: {{workers: 1}}
train: {{steps: 3, micro_batch_tokens: 512, eval_every: 2, eval_problems: 32, save_every: 2}}
sft: {{steps: 60, batch: 32, lr: 5e-3, warmup: 5}}
run: {{dir: {folder}/runs}}
"""
PIPELINED = ("parallel.pp=2", "parallel.last_stage_layers=4")
TIMEOUT = 400.0
PROBLEMS = 32

# What every step of CompPO measures, by what it is about.
MEASURED = {
    "gate": "kappa_mean kappa_median kappa_iqr kappa_q05 kappa_q25 kappa_q75 kappa_q95 kappa_third_1 "
    "kappa_third_2 kappa_third_3 kappa_incorrect drift_mean drift_max empty_rows",
    "credit": "trace_reach value_reach beyond_reach advantage_mean advantage_std abs_mean abs_max",
    "critic": "value_mean return_mean explained_variance mae saturation dead_rows",
    "policy": "entropy ratio_mean ratio_max clip_fraction",
    "kl": "behavior reference loss",
    "loss": "policy value",
    "grad": "critic critic_max",
    "optimizer": "applied skipped",
    "gap": "mean max",
    "reward": "mean std accuracy_part format_part length_part correct formatted timed_out",
    "response": "length_mean length_max length_incorrect truncated tokens",
    "group": "zero_variance all_correct none_correct",
    "controller": "phase requested kl clip actor_lr value_clip critic_lr advantage_clip grad_clip epochs",
    "time": "rollout_s reward_s behavior_pass_s reference_pass_s transport_s update_s weight_sync_s step_s "
    "rollout_tokens_per_s behavior_pass_tokens_per_s reference_pass_tokens_per_s update_tokens_per_s",
    "tokens": "rollout behavior_pass reference_pass transport update",
    "memory": "peak_rss_gib",
}
# What only some steps have: after the critic's warm-up, with a correct response, at an evaluation.
SOMETIMES = {
    "grad": "actor actor_max",
    "critic": "spearman",
    "gate": "kappa_correct",
    "response": "length_correct",
    "eval": "accuracy problems best best_step last_20 aulc",
}


def keys(table: dict[str, str]) -> set[str]:
    return {f"{part}/{name}" for part, names in table.items() for name in names.split()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    write_small_demo_model(folder / "model")
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def command(folder: Path, name: str, *words: object) -> Finished:
    return comppo(*words, log=folder / f"{name}.log", timeout=TIMEOUT)


@pytest.fixture(scope="module")
def warm_start(folder: Path) -> Finished:
    words = ("run.name=warm", "model.weights=random")
    return command(folder, "warm", "sft", folder / "config.yaml", *words)


@pytest.fixture(scope="module")
def warm(folder: Path, warm_start: Finished) -> Path:
    """The policy that the warm start wrote."""
    assert warm_start.code == 0, warm_start.output
    return folder / "runs" / "warm" / "hf"


@pytest.fixture(scope="module")
def training(folder: Path, warm: Path) -> Finished:
    words = ("run.name=trained", f"model.path={warm}", *PIPELINED)
    return command(folder, "trained", "train", folder / "config.yaml", *words)


@pytest.fixture(scope="module")
def trained(folder: Path, training: Finished) -> Path:
    """The run folder of three CompPO steps in two processes."""
    assert training.code == 0, training.output
    return folder / "runs" / "trained"


@pytest.fixture(scope="module")
def tabulating(folder: Path, trained: Path) -> Finished:
    return command(folder, "table", "gate-table", trained)


@pytest.fixture
def here() -> Iterator[None]:
    """A command in this process leaves no process group behind."""
    yield
    parallel.shutdown()


def number(pattern: str, text: str) -> float:
    """The one number that a pattern's group finds."""
    (found,) = re.findall(pattern, text, re.M)
    return float(found)


# ---------------------------------------------------------------------------- sft


def test_sft_prints_its_batch_its_loss_and_the_accuracy(warm_start: Finished, warm: Path) -> None:
    assert (
        "batch: 32 examples per optimizer step (32 per data-parallel rank); micro-batch ≤ 512 tokens; "
        "60 optimizer steps; data-parallel size 1 (world 1 = TP 1 × PP 1 × CP 1 × DP 1)"
    ) in warm_start.output
    losses = [float(x) for x in re.findall(r"^step \d+/60  loss ([\d.]+)", warm_start.output, re.M)]
    assert len(losses) == 60 and losses[-1] < losses[0] / 3
    accuracy = number(r"^warm start after 60 steps: greedy accuracy (\d\.\d{3}) on 32 ", warm_start.output)
    assert 0 <= accuracy <= 1
    assert warm_start.output.splitlines()[-1].endswith(f" on {PROBLEMS} held-out problems; model in {warm}")


def test_sft_writes_a_model_that_transformers_loads(warm: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(warm)
    assert model.config.num_hidden_layers == 5 and model.config.hidden_size == 32
    assert len(load_tokenizer(warm)) == model.config.vocab_size
    assert [r["step"] for r in read_metrics(warm.parent / "metrics.jsonl")] == list(range(1, 61))


# ---------------------------------------------------------------------------- train


def test_train_prints_its_batch_once_and_every_step(training: Finished, trained: Path) -> None:
    line = (
        "batch: 8 prompts × 4 responses = 32 trajectories; minibatch 16 trajectories (16 per data-parallel "
        "rank); micro-batch ≤ 512 tokens; 2 optimizer steps per epoch × 2 epochs; data-parallel size 1 "
        "(world 2 = TP 1 × PP 2 × CP 1 × DP 1)"
    )
    assert training.output.splitlines().count(line) == 1
    assert "model: qwen3, 5 layers (1 + 4 over 2 pipeline stages); hidden 32;" in training.output
    assert re.findall(r"^step (\d)/3 ", training.output, re.M) == ["0", "1", "2", "3"]
    for step in (1, 2, 3):
        (shown,) = re.findall(rf"^step {step}/3 .*$", training.output, re.M)
        assert all(f"  {label} " in shown for label in ("reward", "accuracy", "κ", "reach", "EV", "length"))


def test_train_ends_with_accuracy_gate_and_reach(training: Finished, trained: Path) -> None:
    *_, finished, accuracy, gate, thirds, reach = training.output.splitlines()
    assert finished == f"finished after step 3; policy in {trained / 'hf'}"
    last = read_metrics(trained / "metrics.jsonl")[-1]
    assert f" at step 0, final {last['eval/accuracy']:.3f}, best {last['eval/best']:.3f} (step " in accuracy
    assert accuracy.startswith("held-out accuracy: ") and f", AULC {last['eval/aulc']:.3f}" in accuracy
    quantiles = " / ".join(f"{last[f'gate/kappa_{q}']:.3f}" for q in ("q05", "q25", "median", "q75", "q95"))
    assert gate == f"κ: mean {last['gate/kappa_mean']:.3f}, quantiles 5/25/50/75/95 %: {quantiles}"
    means = " / ".join(f"{last[f'gate/kappa_third_{i}']:.3f}" for i in (1, 2, 3))
    assert thirds == f"κ by thirds of the response: {means}"
    trace, value = last["credit/trace_reach"], last["credit/value_reach"]
    assert reach == f"credit reach: trace {trace:.3f}, value {value:.3f}"
    assert 0.1 < last["gate/kappa_q05"] < last["gate/kappa_q95"] < 0.9


def test_train_measures_everything_on_every_step(trained: Path) -> None:
    records = read_metrics(trained / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert {step: keys(MEASURED) - records[step].keys() for step in (1, 2, 3)} == {
        1: set(),
        2: set(),
        3: set(),
    }
    assert keys(SOMETIMES) - set().union(*records) == set()
    assert ["grad/actor" in r for r in records] == [False, False, True, True]  # after one step of warm-up
    assert ["eval/accuracy" in r for r in records] == [True, False, True, True]
    for record in records[1:]:
        assert record["tokens/update"] == 2 * record["response/tokens"] == 2 * record["tokens/rollout"]
        assert record["optimizer/applied"] == 4 and record["gap/mean"] < 1e-4


def test_train_leaves_its_configuration_events_checkpoints_and_policy(folder: Path, trained: Path) -> None:
    overrides = ("run.name=trained", f"model.path={folder}/runs/warm/hf", *PIPELINED)
    assert load(trained / "config.yaml") == load(folder / "config.yaml", overrides)
    assert list((trained / "tensorboard").glob("events.out.tfevents.*"))
    names = {path.name for path in (trained / "checkpoints").iterdir()}
    assert names >= {"step_00000002", "step_00000003"} and not any("partial" in name for name in names)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder / "runs" / "warm" / "hf", trained / "hf")
    )
    assert before.keys() == after.keys()
    assert all((after[name] != x).any() for name, x in before.items())


# ---------------------------------------------------------------------------- eval, gate-table, position


def test_eval_prints_greedy_and_majority_accuracy(folder: Path, trained: Path) -> None:
    words = (f"model.path={trained / 'hf'}", "train.eval_majority=2")
    result = command(folder, "eval", "eval", folder / "config.yaml", *words)
    assert result.code == 0, result.output
    accuracy = number(rf"^greedy pass@1: ([\d.]+) on {PROBLEMS} held-out problems$", result.output)
    majority = number(r"^majority@2: ([\d.]+)$", result.output)
    in_training = read_metrics(trained / "metrics.jsonl")[-1]["eval/accuracy"]
    assert abs(accuracy - in_training) <= 1 / PROBLEMS + 1e-4  # other batches round differently
    assert 0 <= majority <= 1


def test_gate_table_prints_and_writes_the_table(trained: Path, tabulating: Finished) -> None:
    assert tabulating.code == 0, tabulating.output
    path = trained / "gate_table.json"
    *rows, last = tabulating.output.splitlines()
    assert last == f"wrote {path}; use it with gate.mode=position gate.table={path}"
    table = PositionTable.from_json(path.read_text(), str(path))
    expected = zip(range(POSITION_BINS), table.kappa, table.count, strict=True)
    assert rows == [f"t/T {b / POSITION_BINS:.2f}  κ {kappa:.4f}  tokens {n}" for b, kappa, n in expected]
    assert sum(table.count) == sum(
        r.get("response/tokens", 0) for r in read_metrics(trained / "metrics.jsonl")
    )


def test_train_by_position_uses_the_table(
    folder: Path, warm: Path, trained: Path, tabulating: Finished
) -> None:
    path = trained / "gate_table.json"
    words = ("run.name=position", f"model.path={warm}", "gate.mode=position", f"gate.table={path}")
    short = ("train.steps=1", "train.eval_every=0", "train.eval_problems=4")
    result = command(folder, "position", "train", folder / "config.yaml", *words, *short)
    assert result.code == 0, result.output
    record = read_metrics(folder / "runs" / "position" / "metrics.jsonl")[-1]
    kappa = json.loads(path.read_text())["kappa"]
    assert min(kappa) - 1e-6 <= record["gate/kappa_q05"] <= record["gate/kappa_q95"] <= max(kappa) + 1e-6
    assert "gate/drift_mean" not in record and "gate_position/sum_00" not in record
    first = read_metrics(trained / "metrics.jsonl")[1]
    assert record["gate/kappa_median"] != first["gate/kappa_median"]


# ---------------------------------------------------------------------------- other sources and algorithms


def run_here(folder: Path, *words: str) -> dict[str, Any]:
    """One step in this process; its record."""
    name = next(word.removeprefix("run.name=") for word in words if word.startswith("run.name="))
    short = ("train.steps=1", "train.eval_every=0", "train.eval_problems=4", "train.keep_best=false")
    assert cli.main(["train", str(folder / "config.yaml"), *short, *words]) == 0
    return read_metrics(folder / "runs" / name / "metrics.jsonl")[-1]


def test_train_on_a_file_of_dapos_layout(
    folder: Path, warm: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = [(a, b) for a in range(4) for b in range(4)]
    records = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
            "reward_model": {"ground_truth": str(a + b), "style": "rule"},
        }
        for a, b in sums
    ]
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = ("data.source=file", f"data.path={path}", "data.answer_key=reward_model.ground_truth")
    record = run_here(folder, "run.name=file", f"model.path={warm}", *source, "data.eval_holdout=6")
    assert record["eval/problems"] == 4 and record["response/tokens"] > 0
    assert keys(MEASURED) - record.keys() <= {"gate/kappa_incorrect", "response/length_incorrect"}
    assert "finished after step 1" in capsys.readouterr().out


def test_train_with_grpo_has_no_critic(
    folder: Path, warm: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_here(folder, "run.name=grpo", f"model.path={warm}", "algo.name=grpo", "algo.kl.coef=0")
    printed = capsys.readouterr().out
    assert "κ" not in printed and "credit reach" not in printed and "critic:" not in printed
    assert "held-out accuracy: " in printed
    assert not [key for key in record if key.startswith(("gate/", "critic/", "gate_position/"))]
    absent = {"grad/critic", "loss/value", "kl/reference", "time/reference_pass_s", "tokens/reference_pass"}
    assert not absent & record.keys()
    assert record["grad/actor"] > 0 and record["tokens/transport"] == record["response/tokens"]


@pytest.mark.parametrize(("cap", "epochs"), [(None, 3), (2, 2), (1, 1), (4, 3)])
def test_update_tokens_are_those_of_the_epochs_that_were_run(cap: int | None, epochs: int) -> None:
    """The controller may cap the epochs; its knob is absent where it does not."""
    config = Config.model_validate({"algo": {"epochs": 3}})
    clock = StageClock(lambda _: None)
    knobs = {} if cap is None else {"controller/epochs": float(cap)}
    train.count_tokens(clock, config, {"response/tokens": 100.0, **knobs})
    assert clock.metrics()["tokens/update"] == 100 * epochs


def test_sft_on_pairs_needs_no_problems(folder: Path, here: None, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [{"prompt": f"{a}+1=?", "response": f"<answer>{a + 1}</answer>"} for a in range(8)]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = ("run.name=pairs", "model.weights=random", "data.source=file", f"sft.path={path}", "sft.steps=1")
    assert cli.main(["sft", str(folder / "config.yaml"), *words]) == 0
    out = folder / "runs" / "pairs" / "hf"
    assert capsys.readouterr().out.splitlines()[-1] == f"warm start after 1 steps: model in {out}"
    assert (out / "model.safetensors").is_file()
