"""What is relied on of a real SGLang 0.5.23; faults through a proxy in front of it; one real kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from comppo_mcore.rollout.engine import Sampling
from comppo_mcore.rollout.sglang import fleet as fleet_module
from comppo_mcore.rollout.sglang import server as server_module
from comppo_mcore.rollout.sglang.fleet import Fleet, Request
from comppo_mcore.rollout.sglang.http import Refused, ServerError
from comppo_mcore.rollout.sglang.server import Generated, Server
from tests.faulty_proxy import CUT, DROP, TRUNCATE, UNAVAILABLE, Fault, FaultyProxy
from tests.sglang_fixtures import (
    CONTEXT,
    RealServer,
    load_from_disk,
    reference_logprobs,
    reference_scores,
    server_processes,
)

pytestmark = pytest.mark.sglang

PROMPT = (10, 20, 30, 40, 50)
LIMIT = 1e-4  # nats, fp32
LONG = Sampling(max_tokens=400)
T = TypeVar("T")


def talk(real: RealServer, say: Callable[[Server], Awaitable[T]]) -> T:
    async def conversation() -> T:
        server = real.client()
        try:
            return await say(server)
        finally:
            await server.aclose()

    return asyncio.run(conversation())


def worst_gap(
    generated: Generated, model: Path, temperature: float = 1.0, prompt: tuple[int, ...] = PROMPT
) -> float:
    expected = reference_logprobs(model, prompt, generated.token_ids, temperature)
    return max(abs(found - wanted) for found, wanted in zip(generated.logprobs, expected, strict=True))


def test_it_says_what_it_is(sglang_server: RealServer) -> None:
    info = talk(sglang_server, lambda server: server.info())
    assert info.sglang == "0.5.23"
    assert (info.model_path, info.dtype, info.tp_size) == (str(sglang_server.model), "float32", 1)
    assert (info.weight_version, info.max_context) == (0, CONTEXT)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.7, 1.0])
def test_logprobs_are_those_of_transformers(
    sglang_server: RealServer, checkpoints: tuple[Path, Path], temperature: float, top_p: float
) -> None:
    sampling = Sampling(max_tokens=40, temperature=temperature, top_p=top_p)

    async def several(server: Server) -> list[Generated]:
        prompts = [PROMPT, (7,), tuple(range(100))]
        return await asyncio.gather(
            *(server.generate(prompt, sampling, rid=f"l{i}") for i, prompt in enumerate(prompts))
        )

    for prompt, generated in zip(
        [PROMPT, (7,), tuple(range(100))], talk(sglang_server, several), strict=True
    ):
        assert len(generated.token_ids) == 40 and generated.finish == "length"
        assert generated.versions == (0,) * 40
        assert worst_gap(generated, checkpoints[0], temperature, prompt) <= LIMIT
        assert worst_gap(generated, checkpoints[1], temperature, prompt) > 0.1  # the test can fail


def test_greedy_also_beside_sampled_requests(sglang_server: RealServer) -> None:
    async def both(server: Server) -> tuple[Generated, Generated]:
        alone = await server.generate(PROMPT, Sampling(max_tokens=20, greedy=True), rid="g0")
        beside, _ = await asyncio.gather(
            server.generate(PROMPT, Sampling(max_tokens=20, greedy=True), rid="g1"),
            server.generate(PROMPT, Sampling(max_tokens=20, temperature=2.0, top_p=0.5), rid="g2"),
        )
        return alone, beside

    alone, beside = talk(sglang_server, both)
    assert alone.token_ids == beside.token_ids
    assert worst_gap(alone, sglang_server.model) <= LIMIT
    assert worst_gap(beside, sglang_server.model) <= LIMIT


def test_the_stop_token_stays(sglang_server: RealServer) -> None:
    greedy = Sampling(max_tokens=8, greedy=True)
    free = talk(sglang_server, lambda server: server.generate(PROMPT, greedy, rid="s0"))
    stop = free.token_ids[3]
    sampling = Sampling(max_tokens=8, greedy=True, stop_ids=(stop,))
    stopped = talk(sglang_server, lambda server: server.generate(PROMPT, sampling, rid="s1"))
    end = free.token_ids.index(stop) + 1
    assert stopped.finish == "stop"
    assert stopped.token_ids == free.token_ids[:end]
    assert worst_gap(stopped, sglang_server.model) <= LIMIT


def test_the_whole_context_can_be_used_and_no_more(sglang_server: RealServer) -> None:
    prompt = (3,) * (CONTEXT - 6)
    full = talk(sglang_server, lambda server: server.generate(prompt, Sampling(max_tokens=6), rid="c0"))
    assert len(full.token_ids) == 6 and full.finish == "length"
    with pytest.raises(ValueError, match=f"are more than the {CONTEXT}"):
        talk(sglang_server, lambda server: server.generate(prompt, Sampling(max_tokens=7), rid="c1"))


def test_seeds_decide_and_repeated_prompts_differ(sglang_server: RealServer) -> None:
    sampling = Sampling(max_tokens=24, top_p=0.9)

    async def draw(server: Server) -> list[Generated]:
        return await asyncio.gather(
            *(
                server.generate(PROMPT, sampling, rid=f"n{i}", seed=seed)
                for i, seed in enumerate((1, 2, 3, 4, 1))
            )
        )

    first, second = talk(sglang_server, draw), talk(sglang_server, draw)
    assert [one.token_ids for one in first] == [one.token_ids for one in second]
    assert first[0].token_ids == first[4].token_ids
    assert len({one.token_ids for one in first}) == 4


def test_masks_are_the_nucleus(sglang_server: RealServer) -> None:
    sampling = Sampling(max_tokens=16, top_p=0.5, temperature=0.5)
    generated = talk(sglang_server, lambda server: server.generate(PROMPT, sampling, rid="m", mask=True))
    assert generated.supports is not None
    assert worst_gap(generated, sglang_server.model, 0.5) <= LIMIT  # of the whole softmax all the same
    scores = reference_scores(sglang_server.model, PROMPT, generated.token_ids, 0.5)
    for support, row in zip(generated.supports, scores.exp().tolist(), strict=True):
        mass, nucleus = 0.0, set()
        for token in sorted(range(len(row)), key=lambda token: -row[token]):
            if mass > 0.5:
                break
            nucleus.add(token)
            mass += row[token]
        assert set(support) == nucleus
    assert len({len(support) for support in generated.supports}) > 1


def test_an_id_outside_the_vocabulary_never_reaches_it(sglang_server: RealServer) -> None:
    async def play() -> None:
        with FaultyProxy(sglang_server.url) as proxy:
            server = sglang_server.client(proxy.url)
            for bad in (sglang_server.vocab_size, 9_999_999, -1):
                with pytest.raises(ValueError, match="outside"):
                    await server.generate((10, bad), Sampling(max_tokens=2), rid="o")
            assert proxy.bodies("/generate") == []
            await server.generate((10,), Sampling(max_tokens=2), rid="o2")
            await server.aclose()

    asyncio.run(play())


def test_a_refusal_keeps_the_server(sglang_server: RealServer) -> None:
    async def play(server: Server) -> None:
        with pytest.raises(Refused, match="HTTP 400"):
            await server.post("/generate", {"input_ids": [1], "sampling_params": {"temperature": -1.0}})
        with pytest.raises(ServerError):
            await load_from_disk(server, Path("/nowhere"), 3)
        assert await server.weight_version(timeout_s=20) == 0
        generated = await server.generate(PROMPT, Sampling(max_tokens=4), rid="k")
        assert worst_gap(generated, sglang_server.model) <= LIMIT

    talk(sglang_server, play)


def test_an_abort_returns_what_there_is(sglang_server: RealServer) -> None:
    async def play(server: Server) -> tuple[Generated, Generated]:
        first = asyncio.create_task(server.generate(PROMPT, LONG, rid="a0"))
        second = asyncio.create_task(server.generate(PROMPT, Sampling(max_tokens=40), rid="a1"))
        await asyncio.sleep(0.5)
        await server.abort("a0")
        return await first, await second

    aborted, other = talk(sglang_server, play)
    assert aborted.finish == "abort" and 0 < len(aborted.token_ids) < 400
    assert worst_gap(aborted, sglang_server.model) <= LIMIT
    assert other.finish == "length" and len(other.token_ids) == 40


def test_resubmitted_partial_responses_go_on_exactly(
    sglang_server: RealServer, checkpoints: tuple[Path, Path]
) -> None:
    async def play(server: Server) -> tuple[Generated, Generated]:
        running = asyncio.create_task(server.generate(PROMPT, LONG, rid="p0"))
        await asyncio.sleep(0.5)
        await server.pause("abort")
        partial = await running
        await load_from_disk(server, checkpoints[1], 1)
        await server.resume()
        return partial, await server.generate(
            (*PROMPT, *partial.token_ids), Sampling(max_tokens=20), rid="p1"
        )

    partial, rest = talk(sglang_server, play)
    assert set(partial.versions) == {0} and set(rest.versions) == {1}
    assert worst_gap(partial, checkpoints[0]) <= LIMIT
    assert worst_gap(rest, checkpoints[1], prompt=(*PROMPT, *partial.token_ids)) <= LIMIT


def test_retract_and_flush_are_exact_to_the_last_token(
    sglang_server: RealServer, checkpoints: tuple[Path, Path]
) -> None:
    """Every token's log-prob is that of the weights it is labelled with, keys and values included."""

    async def play(server: Server) -> Generated:
        running = asyncio.create_task(server.generate(PROMPT, LONG, rid="t0"))
        await asyncio.sleep(0.5)
        await server.pause("retract")
        await server.flush()
        await load_from_disk(server, checkpoints[1], 1)
        assert not running.done()
        await server.resume()
        return await running

    generated = talk(sglang_server, play)
    cut = generated.versions.index(1)
    assert generated.versions == (0,) * cut + (1,) * (400 - cut) and 0 < cut < 400
    old = reference_logprobs(checkpoints[0], PROMPT, generated.token_ids)
    new = reference_logprobs(checkpoints[1], PROMPT, generated.token_ids)
    expected = old[:cut] + new[cut:]
    assert max(abs(a - b) for a, b in zip(generated.logprobs, expected, strict=True)) <= LIMIT


