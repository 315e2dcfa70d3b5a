"""Several servers as one: every request gets exactly one result as long as one server lives.

A server that fails is put in quarantine: its requests begin again elsewhere, and it gets no more until
`readmit` has seen the fleet's weight version on it. Nothing is sent out between `begin_update` and `admit`,
so that a server with stale or half-updated weights is never used.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from comppo_mcore.rollout.engine import Sampling
from comppo_mcore.rollout.sglang.http import Broken, ServerError, Unreachable
from comppo_mcore.rollout.sglang.server import Generated, Memory, Server

HEALTH_PERIOD_S = 5.0
HEALTH_TIMEOUT_S = 20.0
ABORT_PERIOD_S = 0.5
MAX_FAILURES = 3  # of one request: it may be what its servers died of
NO_WEIGHTS = "has no weights from this run"
ABORTED = Generated(token_ids=(), logprobs=(), finish="abort", versions=())


class NoServers(ServerError):
    """Every server is in quarantine; the message says why each is."""


@dataclass(frozen=True)
class Request:
    """One response to generate; `rid` names it among all requests that are open."""

    rid: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int | None = None
    mask: bool = False


@dataclass(eq=False)
class _Member:
    server: Server
    out: str | None = NO_WEIGHTS  # why it is in quarantine; None: it is in use
    tasks: set[asyncio.Task[Generated]] = field(default_factory=set)
    load: int = 0  # requests sent or about to be


class Fleet:
    """Routes requests to the least loaded server. All methods belong to one event loop.

    Args:
        servers: all in quarantine until `admit`.
        in_flight: requests at a time, each server.
        wait_timeout_s: how long a request waits while there is no server to send it to.
    """

    def __init__(self, servers: Sequence[Server], *, in_flight: int, wait_timeout_s: float) -> None:
        self.servers = tuple(servers)
        self._members = [_Member(server) for server in servers]
        self._in_flight = in_flight
        self._wait_timeout_s = wait_timeout_s
        self._version: int | None = None  # of every server in use; None: being updated
        self._aborting = False
        self._changed = asyncio.Condition()  # a place became free, or servers, version or abort changed
        self._idle = asyncio.Event()
        self._idle.set()
        self._health: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        self._health = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._health is not None:
            self._health.cancel()
            with suppress(asyncio.CancelledError):
                await self._health
        for server in self.servers:
            await server.aclose()

    @property
    def in_use(self) -> tuple[Server, ...]:
        return tuple(member.server for member in self._members if member.out is None)

    @property
    def quarantined(self) -> dict[str, str]:
        """URL → why."""
        return {member.server.url: member.out for member in self._members if member.out is not None}

    @property
    def running(self) -> int:
        """Requests that are at a server."""
        return sum(member.load for member in self._members)

    # Requests

    async def generate(self, request: Request) -> Generated:
        """One response, from whichever server lives to give it.

        Raises:
            NoServers: for `wait_timeout_s` there was none.
            ServerError: refused, or failed on `MAX_FAILURES` servers.
            ValueError: not a request this model can answer.
        """
        failures = 0
        for attempt in itertools.count():
            member = await self._acquire()
            if member is None:
                return ABORTED
            try:
                generated = await self._attempt(member, request, f"{request.rid}-{attempt}")
                if generated is not None:
                    return generated
            except (Unreachable, Broken) as error:
                await self._quarantine(member, str(error))
                failures += 1
                if failures == MAX_FAILURES:
                    raise
            finally:
                await self._release(member)
        raise AssertionError("endless")

    async def stream(self, requests: Iterable[Request]) -> AsyncIterator[tuple[Request, Generated]]:
        """Every request with its result, as they finish. Leaving early cancels the others."""

        async def one(request: Request) -> tuple[Request, Generated]:
            return request, await self.generate(request)

        tasks = [asyncio.create_task(one(request)) for request in requests]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort_all(self, timeout_s: float) -> None:
        """End every open request: each `generate` returns the tokens it has, with finish "abort".

        Those that wait for a server return without a token. Call it before a pause, not during one: a paused
        server takes up what came in meanwhile only when it resumes. A server that has not answered all its
        requests within `timeout_s` is put in quarantine.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._aborting = True
        try:
            await self._notify_all()
            while self.running and asyncio.get_running_loop().time() < deadline:
                await self._order([m for m in self._members if m.load], lambda server: server.abort())
                await self._wait_idle(ABORT_PERIOD_S)  # and again: some may have been on their way
            for member in self._members:
                if member.load:
                    await self._quarantine(member, f"requests still ran {timeout_s:g} s after their abort")
            await self._wait_idle(timeout_s)
        finally:
            self._aborting = False

    async def drain(self, timeout_s: float) -> None:
        """Until no request is at a server.

        Raises:
            ServerError: some still are.
        """
        if not await self._wait_idle(timeout_s):
            raise ServerError(f"{self.running} requests are still running after {timeout_s:g} s")

    # All servers at once

    async def broadcast(self, order: Callable[[Server], Awaitable[None]]) -> None:
        """Give every server in use an order; those that do not follow are put in quarantine."""
        await self._order(self._members, order)

    async def _order(self, members: Sequence[_Member], order: Callable[[Server], Awaitable[None]]) -> None:
        async def one(member: _Member) -> None:
            try:
                await order(member.server)
            except ServerError as error:
                await self._quarantine(member, str(error))

        await asyncio.gather(*(one(member) for member in members if member.out is None))

    async def pause(self, mode: Literal["abort", "retract"]) -> None:
        await self.broadcast(lambda server: server.pause(mode))

    async def resume(self) -> None:
        await self.broadcast(lambda server: server.resume())

    async def flush(self) -> None:
        await self.broadcast(lambda server: server.flush())

    async def release_memory(self, tags: Sequence[Memory]) -> None:
        """Only when nothing runs.

        Raises:
            RuntimeError: something does; a server dies of releasing then.
        """
        if self.running:
            raise RuntimeError(
                f"{self.running} requests are running: drain or abort them before releasing memory"
            )
        await self.broadcast(lambda server: server.release_memory(tags))

    async def resume_memory(self, tags: Sequence[Memory]) -> None:
        await self.broadcast(lambda server: server.resume_memory(tags))

    async def versions(self) -> dict[str, int]:
        """URL → weight version of every server in use; those that do not answer are put in quarantine."""
        found: dict[str, int] = {}

        async def ask(server: Server) -> None:
            found[server.url] = await server.weight_version(timeout_s=HEALTH_TIMEOUT_S)

        await self.broadcast(ask)
        return found

    # Weights

    def begin_update(self) -> None:
        """From here on nothing is sent out, until `admit`."""
        self._version = None

    async def admit(self, servers: Iterable[Server], version: int) -> None:
        """After an update: use those servers of `servers` that answer with `version`, and no others."""
        updated = set(servers)
        await asyncio.gather(
            *(
                self._admit(member, version)
                if member.server in updated
                else self._quarantine(member, f"was not updated to version {version}")
                for member in self._members
            )
        )
        self._version = version
        await self._notify_all()

    async def readmit(self, server: Server) -> None:
        """Use a server again that has been reloaded with the fleet's current weights.

        Raises:
            ServerError: it does not answer, or with other weights; it stays in quarantine.
        """
        if self._version is None:
            raise ServerError(f"{server.url} cannot be readmitted while the weights are being updated")
        member = next(member for member in self._members if member.server is server)
        await self._admit(member, self._version)
        if member.out is not None:
            raise ServerError(f"{server.url} stays in quarantine: {member.out}")
        await self._notify_all()

    async def quarantine(self, server: Server, reason: str) -> None:
        """Take a server out of use; what it was doing begins again elsewhere."""
        await self._quarantine(next(m for m in self._members if m.server is server), reason)

    async def _admit(self, member: _Member, version: int) -> None:
        reason = await self._why_not(member.server, version)
        if reason is None:
            member.out = None
        else:
            await self._quarantine(member, reason)
            member.out = reason  # newer than what it may have been put there for

    async def _why_not(self, server: Server, version: int) -> str | None:
        try:
            found = await server.weight_version(timeout_s=HEALTH_TIMEOUT_S)
        except ServerError as error:
            return str(error)
        return None if found == version else f"has weight version {found}, not {version}"

    async def _quarantine(self, member: _Member, reason: str) -> None:
        """The first reason is the one that is kept: others follow from it."""
        if member.out is None:
            member.out = reason
            for task in member.tasks:
                task.cancel()
            await self._notify_all()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            await asyncio.gather(*(self._check(member) for member in self._members if member.out is None))

    async def _check(self, member: _Member) -> None:
        """A server restarted by somebody else answers too, but with weights of its own."""
        version = self._version
        if version is not None:
            reason = await self._why_not(member.server, version)
            if reason is not None and version == self._version:  # else: an update began meanwhile
                await self._quarantine(member, reason)

    # One request at one server

    async def _attempt(self, member: _Member, request: Request, rid: str) -> Generated | None:
        """None: the server was put in quarantine meanwhile."""
        oldest = self._version
        assert oldest is not None, "nothing is sent out while the version is unknown"
        task = asyncio.create_task(
            member.server.generate(
                request.token_ids, request.sampling, rid=rid, seed=request.seed, mask=request.mask
            )
        )
        member.tasks.add(task)
        try:
            await asyncio.wait({task})
        finally:
            member.tasks.discard(task)
            task.cancel()  # where the caller was cancelled; the server then sees its connection close
        if task.cancelled():
            return None
        generated = task.result()
        self._check_versions(member, generated, oldest)
        return generated

    def _check_versions(self, member: _Member, generated: Generated, oldest: int) -> None:
        newest = self._version  # None: an update has begun, and may have ended at this server
        for version in set(generated.versions):
            if version < oldest or (newest is not None and version > newest):
                raise Broken(
                    f"{member.server.url} generated with weights of version {version}; the trainer's were "
                    f"{oldest} to {newest}"
                )

    async def _acquire(self) -> _Member | None:
        """A server with a free place, one of which is then taken; None: everything is being aborted."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        async with self._changed:
            while not self._aborting:
                usable = [member for member in self._members if member.out is None]
                free = [member for member in usable if member.load < self._in_flight]
                if free and self._version is not None:
                    member = min(free, key=lambda member: member.load)
                    member.load += 1
                    self._idle.clear()
                    return member
                stuck = not usable or self._version is None
                deadline = (deadline or loop.time() + self._wait_timeout_s) if stuck else None
                await self._wait_change(deadline)
            return None

    async def _wait_change(self, deadline: float | None) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._changed.wait()
        except TimeoutError:
            raise NoServers(self._why_none()) from None
        except asyncio.CancelledError:
            self._changed.notify()  # what this one was woken for is another's now
            raise

    def _why_none(self) -> str:
        reasons = "; ".join(f"{url}: {reason}" for url, reason in self.quarantined.items())
        waited = f"no server to generate with for {self._wait_timeout_s:g} s"
        return f"{waited} ({reasons or 'weights are being updated'})"

    async def _release(self, member: _Member) -> None:
        member.load -= 1
        if not self.running:
            self._idle.set()
        async with self._changed:
            self._changed.notify()

    async def _wait_idle(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _notify_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()
