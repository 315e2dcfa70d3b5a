"""Server processes: what is started, how a start fails, that none outlives its trainer. Without SGLang."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from comppo_mcore.config.schema import SGLangConfig
from comppo_mcore.errors import UserError
from comppo_mcore.rollout.sglang import process as process_module
from comppo_mcore.rollout.sglang.process import (
    GUARD,
    Launch,
    ServerProcesses,
    free_ports,
    gpus_for_servers,
    plan,
)

WAIT_S = 30.0

# An interpreter with an "sglang" whose servers do as their last argument says.
PYTHON = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if sys.argv[1] == "-c":
    sys.exit(0)
behave = sys.argv[-1]
print("model", sys.argv[sys.argv.index("--model-path") + 1], flush=True)
if behave == "fail":
    time.sleep(0.5)
    print("CUDA out of memory", flush=True)
    sys.exit(3)
if behave == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "pid", os.getpid(), flush=True)
if behave == "hang":
    time.sleep(600)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "STOP_GRACE_S", 0.5)
    monkeypatch.setattr(process_module, "POLL_S", 0.05)


def planned(python: str, folder: Path, *, gpus: tuple[str, ...] = (), **config: Any) -> list[Launch]:
    return plan(
        SGLangConfig(python=python, **config),
        folder / "model",
        dtype="bf16",
        max_context=100,
        seed=17,
        folder=folder / "run",
        gpus=gpus,
    )


def options(launch: Launch) -> dict[str, str]:
    """Of its command: every `--name value`."""
    words = launch.command
    return {word: value for word, value in pairwise(words) if word.startswith("--")}


def test_a_cpu_server(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    [launch] = planned(python, tmp_path, args=("--log-level", "error"))
    assert launch.command[:3] == (python, "-m", "sglang.launch_server")
    assert launch.command[-2:] == ("--log-level", "error")
    given = options(launch)
    assert given["--device"] == "cpu" and given["--attention-backend"] == "torch_native"
    assert given["--dtype"] == "bfloat16" and given["--context-length"] == "102"
    assert given["--load-format"] == "dummy" and launch.url.endswith(given["--port"])
    assert launch.environment["SGLANG_USE_CPU_ENGINE"] == "1"
    [two] = planned(python, tmp_path, tp=2)
    assert two.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert not {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & launch.environment.keys()


def test_gpus_are_shared_out(python: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").touch()
    launches = planned(python, tmp_path, gpus=("4", "5", "6", "7"), servers=2, tp=2, memory_fraction=0.5)
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in launches] == ["4,5", "6,7"]
    assert len({launch.url for launch in launches}) == len({launch.log for launch in launches}) == 2
    given = options(launches[1])
    assert (given["--tp-size"], given["--mem-fraction-static"]) == ("2", "0.5")
    assert (given["--random-seed"], given["--load-format"]) == ("18", "auto")
    assert "--device" not in given and "--enable-memory-saver" not in launches[1].command
    [colocated] = planned(python, tmp_path, gpus=("0",), placement="colocated")
    assert "--enable-memory-saver" in colocated.command


def test_which_gpus_are_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,5")
    assert gpus_for_servers(SGLangConfig(), trainer_ranks=1) == ("3", "5")
    assert gpus_for_servers(SGLangConfig(placement="colocated"), trainer_ranks=3) == ("2", "3", "5")
    with pytest.raises(
        UserError, match=r"rollout\.sglang\.placement: the 3 ranks of the trainer use all 3 GPUs"
    ):
        gpus_for_servers(SGLangConfig(), trainer_ranks=3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_for_servers(SGLangConfig(), trainer_ranks=3) == ()


def test_too_few_gpus(python: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.sglang: 2 servers of tp 2 need 4 GPUs, 3 are left"):
        planned(python, tmp_path, gpus=("0", "1", "2"), servers=2, tp=2)


def test_an_interpreter_that_is_not_there_or_has_no_sglang(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"rollout\.sglang\.python: /no/python does not run .*launch/sglang_setup"
    ):
        planned("/no/python", tmp_path)
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    with pytest.raises(
        UserError, match=r"rollout\.sglang\.python: .* has no sglang; run `bash launch/sglang_setup\.sh`"
    ):
        planned(str(bare / "bin/python"), tmp_path)


def test_ports_differ() -> None:
    assert len(set(free_ports(20))) == 20


@pytest.fixture
def started(python: str, tmp_path: Path, short_grace: None) -> Iterator[Any]:
    """Behaviour → processes that are stopped at the end."""
    made = []

    def make(*behaviours: str, timeout_s: float = WAIT_S) -> ServerProcesses:
        launches = planned(python, tmp_path, servers=len(behaviours))
        launches = [
            Launch(launch.url, (*launch.command, behave), launch.environment, launch.log)
            for launch, behave in zip(launches, behaviours, strict=True)
        ]
        made.append(ServerProcesses(launches, start_timeout_s=timeout_s))
        return made[-1]

    yield make
    for processes in made:
        processes.stop()


def tree(log: Path) -> list[int]:
    """Process ids that the last start wrote to a log, if it came so far."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("child")]
    return [int(word) for word in lines[-1].split() if word.isdigit()] if lines else []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + WAIT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def test_servers_start_restart_at_their_url_and_stop_with_their_trees(started: Any, tmp_path: Path) -> None:
    processes = started("serve", "deaf")
    asyncio.run(processes.start())
    first, second = processes.urls
    trees = [tree(tmp_path / f"run/sglang-{i}.log") for i in range(2)]
    assert all(is_running(pid) for pids in trees for pid in pids)
    os.kill(trees[0][1], signal.SIGKILL)
    wait_until_gone([trees[0][1]])
    asyncio.run(processes.restart(first))
    assert processes.urls == (first, second) and processes.is_alive(first)
    wait_until_gone(trees[0])  # what the killed one left behind too
    trees[0] = tree(tmp_path / "run/sglang-0.log")
    processes.stop()
    wait_until_gone([*trees[0], *trees[1]])
    assert not processes.is_alive(first) and not processes.is_alive(second)


