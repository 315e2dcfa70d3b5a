"""Weight sync without a server: buckets, files, checksums, and what happens when servers or streams fail."""

from __future__ import annotations

import asyncio
import hashlib
import resource
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from comppo_mcore.config.schema import ParallelConfig, SGLangConfig
from comppo_mcore.errors import UserError
from comppo_mcore.model import parallel
from comppo_mcore.model.hf_table import TensorSpec
from comppo_mcore.rollout.sglang.http import Broken, Refused
from comppo_mcore.rollout.sglang.server import Server, ServerInfo
from comppo_mcore.rollout.sglang.sync import SyncError, WeightSync
from comppo_mcore.rollout.sglang.sync_buckets import fill, plan
from comppo_mcore.rollout.sglang.sync_check import Fingerprint, differences
from comppo_mcore.rollout.sglang.sync_disk import write_folder
from tests.dist import run_distributed

MIB = 2**20
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (128, 512),
    LAYER + "self_attn.q_proj.weight": (512, 512),
    LAYER + "self_attn.k_proj.weight": (256, 512),
    LAYER + "self_attn.v_proj.weight": (256, 512),
    LAYER + "mlp.gate_proj.weight": (400, 512),
    LAYER + "mlp.up_proj.weight": (400, 512),
    "model.norm.weight": (512,),
}
MANIFEST = {name: TensorSpec(shape, torch.float32) for name, shape in SHAPES.items()}
SERVED = {  # how a server stacks them
    "model.embed_tokens.weight": ["model.embed_tokens.weight"],
    LAYER + "self_attn.qkv_proj.weight": [LAYER + f"self_attn.{x}_proj.weight" for x in "qkv"],
    LAYER + "mlp.gate_up_proj.weight": [LAYER + f"mlp.{x}_proj.weight" for x in ("gate", "up")],
    "model.norm.weight": ["model.norm.weight"],
}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def served_hashes(held: dict[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256, shortened as SGLang does, of the stacked tensors' bytes."""
    return {
        name: hashlib.sha256(b"".join(held[part].numpy().tobytes() for part in parts)).hexdigest()[:16]
        for name, parts in SERVED.items()
    }


# ---------------------------------------------------------------------------- buckets

specs = st.builds(
    TensorSpec,
    st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)


@settings(max_examples=200, deadline=None)
@given(specs=st.lists(specs, min_size=1, max_size=12), limit=st.integers(1, 600))
def test_a_plan_holds_every_tensor_once_in_order_and_within_the_limit(
    specs: list[TensorSpec], limit: int
) -> None:
    manifest = {f"t{i}": spec for i, spec in enumerate(specs)}
    buckets = plan(manifest, limit)
    assert [piece.name for pieces in buckets for piece in pieces] == list(manifest)
    for pieces in buckets:
        assert pieces[-1].end <= limit or len(pieces) == 1
        assert pieces[0].begin == 0
        for piece, following in pairwise(pieces):
            assert piece.end == following.begin
        for piece in pieces:
            assert piece.begin % piece.spec.dtype.itemsize == 0
            assert piece.end - piece.begin == torch.empty(piece.spec.shape, dtype=piece.spec.dtype).nbytes


def test_buckets_are_not_smaller_than_they_can_be() -> None:
    manifest = {f"t{i}": TensorSpec((64,), torch.float32) for i in range(10)}
    assert [len(pieces) for pieces in plan(manifest, 3 * 256)] == [3, 3, 3, 1]


def test_the_bytes_of_a_bucket_are_those_of_its_tensors() -> None:
    manifest = {
        "a": TensorSpec((3, 2), torch.bfloat16),
        "b": TensorSpec((5,), torch.float32),
        "c": TensorSpec((2, 2), torch.float32),
    }
    tensors = {name: torch.randn(spec.shape).to(spec.dtype) for name, spec in manifest.items()}
    tensors["c"] = torch.randn(2, 2).t()  # not contiguous
    stream = iter(tensors.items())
    seen = []
    for pieces in plan(manifest, 40):
        bucket = fill(stream, pieces, None, lambda name, tensor: seen.append(name))
        for piece in bucket.pieces:
            back = bucket.data[piece.begin : piece.end].view(piece.spec.dtype).reshape(piece.spec.shape)
            assert torch.equal(back, tensors[piece.name])
    assert seen == list(manifest)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ([("a", torch.zeros(2)), ("x", torch.zeros(3))], "has x .* where b .* belongs"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(4))], r"has b .*\(4,\).* where b .*\(3,\).* belongs"),
        ([("a", torch.zeros(2)), ("b", torch.zeros(3).half())], "has b .*float16.* where b .*float32"),
        ([("a", torch.zeros(2))], "ended before b"),
    ],
)
def test_what_the_manifest_does_not_expect_is_refused(
    sent: list[tuple[str, torch.Tensor]], message: str
) -> None:
    manifest = {"a": TensorSpec((2,), torch.float32), "b": TensorSpec((3,), torch.float32)}
    with pytest.raises(ValueError, match=message):
        fill(iter(sent), plan(manifest, 100)[0], None, lambda *_: None)


