"""Weight sync into the real server: every transport, sharded trainers, requests in flight, and faults."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comppo_mcore.config.schema import ParallelConfig, SGLangConfig
from comppo_mcore.model import parallel
from comppo_mcore.model.hf_table import Stream, hf_manifest
from comppo_mcore.rollout.engine import Sampling
from comppo_mcore.rollout.sglang.server import Generated, Server
from comppo_mcore.rollout.sglang.sync import SyncReport, WeightSync
from tests.dist import run_distributed
from tests.faulty_proxy import DROP, UNAVAILABLE, Fault, FaultyProxy
from tests.hf_folders import read_weights
from tests.sglang_fixtures import RealServer, reference_logprobs

pytestmark = pytest.mark.sglang

TOLERANCE = 1e-4  # nats
PROMPT = (7, 49, 86)
TIMEOUT_S = 20.0
SMALL_BUCKET = {"bucket_mb": 0.125}  # less than the configuration allows, for a tiny model in several
UPDATES = {
    "broadcast": "/update_weights_from_distributed",
    "tensor": "/update_weights_from_tensor",
    "disk": "/update_weights_from_disk",
}


def stream_of(folder: Path) -> Stream:
    tensors = read_weights(folder)
    return iter([(name, tensors[name]) for name in hf_manifest(folder)])


def error_of(generated: Generated, folder: Path, tokens: slice = slice(None)) -> float:
    """Largest |server − transformers| log-prob of a response, or of a part of it."""
    expected = reference_logprobs(folder, PROMPT, generated.token_ids)
    pairs = list(zip(generated.logprobs, expected, strict=True))[tokens]
    return max(abs(ours - theirs) for ours, theirs in pairs)


class Trainer:
    """A trainer of one rank that has the shared server, and the loop to talk to it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, real: RealServer, checkpoints: tuple[Path, Path], folder: Path
    ) -> None:
        self.loop, self.real, self.folder = loop, real, folder
        self.first, self.second = checkpoints
        self.server = real.client(sync_timeout_s=TIMEOUT_S)

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def sync(self, transport: Any, timeout_s: float = TIMEOUT_S) -> WeightSync:
        config = SGLangConfig(transport=transport, sync_timeout_s=timeout_s).model_copy(update=SMALL_BUCKET)
        return WeightSync(config, torch.device("cpu"), self.folder, self.loop)

    def update(self, sync: WeightSync, folder: Path, version: int, *servers: Server) -> SyncReport:
        return sync.update(stream_of(folder), hf_manifest(folder), version, servers or [self.server])

    def generate(self, rid: str, max_tokens: int = 16) -> Generated:
        return self.run(self.server.generate(PROMPT, Sampling(max_tokens=max_tokens), rid=rid))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    parallel.initialize(ParallelConfig(), seed=0)
    yield loop
    parallel.shutdown()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.fixture
def trainer(
    loop: asyncio.AbstractEventLoop,
    sglang_server: RealServer,
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
) -> Iterator[Trainer]:
    trainer = Trainer(loop, sglang_server, checkpoints, tmp_path)
    yield trainer
    trainer.run(trainer.server.resume())
    trainer.run(trainer.server.aclose())


def test_sharded_trainers_over_every_transport(
    sglang_server: RealServer, checkpoints: tuple[Path, Path]
) -> None:
    stdout = run_distributed("weight_sync.py", 2, [sglang_server.url, *checkpoints], timeout=180)
    findings = json.loads(stdout[0])
    assert list(findings) == ["tp2", "pp2"]
    for found in findings.values():
        assert [sync["transport"] for sync in found] == [t for t in UPDATES for _ in range(2)]
        for sync in found:
            assert sync["failed"] == {}
            assert sync["new"] <= TOLERANCE
            assert sync["old"] > 1000 * TOLERANCE
        assert found[0]["buckets"] > 3


@pytest.mark.parametrize("transport", UPDATES)
def test_every_token_was_drawn_from_the_weights_it_is_labelled_with(trainer: Trainer, transport: str) -> None:
    sync = trainer.sync(transport)
    trainer.update(sync, trainer.first, 1)
    running = asyncio.run_coroutine_threadsafe(in_flight(trainer.server, transport), trainer.loop)
    trainer.run(until_running(trainer.server))
    report = trainer.update(sync, trainer.second, 2)
    assert report.failed == {}
    responses = running.result(120)
    folders = {1: trainer.first, 2: trainer.second}
    for response in responses:
        assert response.finish == "length"
        assert list(response.versions) == sorted(response.versions)
        for version, folder in folders.items():
            positions = [i for i, v in enumerate(response.versions) if v == version]
            for i in positions:
                assert error_of(response, folder, slice(i, i + 1)) <= TOLERANCE
    assert {version for response in responses for version in response.versions} == {1, 2}
    sync.disconnect()


async def in_flight(server: Server, name: str) -> list[Generated]:
    return await asyncio.gather(
        *(server.generate(PROMPT, Sampling(max_tokens=150), rid=f"{name}-{i}") for i in range(3))
    )


