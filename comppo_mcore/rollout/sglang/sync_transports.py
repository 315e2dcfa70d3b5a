"""How a bucket gets from the trainer's first rank into servers: over a process group, or by shared memory.

Both send the bytes of a bucket whole and say in the request where each tensor is in them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed import distributed_c10d
from torch.multiprocessing import reductions

from comppo_mcore.errors import UserError
from comppo_mcore.rollout.sglang.http import ServerError
from comppo_mcore.rollout.sglang.server import Server
from comppo_mcore.rollout.sglang.sync_buckets import Allocate, Bucket
from comppo_mcore.rollout.sglang.sync_round import GRACE_S, Round

# Not in the type stubs: making a group that is not part of this process's world, as SGLang does.
_dist: Any = dist
_c10d: Any = distributed_c10d

FORMAT = "flattened_bucket"
DOOR_S = 0.5  # that the door to a group that will not come about is closed, and is open
_DEVICE_ARGUMENT = 6  # of torch's rebuild_cuda_tensor


class Transport(Protocol):
    @property
    def allocate(self) -> Allocate | None:
        """Makes the memory of a bucket; None: any will do."""
        ...

    def connect(self, round: Round, tp_sizes: Mapping[str, int]) -> None:
        """Make ready to send to the servers of this round; those that cannot be reached are dropped."""
        ...

    def send(self, bucket: Bucket, round: Round, version: int | None) -> None:
        """Put a bucket into every server; those it fails in are dropped.

        Args:
            version: given with the last bucket; the servers take it on and forget what they cached.
        """
        ...

    def close(self) -> None:
        """Give back what connects to servers."""
        ...


def _load(version: int | None) -> dict[str, Any]:
    last = {} if version is None else {"weight_version": str(version)}
    return {"load_format": FORMAT, "flush_cache": version is not None, **last}


# ---------------------------------------------------------------------------- broadcast


@dataclass(frozen=True)
class Group:
    """The process group of the trainer's first rank, as rank 0, and every rank of some servers."""

    name: str
    members: tuple[tuple[str, int], ...]  # URL, ranks
    handle: Any
    store: Any  # lives as long as the group


class Broadcast:
    """A bucket is one broadcast over gloo (CPU) or NCCL (GPU) to all ranks of all servers.

    The group is kept from sync to sync while the servers are the same, and made anew after a failure.
    """

    allocate = None

    def __init__(self, master_address: str, device: torch.device, timeout_s: float) -> None:
        self._address = master_address
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Group | None = None

    def connect(self, round: Round, tp_sizes: Mapping[str, int]) -> None:
        if self._group and self._group.members == _members(round, tp_sizes):
            return
        self._leave(round)
        while round.live and self._group is None:  # without the servers that did not join
            self._group = self._join(round, _members(round, tp_sizes))

    def _join(self, round: Round, members: tuple[tuple[str, int], ...]) -> Group | None:
        name, size = f"comppo-{uuid.uuid4().hex[:12]}", 1 + sum(tp for _, tp in members)
        stores = [self._listen(0)]
        port = stores[0].port
        ours = in_thread(lambda: self._open(name, port, size))

        async def order(server: Server) -> None:
            body = self._invitation(name, port, size, members, server)
            await server.post("/init_weights_update_group", body, timeout_s=round.patience_s)

        async def release(waiting: Collection[asyncio.Future[None]]) -> None:
            # Servers that wait for a missing rank lose their connection. One that comes late would go on
            # trying to connect for half an hour; it is let in, to lose its connection too.
            stores.clear()
            while not all(task.done() for task in waiting):
                await asyncio.sleep(DOOR_S)
                stores.append(self._listen(port))
                await asyncio.sleep(DOOR_S)
                stores.clear()

        invited = len(round.live)
        if not round.together(order, release):
            if len(round.live) == invited:  # none of them kept the others waiting
                round.drop_all(f"process group {name} did not come about")
            return None
        try:
            return Group(name, members, ours.result(GRACE_S), stores.pop())
        except (TimeoutError, RuntimeError) as error:
            round.drop_all(f"the trainer could not join process group {name}: {error}")
            return None

    def _listen(self, port: int) -> Any:
        try:
            return _dist.TCPStore(
                self._address, port, is_master=True, timeout=self._timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"rollout.sglang.master_address {self._address!r} must be an address of the first rank's "
                f"host ({reason})"
            ) from error

    def _open(self, name: str, port: int, size: int) -> Any:
        client = _dist.TCPStore(
            self._address, port, is_master=False, timeout=self._timeout, wait_for_workers=False
        )
        # The public `new_group` makes groups inside a world only; these ranks have none in common.
        group, _ = _c10d._new_process_group_helper(
            size,
            0,
            [],
            dist.Backend(self._backend),
            _dist.PrefixStore(name, client),
            group_name=name,
            timeout=self._timeout,
        )
        _c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        return group

    def _invitation(
        self, name: str, port: int, size: int, members: tuple[tuple[str, int], ...], server: Server
    ) -> dict[str, Any]:
        position = [url for url, _ in members].index(server.url)
        return {
            "master_address": self._address,
            "master_port": port,
            "rank_offset": 1 + sum(tp for _, tp in members[:position]),
            "world_size": size,
            "group_name": name,
            "backend": self._backend,
        }

    @property
    def _backend(self) -> str:
        return "nccl" if self._device.type == "cuda" else "gloo"

    def send(self, bucket: Bucket, round: Round, version: int | None) -> None:
        group = self._group
        assert group is not None
        body = {
            "names": [piece.name for piece in bucket.pieces],
            "dtypes": [str(piece.spec.dtype).removeprefix("torch.") for piece in bucket.pieces],
            "shapes": [list(piece.spec.shape) for piece in bucket.pieces],
            "group_name": group.name,
            **_load(version),
        }
        servers = list(round.live)
        ours = in_thread(lambda: self._broadcast(group, bucket.data))

        async def order(server: Server) -> None:
            await server.post("/update_weights_from_distributed", body, timeout_s=round.patience_s)

        async def release(waiting: Collection[asyncio.Future[None]]) -> None:
            await _tear(group, servers)

        if round.together(order, release):
            ours.result(GRACE_S)
            return
        first = next(iter(round.failed.values()), "a rank was lost")
        round.drop_all(f"was in the middle of a broadcast that failed: {first}")
        self._group = None
        self._abandon(group, ours)

    def _broadcast(self, group: Group, data: torch.Tensor) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        dist.broadcast(data, src=0, group=group.handle)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def _abandon(self, group: Group, running: Future[None]) -> None:
        """Destroy a group with a broadcast in it, which on gloo takes until it fails or its time is up."""

        def destroy() -> None:
            if self._device.type == "cuda":
                group.handle.abort()
            running.exception()
            dist.destroy_process_group(group.handle)

        in_thread(destroy)

    def _leave(self, round: Round) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        urls = {url for url, _ in group.members}
        servers = [server for server in round.live if server.url in urls]
        round.run(_tear(group, servers))
        dist.destroy_process_group(group.handle)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group.handle)


