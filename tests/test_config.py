"""Loading, resolving, comparing and describing configurations, and how the console script starts a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comppo_mcore import cli
from comppo_mcore.config.algorithm import fill_algorithm, has_critic
from comppo_mcore.config.check import layers_per_stage
from comppo_mcore.config.describe import batch_line, model_line, sft_batch_line
from comppo_mcore.config.load import FIELDS, FREE_FIELDS, Difference, diff, dump, load
from comppo_mcore.config.model_shape import read_model_shape
from comppo_mcore.config.schema import Config, ParallelConfig
from comppo_mcore.config.yaml12 import parse, render
from tests.configs import write_config, write_model


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write_config(tmp_path)


# ---------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2.5E3", -2500.0),
        (".5", 0.5),
        ("017", 17),
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        (".inf", ".inf"),
        ("[1, 2e0]", [1, 2.0]),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    read = parse(text, "text")
    assert read == value and type(read) is type(value)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)


@given(st.dictionaries(st.text(), SCALARS | st.lists(SCALARS, max_size=3), max_size=4))
def test_yaml_round_trip(tree: dict[str, object]) -> None:
    assert parse(render(tree), "text") == tree


def test_file_lies_over_defaults_and_overrides_over_the_file(config_path: Path) -> None:
    config = load(config_path, ["train.steps=7", "gate.tau=3"])
    assert (config.train.steps, config.rollout.max_response_tokens, config.gate.tau) == (7, 64, 3.0)
    assert config.optim == Config().optim


def test_whole_numbers_pass_as_float_and_lists_as_tuples(config_path: Path) -> None:
    config = load(
        config_path, ["optim.lr=1", "optim.betas=[0, 0.5]", "data.tasks=[a, b]", "controller.ramp=[1, 2]"]
    )
    assert config.optim.lr == 1.0 and type(config.optim.lr) is float
    assert config.optim.betas == (0.0, 0.5)
    assert config.data.tasks == ("a", "b")
    assert config.controller.ramp == (1, 2)


def test_one_field_of_a_ramp_leaves_its_others_alone(config_path: Path) -> None:
    before, after = (
        load(config_path).reward.format,
        load(config_path, ["reward.format.stop=80"]).reward.format,
    )
    assert after == before.model_copy(update={"stop": 80}) and after.end == 1.0


def test_optional_section_can_be_opened_and_closed(config_path: Path) -> None:
    opened = load(config_path, ["gate.calibrate.reach=0.8"]).gate.calibrate
    assert opened is not None and (opened.reach, opened.keep) == (0.8, "lam")
    assert load(config_path, ["gate.calibrate={}", "gate.calibrate=null"]).gate.calibrate is None


def test_text_fields_take_an_override_as_it_stands(config_path: Path) -> None:
    config = load(config_path, ["run.name=17", "data.template={prompt}: a [b", "data.system_prompt=null"])
    assert (config.run.name, config.data.template, config.data.system_prompt) == (
        "17",
        "{prompt}: a [b",
        None,
    )


def test_extends_reads_another_file_first(config_path: Path) -> None:
    folder = config_path.parent / "variants"
    folder.mkdir()
    (folder / "long.yaml").write_text("extends: ../run.yaml\ntrain.steps: 9\ncontroller: {preset: off}\n")
    config = load(folder / "long.yaml")
    assert config == load(config_path, ["train.steps=9", "controller.preset=off"])
    assert config.controller.preset == "off"


def test_dump_is_read_back_as_the_same_configuration(config_path: Path, tmp_path: Path) -> None:
    config = load(config_path, ["algo.name=ppo", "transport.gamma=0.9", "run.name=1e5", "data.template=off"])
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(config))
    assert load(copy) == config


# ---------------------------------------------------------------------------- differences, algorithms


def test_diff_names_fields_and_both_values(config_path: Path) -> None:
    first = load(config_path)
    second = load(
        config_path, ["optim.lr=1e-5", "gate.calibrate.reach=0.5", "train.steps=99", "log.wandb=true"]
    )
    assert sorted(diff(first, second)) == [
        Difference("gate.calibrate.keep", None, "lam"),
        Difference("gate.calibrate.reach", None, 0.5),
        Difference("optim.lr", 1e-6, 1e-5),
    ]
    assert diff(first, first) == []


def test_every_free_field_exists() -> None:
    assert FREE_FIELDS - FIELDS.keys() == set()


def test_ppo_is_a_fixed_gate_at_gamma_with_the_standard_critic(config_path: Path) -> None:
    config = load(config_path, ["algo.name=ppo", "transport.gamma=0.97", "gate.calibrate={}"])
    assert (config.gate.mode, config.gate.fixed_kappa, config.critic.kind) == ("fixed", 0.97, "standard")
    assert config.gate.calibrate is None and has_critic(config)


@pytest.mark.parametrize(
    ("name", "aggregation", "critic"),
    [
        ("comppo", "token", True),
        ("ppo", "token", True),
        ("grpo", "sequence", False),
        ("rloo", "token", False),
    ],
)
def test_algorithm_decides_aggregation_and_critic(
    config_path: Path, name: str, aggregation: str, critic: bool
) -> None:
    config = load(config_path, [f"algo.name={name}"])
    assert config.algo.aggregation == aggregation
    assert has_critic(config) is critic
    assert fill_algorithm(config) == config


def test_comppo_stays_as_configured(config_path: Path) -> None:
    config = load(config_path, ["gate.mode=fixed", "gate.fixed_kappa=0.5", "algo.aggregation=constant"])
    assert (config.gate.mode, config.gate.fixed_kappa, config.algo.aggregation) == ("fixed", 0.5, "constant")
    assert config.critic.kind == "aligned"


# ---------------------------------------------------------------------------- model shape, description


def test_shape_of_qwen3(tmp_path: Path) -> None:
    shape = read_model_shape(write_model(tmp_path))
    assert (shape.family, shape.num_layers, shape.hidden_size, shape.ffn_size) == ("qwen3", 4, 128, 256)
    assert (shape.num_heads, shape.num_kv_groups, shape.head_dim) == (4, 2, 64)
    assert (shape.vocab_size, shape.tied, shape.qk_norm, shape.max_positions) == (131, True, True, 512)
    assert (shape.norm_eps, shape.rope_theta, shape.rope_scaling_factor) == (1e-6, 1e6, None)


def test_shape_of_llama_with_its_rotary_scaling(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    gone = {"head_dim": None, "num_key_value_heads": None, "tie_word_embeddings": None, "rope_theta": None}
    shape = read_model_shape(write_model(tmp_path, model_type="llama", rope_parameters=rope, **gone))
    assert (shape.head_dim, shape.num_kv_groups, shape.tied, shape.qk_norm) == (32, 4, False, False)
    assert (shape.rope_theta, shape.rope_scaling_factor) == (5e5, 8.0)


@pytest.mark.parametrize(
    ("pp", "last", "stages"),
    [
        (1, None, (4,)),
        (2, None, (2, 2)),
        (4, None, (1,) * 4),
        (2, 3, (1, 3)),
        (3, 2, (1, 1, 2)),
        (1, 4, (4,)),
    ],
)
def test_layers_lie_on_stages(pp: int, last: int | None, stages: tuple[int, ...]) -> None:
    assert layers_per_stage(ParallelConfig(pp=pp, last_stage_layers=last), 4) == stages


def test_batch_lines_name_every_number(config_path: Path) -> None:
    config = load(config_path, ["parallel.pp=2", "critic.layers=2"])
    assert batch_line(config, 4) == (
        "batch: 4 prompts × 4 responses = 16 trajectories; minibatch 4 trajectories "
        "(2 per data-parallel rank); micro-batch ≤ 1024 tokens; 4 optimizer steps per epoch × 2 epochs; "
        "data-parallel size 2 (world 4 = TP 1 × PP 2 × CP 1 × DP 2)"
    )
    assert sft_batch_line(config, 4).startswith(
        "batch: 64 examples per optimizer step (32 per data-parallel rank)"
    )
    assert "4 layers (2 + 2 over 2 pipeline stages)" in model_line(
        config, read_model_shape(config.model.path)
    )


# ---------------------------------------------------------------------------- the console script


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What `comppo train` would start: a configuration in this process, or arguments in several."""
    seen: list[object] = []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "train", replace(cli.COMMANDS["train"], run=seen.append))
    monkeypatch.setattr(cli, "launch", lambda arguments, count: seen.append((arguments, count)) or 0)
    return seen