async def until_running(server: Server, num_tokens: int = 20) -> None:
    """Until the running requests have some tokens each, by the server's own count."""
    async with asyncio.timeout(60):
        while True:
            (load,) = (await server.get("/v1/loads"))["loads"]
            if load["num_used_tokens"] >= 3 * (len(PROMPT) + num_tokens):
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", UPDATES)
def test_a_503_in_the_middle_is_a_failure_and_the_next_sync_repairs_it(
    trainer: Trainer, transport: str
) -> None:
    path = UPDATES[transport]
    good = [] if transport == "disk" else [Fault("pass")]
    with FaultyProxy(trainer.real.url) as proxy:
        proxy.inject(path, *good, UNAVAILABLE)
        behind = trainer.real.client(proxy.url, sync_timeout_s=TIMEOUT_S)
        sync = trainer.sync(transport)
        report = trainer.update(sync, trainer.second, 3, behind)
        assert "HTTP 503" in report.failed[proxy.url]
        assert len(proxy.bodies(path)) == len(good) + 1
        assert proxy.bodies("/continue_generation") == []
        repaired = trainer.update(sync, trainer.second, 4, behind)
        assert repaired.failed == {}
        assert len(proxy.bodies("/continue_generation")) == 1
        trainer.run(behind.aclose())
        sync.disconnect()
    response = trainer.generate(f"repaired-{transport}")
    assert set(response.versions) == {4}
    assert error_of(response, trainer.second) <= TOLERANCE


def in_front_of(trainer: Trainer, special: Callable[[str, Any], Any]) -> FaultyProxy:
    """A proxy that answers itself where `special` returns something."""

    def answer(path: str, body: Any) -> Any:
        own = special(path, body)
        if own is not None:
            return own
        is_question = path in ("/model_info", "/server_info")
        return trainer.run(trainer.server.get(path) if is_question else trainer.server.post(path, body))

    return FaultyProxy(answer)


def test_a_server_that_does_not_join_the_group_is_left_out_in_bounded_time(trainer: Trainer) -> None:
    """One loses its invitation, one sleeps over it; the real one takes the weights without them."""
    awake = threading.Event()

    def sleep(path: str, body: Any) -> Any:
        if path == "/init_weights_update_group":
            return {"success": awake.wait(120)}
        return {"success": True} if path == "/begin_weight_update" else None  # the real one has begun already

    with FaultyProxy(trainer.real.url) as deaf, in_front_of(trainer, sleep) as asleep:
        deaf.inject("/init_weights_update_group", DROP)
        sync = trainer.sync("broadcast", timeout_s=3.0)
        for version, proxy in ((5, deaf), (6, asleep)):
            server = trainer.real.client(proxy.url)
            report = trainer.update(sync, trainer.second, version, server, trainer.server)
            assert report.failed.keys() == {proxy.url}
            trainer.run(server.aclose())
        assert "sync_timeout_s = 3" in report.failed[asleep.url]
        awake.set()
        sync.disconnect()
    response = trainer.generate("joined")
    assert set(response.versions) == {6}
    assert error_of(response, trainer.second) <= TOLERANCE


def test_a_server_that_names_another_version_is_not_resumed(trainer: Trainer) -> None:
    class Lying(Server):
        async def weight_version(self, *, timeout_s: float) -> int:
            return await super().weight_version(timeout_s=timeout_s) - 1

    liar = Lying(trainer.real.url, vocab_size=trainer.real.vocab_size, request_timeout_s=9, sync_timeout_s=9)
    report = trainer.update(trainer.sync("tensor"), trainer.second, 8, liar)
    assert report.failed[liar.url].endswith("says weight version 7 after it was sent 8")
    waiting = asyncio.run_coroutine_threadsafe(
        trainer.server.generate(PROMPT, Sampling(max_tokens=1), rid="paused"), trainer.loop
    )
    trainer.run(asyncio.sleep(1.0))
    assert not waiting.done()
    trainer.run(trainer.server.resume())
    assert waiting.result(60).versions == (8,)
    trainer.run(liar.aclose())


def test_weights_changed_behind_the_trainers_back_are_found(trainer: Trainer) -> None:
    """A proxy that keeps the last bucket to itself but says it arrived."""
    swallowed = []

    def keep_the_last(path: str, body: Any) -> Any:
        if path != UPDATES["tensor"] or not body.get("weight_version"):
            return None
        swallowed.append(body)
        named = {"new_version": body["weight_version"], "abort_all_requests": False}
        return trainer.run(trainer.server.post("/update_weight_version", named))

    with in_front_of(trainer, keep_the_last) as proxy:
        behind = trainer.real.client(proxy.url)
        report = trainer.update(trainer.sync("tensor"), trainer.second, 9, behind)
        assert swallowed
        assert "holds other weights than were sent" in report.failed[proxy.url]
        trainer.run(behind.aclose())
    trainer.run(trainer.server.resume())
