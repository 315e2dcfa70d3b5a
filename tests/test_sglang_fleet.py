"""Several servers, all of them functions here: routing, quarantine, one result per request."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from comppo_mcore.rollout.engine import Sampling
from comppo_mcore.rollout.sglang import fleet as fleet_module
from comppo_mcore.rollout.sglang import http
from comppo_mcore.rollout.sglang.fleet import ABORTED, Fleet, NoServers, Request
from comppo_mcore.rollout.sglang.http import Broken, Refused, ServerError
from comppo_mcore.rollout.sglang.server import Server
from tests.faulty_proxy import CUT, DROP, PASS, TRUNCATE, UNAVAILABLE, Fault, FaultyProxy, Reply

VOCAB = 50
SAMPLING = Sampling(max_tokens=3)
WAIT_S = 20.0


class Canned:
    """A server whose responses count up from the prompt's last token; it can hold them back."""

    def __init__(self) -> None:
        self.version = "1"
        self.held = threading.Event()  # set: responses go out at once
        self.held.set()
        self.aborted = threading.Event()
        self.refuses: set[str] = set()
        self.orders: list[str] = []

    def __call__(self, path: str, body: Any) -> Any:
        if path in self.refuses:
            return Reply(500, b"{}")
        if path == "/model_info":
            return {"model_path": "/m", "model_type": "qwen3", "weight_version": self.version}
        if path == "/server_info":
            return {"tp_size": 1, "version": "0.5.23", "max_req_input_len": 96, "dtype": "float32"}
        if path == "/generate":
            return self._generate(body["input_ids"])
        self.orders.append(path)
        if path == "/abort_request":
            self.aborted.set()
        return Reply(200, b"", "text/plain")

    def _generate(self, prompt: list[int]) -> Any:
        while not self.held.wait(0.01):
            if self.aborted.is_set():
                return self._reply(prompt, 1, "abort")
        return self._reply(prompt, 3, "length")

    def _reply(self, prompt: list[int], count: int, finish: str) -> Any:
        tokens = [(prompt[-1] + i) % VOCAB for i in range(count)]
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": finish},
                "weight_version": self.version,
                "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            },
        }


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet_module, "ABORT_PERIOD_S", 0.05)


def request(i: int) -> Request:
    return Request(rid=f"r{i}", token_ids=(1, i % VOCAB), sampling=SAMPLING)


@asynccontextmanager
async def fleet_of(
    proxies: Sequence[FaultyProxy], *, in_flight: int = 8, wait_s: float = WAIT_S, version: int | None = 1
) -> AsyncIterator[Fleet]:
    servers = [
        Server(proxy.url, vocab_size=VOCAB, request_timeout_s=WAIT_S, sync_timeout_s=WAIT_S)
        for proxy in proxies
    ]
    async with Fleet(servers, in_flight=in_flight, wait_timeout_s=wait_s) as fleet:
        if version is not None:
            await fleet.admit(servers, version)
        yield fleet


def run(
    play: Callable[[Fleet, list[FaultyProxy], list[Canned]], Awaitable[None]], count: int, **options: Any
) -> None:
    async def scene() -> None:
        canned = [Canned() for _ in range(count)]
        async with AsyncExitStack() as stack:
            proxies = [stack.enter_context(FaultyProxy(one)) for one in canned]
            fleet = await stack.enter_async_context(fleet_of(proxies, **options))
            await play(fleet, proxies, canned)

    asyncio.run(scene())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_the_least_loaded_server_is_next_and_none_gets_more_than_its_share() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        for one in canned:
            one.held.clear()
        tasks = [asyncio.create_task(fleet.generate(request(i))) for i in range(9)]
        await until(lambda: all(len(proxy.bodies("/generate")) == 3 for proxy in proxies))
        assert fleet.running == 6
        await asyncio.sleep(0.1)
        assert [len(proxy.bodies("/generate")) for proxy in proxies] == [3, 3]
        canned[1].held.set()
        await until(lambda: len(proxies[1].bodies("/generate")) == 6)
        canned[0].held.set()
        results = await asyncio.gather(*tasks)
        assert [result.token_ids[0] for result in results] == list(range(9))
        assert fleet.running == 0

    run(play, 2, in_flight=3)


