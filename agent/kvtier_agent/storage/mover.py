"""The mover: threads that execute moves, reads first.

Three queues, by what waits for them: reads (an engine waits), copies between arenas (a slot of L0
waits) and writes with all other orders (nobody waits). A thread takes from the first that has
something, except that one thread fewer than there are may be busy with writes, so that a slow drive
never keeps a read waiting in line. What is queued is bounded in bytes; a move past the bound is
answered CANCELLED at once, which costs a page its place and nobody any time.

A finished move goes into a list that the cache thread collects; `wake` tells it so.

In an agent the threads are supervised loops (`start`): one that dies answers the move it was at, is
seen by health and comes back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.storage.copier import Copier
from kvtier_agent.supervise import Heart

Start = Callable[[str, Callable[[Heart], None]], None]
"""Name and loop: `Supervisor.start`."""

Done = list[tuple[Move, Outcome]]

QUEUE_BYTES = 4 << 30
"""Bound on bytes queued in all; the cache's own bound on writes is far below it."""

STUCK_SECONDS = 30.0
"""A batch on a slow drive takes long; one that takes this long is a drive that hangs."""
BEAT_SECONDS = 0.1
CLOSE_SECONDS = 10.0

_CLASS = {MoveKind.READ: 0, MoveKind.DEMOTE: 1, MoveKind.PROMOTE: 1}


class Mover:
    """`threads` at least 2: one is always free for reads and copies."""

    def __init__(
        self,
        copier: Copier,
        wake: Callable[[], None],
        *,
        threads: int = 2,
        queue_bytes: int = QUEUE_BYTES,
        start: Start | None = None,
        name: str = "mover",
    ) -> None:
        """`start`: starts each thread under a supervisor, called `name`-0 and so on."""
        self._copier = copier
        self._wake = wake
        self._queue_bytes = queue_bytes
        self._queues: tuple[deque[Move], ...] = (deque(), deque(), deque())
        self._queued = 0
        self._writers = 0
        self._busy = 0
        self._max_writers = max(1, threads - 1)
        self._closing = False
        self._ready = threading.Condition()
        self._done: deque[tuple[Move, Outcome]] = deque()
        self._threads: list[threading.Thread] = []
        self._hearts: list[Heart] = []
        for i in range(max(2, threads)):
            if start is not None:
                start(f"{name}-{i}", self._run)
            else:
                heart = Heart(time.monotonic)
                self._hearts.append(heart)
                thread = threading.Thread(
                    target=self._run, args=(heart,), name=f"{name}-{i}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued

    def alive(self) -> bool:
        """Do all threads run that no supervisor looks after?"""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, moves: list[Move]) -> None:
        """Queue moves; never waits."""
        refused = False
        with self._ready:
            for move in moves:
                if self._closing or (
                    self._queued and self._queued + move.bytes > self._queue_bytes
                ):
                    cancelled = Outcome.uniform(move, MoveStatus.CANCELLED, error="queue is full")
                    self._done.append((move, cancelled))
                    refused = True
                    continue
                self._queues[_CLASS.get(move.kind, 2)].append(move)
                self._queued += move.bytes
            self._ready.notify_all()
        if refused:
            self._wake()

    def collect(self) -> Done:
        """Finished moves since the last call. Never waits."""
        out: Done = []
        while True:
            try:
                out.append(self._done.popleft())
            except IndexError:
                return out

    def close(self) -> None:
        """End the threads after the move each is at; what is queued is cancelled."""
        with self._ready:
            self._closing = True
            for queue in self._queues:
                while queue:
                    move = queue.popleft()
                    self._queued -= move.bytes
                    cancelled = Outcome.uniform(move, MoveStatus.CANCELLED, error="closing")
                    self._done.append((move, cancelled))
            self._ready.notify_all()
            self._ready.wait_for(lambda: not self._busy, CLOSE_SECONDS)
        for heart in self._hearts:
            heart.stopping.set()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _take(self, heart: Heart) -> tuple[Move, bool] | None:
        while not self._closing and not heart.stopping.is_set():
            heart.beat()
            with self._ready:
                for number, queue in enumerate(self._queues):
                    writing = number == 2
                    if queue and not (writing and self._writers >= self._max_writers):
                        self._writers += writing
                        self._busy += 1
                        return queue.popleft(), writing
                self._ready.wait(BEAT_SECONDS)
        return None

    def _run(self, heart: Heart) -> None:
        while (taken := self._take(heart)) is not None:
            move, writing = taken
            outcome = Outcome.uniform(move, MoveStatus.IO_ERROR, error="the mover died at it")
            try:
                with heart.allowing(STUCK_SECONDS):
                    outcome = self._copier.execute(move)
            finally:
                with self._ready:
                    self._queued -= move.bytes
                    self._writers -= writing
                    self._busy -= 1
                    if self._closing or (writing and self._queues[2]):
                        self._ready.notify_all()
                self._done.append((move, outcome))
                self._wake()
        while not heart.wait(BEAT_SECONDS):
            pass  # closed before its supervisor stopped it: that is in order


class SyncMover:
    """The same interface without threads: `submit` executes. For tests and measurements."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._done: Done = []
        self.queued_bytes = 0

    def alive(self) -> bool:
        return True

    def submit(self, moves: list[Move]) -> None:
        self._done += [(move, self._copier.execute(move)) for move in moves]

    def collect(self) -> Done:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass
