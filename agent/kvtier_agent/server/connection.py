"""One conversation with one agent process: a message socket and a lifeline.

A ``Connection`` lives exactly as long as the agent process that welcomed it. It is never mended:
when the lifeline ends (the agent died) or the agent does not know the client any more, the
connection is dropped and ``client.Client`` makes a new one, with a new boot token and newly mapped
arenas, so that nothing of an old agent is ever used with a new one.

A request that timed out may still be answered: such a late answer is recognised by its id, and
what it granted (a lease, slots) is given back at once.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from kvtier_agent.cache.identity import KEY_VERSION
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.units import PageForm, form_of, in_one_piece
from kvtier_agent.server import protocol as p
from kvtier_agent.server.mapping import Mapped, map_arenas
from kvtier_agent.server.wire import receive_frames, send_frames

R = TypeVar("R", bound=p.Reply)
Buffer = bytes | memoryview
QUICK_SECONDS = 0.02
"""An answer is waited for so long without a look at the lifeline."""
MOST_UNANSWERED = 1024
"""Timed-out requests that are remembered for their late answers."""
SIGNS_OF_LIFE = 4
"""How many an agent gets within the time that pins last without any."""


class AgentError(Exception):
    """The agent could not be asked; a ``Client`` turns this into a miss unless told otherwise."""


class AgentGoneError(AgentError):
    """No agent listens at this socket, or the one that did is gone."""


class AgentTimeoutError(AgentError):
    """The agent did not answer in time."""


class RefusedError(AgentError):
    """The agent refused; ``code`` is one of ``protocol.Code``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


_open: weakref.WeakSet[Connection] = weakref.WeakSet()
"""Connections of this process that have a lifeline, or are about to."""
_no_fork = threading.Lock()


