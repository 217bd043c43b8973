"""Whose turn it is on a connection: one call at a time, and nobody waits longer than it has.

A call takes its turn with the seconds it has; one that did not get it in time goes without. What
wants no answer (a lease given back, slots given back) does not wait at all: it is posted, and sent
by whoever has the turn next. So a call that waits for NVMe delays the others' answers by no more
than they allow, and a lease can be given back from anywhere, a finalizer included.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvtier_agent.server import protocol as p
from kvtier_agent.server.connection import Buffer, Connection


class Turns:
    """See the module's story."""

    def __init__(self) -> None:
        # Not reentrant: a call made in the middle of another one must not write into it.
        self._lock = threading.Lock()
        self._letters: deque[tuple[Connection, p.Request, Sequence[Buffer]]] = deque()

    def turn(self, seconds: float) -> Turn:
        """Wait for the turn, for at most ``seconds``; False: it did not come, the body runs anyway
        and must leave the connection alone."""
        return Turn(self, seconds)

    def _take(self, seconds: float) -> bool:
        if not (
            self._lock.acquire(blocking=False) or self._lock.acquire(timeout=max(0.0, seconds))
        ):
            return False
        try:
            self._send_all()
        except BaseException:
            self._lock.release()
            raise
        return True

    def _give(self) -> None:
        self._lock.release()
        self._deliver()

    def post(self, connection: Connection, message: p.Request, buffers: Sequence[Buffer]) -> None:
        """Have this one-way message sent, now or at the end of the turn that somebody has. Nothing
        where the connection is closed by then. Never waits."""
        self._letters.append((connection, message, buffers))
        self._deliver()

    def _deliver(self) -> None:
        # Whoever fails to get the lock leaves its letter to the holder, who looks after releasing.
        while self._letters and self._lock.acquire(blocking=False):
            try:
                self._send_all()
            finally:
                self._lock.release()

    def _send_all(self) -> None:
        while self._letters:
            connection, message, buffers = self._letters.popleft()
            connection.send(message, buffers)


class Turn:
    """What ``Turns.turn`` gives. A class of its own: every call of an engine passes here, and a
    generator would cost it microseconds."""

    __slots__ = ("_mine", "_seconds", "_turns")

    def __init__(self, turns: Turns, seconds: float) -> None:
        self._turns = turns
        self._seconds = seconds
        self._mine = False

    def __enter__(self) -> bool:
        self._mine = self._turns._take(self._seconds)
        return self._mine

    def __exit__(self, *_: object) -> None:
        if self._mine:
            self._mine = False
            self._turns._give()
