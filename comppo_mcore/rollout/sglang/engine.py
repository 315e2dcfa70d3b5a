"""Servers behind the trainer's engine protocol.

The first rank talks to the servers, from an event loop in a thread of its own, because its main thread takes
part in the trainer's collectives meanwhile. The other ranks only take part in weight syncs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from comppo_mcore.config.model_shape import ModelShape, read_model_shape
from comppo_mcore.config.schema import SGLangConfig
from comppo_mcore.errors import UserError
from comppo_mcore.model.hf_table import Manifest, Stream
from comppo_mcore.model.parallel import on_first_rank
from comppo_mcore.rollout import groups
from comppo_mcore.rollout.engine import Completion, Done, EngineLost, Sampling
from comppo_mcore.rollout.groups import Enough, Heard, all_finished
from comppo_mcore.rollout.sglang.fleet import NO_WEIGHTS, Fleet, NoServers, Request
from comppo_mcore.rollout.sglang.http import ServerError
from comppo_mcore.rollout.sglang.process import ServerProcesses
from comppo_mcore.rollout.sglang.server import Generated, Server, ServerInfo
from comppo_mcore.rollout.sglang.sync import WeightSync

T = TypeVar("T")
SIGN_OF_LIFE_S = 20.0  # for an answer of a server that left the fleet
LOST_TIMEOUT_S = 1.0  # without a server: only a sync by the trainer brings one back


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="comppo-servers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result; from any thread but the loop's. What `work` waits for is bounded by itself."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class SGLangEngine:
    """`rollout.groups.GroupEngine` over SGLang servers; built on every rank, after the process group.

    Args:
        processes: of this run, on the first rank; None: the servers of `config.urls` are joined.
        manifest: what the servers take.
        shape: of the model they must have.
        max_context: tokens of prompt + response.
        folder: of the run.

    Raises:
        UserError: on the first rank: a server does not start, is not there, or cannot do what is asked.
    """

    shared = True

    def __init__(
        self,
        config: SGLangConfig,
        processes: ServerProcesses | None,
        manifest: Manifest,
        *,
        shape: ModelShape,
        max_context: int,
        device: torch.device,
        folder: Path,
    ) -> None:
        self.manifest = manifest
        self.weight_version: int | None = None
        self._config = config
        self._shape = shape
        self._max_context = max_context
        self._is_first = dist.get_rank() == 0
        self._processes = processes
        self._runs = 0
        self._background = Background() if self._is_first else None
        self._closing = AsyncExitStack()
        loop = self._background.loop if self._background else None
        self._sync = WeightSync(config, device, folder / "sync", loop)
        self._resting = False  # memory was released
        self._candidates: list[Server] = []  # of the sync that is under way
        self._incidents: list[str] = []
        urls = config.urls if processes is None else processes.urls
        timeouts = {"request_timeout_s": config.request_timeout_s, "sync_timeout_s": config.sync_timeout_s}
        servers = [Server(url, vocab_size=shape.vocab_size, **timeouts) for url in urls if self._is_first]
        self._fleet = Fleet(servers, in_flight=config.in_flight, wait_timeout_s=LOST_TIMEOUT_S)
        on_first_rank(self._start)

    def _start(self) -> None:
        try:
            self._run(self._connect())
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        if self._processes is not None:
            await self._processes.start()
        await self._closing.enter_async_context(self._fleet)
        await asyncio.gather(*(self._check(server) for server in self._fleet.servers))

    async def _check(self, server: Server) -> None:
        try:
            await server.wait_ready(self._config.start_timeout_s)
            info = await server.info()
        except ServerError as error:
            raise UserError(f"rollout.sglang.urls: no SGLang server is ready there: {error}") from error
        self._check_model(server, info)
        if info.max_context < self._max_context:
            raise UserError(
                f"rollout.sglang.urls: {server.url} has room for {info.max_context} tokens of prompt and "
                f"response, but this run needs {self._max_context}: start it with --context-length "
                f"{self._max_context + 2}, or lower model.max_context"
            )

    def _check_model(self, server: Server, info: ServerInfo) -> None:
        """Another model takes some updates without a word, and dies of others."""
        differing = info.model_type != self._shape.family
        if (
            not differing and (Path(info.model_path) / "config.json").is_file()
        ):  # not where only servers see it
            differing = read_model_shape(info.model_path) != self._shape
        if differing:
            raise UserError(
                f"rollout.sglang.urls: {server.url} serves {info.model_path}, a {info.model_type} of another "
                "shape than model.path; start it with that model"
            )

    # ------------------------------------------------------------------------ generation

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, done: Done | None = None
    ) -> list[Completion]:
        """One completion per prompt, in order; on the first rank.

        Raises:
            EngineLost: no server is left.
        """
        requests = [
            groups.Request(tuple(prompt), sampling, (seed + i) & (2**63 - 1))
            for i, prompt in enumerate(prompts)
        ]
        results = self.run(requests, all_finished, None, done or (lambda i, completion: None))
        return [r for r in results if r is not None]

    def run(
        self, requests: Sequence[groups.Request], enough: Enough, max_wait_s: float | None, heard: Heard
    ) -> list[Completion | None]:
        if self.weight_version is None:
            raise RuntimeError("the servers have no weights: call update_weights before generate")
        return self._run(self._generate(requests, enough, max_wait_s, heard))

    async def _generate(
        self, requests: Sequence[groups.Request], enough: Enough, max_wait_s: float | None, heard: Heard
    ) -> list[Completion | None]:
        self._runs += 1
        named = {f"{self._runs}-{i}": i for i in range(len(requests))}
        sent = [
            Request(rid, r.token_ids, r.sampling, r.seed, r.sampling.record_support)
            for rid, r in zip(named, requests, strict=True)
        ]
        results: list[Completion | None] = [None] * len(requests)
        unheard, stop = len(requests), asyncio.Event()
        aborting = asyncio.create_task(self._abort_at(stop, max_wait_s))
        try:
            async for request, generated in self._fleet.stream(sent):
                i, unheard = named[request.rid], unheard - 1
                if (completion := _completion(generated)) is not None:
                    results[i] = completion
                    heard(i, completion)
                if unheard and enough(results):
                    stop.set()
        except NoServers as error:
            raise EngineLost(str(error), results) from error
        finally:
            aborting.cancel()
            await asyncio.gather(aborting, return_exceptions=True)
        return results

    async def _abort_at(self, stop: asyncio.Event, max_wait_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max_wait_s):
                await stop.wait()
        await self._fleet.abort_all(self._config.sync_timeout_s)

    def score(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        return self._run(self._score(token_ids))

    async def _score(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        scores: dict[str, list[float]] = {}

        async def ask(server: Server) -> None:
            scores[server.url] = await server.score(token_ids)

        await self._fleet.broadcast(ask)
        if not scores:
            raise EngineLost("; ".join(self._fleet.quarantined.values()), [])
        return scores

    # ------------------------------------------------------------------------ weights

    def update_weights(self, stream: Stream, version: int) -> None:
        """Give the servers the stream's weights. Those that fail are left out until the next time.

        Servers of this run that have died are started anew first.

        Raises:
            UserError: no server is left.
            SyncError: a rank did not come, or the stream failed.
        """
        self.weight_version = None
        on_first_rank(self._prepare)
        report = self._sync.update(stream, self.manifest, version, self._candidates)
        refusals = on_first_rank(lambda: self._run(self._admit(report.failed, version)))
        if refusals is not None:
            raise UserError(f"rollout.sglang: no server took weights {version}: {refusals}")
        self.weight_version = version

    def _prepare(self) -> None:
        if self._fleet.quarantined:  # they may come back as other processes
            self._sync.disconnect()
        self._candidates = self._run(self._living())

    async def _living(self) -> list[Server]:
        """The servers to give weights to: those in use, and those that are back."""
        self._fleet.begin_update()
        self._incidents += [why for why in self._fleet.quarantined.values() if why != NO_WEIGHTS]
        if self._resting:
            await self._fleet.resume_memory(["weights"])
        absent = [s for s in self._fleet.servers if s.url in self._fleet.quarantined]
        back = await asyncio.gather(*(self._is_back(server) for server in absent))
        returned = [server for server, is_back in zip(absent, back, strict=True) if is_back]
        return [*self._fleet.in_use, *returned]

    async def _is_back(self, server: Server) -> bool:
        """Whether a server outside the fleet can take weights; one of this run's is started anew if not."""
        if self._processes is None or self._processes.is_alive(server.url):
            with suppress(ServerError):
                await server.weight_version(timeout_s=SIGN_OF_LIFE_S)
                return True
        if self._processes is None:
            return False
        try:
            await self._processes.restart(server.url)
        except UserError as error:
            if not self._fleet.in_use:
                raise
            self._incidents.append(str(error))  # the others go on
            return False
        return True

    async def _admit(self, failed: Mapping[str, str], version: int) -> str | None:
        """Use the servers that took the weights; why none did, if none did."""
        await self._fleet.admit([s for s in self._candidates if s.url not in failed], version)
        if not self._fleet.in_use:
            return "; ".join((failed or self._fleet.quarantined).values())
        if self._resting:
            await self._fleet.resume_memory(["kv_cache"])
            self._resting = False
        return None

    def incidents(self) -> list[str]:
        taken, self._incidents = self._incidents, []
        return taken

    def rest(self) -> None:
        if self._config.placement == "colocated" and self._is_first:
            self._run(self._fleet.release_memory(["kv_cache", "weights"]))
            self._resting = True

    def close(self) -> None:
        """Stop the servers of this run, and break off what runs on others."""
        if self._background is None:
            return
        with suppress(ServerError):
            self._run(self._leave())
        if self._processes is not None:
            self._processes.stop()
        self._sync.disconnect()
        self._background.stop()

    async def _leave(self) -> None:
        await self._fleet.abort_all(SIGN_OF_LIFE_S)
        await self._closing.aclose()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._background is not None, "only the first rank talks to the servers"
        return self._background.run(work)


def _completion(generated: Generated) -> Completion | None:
    """None where not a token was generated."""
    if not generated.token_ids:
        return None
    return Completion(
        token_ids=generated.token_ids,
        logprobs=generated.logprobs,
        finish=generated.finish,
        versions=generated.versions,
        supports=generated.supports,
    )
