"""Weight sync: the trainer's weights into every server, streamed, without a full copy on any rank.

    ranks meet → pause, begin → bucket, bucket, …, last bucket (version, flush) → end → check → resume

`model.hf.export_hf` is collective: every rank of the trainer consumes the stream, the first one sends it.
A server is resumed only if it then holds this version, whole; the others are reported and left paused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from comppo_mcore.config.schema import SGLangConfig
from comppo_mcore.errors import UserError
from comppo_mcore.model.hf_table import Manifest, Stream
from comppo_mcore.model.parallel import from_rank0
from comppo_mcore.rollout.sglang.http import Broken, Refused
from comppo_mcore.rollout.sglang.server import Server
from comppo_mcore.rollout.sglang.sync_buckets import Watched, fill, num_bytes, peak_bytes, plan
from comppo_mcore.rollout.sglang.sync_check import Checksums, Fingerprint, checksums, differences
from comppo_mcore.rollout.sglang.sync_disk import remove, write_folder
from comppo_mcore.rollout.sglang.sync_round import Round
from comppo_mcore.rollout.sglang.sync_transports import Broadcast, SharedTensor, Transport

Pause = Literal["retract", "abort"]


class SyncError(RuntimeError):
    """A sync came to no end.

    Attributes:
        failed: URL → why, of the servers that may be half-updated and must not be used.
    """

    def __init__(self, message: str, failed: Mapping[str, str] | None = None) -> None:
        super().__init__(message)  # alone, because exceptions are pickled as their arguments and attributes
        self.failed = dict(failed or {})


@dataclass(frozen=True)
class SyncReport:
    """What a sync did; the same on every rank."""

    version: int
    num_bytes: int  # of weights
    num_buckets: int
    peak_bytes: int  # taken beside the model on the first rank: a bucket and the tensor being added to it
    seconds: float
    frozen_seconds: float  # from the first server's pause to the last one's resumption
    failed: Mapping[str, str]  # URL → why; left paused, not to be used until they have been synced


class WeightSync:
    """Syncs weights again and again; called on all ranks of the trainer alike.

    Args:
        device: of the trainer's parameters.
        folder: for transport `disk`, on a filesystem the servers share.
        loop: runs the requests, in another thread; on the first rank only.
    """

    def __init__(
        self,
        config: SGLangConfig,
        device: torch.device,
        folder: Path,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config = config
        self._folder = folder.absolute()
        self._loop = loop
        self._count = 0
        self._transport: Transport | None = None
        if config.transport == "broadcast":
            self._transport = Broadcast(config.master_address, device, config.sync_timeout_s)
        elif config.transport == "tensor":
            self._transport = SharedTensor(device)

    def update(
        self,
        stream: Stream,
        manifest: Manifest,
        version: int,
        servers: Sequence[Server] = (),
        pause: Pause = "retract",
    ) -> SyncReport:
        """Give every server the stream's weights as `version`.

        Args:
            stream: the manifest's tensors in its order, from `export_hf`.
            servers: on the first rank; after a failure any of them may come again, whatever they hold.
            pause: what becomes of running requests, as in `Server.pause`.

        Raises:
            UserError: on all ranks: the folder cannot be written; no server was touched.
            SyncError: on all ranks: a rank did not come to the sync, or the stream failed.
        """
        self._meet(version)
        watched = Watched(stream)
        outcome: SyncReport | Exception | None = None
        if dist.get_rank() == 0:
            outcome = self._attempt(watched, manifest, version, servers, pause)
        for _ in watched:  # ranks that do not send, or no longer can, still take part in the collectives
            pass
        return _agree(outcome)

    def _attempt(
        self, stream: Watched, manifest: Manifest, version: int, servers: Sequence[Server], pause: Pause
    ) -> SyncReport | Exception:
        """A report, or what went wrong while the stream is intact, for the other ranks to hear of."""
        round = Round(servers, self._loop, self._config.sync_timeout_s)
        try:
            if self._transport is None:
                return self._through_folder(stream, manifest, version, round, pause)
            return self._through_buckets(self._transport, stream, manifest, version, round, pause)
        except Exception as error:
            if round.touched:
                round.drop_all(f"the sync stopped: {error}")
            if stream.failed:  # on the other ranks too, or they are gone
                raise SyncError(f"weight sync {version} stopped: {error}", round.failed) from error
            return error if isinstance(error, UserError) else SyncError(_one_line(error), round.failed)

    def _through_buckets(
        self,
        transport: Transport,
        stream: Watched,
        manifest: Manifest,
        version: int,
        round: Round,
        pause: Pause,
    ) -> SyncReport:
        begin = time.monotonic()
        buckets = plan(manifest, self._config.bucket_mb * 2**20)
        # The export compares names and shapes on all ranks before its first tensor, and no server is touched
        # before that.
        stream.begin()
        frozen = time.monotonic()
        tp_sizes: dict[str, int] = {}

        async def prepare(server: Server) -> None:
            tp_sizes[server.url] = (await server.info()).tp_size
            await server.pause(pause)
            await _begin(server)

        round.each(prepare)
        transport.connect(round, tp_sizes)
        sent = Fingerprint()
        for number, pieces in enumerate(buckets):
            if not round.live:
                break
            bucket = fill(stream, pieces, transport.allocate, sent.look)
            transport.send(bucket, round, version if number + 1 == len(buckets) else None)
            del bucket
        round.each(lambda server: server.end_update())
        self._check_and_resume(round, version, sent)
        return SyncReport(
            version,
            sum(map(num_bytes, manifest.values())),
            len(buckets),
            max(peak_bytes(pieces, copied=transport.allocate is not None) for pieces in buckets),
            time.monotonic() - begin,
            time.monotonic() - frozen,
            round.failed,
        )

    def _through_folder(
        self, stream: Watched, manifest: Manifest, version: int, round: Round, pause: Pause
    ) -> SyncReport:
        begin = time.monotonic()
        folder = self._folder / f"weights_{version}"
        sent = Fingerprint()
        size = write_folder(stream, manifest, folder, sent.look)
        frozen = time.monotonic()

        async def load(server: Server) -> None:
            await server.pause(pause)
            body = {
                "model_path": str(folder),
                "load_format": "auto",  # its own is "dummy" where it began without weights
                "weight_version": str(version),
                "flush_cache": True,
            }
            await server.post("/update_weights_from_disk", body)

        round.each(load)
        self._check_and_resume(round, version, sent)
        remove(folder)
        largest = max(map(num_bytes, manifest.values()))
        now = time.monotonic()
        return SyncReport(version, size, 1, largest, now - begin, now - frozen, round.failed)

    def _check_and_resume(self, round: Round, version: int, sent: Fingerprint) -> None:
        told: dict[str, Checksums] = {}

        async def check(server: Server) -> None:
            now = await server.weight_version(timeout_s=self._config.sync_timeout_s)
            if now != version:
                raise Broken(f"{server.url}: says weight version {now} after it was sent {version}")
            weights = await checksums(server)
            if weights is not None:
                told[server.url] = weights

        round.each(check)
        wrong = differences(told, sent)
        for server in list(round.live):
            if server.url in wrong:
                round.drop(server, f"{server.url}: {wrong[server.url]}")
        round.each(lambda server: server.resume())

    def disconnect(self) -> None:
        """Forget the connection to the servers, as after one of them was started anew."""
        if self._transport is not None:
            self._transport.close()

    def _meet(self, version: int) -> None:
        """Wait for every rank, so that one that is gone is named, instead of hung for in a collective."""
        world = dist.get_world_size()
        if world == 1:
            return
        self._count += 1
        store: Any = distributed_c10d._get_default_store()
        marks = [f"weight_sync/{self._count}/{rank}" for rank in range(world)]
        store.set(marks[dist.get_rank()], "here")
        try:
            store.wait(marks, timedelta(seconds=self._config.sync_timeout_s))
        except dist.DistStoreError:
            missing = [rank for rank, mark in enumerate(marks) if not store.check([mark])]
            raise SyncError(
                f"trainer ranks {missing} did not come to weight sync {version} within "
                f"rollout.sglang.sync_timeout_s = {self._config.sync_timeout_s:g}"
            ) from None
        store.delete_key(f"weight_sync/{self._count - 1}/{dist.get_rank()}")


async def _begin(server: Server) -> None:
    """Open an update. One that an earlier sync left open is closed first; all its weights are sent again."""
    try:
        await server.begin_update()
    except Refused:
        await server.end_update()
        await server.begin_update()


def _agree(outcome: SyncReport | Exception | None) -> SyncReport:
    """The first rank's outcome on every rank."""
    told = from_rank0(outcome)
    if isinstance(told, SyncReport):
        return told
    raise told


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
