"""``/healthz``, ``/readyz`` and ``/metrics``: served from the first moment of the agent's start.

- ``/healthz``: 200 while every supervised loop runs and beats; else 503 with a line per loop that
  does not, its name and the cause. Starting up is healthy.
- ``/readyz``: 200 after a real round trip of a page through each socket (``server.probe``). The
  answer is kept for a second, so that probing cannot become load.
- ``/metrics``: Prometheus text.

Requests are answered by short-lived threads, at most ``MOST_REQUESTS`` at a time; the listening
loop itself is a supervised loop of the agent like any other.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from kvtier_agent.server.metrics import CONTENT_TYPE, Metrics
from kvtier_agent.server.probe import Probe
from kvtier_agent.server.settings import ServerError
from kvtier_agent.server.snapshot import ServerSnapshot
from kvtier_agent.supervise import Heart, Supervisor

MOST_REQUESTS: Final = 16
REQUEST_SECONDS: Final = 5.0
ROOM_SECONDS: Final = 0.5
"""How long a newcomer waits for the place of a connection that was ended for it."""
READY_KEPT_SECONDS: Final = 1.0
_TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[int, str, bytes]


class HttpServer:
    """The HTTP side of one agent. ``address`` says where it listens."""

    def __init__(
        self,
        host: str,
        port: int,
        supervisor: Supervisor,
        snapshot: Callable[[], ServerSnapshot | None] = lambda: None,
        run_dir: Path | None = None,
    ) -> None:
        """Binds at once; port 0 takes a free one. ``ServerError`` where the address is taken.

        ``snapshot`` and ``run_dir`` may come later, with ``attach``.
        """
        self._supervisor = supervisor
        self._snapshot = snapshot
        self._probe: Probe | None = None
        self.metrics = Metrics(lambda: self._snapshot(), supervisor)
        self._ready: tuple[float, bool, list[str]] = (-1e9, False, [])
        self._ready_lock = threading.Lock()
        self.cause: str = ""
        """Why the agent is not ready yet, said by whoever starts it; shown by ``/readyz``."""
        handler = _handler(self)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server: _Server = kind((host, port), handler)
        except OSError as error:
            raise ServerError(
                f"cannot serve HTTP on {host}:{port}: {error.strerror or error};"
                " choose another address with --http"
            ) from None
        self.address: tuple[str, int] = self._server.server_address[:2]
        if run_dir is not None:
            self.attach(snapshot, run_dir)

    def attach(self, snapshot: Callable[[], ServerSnapshot | None], run_dir: Path) -> None:
        """The cache is there: from now on ``/readyz`` asks it and ``/metrics`` shows it."""
        self._snapshot = snapshot
        self._probe = Probe(run_dir, snapshot)

    def run(self, heart: Heart) -> None:
        """Serve until ``heart.stopping``; a target for ``Supervisor.start``."""
        self._server.timeout = 0.1
        while not heart.stopping.is_set():
            heart.beat()
            self._server.handle_request()

    def close(self) -> None:
        """Stop listening."""
        self._server.server_close()
        if self._probe is not None:
            self._probe.close()

    def answer(self, path: str) -> Answer:
        """Status, content type and body for a path."""
        match path.partition("?")[0]:
            case "/healthz":
                causes = self._supervisor.causes()
                return (503, _TEXT, _lines(causes)) if causes else (200, _TEXT, b"ok\n")
            case "/readyz":
                ok, lines = self._readiness()
                return 200 if ok else 503, _TEXT, _lines(lines)
            case "/metrics":
                return 200, CONTENT_TYPE, self.metrics.text()
            case _:
                return 404, _TEXT, b"not here; there are /healthz, /readyz and /metrics\n"

    def _readiness(self) -> tuple[bool, list[str]]:
        probe = self._probe
        if probe is None:
            return False, [f"starting{': ' + self.cause if self.cause else ''}"]
        causes = self._supervisor.causes()
        if causes:
            return False, causes
        with self._ready_lock:
            since, ok, lines = self._ready
            if time.monotonic() - since > READY_KEPT_SECONDS:
                ok, lines = probe.check()
                self._ready = (time.monotonic(), ok, lines)
        return ok, lines


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


class _Server(ThreadingHTTPServer):
    """One thread a request, few at a time. In a full house the oldest has to go: somebody who holds
    connections open without a word must not keep the kubelet's probe out."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._places = threading.BoundedSemaphore(MOST_REQUESTS)
        self._inside: dict[Any, None] = {}
        """Connections that hold a place, oldest first."""
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not (self._places.acquire(blocking=False) or self._end_oldest()):
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\n\r\nbusy\n")
            self.shutdown_request(request)
            return
        with self._lock:
            self._inside[request] = None
        super().process_request(request, client_address)

    def _end_oldest(self) -> bool:
        """Whether a place came free by it."""
        with self._lock:
            oldest = next(iter(self._inside), None)
            if oldest is not None:
                del self._inside[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        return self._places.acquire(timeout=ROOM_SECONDS)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._inside.pop(request, None)
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


def _handler(owner: HttpServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version = "kvtier"
        sys_version = ""

        def do_GET(self) -> None:
            status, kind, body = owner.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Probes every few seconds are not worth a line."""

    return Handler