def test_a_dead_servers_requests_move_and_each_has_one_result() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].held.clear()
        results = fleet.stream([request(i) for i in range(12)])
        seen = [await anext(results) for _ in range(6)]
        assert len(proxies[0].bodies("/generate")) > 0
        proxies[0].die()
        seen += [pair async for pair in results]
        assert sorted(asked.rid for asked, _ in seen) == sorted(f"r{i}" for i in range(12))
        assert all(got.token_ids[0] == asked.token_ids[-1] for asked, got in seen)
        assert list(fleet.quarantined) == [proxies[0].url]
        assert [server.url for server in fleet.in_use] == [proxies[1].url]

    run(play, 2, in_flight=6)


@pytest.mark.parametrize("seed", range(3))
def test_under_any_faults_every_request_has_one_result(seed: int) -> None:
    draw = random.Random(seed)

    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        for proxy in proxies[:2]:  # the third stays sound
            faults = draw.choices([PASS, UNAVAILABLE, DROP, CUT, TRUNCATE], [4, 1, 1, 1, 1], k=60)
            proxy.inject("/generate", *faults)
        pairs = [pair async for pair in fleet.stream([request(i) for i in range(80)])]
        assert sorted(asked.rid for asked, _ in pairs) == sorted(f"r{i}" for i in range(80))
        assert all(got.token_ids[0] == asked.token_ids[-1] for asked, got in pairs)
        assert fleet.running == 0
        rids = [body["rid"] for proxy in proxies for body in proxy.bodies("/generate")]
        assert len(set(rids)) == len(rids)

    run(play, 3)


def test_results_come_as_they_finish() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].held.clear()
        results = fleet.stream([request(0), request(1)])
        first, _ = await anext(results)
        assert first.rid == "r1"
        canned[0].held.set()
        assert [asked.rid async for asked, _ in results] == ["r0"]

    run(play, 2)


def test_leaving_a_stream_ends_what_it_began() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].held.clear()
        results = fleet.stream([request(i) for i in range(6)])
        await anext(results)
        await results.aclose()
        await fleet.drain(WAIT_S)
        assert fleet.running == 0 and not fleet.quarantined

    run(play, 2, in_flight=2)


def test_without_a_server_requests_wait_for_one_and_then_fail() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        proxies[0].die()
        with pytest.raises(
            NoServers, match=rf"no server to generate with for 0\.5 s \({proxies[0].url}: .*Connect"
        ):
            await fleet.generate(request(0))

    run(play, 1, wait_s=0.5)


def test_a_waiting_request_goes_to_a_server_that_comes_back() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        [server] = fleet.servers
        await fleet.quarantine(server, "test")
        task = asyncio.create_task(fleet.generate(request(4)))
        await asyncio.sleep(0.05)
        assert not task.done()
        await fleet.readmit(server)
        assert (await task).token_ids == (4, 5, 6)

    run(play, 1)


def test_servers_are_used_only_with_the_fleets_weights() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        first, second = fleet.servers
        assert fleet.in_use == ()
        with pytest.raises(ServerError, match="while the weights are being updated"):
            await fleet.readmit(first)
        canned[1].version = "default"
        await fleet.admit(fleet.servers, 1)
        assert fleet.in_use == (first,)
        assert "has weight version -1, not 1" in fleet.quarantined[second.url]
        with pytest.raises(ServerError, match="stays in quarantine: has weight version -1, not 1"):
            await fleet.readmit(second)
        canned[1].version = "1"
        await fleet.readmit(second)
        assert fleet.in_use == (first, second)
        canned[0].version = "2"
        fleet.begin_update()
        await fleet.admit([first], 2)
        assert fleet.in_use == (first,)
        assert "was not updated to version 2" in fleet.quarantined[second.url]
        assert await fleet.versions() == {first.url: 2}

    run(play, 2, version=None)


def test_nothing_is_sent_while_weights_are_updated() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        fleet.begin_update()
        task = asyncio.create_task(fleet.generate(request(0)))
        await asyncio.sleep(0.1)
        assert proxies[0].bodies("/generate") == []
        canned[0].version = "2"
        await fleet.admit(fleet.servers, 2)
        assert (await task).versions == (2, 2, 2)

    run(play, 1)


@pytest.mark.parametrize("version", ["0", "2", "default"])
def test_tokens_of_other_weights_are_not_accepted(version: str) -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].version = version  # somebody else restarted or updated it
        result = await fleet.generate(request(0))
        assert result.versions == (1, 1, 1)
        assert "generated with weights of version" in fleet.quarantined[proxies[0].url]

    run(play, 2)


