"""The lifelines of one trust domain: accept, check who it is, hand over the arenas, notice the end.

All without blocking, in the cache thread's poll loop. A connection first has to send one
``protocol.LIFELINE_HELLO``; one that does not within the grace time, or sends anything else, is
closed. After that the client never writes again, so whatever is readable is its end.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvtier_agent.server import protocol as p
from kvtier_agent.server.sessions import Session, Sessions

MOST_ACCEPTED_PER_ROUND: Final = 64


@dataclass(eq=False)
class _Line:
    connection: socket.socket
    since: float
    session: Session | None = None
    received: bytearray = field(default_factory=bytearray)


class Lifelines:
    """See the module's story. ``watch`` and ``unwatch`` put descriptors into the poll loop."""

    def __init__(
        self,
        listener: socket.socket,
        sessions: Sessions,
        arenas: Callable[[], list[int]],
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        grace_seconds: float,
        most: int,
    ) -> None:
        """``arenas``: opens the arena files anew and returns the descriptors to hand over."""
        self.listener = listener
        self._sessions = sessions
        self._arenas = arenas
        self._watch = watch
        self._unwatch = unwatch
        self._grace = grace_seconds
        self._most = most
        self._lines: dict[int, _Line] = {}
        self.refused = 0

    def accept(self, now: float) -> None:
        """Take new connections; more than twice as many as there may be clients are closed."""
        for _ in range(MOST_ACCEPTED_PER_ROUND):
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self.refused += 1  # out of descriptors: the client's hello will time out
                return
            if len(self._lines) >= 2 * self._most:
                self.refused += 1
                connection.close()
                continue
            connection.setblocking(False)
            self._lines[connection.fileno()] = _Line(connection, now)
            self._watch(connection.fileno())

    def readable(self, descriptor: int) -> Session | None:
        """Something came on a lifeline. The session that is over by it, or None."""
        line = self._lines.get(descriptor)
        if line is None:
            return None
        try:
            data = line.connection.recv(256)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        if line.session is None and data:
            line.received += data
            if len(line.received) < p.LIFELINE_HELLO.size:
                return None
            if self._welcome(line):
                return None
            self.refused += 1
        # Ended, or written to after the hello, or no client of ours: close it.
        self._drop(line)
        return line.session

    def holds(self, descriptor: int) -> bool:
        """Is this descriptor one of these lifelines?"""
        return descriptor in self._lines

    def close(self, session: Session) -> None:
        """The session is over for another reason: let its lifeline go."""
        if session.lifeline is not None:
            line = self._lines.get(session.lifeline)
            if line is not None and line.session is session:
                self._drop(line)

    def expire(self, now: float) -> None:
        """Close connections that did not say who they are in time."""
        for line in list(self._lines.values()):
            if line.session is None and now - line.since > self._grace:
                self.refused += 1
                self._drop(line)

    def close_all(self) -> None:
        """Close everything, the listener too."""
        for line in list(self._lines.values()):
            self._drop(line)
        self.listener.close()

    def _welcome(self, line: _Line) -> bool:
        if len(line.received) != p.LIFELINE_HELLO.size:
            return False
        magic, number, secret = p.LIFELINE_HELLO.unpack(line.received)
        if magic != p.LIFELINE_MAGIC:
            return False
        descriptor = line.connection.fileno()
        session = self._sessions.take_lifeline(number, secret, descriptor)
        if session is None:
            return False
        line.session = session
        files: list[int] = []
        try:
            files = self._arenas()
            socket.send_fds(line.connection, [p.LIFELINE_ARENAS.pack(1, len(files))], files)
        except OSError:
            return False
        finally:
            for file in files:
                os.close(file)
        return True

    def _drop(self, line: _Line) -> None:
        descriptor = line.connection.fileno()
        if self._lines.pop(descriptor, None) is not None:
            self._unwatch(descriptor)
        with contextlib.suppress(OSError):
            line.connection.close()