class Connection:
    """See the module's story. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        path: Path,
        geometry: p.GeometryInfo,
        *,
        name: str = "",
        probe: bool = False,
        kv_pool_bytes: int = 0,
        rank: int = 0,
        tenant: str = "",
        timeout_seconds: float = 1.0,
    ) -> None:
        """Say hello, take up the lifeline, map the arenas.

        Raises ``AgentGoneError``, ``AgentTimeoutError`` or ``RefusedError``.
        """
        self._ids = 0
        self._late: dict[int, bytes] = {}
        self.late_answers = 0
        """Answers that came after their call had given up."""
        self.holds_pins = False
        """Pages may be pinned over this connection: the agent is to hear of it now and then."""
        self._spoke = 0.0
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._lifeline: socket.socket | None = None
        self._poller = zmq.Poller()
        self.arenas: dict[int, Mapped] = {}
        self._deadline = time.monotonic() + timeout_seconds
        _open.add(self)  # before there is a lifeline: a fork may come at any moment
        try:
            self._dial(path)
            hello = p.Hello(
                self.next_id(), p.OLDEST_PROTOCOL, p.PROTOCOL, p.ARENA_LAYOUT, KEY_VERSION,
                geometry, name[: p.MAX_NAME_BYTES], os.getpid(), probe,
                kv_pool_bytes, rank, tenant,
            )  # fmt: skip
            self.welcome, _ = self.request(hello, (), timeout_seconds, p.Welcome)
            if self.welcome.protocol < p.RANKS_SINCE and geometry.tp > 1:
                raise RefusedError(
                    p.Code.PROTOCOL_VERSION,
                    f"ranks of a tensor-parallel group need an agent of protocol {p.RANKS_SINCE}, "
                    f"this one speaks {self.welcome.protocol}; update the agent",
                )
            self.form = _form(self.welcome, geometry)
            self._hold_lifeline(path)
        except BaseException:
            self.close()
            raise

    def _dial(self, path: Path) -> None:
        if not path.is_socket():
            raise AgentGoneError(f"no agent at {path}: start one with `kvtier agent`")
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 1000),
            (zmq.RCVHWM, 1000),
            (zmq.RCVTIMEO, _milliseconds(QUICK_SECONDS)),
        ):
            self._socket.setsockopt(option, value)
        self._poller.register(self._socket, zmq.POLLIN)
        self._socket.connect(f"ipc://{path}")

    def _hold_lifeline(self, path: Path) -> None:
        with _no_fork:  # in between a child would hold it, and not know
            line = self._lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.settimeout(max(0.05, self._deadline - time.monotonic()))
            line.connect(str(path.with_suffix(".life")))
            welcome = self.welcome
            line.sendall(p.LIFELINE_HELLO.pack(p.LIFELINE_MAGIC, welcome.client, welcome.secret))
            answer, descriptors = _receive_arenas(line)
        except TimeoutError:
            raise AgentTimeoutError(f"the agent at {path} did not take the lifeline") from None
        except OSError as error:
            raise AgentGoneError(f"lifeline of {path}: {error.strerror or error}") from None
        if answer[:1] != b"\x01":
            for descriptor in descriptors:
                os.close(descriptor)
            raise AgentGoneError(f"the agent at {path} refused the lifeline")
        if answer[1:] != bytes([len(descriptors)]):
            # Those for which this process has no room are not handed over.
            for descriptor in descriptors:
                os.close(descriptor)
            raise AgentGoneError(
                f"{len(descriptors)} of the arenas of {path} came; raise this process's limit of"
                " open files (ulimit -n)"
            )
        line.setblocking(False)
        self._poller.register(line.fileno(), zmq.POLLIN)
        try:
            self.arenas = map_arenas(welcome.arenas, descriptors)
        except Exception as error:  # torch, where L0 is on a device, raises whatever it likes
            raise AgentGoneError(
                f"arenas of {path} cannot be mapped: {type(error).__name__}: {error}"
            ) from None

    def request(
        self, message: p.Request, buffers: Sequence[Buffer], timeout_seconds: float, kind: type[R]
    ) -> tuple[R, list[Any]]:
        """Send and wait for the reply of type ``kind``; the reply and its buffers.

        Raises ``AgentTimeoutError``, ``AgentGoneError`` or ``RefusedError``.
        """
        end = time.monotonic() + timeout_seconds
        self._put_on_wire([p.encode(message), *buffers], end)
        frames = self._quick_answer() if timeout_seconds > QUICK_SECONDS else None
        while True:
            left = end - time.monotonic()
            frames = frames or self._next_message(left)
            if frames is not None:
                reply = p.decode_reply(frames[0])
                if reply.id == message.id:
                    return self._right(reply, kind), frames[1:]
                self._take_late(frames)
                frames = None
            elif left <= 0:
                self._remember(message, buffers)
                raise AgentTimeoutError(f"no answer within {timeout_seconds:.3g} s")

    def _quick_answer(self) -> list[Any] | None:
        """The next message, if it comes at once, as nearly all do: heard in the shortest way, which
        does not hear the lifeline."""
        try:
            return receive_frames(self._socket, wait=True)
        except zmq.Again:
            return None

    def _next_message(self, seconds: float) -> list[Any] | None:
        """The next message, if one comes in time. Raises ``AgentGoneError``."""
        events = self._poller.poll(_milliseconds(seconds))
        ready = {entry[0] for entry in events}
        if self._socket in ready:
            return receive_frames(self._socket)
        if ready and self._lifeline_ended():
            raise AgentGoneError("the agent is gone")
        return None

    @staticmethod
    def _right(reply: p.Reply, kind: type[R]) -> R:
        """The reply, if it is of this kind. Raises ``RefusedError`` and ``AgentGoneError``."""
        if isinstance(reply, kind):
            return reply
        if isinstance(reply, p.Refused):
            raise RefusedError(reply.code, reply.message)
        raise AgentGoneError(f"answer of type {type(reply).__name__}")

    def send(self, message: p.Request, buffers: Sequence[Buffer] = ()) -> None:
        """Send a message that wants no reply; dropped when the agent does not take messages."""
        self._spoke = time.monotonic()
        with contextlib.suppress(zmq.ZMQError):
            send_frames(self._socket, [p.encode(message), *buffers])

    def keep_pins(self) -> None:
        """Pins end when the agent hears nothing for too long: give a sign of life in time."""
        silent = time.monotonic() - self._spoke
        if self.holds_pins and silent * 1000 * SIGNS_OF_LIFE > self.welcome.pin_milliseconds:
            self.send(p.Ping(0))

    def next_id(self) -> int:
        """A new request id."""
        self._ids += 1
        return self._ids

    def alive(self) -> bool:
        """Take late answers in, and look whether the agent is still there."""
        while self._socket.poll(0):
            self._take_late(receive_frames(self._socket))
        return not self._lifeline_ended()

    def close(self) -> None:
        """End the conversation; the agent takes back whatever was held."""
        _open.discard(self)
        self._socket.close(0)
        # term() could wait for the I/O thread; destroy with linger 0 does not.
        self._context.destroy(linger=0)
        if self._lifeline is not None:
            self._lifeline.close()
        self.arenas = {}

    def _forget_after_fork(self) -> None:
        """In a forked child: let go of the parent's lifeline, or its death would go unseen."""
        if self._lifeline is not None:
            self._lifeline.close()

    def _put_on_wire(self, frames: list[Buffer], end: float) -> None:
        """Send; with IMMEDIATE set a socket that is not connected yet takes nothing."""
        self._spoke = time.monotonic()
        while True:
            try:
                send_frames(self._socket, frames)
                return
            except zmq.Again:
                left = end - time.monotonic()
                if left <= 0:
                    raise AgentGoneError("no agent takes messages at this socket") from None
                self._socket.poll(_milliseconds(min(left, 0.1)), zmq.POLLOUT)

    def _remember(self, message: p.Request, buffers: Sequence[Buffer]) -> None:
        if isinstance(message, p.Load | p.Reserve):
            self._late[message.id] = bytes(buffers[0])
            while len(self._late) > MOST_UNANSWERED:
                self._late.pop(next(iter(self._late)))

    def _take_late(self, frames: list[bytes]) -> None:
        reply = p.decode_reply(frames[0])
        self.late_answers += 1
        keys = self._late.pop(reply.id, None)
        if isinstance(reply, p.Loaded) and reply.lease:
            self.send(p.Release(0, self.welcome.boot, reply.lease, used=False), (b"",))
        elif isinstance(reply, p.Reserved) and keys is not None:
            # Only what this very answer granted: a later call may hold slots for the other pages.
            names = p.keys_of(keys, len(keys))
            status = p.column(frames[1], "u1", len(names))
            granted = np.ascontiguousarray(names[status == PutStatus.OFFERED])
            if granted.size:
                self.send(p.Abort(0, self.welcome.boot), (granted.data,))

    def _lifeline_ended(self) -> bool:
        line = self._lifeline
        if line is None:
            return False
        try:
            return line.recv(16) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _receive_arenas(line: socket.socket) -> tuple[bytes, list[int]]:
    """The agent's answer on a new lifeline, and the descriptors that came with it."""
    size = p.LIFELINE_ARENAS.size
    answer, ancillary, _, _ = line.recvmsg(size, socket.CMSG_SPACE(8 * 4))
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return answer, list(descriptors)


def _form(welcome: p.Welcome, geometry: p.GeometryInfo) -> PageForm:
    """How pages lie in the arenas of this agent: of one before units, in one piece."""
    if welcome.protocol < p.UNITS_SINCE:
        return in_one_piece(welcome.page_bytes)
    return form_of(geometry.geometry())


def _milliseconds(seconds: float) -> int:
    """Rounded up: a poll of 0 ms in a loop would spin."""
    return max(0, math.ceil(seconds * 1000))


def _after_fork() -> None:
    _no_fork.release()
    for connection in list(_open):
        connection._forget_after_fork()
    _open.clear()


os.register_at_fork(
    before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork
)


def is_live(path: Path) -> bool:
    """Does anybody listen on this Unix socket?"""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(0.5)
    try:
        probe.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        # Somebody is there (a full backlog, no permission): not ours to replace.
        return True
    finally:
        probe.close()
    return True


__all__ = [
    "AgentError",
    "AgentGoneError",
    "AgentTimeoutError",
    "Connection",
    "RefusedError",
    "is_live",
]
