"""Server processes of this host: started, watched until ready, started again, stopped with their trees."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from comppo_mcore.config.schema import SGLangConfig
from comppo_mcore.errors import UserError
from comppo_mcore.rollout.sglang.http import Connection, ServerError

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.5
HEALTH_TIMEOUT_S = 30.0
STOP_GRACE_S = 10.0
TAIL_LINES = 30
RESERVED_TOKENS = 2  # of its context length, which SGLang's scheduler does not give to a request
CPU_REQUESTS = 16  # at a time: bounds the keys and values that a CPU server makes room for

# Of the trainer's environment: how torchrun introduces its ranks to each other, and what Python imports. The
# server is no rank, and its Python another one.
NOT_INHERITED = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
)
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Launch:
    """One server to start."""

    url: str
    command: tuple[str, ...]
    environment: Mapping[str, str]  # whole
    log: Path


def plan(
    config: SGLangConfig,
    model: Path,
    *,
    dtype: Literal["fp32", "bf16"],
    max_context: int,
    seed: int,
    folder: Path,
    gpus: Sequence[str],
) -> list[Launch]:
    """The servers a configuration asks for.

    Args:
        model: HF folder. Without safetensors the servers begin with random weights.
        max_context: tokens of prompt + response that a request may have.
        seed: of sampling where requests bring none; every server adds its number.
        folder: of the run, for the logs.
        gpus: what the servers may use, as CUDA_VISIBLE_DEVICES names them; empty on a host without.

    Raises:
        UserError: no such interpreter, one without sglang, or fewer GPUs than the servers need.
    """
    check_python(config.python)
    needed = config.servers * config.tp
    if gpus and len(gpus) < needed:
        raise UserError(
            f"rollout.sglang: {config.servers} servers of tp {config.tp} need {needed} GPUs, {len(gpus)} are "
            "left for them; lower servers or tp, or use placement colocated"
        )
    ports = free_ports(config.servers)
    launches = []
    for i, port in enumerate(ports):
        own = gpus[i * config.tp : (i + 1) * config.tp]
        words = _words(config, model, dtype, max_context, seed + i, on_cpu=not gpus)
        launches.append(
            Launch(
                url=f"http://127.0.0.1:{port}",
                command=(
                    config.python,
                    "-m",
                    "sglang.launch_server",
                    *words,
                    "--port",
                    str(port),
                    *config.args,
                ),
                environment=_environment(own, config.tp),
                log=folder / f"sglang-{i}.log",
            )
        )
    return launches


def check_python(python: str) -> None:
    """Raise a UserError unless `python` is an interpreter that finds sglang."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    hint = "run `bash launch/sglang_setup.sh`, or name the interpreter of an environment that has sglang"
    try:
        found = subprocess.run(
            [python, "-c", find], env=_environment((), tp=1), capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"rollout.sglang.python: {python} does not run ({error}); {hint}") from error
    if found.returncode != 0:
        raise UserError(f"rollout.sglang.python: {python} has no sglang; {hint}")


def gpus_for_servers(config: SGLangConfig, trainer_ranks: int) -> tuple[str, ...]:
    """The GPUs of this host for servers: all when colocated, else those behind the trainer's ranks."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        visible = tuple(str(i) for i in range(torch.cuda.device_count()))
    else:
        visible = tuple(name.strip() for name in listed.split(",") if name.strip())
    if not visible:
        return ()
    left = visible if config.placement == "colocated" else visible[trainer_ranks:]
    if not left:
        raise UserError(
            f"rollout.sglang.placement: the {trainer_ranks} ranks of the trainer use all {len(visible)} GPUs "
            "of this host; use placement colocated, fewer ranks, or servers elsewhere (rollout.sglang.urls)"
        )
    return left


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def _words(
    config: SGLangConfig, model: Path, dtype: str, max_context: int, seed: int, *, on_cpu: bool
) -> Iterator[str]:
    """Arguments of `sglang.launch_server`; the configuration's own follow and win."""
    yield from ("--model-path", str(model), "--host", "127.0.0.1", "--tp-size", str(config.tp))
    yield from ("--load-format", "auto" if any(model.glob("*.safetensors")) else "dummy")
    yield from ("--dtype", {"fp32": "float32", "bf16": "bfloat16"}[dtype])
    yield from ("--context-length", str(max_context + RESERVED_TOKENS), "--skip-tokenizer-init")
    yield from ("--mem-fraction-static", str(config.memory_fraction), "--random-seed", str(seed))
    yield from ("--log-level-http", "warning")
    if on_cpu:
        yield from ("--device", "cpu", "--attention-backend", "torch_native")
        yield "--enable-deterministic-inference"  # without it a CPU server ignores seeds
        yield "--sleep-on-idle"  # it would keep a core busy that the trainer shares
        yield from ("--max-running-requests", str(CPU_REQUESTS))
        yield from ("--max-total-tokens", str(CPU_REQUESTS * (max_context + RESERVED_TOKENS)))
    elif config.placement == "colocated":
        yield "--enable-memory-saver"


