"""The servers of one weight sync: orders to all of them at once, bounded in time, and who failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

from comppo_mcore.rollout.sglang.http import ServerError
from comppo_mcore.rollout.sglang.server import Server

GRACE_S = 10.0  # for what follows at once from something that has happened

Order = Callable[[Server], Awaitable[None]]
Release = Callable[[Collection[asyncio.Future[None]]], Awaitable[None]]


class Round:
    """Who still takes part in a sync, and why the others no longer do.

    Called from the trainer's main thread; the requests run in `loop`, in a thread of its own.

    Args:
        timeout_s: of one order to all servers.
    """

    def __init__(
        self, servers: Sequence[Server], loop: asyncio.AbstractEventLoop | None, timeout_s: float
    ) -> None:
        self.live = list(servers)
        self.failed: dict[str, str] = {}
        self.touched = False  # whether a server was given an order
        self._loop = loop
        self._timeout_s = timeout_s

    @property
    def patience_s(self) -> float:
        """For the requests of `together`, which judges itself who was late."""
        return self._timeout_s + 2 * GRACE_S

    def drop(self, server: Server, reason: str) -> None:
        self.live.remove(server)
        self.failed[server.url] = reason

    def drop_all(self, reason: str) -> None:
        for server in list(self.live):
            self.drop(server, reason)

    def each(self, order: Order) -> None:
        """Give an order to all servers at once; one that fails, or is late, is dropped alone."""
        self.run(self._each(order))

    def together(self, order: Order, release: Release) -> bool:
        """Give an order that no server can follow without the others.

        Args:
            release: called after the first failure with the orders that are not done, to free the servers
                that wait for another one.

        Returns:
            False if any failed. Dropped are those that failed by themselves, or do not answer even after the
            release; not those that answer after it, whatever they say.
        """
        return self.run(self._together(order, release))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if not self.live:
            work.close()
            return True
        assert self._loop is not None
        self.touched = True
        limit = self._timeout_s + 3 * GRACE_S  # never reached while the loop runs
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit)

    async def _each(self, order: Order) -> None:
        servers = list(self.live)
        tasks = [asyncio.ensure_future(order(server)) for server in servers]
        await asyncio.wait(tasks, timeout=self._timeout_s)
        self._judge(list(zip(servers, tasks, strict=True)))

    async def _together(self, order: Order, release: Release) -> bool:
        servers = list(self.live)
        tasks = [asyncio.ensure_future(order(server)) for server in servers]
        done, waiting = await asyncio.wait(
            tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if not waiting and all(task.exception() is None for task in done):
            return True
        releasing = asyncio.ensure_future(release(waiting))
        await asyncio.wait([releasing, *waiting], timeout=GRACE_S)
        releasing.cancel()
        freed = [task for task in waiting if task.done()]
        for task in freed:
            task.exception()  # of having been freed; asyncio complains of one that nobody looks at
        judged = [(s, task) for s, task in zip(servers, tasks, strict=True) if task not in freed]
        self._judge(judged)
        return False

    def _judge(self, tasks: Sequence[tuple[Server, asyncio.Future[None]]]) -> None:
        """Drop the servers whose task failed or is not done."""
        for server, task in tasks:
            if not task.done():
                task.cancel()
                self.drop(
                    server,
                    f"{server.url}: no answer within rollout.sglang.sync_timeout_s = {self._timeout_s:g}",
                )
                continue
            error = task.exception()
            if isinstance(error, ServerError):
                self.drop(server, str(error))
            elif error is not None:
                raise error