def test_dry_run_prints_the_resolved_configuration(
    config_path: Path, started: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(config_path), "--dry-run", "algo.name=grpo"]) == 0
    text, _, lines = capsys.readouterr().out.partition("\n\n")
    (tmp_path / "printed.yaml").write_text(text)
    assert load(tmp_path / "printed.yaml") == load(config_path, ["algo.name=grpo"])
    assert lines.startswith("batch: ") and "\nmodel: qwen3" in lines
    assert started == []


def test_one_process_runs_here(config_path: Path, started: list[object]) -> None:
    assert cli.main(["train", str(config_path), "train.steps=5"]) == 0
    assert started == [load(config_path, ["train.steps=5"])]


@pytest.mark.parametrize(
    ("words", "count"),
    [(["parallel.tp=2"], 2), (["--nproc", "4", "parallel.tp=2"], 4), (["--nproc", "2"], 2)],
)
def test_several_processes_are_launched(
    config_path: Path, started: list[object], words: list[str], count: int
) -> None:
    arguments = ["train", str(config_path), *words]
    assert cli.main(arguments) == 0
    assert started == [(arguments, count)]


def test_a_rank_of_torchrun_runs_here(
    config_path: Path,
    started: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["train", str(config_path), "parallel.tp=2"]) == 0
    assert started == [load(config_path, ["parallel.tp=2"])] * 2
    assert capsys.readouterr().out.count("batch: ") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("comppo ")


def test_cpu_defaults_leave_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_run", lambda *_: 0)
    monkeypatch.setattr("comppo_mcore.processes.shutil.which", lambda _: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    cli.main(["train", "any.yaml"])
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCHDYNAMO_DISABLE"]) == ("3", "1")
