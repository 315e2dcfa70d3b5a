"""One real SGLang server for all tests marked `sglang`; checkpoints and an exact scorer to go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from comppo_mcore.config.schema import SGLangConfig
from comppo_mcore.rollout.sglang.process import ServerProcesses, plan
from comppo_mcore.rollout.sglang.server import Server
from tests.hf_folders import VOCAB, write_folder

ROOT = Path(__file__).parent.parent
CONTEXT = 512  # tokens; the checkpoints' max_position_embeddings
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class RealServer:
    """A running server. Clients belong to one event loop: make a new one in each."""

    url: str
    model: Path
    vocab_size: int = VOCAB
    max_context: int = CONTEXT

    def client(
        self, url: str | None = None, *, request_timeout_s: float = 60.0, sync_timeout_s: float = 60.0
    ) -> Server:
        """Args: url: of a proxy in front of it, instead of its own."""
        return Server(
            url or self.url,
            vocab_size=self.vocab_size,
            request_timeout_s=request_timeout_s,
            sync_timeout_s=sync_timeout_s,
        )


def server_processes(model: Path, folder: Path, **config: object) -> ServerProcesses:
    """CPU servers as the trainer starts them; `config` is of `SGLangConfig`."""
    settings = SGLangConfig.model_validate({"python": str(ROOT / ".venv-sglang/bin/python"), **config})
    launches = plan(settings, model, dtype="fp32", max_context=CONTEXT, seed=17, folder=folder, gpus=())
    return ServerProcesses(launches, start_timeout_s=START_TIMEOUT_S)


async def load_from_disk(server: Server, folder: Path, version: int) -> None:
    """The simplest exact update: SGLang reads the folder itself."""
    await server.post(
        "/update_weights_from_disk",
        {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": True,
        },
    )


@lru_cache(maxsize=4)
def _reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_scores(
    folder: Path, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """log_softmax(z/T) where a response's tokens are drawn, by `transformers`: float32 [T, V]."""
    logits = _reference(folder)(torch.tensor([[*prompt, *response]])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)


def reference_logprobs(
    folder: Path, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Of a response's own tokens."""
    scores = reference_scores(folder, prompt, response, temperature)
    return [scores[t, token].item() for t, token in enumerate(response)]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two HF folders of one tiny Qwen3 with different random weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return tuple(  # type: ignore[return-value]
        write_folder(folder / name, family="qwen3", head_dim=32, tied=False, seed=seed)
        for seed, name in enumerate(("first", "second"))
    )


@pytest.fixture(scope="session")
def sglang_processes(
    checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcesses]:
    """The shared server's process, with the first checkpoint."""
    processes = server_processes(checkpoints[0], tmp_path_factory.mktemp("sglang"))
    asyncio.run(processes.start())
    yield processes
    processes.stop()


@pytest.fixture
def sglang_server(sglang_processes: ServerProcesses, checkpoints: tuple[Path, Path]) -> RealServer:
    """The shared server, idle, running, and with the first checkpoint as version 0."""
    real = RealServer(sglang_processes.urls[0], checkpoints[0])
    asyncio.run(_reset(real))
    return real


async def _reset(real: RealServer) -> None:
    server = real.client()
    await server.abort()
    await server.pause("abort")
    await load_from_disk(server, real.model, 0)
    await server.resume()
    await server.aclose()