# ---------------------------------------------------------------------------- disk


def test_a_written_folder_is_what_safetensors_reads(tmp_path: Path) -> None:
    manifest = {
        "a": TensorSpec((3, 5), torch.bfloat16),
        "b": TensorSpec((4,), torch.float32),
        "c": TensorSpec((2, 1), torch.float16),
    }
    tensors = {name: torch.randn(spec.shape).to(spec.dtype) for name, spec in manifest.items()}
    size = write_folder(iter(tensors.items()), manifest, tmp_path / "w", lambda *_: None)
    assert size == 3 * 5 * 2 + 4 * 4 + 2 * 2
    read: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "w").iterdir():  # two, because b would not be aligned behind a
        with safe_open(path, framework="pt") as file:
            read |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            assert file.metadata() == {"format": "pt"}
    assert sorted(read) == list(manifest)
    assert all(torch.equal(read[name], tensors[name]) for name in manifest)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may have more than 1 MiB: writing fails half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.sglang.transport 'disk' .* File too large"):
        write_folder(iter(weights(0).items()), MANIFEST, tmp_path / "w", lambda *_: None)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- checksums


def fingerprint(held: dict[str, torch.Tensor]) -> Fingerprint:
    sent = Fingerprint()
    for name, tensor in held.items():
        sent.look(name, tensor)
    return sent


def test_a_fingerprint_knows_what_servers_stack() -> None:
    held = weights(0)
    assert fingerprint(held).expected(tp_size=1) == served_hashes(held)
    assert fingerprint(held).expected(tp_size=2).keys() == {"model.norm.weight"}


def test_one_wrong_bit_is_found() -> None:
    held, sent = weights(0), fingerprint(weights(0))
    assert differences({"u": [served_hashes(held)]}, sent) == {}
    held[LAYER + "self_attn.v_proj.weight"].view(torch.int32)[-1, -1] ^= 1
    (reason,) = differences({"u": [served_hashes(held)]}, sent).values()
    assert reason.endswith("first in model.layers.0.self_attn.qkv_proj.weight")


def test_a_vocabulary_that_servers_pad_is_not_compared() -> None:
    sent = fingerprint({"lm_head.weight": torch.zeros(131, 4), "model.norm.weight": torch.zeros(4)})
    assert sent.expected(tp_size=1).keys() == {"model.norm.weight"}


def test_servers_outside_the_majority_are_wrong() -> None:
    def told(*hashes: str) -> dict[str, list[dict[str, str]]]:
        return {f"u{i}": [{"w": value}] for i, value in enumerate(hashes)}

    unknown = Fingerprint()  # as on GPUs
    assert differences(told("a", "a", "b"), unknown).keys() == {"u2"}
    assert differences(told("a", "b"), unknown).keys() == {"u0", "u1"}
    assert differences(told("a", "a"), unknown) == {}
    split = {"u0": [{"w": "a"}], "u1": [{"w": "b"}, {"w": "c"}]}  # TP 1 and TP 2 are not compared
    assert differences(split, unknown) == {}


# ---------------------------------------------------------------------------- whole syncs


