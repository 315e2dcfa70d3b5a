"""`comppo train` on real servers: exact log-probs, tokens of older weights, each prompt once, a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.demo_folder import write_small_demo_model
from tests.runs import Finished, Running, comppo
from tests.sglang_fixtures import server_processes

pytestmark = pytest.mark.sglang

GAP = 1e-4  # nats
BASE = {
    "parallel.pp": 2,
    "parallel.last_stage_layers": 4,
    "model.weights": "random",
    "rollout.engine": "sglang",
    "rollout.prompts": 8,
    "rollout.max_response_tokens": 32,
    "algo.minibatch": 16,
    "critic.warmup_steps": 0,
    "optim.lr": 0.003,
    "train.steps": 3,
    "train.eval_every": 0,
    "train.eval_problems": 8,
    "train.save_every": 1,
    "log.tensorboard": "false",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_demo_model(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that all runs join, one after the other."""
    processes = server_processes(model, tmp_path_factory.mktemp("servers"))
    asyncio.run(processes.start())
    yield processes.urls[0]
    processes.stop()


def words(model: Path, folder: Path, **changes: Any) -> list[str]:
    fields = BASE | {"model.path": model, "run.dir": folder}
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    return ["train", "configs/demo.yaml", *(f"{name}={value}" for name, value in fields.items())]


def train(model: Path, folder: Path, url: str, **changes: Any) -> tuple[Finished, list[dict[str, float]]]:
    """A run on the server, which must end well, and its records of steps."""
    folder.mkdir(exist_ok=True)
    arguments = words(model, folder, rollout__sglang__urls=f"[{url}]", **changes)
    finished = comppo(*arguments, log=folder / "log")
    assert finished.code == 0, finished.output[-3000:]
    return finished, records(folder)


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "demo" / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["step"] > 0]


def state(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "demo" / "checkpoints" / f"step_{step:08d}" / "trainer.json").read_text())


def test_tokens_are_exact_and_of_the_present_weights(model: Path, url: str, tmp_path: Path) -> None:
    """Also over recorded supports, with weights by shared memory, and a second run goes on from the first."""
    masked = {"algo__ratio": "mask", "rollout__top_p": 0.7, "rollout__sglang__transport": "tensor"}
    _, steps = train(model, tmp_path, url, train__steps=2, **masked)
    assert [s["step"] for s in steps] == [1, 2]
    finished, steps = train(model, tmp_path, url, train__steps=3, run__allow_config_change="true", **masked)
    assert "resumed after step 2" in finished.output
    assert [s["step"] for s in steps] == [1, 2, 3]
    for step in steps:
        assert step["gap/max"] <= GAP and step["rollout/stale"] == 0
        assert step["gap/tokens"] == step["response/tokens"] > 16


def test_a_server_of_another_model_is_refused(url: str, tmp_path: Path) -> None:
    other = write_small_demo_model(tmp_path / "other", hidden_size=48)
    finished = comppo(*words(other, tmp_path, rollout__sglang__urls=f"[{url}]"), log=tmp_path / "log")
    assert finished.code == 2
    assert "rollout.sglang.urls" in finished.error and "another shape than model.path" in finished.error


def test_one_step_ahead_every_token_is_one_version_old(model: Path, url: str, tmp_path: Path) -> None:
    _, steps = train(model, tmp_path, url, rollout__lag=1, algo__importance_cap=2.0)
    assert [s["rollout/stale"] for s in steps] == [0, 1, 1]
    assert steps[0]["gap/max"] <= GAP
    assert all(s["gap/stale_mean"] > 10 * GAP for s in steps[1:]), "the weights in between did change"


def test_partial_rollouts_go_on_and_no_prompt_is_lost_or_taken_twice(
    model: Path, url: str, tmp_path: Path
) -> None:
    """Weights by disk; after each step the used and the carried prompts are those drawn so far."""
    changes = {"rollout__oversample": 4, "rollout__partial": "true", "algo__importance_cap": 2.0}
    _, steps = train(model, tmp_path, url, rollout__sglang__transport="disk", train__keep_last=3, **changes)
    assert steps[0]["rollout/stale"] == 0
    assert any(0 < s["rollout/stale"] < 1 for s in steps[1:])
    assert all(s["gap/max"] <= GAP for s in steps), "over the tokens of the present weights"
    for step in (1, 2, 3):
        after = state(tmp_path, step)
        carried = [group["prompt"] for group in after["carried"]]
        assert len(set(carried)) == len(carried) == 4
        assert after["prompts_consumed"] == 8 * step + 4
        assert set(carried) <= set(range(after["prompts_consumed"]))


def test_a_killed_server_costs_its_requests_only(model: Path, tmp_path: Path) -> None:
    """A server of the run's own, killed in the middle: it is started anew, and the run ends as planned."""
    with Running(*words(model, tmp_path, train__steps=5), log=tmp_path / "log") as running:
        path = tmp_path / "demo" / "metrics.jsonl"
        running.wait_until(lambda: path.exists() and '"step": 2' in path.read_text(), timeout=150)
        os.kill(scheduler_of(running), signal.SIGKILL)
        finished = running.wait(timeout=200)
    assert finished.code == 0, finished.output[-3000:]
    assert "a rollout server was lost" in finished.output
    steps = records(tmp_path)
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    assert all(s["gap/max"] <= GAP and s["rollout/stale"] == 0 for s in steps)


def scheduler_of(running: Running) -> int:
    """The process of a run's server that holds the model."""
    tree = psutil.Process(running.process.pid).children(recursive=True)
    servers = [p for p in tree if "sglang.launch_server" in " ".join(p.cmdline())]
    children = [child for server in servers for child in server.children(recursive=True)]
    return next(child.pid for child in children if "scheduler" in " ".join(child.cmdline()))