def _members(round: Round, tp_sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((server.url, tp_sizes[server.url]) for server in round.live)


async def _tear(group: Group, servers: list[Server]) -> None:
    """Ask servers to leave a group. One that is gone, or was never in it, is left alone."""

    async def leave(server: Server) -> None:
        with contextlib.suppress(ServerError):
            await server.post("/destroy_weights_update_group", {"group_name": group.name}, timeout_s=GRACE_S)

    await asyncio.gather(*map(leave, servers))


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run something that may block for long; the interpreter does not wait for it at its end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="weight-sync", daemon=True).start()
    return future


# ---------------------------------------------------------------------------- tensor


class SharedTensor:
    """A bucket is shared memory, or on a GPU a CUDA IPC handle, that servers on the same host open.

    What is pickled is torch's own description of the memory, once for each rank that will open it.
    """

    def __init__(self, device: torch.device) -> None:
        self._tp_sizes: Mapping[str, int] = {}
        self.allocate: Allocate | None = _shared if device.type == "cpu" else None

    def connect(self, round: Round, tp_sizes: Mapping[str, int]) -> None:
        self._tp_sizes = dict(tp_sizes)

    def send(self, bucket: Bucket, round: Round, version: int | None) -> None:
        # Made here, because tasks may keep what they use for a while, and a bucket is large.
        handles = {s.url: [serialize(bucket) for _ in range(self._tp_sizes[s.url])] for s in round.live}

        async def order(server: Server) -> None:
            body = {"serialized_named_tensors": handles[server.url], **_load(version)}
            await server.post("/update_weights_from_tensor", body)

        round.each(order)

    def close(self) -> None:
        self._tp_sizes = {}


def _shared(size: int) -> torch.Tensor:
    """Bytes that are in shared memory from the start: sharing them later would copy them."""
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))  # pyright: ignore[reportArgumentType]


def serialize(bucket: Bucket) -> str:
    """A bucket's handle as base64 of a pickle; plain namespaces stand for SGLang's own class of metadata."""
    metadata = [
        SimpleNamespace(
            name=piece.name,
            shape=piece.spec.shape,
            dtype=piece.spec.dtype,
            start_idx=piece.begin,
            end_idx=piece.end,
            numel=piece.end - piece.begin,
        )
        for piece in bucket.pieces
    ]
    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    if bucket.data.is_cuda:
        pickler.dispatch_table[torch.Tensor] = _reduce_for_any_process
    with _by_file_name():
        pickler.dump({"flattened_tensor": bucket.data, "metadata": metadata})
    return base64.b64encode(buffer.getvalue()).decode()


def _reduce_for_any_process(tensor: torch.Tensor) -> tuple[Any, ...]:
    """torch's reduction with the GPU's UUID for its index, which can be another in the server's process."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    uuid_of_gpu = str(torch.cuda.get_device_properties(tensor.device).uuid)
    at = _DEVICE_ARGUMENT
    return rebuild, (*arguments[:at], uuid_of_gpu, *arguments[at + 1 :])


@contextlib.contextmanager
def _by_file_name() -> Iterator[None]:
    """torch's other way, passing descriptors, needs the key of the sender's process and kills a server."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)