class StandIn(Server):
    """Answers as a server would, without one, and does what a test tells it to do wrong."""

    def __init__(self, url: str, **faults: Any) -> None:
        super().__init__(url, vocab_size=128, request_timeout_s=5, sync_timeout_s=5)
        self.orders: list[str] = []
        self.version = 0
        self.holds = weights(1)
        self.faults = faults

    async def info(self) -> ServerInfo:
        return ServerInfo("m", "qwen3", 1, self.version, "0", 99, "float32")

    async def weight_version(self, *, timeout_s: float) -> int:
        return self.faults.get("says", self.version)

    async def post(self, path: str, body: Any, *, timeout_s: float | None = None) -> Any:
        self.orders.append(path.removeprefix("/"))
        if self.faults.get("at") == (path, self.orders.count(path.removeprefix("/"))):
            raise self.faults["error"]
        if self.faults.get("hangs") == path:
            await asyncio.sleep(60)
        if path == "/weights_checker":
            return {"success": True, "ranks": [{"checksums": served_hashes(self.holds)}]}
        self.version = int(body.get("weight_version", self.version)) if body else self.version
        return {"success": True}


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
def sync(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> WeightSync:
    config = SGLangConfig(transport="tensor", bucket_mb=1, sync_timeout_s=1.0)
    return WeightSync(config, torch.device("cpu"), tmp_path, loop)


GOOD_ORDERS = [
    "pause_generation",
    "begin_weight_update",
    *["update_weights_from_tensor"] * 5,
    "end_weight_update",
    "weights_checker",
    "continue_generation",
]


def test_the_sequence_and_its_report(sync: WeightSync) -> None:
    server = StandIn("http://a")
    report = sync.update(iter(weights(1).items()), MANIFEST, 7, [server])
    assert server.orders == GOOD_ORDERS
    assert report.failed == {}
    assert (report.version, report.num_buckets) == (7, 5)
    assert report.num_bytes == sum(tensor.nbytes for tensor in weights(1).values())
    assert report.peak_bytes <= MIB + max(tensor.nbytes for tensor in weights(1).values())
    assert 0 < report.frozen_seconds <= report.seconds


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"at": ("/update_weights_from_tensor", 2), "error": Broken("http://b: HTTP 503")}, "HTTP 503"),
        ({"hangs": "/update_weights_from_tensor"}, "sync_timeout_s = 1"),
        ({"hangs": "/pause_generation"}, "sync_timeout_s = 1"),
        ({"says": 6}, "says weight version 6 after it was sent 7"),
    ],
)
def test_a_server_that_fails_is_reported_and_not_resumed(
    sync: WeightSync, faults: dict[str, Any], reason: str
) -> None:
    good, bad = StandIn("http://a"), StandIn("http://b", **faults)
    stream = iter(weights(1).items())
    report = sync.update(stream, MANIFEST, 7, [good, bad])
    assert report.failed.keys() == {"http://b"}
    assert reason in report.failed["http://b"]
    assert "continue_generation" not in bad.orders
    assert good.orders == GOOD_ORDERS
    assert next(stream, None) is None


def test_a_server_with_other_weights_than_sent_is_not_resumed(sync: WeightSync) -> None:
    good, bad = StandIn("http://a"), StandIn("http://b")
    bad.holds = weights(2)
    report = sync.update(iter(weights(1).items()), MANIFEST, 7, [good, bad])
    assert report.failed.keys() == {"http://b"}
    assert "holds other weights than were sent" in report.failed["http://b"]
    assert "continue_generation" not in bad.orders


def test_the_stream_is_consumed_though_no_server_is_left(sync: WeightSync) -> None:
    bad = StandIn("http://b", at=("/pause_generation", 1), error=Broken("http://b: HTTP 503"))
    stream = iter(weights(1).items())
    report = sync.update(stream, MANIFEST, 7, [bad])
    assert report.failed.keys() == {"http://b"}
    assert bad.orders == ["pause_generation"]
    assert next(stream, None) is None


def test_an_update_that_was_left_open_is_begun_anew(sync: WeightSync) -> None:
    server = StandIn("http://a", at=("/begin_weight_update", 1), error=Refused("already open", 400))
    report = sync.update(iter(weights(1).items()), MANIFEST, 7, [server])
    assert report.failed == {}
    assert server.orders[1:4] == ["begin_weight_update", "end_weight_update", "begin_weight_update"]


@pytest.mark.parametrize("transport", ["tensor", "broadcast", "disk"])
def test_a_stream_that_fails_before_its_first_tensor_touches_no_server(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, transport: Any
) -> None:
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        raise ValueError("the Megatron model and the HF manifest differ in x")
        yield

    sync = WeightSync(SGLangConfig(transport=transport), torch.device("cpu"), tmp_path, loop)
    server = StandIn("http://a")
    with pytest.raises(SyncError, match="differ in x") as caught:
        sync.update(stream(), MANIFEST, 7, [server])
    assert server.orders == []
    assert caught.value.failed == {}


def test_a_wrong_shape_is_refused_before_its_bucket_is_sent(sync: WeightSync) -> None:
    wrong = weights(1) | {"model.norm.weight": torch.zeros(7)}
    server = StandIn("http://a")
    with pytest.raises(SyncError, match=r"model.norm.weight .*\(7,\)") as caught:
        sync.update(iter(wrong.items()), MANIFEST, 7, [server])
    assert caught.value.failed.keys() == {"http://a"}
    assert server.orders == GOOD_ORDERS[:6]  # four of five buckets


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_touches_no_server(loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    sync = WeightSync(SGLangConfig(transport="disk"), torch.device("cpu"), tmp_path, loop)
    server, stream = StandIn("http://a"), iter(weights(1).items())
    with pytest.raises(UserError, match="File too large; make room, or set it to broadcast"):
        sync.update(stream, MANIFEST, 7, [server])
    assert server.orders == []
    assert next(stream, None) is None
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_come_is_named_in_bounded_time() -> None:
    first, second = run_distributed("absent_rank.py", 2, timeout=120)
    assert first.strip() == (
        "trainer ranks [1] did not come to weight sync 3 within rollout.sglang.sync_timeout_s = 1"
    )
    assert second == ""