def test_a_server_that_fails_says_why_and_takes_the_others_with_it(started: Any, tmp_path: Path) -> None:
    processes = started("serve", "fail")
    with pytest.raises(
        UserError, match=r"(?s)rollout\.sglang: the server of http.* ended with code 3; .*CUDA out of memory"
    ):
        asyncio.run(processes.start())
    wait_until_gone(tree(tmp_path / "run/sglang-0.log"))


def test_a_server_that_takes_too_long_is_not_waited_for(started: Any, tmp_path: Path) -> None:
    processes = started("hang", timeout_s=1.5)
    with pytest.raises(
        UserError, match=r"(?s)was not ready within 1\.5 s; its log .*sglang-0\.log ends with:\nmodel"
    ):
        asyncio.run(processes.start())
    wait_until_gone(tree(tmp_path / "run/sglang-0.log"))


@pytest.mark.parametrize("behave", ["serve", "deaf"])
def test_servers_end_with_a_killed_trainer(python: str, tmp_path: Path, behave: str) -> None:
    """A trainer that is SIGKILLed stops nothing itself."""
    log = tmp_path / "log"
    [port] = free_ports(1)
    command = [python, "-m", "sglang.launch_server", "--model-path", "m", "--port", str(port), behave]
    trainer = f"""
import os, subprocess, sys, time
with open({str(log)!r}, "wb") as log:
    subprocess.Popen([sys.executable, "-I", {str(GUARD)!r}, str(os.getpid()), *{command!r}],
                     stdout=log, stderr=log, start_new_session=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", trainer])
    deadline = time.monotonic() + WAIT_S
    while not (log.exists() and b"child" in log.read_bytes()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = tree(log)
    process.kill()
    process.wait()
    wait_until_gone(pids)
