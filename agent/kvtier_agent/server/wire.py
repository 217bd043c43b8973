"""Messages of several frames on a socket of ZeroMQ.

pyzmq's own `send_multipart` and `recv_multipart` make members of enums of the flags of every frame,
which costs a short call as much as its frames do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import zmq

_NOW: Final = int(zmq.NOBLOCK)
_MORE_NOW: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)

Socket = zmq.Socket[bytes]


def send_frames(socket: Socket, frames: Sequence[bytes | memoryview]) -> None:
    """Send one message without waiting. Raises ``zmq.ZMQError`` (``zmq.Again``: not now)."""
    for frame in frames[:-1]:
        socket.send(frame, _MORE_NOW)
    socket.send(frames[-1], _NOW)


def receive_frames(socket: Socket, *, wait: bool = False) -> list[Any]:
    """One message; with ``wait`` for as long as the socket's own time-out. Raises ``zmq.Again``
    where there is none."""
    frames = [socket.recv(0 if wait else _NOW)]
    while socket.getsockopt(_RCVMORE):
        frames.append(socket.recv(_NOW))
    return frames
