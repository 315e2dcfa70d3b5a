"""The client of one SGLang server: retries, checks before and after a request. No SGLang is needed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from comppo_mcore.errors import UserError
from comppo_mcore.rollout.engine import Sampling
from comppo_mcore.rollout.sglang import http
from comppo_mcore.rollout.sglang.http import Broken, Refused, Unreachable
from comppo_mcore.rollout.sglang.server import Generated, Server, parse_version
from tests.faulty_proxy import CUT, DROP, TRUNCATE, UNAVAILABLE, Fault, FaultyProxy, Reply

VOCAB = 50
ROOM = 100
PROMPT = (3, 1, 4)
SAMPLING = Sampling(max_tokens=2, stop_ids=(9,))
T = TypeVar("T")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.01)


def reply(tokens: list[int], finish: str = "length", **meta: Any) -> dict[str, Any]:
    """What SGLang 0.5.23 answers, as far as it is read."""
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": finish},
            "weight_version": "7",
            "output_token_logprobs": [[-1.5, token, None] for token in tokens],
            "weight_versions": [{"version": "7", "start": 0, "end": len(tokens)}],
            **meta,
        },
    }


def sglang(path: str, body: Any) -> Any:
    if path == "/model_info":
        return {"model_path": "/m", "model_type": "qwen3", "weight_version": "7"}
    if path == "/server_info":
        return {"tp_size": 1, "version": "0.5.23", "max_req_input_len": ROOM - 4, "dtype": "float32"}
    if path == "/generate":
        return reply([5, 6])
    if path in ("/health", "/flush_cache", "/abort_request"):
        return Reply(200, b"", "text/plain")
    return {"success": True, "message": ""}


def talk(proxy: FaultyProxy, say: Callable[[Server], Awaitable[T]], *, timeout_s: float = 20.0) -> T:
    async def conversation() -> T:
        server = Server(proxy.url, vocab_size=VOCAB, request_timeout_s=timeout_s, sync_timeout_s=timeout_s)
        try:
            return await say(server)
        finally:
            await server.aclose()

    return asyncio.run(conversation())


def generate(
    proxy: FaultyProxy, sampling: Sampling = SAMPLING, *, mask: bool = False, timeout_s: float = 20.0
) -> Generated:
    return talk(
        proxy, lambda server: server.generate(PROMPT, sampling, rid="r", mask=mask), timeout_s=timeout_s
    )


def answering(value: Any) -> Callable[[str, Any], Any]:
    return lambda path, body: value if path == "/generate" else sglang(path, body)


def test_a_response_is_read_whole() -> None:
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    with FaultyProxy(answering(reply([5, 9], "stop", weight_versions=spans))) as proxy:
        assert generate(proxy) == Generated((5, 9), (-1.5, -1.5), "stop", (7, 8))


def test_every_sampling_word_is_sent() -> None:
    sampling = Sampling(max_tokens=2, temperature=0.5, top_p=0.7, stop_ids=(9, 8))
    with FaultyProxy(sglang) as proxy:
        talk(proxy, lambda server: server.generate(PROMPT, sampling, rid="r", seed=11))
        [body] = proxy.bodies("/generate")
    assert body["input_ids"] == list(PROMPT) and body["rid"] == "r" and body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.7,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": [9, 8],
        "ignore_eos": False,
        "sampling_seed": 11,
    }


def test_without_stop_ids_nothing_stops_it() -> None:
    with FaultyProxy(sglang) as proxy:
        generate(proxy, Sampling(max_tokens=2, greedy=True))
        [body] = proxy.bodies("/generate")
    assert body["sampling_params"]["ignore_eos"] is True
    assert body["sampling_params"]["top_k"] == 1 and body["sampling_params"]["temperature"] == 1.0


def test_greedy_at_another_temperature_is_refused() -> None:
    with (
        FaultyProxy(sglang) as proxy,
        pytest.raises(ValueError, match=r"greedy needs temperature 1, got 0\.5"),
    ):
        generate(proxy, Sampling(max_tokens=2, greedy=True, temperature=0.5))


@pytest.mark.parametrize("fault", [UNAVAILABLE, DROP, CUT, TRUNCATE], ids=lambda fault: fault.kind)
def test_faults_of_a_generation_are_retried_under_a_fresh_id(fault: Fault) -> None:
    with FaultyProxy(sglang) as proxy:
        proxy.inject("/generate", fault, fault)
        assert generate(proxy).token_ids == (5, 6)
        assert [body["rid"] for body in proxy.bodies("/generate")] == ["r", "r.1", "r.2"]


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (UNAVAILABLE, Broken, "HTTP 503 injected"),
        (TRUNCATE, Broken, "truncated or malformed JSON"),
        (DROP, Unreachable, "generate"),
    ],
    ids=["503", "truncated", "dropped"],
)
def test_a_fault_that_stays_is_an_error(fault: Fault, error: type[Exception], says: str) -> None:
    with FaultyProxy(sglang) as proxy:
        proxy.inject("/generate", *[fault] * 10)
        with pytest.raises(error, match=says):
            generate(proxy)
        assert len(proxy.bodies("/generate")) == http.ATTEMPTS


def test_a_slow_server_is_waited_for_once_and_not_for_ever() -> None:
    with FaultyProxy(sglang) as proxy:
        proxy.inject("/generate", *[Fault("delay", seconds=30)] * 10)
        with pytest.raises(Unreachable, match=r"/generate: no reply within"):
            generate(proxy, timeout_s=0.3)
        assert len(proxy.bodies("/generate")) == 1


def test_all_attempts_share_one_timeout() -> None:
    """The second 503 would come after the time is up."""
    with FaultyProxy(sglang) as proxy:
        proxy.inject("/generate", *[Fault("status", seconds=1.2)] * 10)
        with pytest.raises(Unreachable, match=r"/generate: no reply within"):
            generate(proxy, timeout_s=2.0)


def test_a_dead_server_is_named() -> None:
    proxy = FaultyProxy(sglang)
    proxy.die()
    with pytest.raises(Unreachable, match=rf"{proxy.url}/model_info: ConnectError"):
        generate(proxy)


def test_a_refusal_is_not_retried() -> None:
    refusal = Reply(400, json.dumps({"error": {"message": "top_k is wrong"}}).encode())
    with FaultyProxy(answering(refusal)) as proxy:
        with pytest.raises(Refused, match="HTTP 400 top_k is wrong") as caught:
            generate(proxy)
        assert caught.value.status == 400
        assert len(proxy.bodies("/generate")) == 1


@pytest.mark.parametrize(
    ("fault", "error"), [(UNAVAILABLE, Broken), (DROP, Unreachable), (TRUNCATE, Broken)], ids=lambda x: str(x)
)
def test_an_update_is_never_sent_twice(fault: Fault, error: type[Exception]) -> None:
    with FaultyProxy(sglang) as proxy:
        proxy.inject("/update_weights_from_disk", *[fault] * 10)
        with pytest.raises(error):
            talk(proxy, lambda server: server.post("/update_weights_from_disk", {"model_path": "/m"}))
        assert len(proxy.bodies("/update_weights_from_disk")) == 1


def test_success_false_is_a_refusal() -> None:
    with (
        FaultyProxy(lambda path, body: {"success": False, "message": "no such name"}) as proxy,
        pytest.raises(Refused, match="/end_weight_update: no such name"),
    ):
        talk(proxy, lambda server: server.end_update())


def test_a_server_without_the_update_protocol_needs_none() -> None:
    with FaultyProxy(lambda path, body: Reply(404, b'{"detail": "Not Found"}')) as proxy:
        talk(proxy, lambda server: server.begin_update())
        talk(proxy, lambda server: server.end_update())
        with pytest.raises(Refused, match="Not Found"):
            talk(proxy, lambda server: server.resume())


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ((), SAMPLING, r"empty or has a token id outside \[0, 50\)"),
        ((3, 50), SAMPLING, r"outside \[0, 50\)"),
        ((-1,), SAMPLING, r"outside \[0, 50\)"),
        ((3,), Sampling(max_tokens=2, stop_ids=(50,)), "a stop id is outside"),
        ((3,) * 99, SAMPLING, "99 prompt tokens and 2 response tokens are more than the 100"),
    ],
    ids=["empty", "beyond", "negative", "stop", "long"],
)
def test_bad_input_does_not_reach_the_server(prompt: tuple[int, ...], sampling: Sampling, says: str) -> None:
    with FaultyProxy(sglang) as proxy:
        with pytest.raises(ValueError, match=says):
            talk(proxy, lambda server: server.generate(prompt, sampling, rid="r"))
        assert proxy.bodies("/generate") == []


@pytest.mark.parametrize(
    "senseless",
    [
        [],
        {"output_ids": [5, 6]},
        reply([5, 6], "explosion"),
        reply([5]),
        reply([5, 6, 7]),
        reply([], "stop"),
        reply([5, VOCAB]),
        reply([5, 6], output_token_logprobs=[[-1.0, 5, None]]),
        reply([5, 6], output_token_logprobs=[[-1.0, 5, None], [-1.0, 7, None]]),
        reply([5, 6], output_token_logprobs=[[-1.0, 5, None], [math.nan, 6, None]]),
        reply([5, 6], output_token_logprobs=[[-1.0, 5, None], [None, 6, None]]),
        reply([5, 6], output_token_logprobs=[[-1.0, 5, None], [0.5, 6, None]]),
        reply([5, 6], weight_versions=[{"version": "7", "start": 0, "end": 1}]),
        reply([5, 6], weight_versions=[{"version": "7", "start": 1, "end": 2}]),
    ],
)
def test_a_senseless_reply_is_broken(senseless: Any) -> None:
    with FaultyProxy(answering(senseless)) as proxy, pytest.raises(Broken, match="makes no sense"):
        generate(proxy)


def test_an_abort_may_be_empty() -> None:
    waiting = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "7"}}
    with FaultyProxy(answering(waiting)) as proxy:
        assert generate(proxy) == Generated((), (), "abort", ())
        assert generate(proxy, mask=True).supports == ()


def test_a_stop_at_a_token_the_trainer_does_not_know_is_the_users() -> None:
    with (
        FaultyProxy(answering(reply([5], "stop"))) as proxy,
        pytest.raises(UserError, match=r"model\.path: .* token 5, an eos_token_id of config\.json"),
    ):
        generate(proxy)


def test_supports_are_read_and_checked() -> None:
    masked = reply([5, 6], output_token_sampling_mask=[[5, 1], [6]])
    with FaultyProxy(answering(masked)) as proxy:
        assert generate(proxy, mask=True).supports == ((5, 1), (6,))
        [body] = proxy.bodies("/generate")
    assert body["return_sampling_mask"] is True and body["sampling_params"]["top_k"] == 4096
    for mask in ([[5, 1]], [[5, 1], [5, 1]]):
        with (
            FaultyProxy(answering(reply([5, 6], output_token_sampling_mask=mask))) as proxy,
            pytest.raises(Broken, match="sampling mask"),
        ):
            generate(proxy, mask=True)


def test_info() -> None:
    with FaultyProxy(sglang) as proxy:
        info = talk(proxy, lambda server: server.info())
    assert (info.model_path, info.weight_version, info.max_context, info.sglang) == ("/m", 7, ROOM, "0.5.23")
    with (
        FaultyProxy(lambda path, body: {"hello": "world"}) as proxy,
        pytest.raises(Broken, match="not the reply of an SGLang server"),
    ):
        talk(proxy, lambda server: server.info())


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0", 0),
        ("17", 17),
        ("default", -1),
        ("", -1),
        (None, -1),
        (3, -1),
        ("-2", -1),
        ("1.0", -1),
        ("٣", -1),
    ],
)
def test_versions_are_decimal(text: object, version: int) -> None:
    assert parse_version(text) == version


def test_ready_is_waited_for_and_not_for_ever() -> None:
    with FaultyProxy(sglang) as proxy:
        proxy.inject("/health", UNAVAILABLE)
        talk(proxy, lambda server: server.wait_ready(20))
        assert len(proxy.bodies("/health")) == 2
        proxy.inject("/health", *[UNAVAILABLE] * 100)
        with pytest.raises(Unreachable, match=r"is not ready after 0\.2 s: .*/health"):
            talk(proxy, lambda server: server.wait_ready(0.2))


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of whole 4-byte words, in plain integers."""
    state, word = 0, (1 << 32) - 1
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & word
        k = (k << 15 | k >> 17) * 0x1B873593 & word
        state ^= k
        state = ((state << 13 | state >> 19) & word) * 5 + 0xE6546B64 & word
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & word
    state = (state ^ state >> 13) * 0xC2B2AE35 & word
    return state ^ state >> 16


def test_the_hash_behind_a_cpu_servers_seeds() -> None:
    path = Path(__file__).parent.parent / "launch/sglang_cpu/sgl_kernel/murmur.py"
    spec = importlib.util.spec_from_file_location("murmur", path)
    assert spec is not None and spec.loader is not None
    murmur = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(murmur)
    assert murmur3(b"test") == 0xBA6BD213  # published
    seeds = [0, 1, 2**63 + 12345, 2**64 - 1]
    positions, columns = [0, 7, 2**31 - 1, 5], [0, 1, 151_935]
    found = murmur.murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions), torch.tensor(columns)
    )
    assert found.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, expected in enumerate(columns):
            words = (
                seed.to_bytes(8, "little") + position.to_bytes(4, "little") + expected.to_bytes(4, "little")
            )
            assert found[row, column].item() == murmur3(words)
