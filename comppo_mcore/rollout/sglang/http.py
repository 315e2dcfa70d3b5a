"""One JSON request to a server: bounded in time, its failures typed, retried only where that is safe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

ATTEMPTS = 4
FIRST_PAUSE_S = 0.25  # before the second attempt; doubled before each further one
# Uvicorn closes a connection idle for 5 s; a request that reuses it at that moment fails, and an update must
# not be retried.
IDLE_CONNECTION_S = 2.0
CONNECT_TIMEOUT_S = 10.0


class ServerError(RuntimeError):
    """A server did not do what it was asked; the message names its URL, the path and what happened."""


class Unreachable(ServerError):
    """No reply: connection refused, reset or dropped, or the time was up."""


class Refused(ServerError):
    """A reply that says no: HTTP 4xx, or `success: false`. Asking again would not help."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Broken(ServerError):
    """A reply that cannot be used: HTTP 5xx, truncated JSON, or JSON that makes no sense."""


class Connection:
    """Requests to one server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),  # the whole request is bounded below
            limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_CONNECTION_S),
            verify=self.url.startswith("https:"),  # reading the certificates takes a quarter of a second
            trust_env=False,  # a proxy for the internet does not lead to the servers of a cluster
        )

    async def once(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """The reply's JSON, or its text where it is none.

        Raises:
            Unreachable, Refused, Broken.
        """
        where = f"{method} {self.url}{path}"
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, json=body)
        except TimeoutError:
            raise Unreachable(f"{where}: no reply within {timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise Unreachable(f"{where}: {type(error).__name__} {error}".rstrip()) from error
        return _read(response, where)

    async def retried(
        self, method: str, path: str, body: Callable[[int], Any] = lambda attempt: None, *, timeout_s: float
    ) -> Any:
        """`once`, again after a failed connection, a 5xx or a truncated reply; for what may happen twice.

        Args:
            body: number of the attempt → its body, so that every attempt can have an id of its own.
            timeout_s: of all attempts together.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for attempt in range(ATTEMPTS):
            try:
                return await self.once(method, path, body(attempt), timeout_s=deadline - loop.time())
            except (Unreachable, Broken):
                pause = FIRST_PAUSE_S * 2**attempt
                if attempt + 1 == ATTEMPTS or loop.time() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def aclose(self) -> None:
        await self._client.aclose()


def _read(response: httpx.Response, where: str) -> Any:
    if response.status_code >= 500:
        raise Broken(f"{where}: HTTP {response.status_code} {_reason(response)}".rstrip())
    if response.status_code >= 300:
        status = response.status_code
        raise Refused(f"{where}: HTTP {status} {_reason(response)}".rstrip(), status)
    if "json" not in response.headers.get("content-type", ""):
        return response.text
    try:
        value = response.json()
    except ValueError:
        raise Broken(f"{where}: truncated or malformed JSON of {len(response.content)} bytes") from None
    if isinstance(value, dict) and value.get("success") is False:
        raise Refused(f"{where}: {value.get('message', 'success: false')}", response.status_code)
    return value


def _reason(response: httpx.Response) -> str:
    """What a failed reply says about itself: `error.message`, `message`, `detail` or the text's beginning."""
    try:
        value = response.json()
    except ValueError:
        return response.text[:200].strip()
    if isinstance(value, dict):
        error = value.get("error")
        nested = error.get("message") if isinstance(error, dict) else error
        return str(nested or value.get("message") or value.get("detail") or value)[:500]
    return str(value)[:200]
