"""Probes and metrics over HTTP, in the event loop they tell about.

A loop that hangs answers nothing, which is the answer the kubelet needs. Paths: ``/healthz``,
``/readyz`` (200 or 503, with the reasons as JSON) and ``/metrics``. Only GET and HEAD, one request
per connection, headers up to 8 KiB, 5 s for each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["Report", "serve"]

MAX_HEADER_BYTES: Final = 8192
TIMEOUT_SECONDS: Final = 5.0

Report = Callable[[], tuple[bool, Mapping[str, Any]]]
"""(whether all is well, details)"""


async def serve(
    host: str,
    port: int,
    *,
    health: Report,
    readiness: Report,
    metrics: Callable[[], bytes],
    metrics_type: str,
) -> asyncio.Server:
    """Start; the caller closes it. Raises ``OSError`` when the address is taken."""

    def answer(path: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            return 200, metrics_type, metrics()
        report = {"/healthz": health, "/readyz": readiness}.get(path)
        if report is None:
            return 404, "text/plain", b"try /healthz, /readyz or /metrics\n"
        well, details = report()
        body = json.dumps(details, indent=1).encode() + b"\n"
        return (200 if well else 503), "application/json", body

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, *_ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
                if method not in ("GET", "HEAD"):
                    code, kind, body = 405, "text/plain", b"GET only\n"
                else:
                    code, kind, body = answer(target.split("?", 1)[0])
                phrase = {200: "OK", 404: "Not Found", 405: "Method Not Allowed"}.get(
                    code, "Service Unavailable"
                )
                writer.write(
                    f"HTTP/1.1 {code} {phrase}\r\nContent-Type: {kind}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                )
                if method != "HEAD":
                    writer.write(body)
                await writer.drain()
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
            pass  # a client that does not speak HTTP, or left
        except asyncio.LimitOverrunError:
            pass  # headers beyond the limit
        finally:
            writer.close()

    return await asyncio.start_server(handle, host, port, limit=MAX_HEADER_BYTES)