def _environment(gpus: Sequence[str], tp: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_INHERITED and not name.startswith("TORCHELASTIC_")
    }
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else CPU_ENVIRONMENT
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder
        "TOKENIZERS_PARALLELISM": "false",
        # On a CPU more ranks than NUMA nodes must say where they run; only AMX kernels do as it says.
        **({"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp)))} if tp > 1 else {}),
        **kept,
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by RESERVED_TOKENS: positions never reached
        **own,
    }


class ServerProcesses:
    """The planned servers as processes. They end with `stop`, with this process, or when it is killed."""

    def __init__(self, launches: Sequence[Launch], *, start_timeout_s: float) -> None:
        self._launches = {launch.url: launch for launch in launches}
        self._start_timeout_s = start_timeout_s
        self._guards: dict[str, subprocess.Popen[bytes]] = {}
        atexit.register(self.stop)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(self._launches)

    async def start(self) -> None:
        """Start all and wait until each has generated a token.

        Raises:
            UserError: one ended or took too long; it says so with the end of its log. All are stopped.
        """
        for url in self.urls:
            self._spawn(url)
        try:
            await asyncio.gather(*(self._wait_ready(url) for url in self.urls))
        except BaseException:
            self.stop()
            raise

    async def restart(self, url: str) -> None:
        """End what is left of one server and start it anew, at its old URL and with its first weights.

        Raises:
            UserError: as `start`; the others go on.
        """
        await asyncio.to_thread(self._stop, url)
        self._spawn(url)
        try:
            await self._wait_ready(url)
        except BaseException:
            self._stop(url)
            raise

    def is_alive(self, url: str) -> bool:
        return url in self._guards and self._guards[url].poll() is None

    def pid(self, url: str) -> int:
        """Of the group that a server's whole tree belongs to."""
        return self._guards[url].pid

    def stop(self) -> None:
        """End all; takes a second, or `STOP_GRACE_S` where a server does not heed SIGTERM."""
        for guard in self._guards.values():
            _signal_group(guard.pid, signal.SIGTERM)
        for url in list(self._guards):
            self._stop(url)
        atexit.unregister(self.stop)

    def _spawn(self, url: str) -> None:
        launch = self._launches[url]
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            self._guards[url] = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), str(os.getpid()), *launch.command],
                env=dict(launch.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, which the terminal's Ctrl-C does not reach
            )

    async def _wait_ready(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._start_timeout_s
        connection = Connection(url)
        try:
            while True:
                if not self.is_alive(url):
                    raise UserError(self._report(url, f"ended with code {self._guards[url].returncode}"))
                left = deadline - loop.time()
                if left <= 0:
                    raise UserError(self._report(url, f"was not ready within {self._start_timeout_s:g} s"))
                try:
                    await connection.once("GET", "/health", timeout_s=min(left, HEALTH_TIMEOUT_S))
                    return
                except ServerError:
                    await asyncio.sleep(POLL_S)
        finally:
            await connection.aclose()

    def _report(self, url: str, what: str) -> str:
        log = self._launches[url].log
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"rollout.sglang: the server of {url} {what}; its log {log} ends with:", *lines])

    def _stop(self, url: str) -> None:
        guard = self._guards.pop(url, None)
        if guard is None:
            return
        _signal_group(guard.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            guard.wait(STOP_GRACE_S)
        _signal_group(guard.pid, signal.SIGKILL)  # whatever is left of the tree
        guard.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # nobody is left
        os.killpg(group, number)