@pytest.mark.parametrize("fault", ["dead", "restarted"])
def test_health_is_watched(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "HEALTH_PERIOD_S", 0.05)

    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].held.clear()
        task = asyncio.create_task(fleet.generate(request(0)))
        await until(lambda: len(proxies[0].bodies("/generate")) == 1)
        if fault == "dead":
            canned[0].refuses.add("/model_info")
        else:
            canned[0].version = "default"
        result = await task  # it would hang at the first server
        assert result.token_ids == (0, 1, 2)
        assert list(fleet.quarantined) == [proxies[0].url]

    run(play, 2)


def test_a_request_that_kills_its_servers_does_not_kill_them_all() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        for one in canned:
            one.refuses.add("/generate")
        with pytest.raises(Broken, match="HTTP 500"):
            await fleet.generate(request(0))
        assert len(fleet.quarantined) == fleet_module.MAX_FAILURES
        assert len(fleet.in_use) == 1

    run(play, 4)


def test_a_refused_request_is_the_callers_and_no_servers_fault() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        proxies[0].inject("/generate", Fault("status", status=400))
        with pytest.raises(Refused, match="HTTP 400"):
            await fleet.generate(request(0))
        with pytest.raises(ValueError, match="outside"):
            await fleet.generate(Request("x", (VOCAB,), SAMPLING))
        assert not fleet.quarantined and fleet.running == 0

    run(play, 1)


def test_abort_gives_what_there_is() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].held.clear()
        tasks = [asyncio.create_task(fleet.generate(request(i))) for i in range(3)]
        await until(lambda: len(proxies[0].bodies("/generate")) == 2)
        await fleet.abort_all(WAIT_S)
        first, second, waiting = await asyncio.gather(*tasks)
        assert (first.token_ids, second.token_ids) == ((0,), (1,))
        assert first.finish == second.finish == "abort"
        assert waiting == ABORTED
        assert fleet.running == 0 and not fleet.quarantined
        canned[0].held.set()
        assert (await fleet.generate(request(5))).finish == "length"

    run(play, 1, in_flight=2)


def test_a_server_deaf_to_an_abort_is_not_waited_for_for_ever() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].held.clear()
        canned[0].aborted.wait = lambda *args: False  # type: ignore[method-assign]
        canned[0].aborted.set = lambda: None  # type: ignore[method-assign]
        task = asyncio.create_task(fleet.generate(request(0)))
        await until(lambda: len(proxies[0].bodies("/generate")) == 1)
        await fleet.abort_all(0.3)
        assert await task == ABORTED
        assert "requests still ran 0.3 s after their abort" in fleet.quarantined[proxies[0].url]
        canned[0].held.set()

    run(play, 1)


def test_orders_reach_all_and_quarantine_those_that_do_not_follow() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        await fleet.pause("retract")
        await fleet.flush()
        await fleet.resume()
        canned[1].refuses.add("/release_memory_occupation")
        await fleet.release_memory(["kv_cache"])
        await fleet.resume_memory(["kv_cache"])
        sent = ["/pause_generation", "/flush_cache", "/continue_generation"]
        released = ["/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"]
        assert canned[0].orders == [*sent, *released]
        assert canned[1].orders == [*sent, "/flush_cache"]
        assert proxies[0].bodies("/pause_generation") == [{"mode": "retract"}]
        assert list(fleet.quarantined) == [proxies[1].url]

    run(play, 2)


def test_memory_is_not_released_under_a_request() -> None:
    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        canned[0].held.clear()
        task = asyncio.create_task(fleet.generate(request(0)))
        await until(lambda: fleet.running == 1)
        with pytest.raises(RuntimeError, match="1 requests are running: drain or abort"):
            await fleet.release_memory(["weights"])
        with pytest.raises(ServerError, match=r"1 requests are still running after 0\.05 s"):
            await fleet.drain(0.05)
        canned[0].held.set()
        await fleet.drain(WAIT_S)
        await task
        assert canned[0].orders == []

    run(play, 1)


def test_a_thousand_requests_at_once() -> None:
    """Waking is linear: nobody is woken for a place that another takes."""

    async def play(fleet: Fleet, proxies: list[FaultyProxy], canned: list[Canned]) -> None:
        for server in fleet.servers:
            server.generate = instantly  # type: ignore[method-assign]
        pairs = [pair async for pair in fleet.stream([request(i) for i in range(1000)])]
        assert len({asked.rid for asked, _ in pairs}) == 1000

    async def instantly(token_ids: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return fleet_module.Generated((1,), (-1.0,), "length", (1,))

    run(play, 2, in_flight=4)
