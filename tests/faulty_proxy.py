"""An HTTP server that does what networks and dying servers do, in front of a real server or of a function.

It lives in threads of its own, so that tests may use any event loop.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

TIMEOUT_S = 300.0

Kind = Literal["pass", "delay", "status", "truncate", "cut", "drop"]


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    `delay`: forwarded after `seconds`, which `status`, `truncate` and `cut` can have too. `status`: answered
    with it. `truncate`: half the reply, as if it were whole. `cut`: half of it, then the connection closes.
    `drop`: the connection closes at once.
    """

    kind: Kind
    seconds: float = 0.0
    status: int = 503


PASS = Fault("pass")
DROP = Fault("drop")
CUT = Fault("cut")
TRUNCATE = Fault("truncate")
UNAVAILABLE = Fault("status")


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    kind: str = "application/json"


Answer = Callable[[str, Any], Any]  # path, JSON of the request → JSON of the reply, or a Reply


class FaultyProxy:
    """Forwards to `target`, a URL or a function; the next faults of a path are given by `inject`."""

    def __init__(self, target: str | Answer) -> None:
        self._target = target
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self.seen: list[tuple[str, Any]] = []  # path and JSON of every request
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.die()

    def inject(self, path: str, *faults: Fault) -> None:
        """The next requests to `path` meet these, in order."""
        with self._lock:
            self._faults[path] += faults

    def bodies(self, path: str) -> list[Any]:
        return [body for seen, body in self.seen if seen == path]

    def die(self) -> None:
        """As a killed process: connections are reset, new ones refused."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for opened in self._sockets:
                _close(opened)

    def _next(self, path: str, body: Any) -> Fault:
        with self._lock:
            self.seen.append((path, body))
            faults = self._faults[path]
            return faults.popleft() if faults else PASS

    def _answer(self, method: str, path: str, raw: bytes) -> Reply:
        if callable(self._target):
            answer = self._target(path, json.loads(raw) if raw else None)
            return answer if isinstance(answer, Reply) else Reply(200, json.dumps(answer).encode())
        where = urlsplit(self._target)
        connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, raw, {"Content-Type": "application/json"} if raw else {})
            reply = connection.getresponse()
            return Reply(reply.status, reply.read(), reply.headers.get("Content-Type", "text/plain"))
        finally:
            connection.close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length", 0))
        raw = handler.rfile.read(length)
        if len(raw) < length:  # the client left while it was sending
            handler.close_connection = True
            return
        path = urlsplit(handler.path).path
        fault = self._next(path, json.loads(raw) if raw else None)
        if fault.kind == "drop":
            _close(handler.connection)
            handler.close_connection = True
            return
        self._closing.wait(fault.seconds)
        reply = (
            Reply(fault.status, b'{"error": {"message": "injected"}}')
            if fault.kind == "status"
            else self._answer(handler.command, handler.path, raw)
        )
        half = reply.body[: len(reply.body) // 2]
        sent = half if fault.kind in ("truncate", "cut") else reply.body
        handler.send_response(reply.status)
        handler.send_header("Content-Type", reply.kind)
        handler.send_header("Content-Length", str(len(half if fault.kind == "truncate" else reply.body)))
        handler.end_headers()
        handler.wfile.write(sent)
        if fault.kind == "cut":
            handler.wfile.flush()
            _close(handler.connection)
            handler.close_connection = True

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with proxy._lock:
                    proxy._sockets.add(self.connection)

            def finish(self) -> None:
                with proxy._lock:
                    proxy._sockets.discard(self.connection)
                with suppress(OSError):  # the other side is gone, which is what these tests are about
                    super().finish()

            def handle(self) -> None:
                with suppress(OSError):
                    super().handle()

            def do_POST(self) -> None:
                proxy._serve(self)

            def do_GET(self) -> None:
                proxy._serve(self)

            def log_message(self, format: str, *args: object) -> None:
                """Tests are quiet."""

        return Handler


def _close(opened: socket.socket) -> None:
    """At once, whoever else holds the file."""
    with suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
