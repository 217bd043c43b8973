"""A peer of the agent's sockets that says exactly what it is told, without the client library."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import zmq
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import KEY_VERSION
from kvtier_agent.server import protocol as p

GEOMETRY = Geometry.of_page_bytes(16384, 16)
INFO = p.GeometryInfo.of(GEOMETRY)


class Raw:
    """A message socket without the client library."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.Context()
        self.path = path
        self.socket = self.dial()

    def dial(self) -> zmq.Socket:
        one = self.context.socket(zmq.DEALER)
        one.setsockopt(zmq.LINGER, 0)
        one.setsockopt(zmq.SNDTIMEO, 2000)
        one.connect(f"ipc://{self.path}")
        return one

    def ask(self, message: p.Request | bytes, *buffers: bytes, seconds: float = 5.0) -> p.Reply:
        header = message if isinstance(message, bytes) else p.encode(message)
        self.socket.send_multipart([header, *buffers])
        assert self.socket.poll(int(seconds * 1000)), "no answer"
        return p.decode_reply(self.socket.recv_multipart()[0])

    def hello(self, **changes: Any) -> p.Reply:
        fields: dict[str, Any] = {
            "id": 1, "oldest": p.OLDEST_PROTOCOL, "newest": p.PROTOCOL,
            "arena_layout": p.ARENA_LAYOUT, "key_version": KEY_VERSION, "geometry": INFO,
        }  # fmt: skip
        return self.ask(p.Hello(**{**fields, **changes}))

    def lifeline(self, welcome: p.Welcome, secret: bytes | None = None) -> socket.socket:
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(5)
        line.connect(str(self.path.with_suffix(".life")))
        line.sendall(
            p.LIFELINE_HELLO.pack(p.LIFELINE_MAGIC, welcome.client, secret or welcome.secret)
        )
        return line

    def close(self) -> None:
        self.context.destroy(linger=0)