def test_a_cache_in_use_is_not_flushed_and_its_memory_not_released(
    sglang_server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(server: Server) -> Generated:
        running = asyncio.create_task(server.generate(PROMPT, LONG, rid="f0"))
        await asyncio.sleep(0.5)
        monkeypatch.setattr(server_module, "SETTLE_S", 0.0)
        with pytest.raises(Refused):
            await server.flush()
        with pytest.raises(Refused):
            await server.release_memory(["kv_cache"])
        monkeypatch.undo()
        await server.abort()
        await server.flush()
        return await running

    generated = talk(sglang_server, play)
    assert generated.finish == "abort" and worst_gap(generated, sglang_server.model) <= LIMIT


def test_memory_is_released_and_comes_back(sglang_server: RealServer) -> None:
    """Without GPU memory to save, what shows is that the order of events is one the server takes."""

    async def play(server: Server) -> Generated:
        await server.pause("abort")
        await server.release_memory(["kv_cache", "weights"])
        await server.resume_memory(["weights"])
        await load_from_disk(server, sglang_server.model, 5)
        await server.resume_memory(["kv_cache"])
        await server.resume()
        return await server.generate(PROMPT, Sampling(max_tokens=8), rid="r")

    generated = talk(sglang_server, play)
    assert set(generated.versions) == {5}
    assert worst_gap(generated, sglang_server.model) <= LIMIT


@pytest.mark.parametrize(
    "fault", [UNAVAILABLE, TRUNCATE, CUT, DROP, Fault("delay", seconds=1.0)], ids=lambda f: f.kind
)
def test_a_passing_fault_costs_nothing(sglang_server: RealServer, fault: Fault) -> None:
    async def play() -> Generated:
        with FaultyProxy(sglang_server.url) as proxy:
            server = sglang_server.client(proxy.url)
            proxy.inject("/generate", fault)
            try:
                return await server.generate(PROMPT, Sampling(max_tokens=12), rid=f"x-{fault.kind}", seed=3)
            finally:
                await server.aclose()

    assert worst_gap(asyncio.run(play()), sglang_server.model) <= LIMIT


@pytest.mark.parametrize(
    "fault", [UNAVAILABLE, TRUNCATE, DROP, Fault("delay", seconds=60)], ids=lambda fault: fault.kind
)
def test_a_faulty_servers_work_moves_and_nothing_is_lost(sglang_server: RealServer, fault: Fault) -> None:
    """Two ways to the one server; all of one way's generations fail for good."""
    requests = [Request(f"{fault.kind}{i}", (*PROMPT, i), Sampling(max_tokens=12)) for i in range(8)]

    async def play() -> tuple[list[tuple[Request, Generated]], dict[str, str], str]:
        with FaultyProxy(sglang_server.url) as bad, FaultyProxy(sglang_server.url) as good:
            bad.inject("/generate", *[fault] * 100)
            servers = [sglang_server.client(proxy.url, request_timeout_s=5.0) for proxy in (bad, good)]
            async with Fleet(servers, in_flight=8, wait_timeout_s=30) as fleet:
                await fleet.admit(servers, 0)
                pairs = [pair async for pair in fleet.stream(requests)]
                assert fleet.in_use == (servers[1],)
                return pairs, fleet.quarantined, bad.url

    pairs, quarantined, url = asyncio.run(play())
    assert sorted(asked.rid for asked, _ in pairs) == sorted(request.rid for request in requests)
    assert all(worst_gap(got, sglang_server.model, prompt=asked.token_ids) <= LIMIT for asked, got in pairs)
    assert list(quarantined) == [url]


def test_work_in_flight_moves_when_its_server_goes(sglang_server: RealServer) -> None:
    requests = [Request(f"w{i}", (*PROMPT, i), Sampling(max_tokens=100)) for i in range(6)]

    async def play() -> tuple[list[tuple[Request, Generated]], int]:
        with FaultyProxy(sglang_server.url) as first, FaultyProxy(sglang_server.url) as second:
            servers = [sglang_server.client(proxy.url) for proxy in (first, second)]
            async with Fleet(servers, in_flight=8, wait_timeout_s=30) as fleet:
                await fleet.admit(servers, 0)
                stream = asyncio.create_task(collect(fleet, requests))
                while not (first.bodies("/generate") and second.bodies("/generate")):
                    await asyncio.sleep(0.01)
                first.die()
                return await stream, len(second.bodies("/generate"))

    pairs, at_second = asyncio.run(play())
    assert at_second == 6
    assert sorted(asked.rid for asked, _ in pairs) == [f"w{i}" for i in range(6)]
    assert all(worst_gap(got, sglang_server.model, prompt=asked.token_ids) <= LIMIT for asked, got in pairs)


async def collect(fleet: Fleet, requests: list[Request]) -> list[tuple[Request, Generated]]:
    return [pair async for pair in fleet.stream(requests)]


def test_the_fleet_aborts_what_runs_and_what_waits(sglang_server: RealServer) -> None:
    requests = [Request(f"b{i}", (*PROMPT, i), LONG) for i in range(6)]

    async def play() -> list[tuple[Request, Generated]]:
        servers = [sglang_server.client()]
        async with Fleet(servers, in_flight=4, wait_timeout_s=30) as fleet:
            await fleet.admit(servers, 0)
            stream = asyncio.create_task(collect(fleet, requests))
            await asyncio.sleep(0.7)
            await fleet.abort_all(30)
            assert fleet.running == 0 and not fleet.quarantined
            return await stream

    results = {asked.rid: got for asked, got in asyncio.run(play())}
    assert len(results) == 6 and all(got.finish == "abort" for got in results.values())
    assert sum(len(got.token_ids) > 0 for got in results.values()) == 4
    for request in requests:
        if results[request.rid].token_ids:
            assert worst_gap(results[request.rid], sglang_server.model, prompt=request.token_ids) <= LIMIT


def test_a_killed_server_is_replaced_and_comes_back_with_the_right_weights(
    sglang_server: RealServer,
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGKILL in mid-generation: no response is lost or doubled; back only with the fleet's weights."""
    monkeypatch.setattr(fleet_module, "HEALTH_PERIOD_S", 1.0)
    processes = server_processes(checkpoints[1], tmp_path)
    requests = [Request(f"k{i}", (*PROMPT, i), Sampling(max_tokens=150)) for i in range(8)]

    async def play() -> None:
        await processes.start()
        [url] = processes.urls
        shared, second = sglang_server.client(), sglang_server.client(url)
        async with Fleet([shared, second], in_flight=8, wait_timeout_s=30) as fleet:
            await load_from_disk(second, checkpoints[0], 0)
            await fleet.admit([shared, second], 0)
            stream = asyncio.create_task(collect(fleet, requests))
            await asyncio.sleep(0.7)
            assert fleet.running == 8
            os.killpg(processes.pid(url), signal.SIGKILL)
            pairs = await stream
            assert sorted(asked.rid for asked, _ in pairs) == sorted(request.rid for request in requests)
            for asked, got in pairs:
                assert worst_gap(got, checkpoints[0], prompt=asked.token_ids) <= LIMIT
            assert fleet.in_use == (shared,) and not processes.is_alive(url)

            await processes.restart(url)
            assert fleet.in_use == (shared,)  # alive, but with weights of its own
            with pytest.raises(ServerError, match="has weight version -1, not 0"):
                await fleet.readmit(second)
            await load_from_disk(second, checkpoints[0], 0)
            await fleet.readmit(second)
            assert fleet.in_use == (shared, second)
            again = await second.generate(PROMPT, Sampling(max_tokens=8), rid="again")
            assert worst_gap(again, checkpoints[0]) <= LIMIT

    try:
        asyncio.run(play())
    finally:
        processes.stop()
    assert not processes.is_alive(processes.urls[0])
