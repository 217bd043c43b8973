"""The mover: threads that execute moves, reads first.

Three queues, by what waits for them: reads (an engine waits), copies between arenas (a slot of L0
waits) and writes with all other orders (nobody waits). A thread takes from the first that has
something, except that one thread fewer than there are may be busy with writes, so that a slow drive
never keeps a read waiting in line. Reads and writes that are queued are bounded in bytes, each by
themselves; a move past the bound is answered CANCELLED at once, which costs a page its place and
nobody any time. Copies are bounded by the tier that they leave.

A finished move goes into a list that the cache thread collects; `wake` tells it so.

Where there are rings (`flights`) a read is begun by whoever submits it and a write by a thread,
which does not stay with it: the drive works on many at a time. What then ends is finished by the
loop of the rings, or by a thread where that may wait for a drive again.

In an agent the threads are supervised loops (`start`): one that dies answers the move it was at, is
seen by health and comes back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.progress import Units
from kvtier_agent.storage.copier import Copier
from kvtier_agent.storage.flights import Flights
from kvtier_agent.storage.settings import CoreSettings
from kvtier_agent.supervise import Heart

log = structlog.get_logger("kvtier.storage.mover")

Start = Callable[[str, Callable[[Heart], None]], None]
"""Name and loop: `Supervisor.start`."""

Done = list[tuple[Move, Outcome]]
News = list[tuple[Move, Units]]
Job = Move | Callable[[], None]
"""What a thread does: a move, or what `Mover.later` was asked for."""

QUEUE_BYTES = 4 << 30
"""Bound on bytes queued of reads, and of writes: reads that a drive hangs on must not keep pages
from leaving memory."""

STUCK_SECONDS = 30.0
"""A batch on a slow drive takes long; one that takes this long is a drive that hangs."""
BEAT_SECONDS = 0.1
CLOSE_SECONDS = 10.0

_CLASS = {MoveKind.READ: 0, MoveKind.DEMOTE: 1, MoveKind.PROMOTE: 1}
_COPYING, _WRITING = 1, 2


def _class(move: Move) -> int:
    return _CLASS.get(move.kind, _WRITING)


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
        flights: Flights | None = None,
    ) -> None:
        """`start`: starts each thread under a supervisor, called `name`-0 and so on, and the loop
        of `flights`, which is this mover's from now on, called `name`-rings."""
        self._copier = copier
        self._flights = flights
        self._wake = wake
        self._queue_bytes = queue_bytes
        self._queues: tuple[deque[Job], ...] = (deque(), deque(), deque())
        self._queued = [0, 0, 0]
        """Bytes in each."""
        self._writers = 0
        self._busy = 0
        self._max_writers = max(1, threads - 1)
        self._closing = False
        self._ready = threading.Condition()
        self._done: deque[tuple[Move, Outcome]] = deque()
        self._news: deque[tuple[Move, Units]] = deque()
        copier.announce = self._announce
        self._threads: list[threading.Thread] = []
        self._hearts: list[Heart] = []
        loops = [(f"{name}-{i}", self._run) for i in range(max(2, threads))]
        if flights is not None:
            flights.deliver, flights.later = self._deliver, self.later
            flights.by_calls, flights.announce = self.by_calls, self._announce
            loops.append((f"{name}-rings", flights.run))
        for called, loop in loops:
            if start is not None:
                start(called, loop)
            else:
                heart = Heart(time.monotonic)
                self._hearts.append(heart)
                thread = threading.Thread(target=loop, args=(heart,), name=called, daemon=True)
                self._threads.append(thread)
                thread.start()

    @property
    def queued_bytes(self) -> int:
        return sum(self._queued)

    def alive(self) -> bool:
        """Do all threads run that no supervisor looks after?"""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, moves: list[Move]) -> None:
        """Queue moves, or begin them; never waits."""
        taken: list[Move] = []
        refused = False
        with self._ready:
            for move in moves:
                kind = _class(move)
                queued = 0 if kind == _COPYING else self._queued[kind]
                if self._closing or (queued and queued + move.bytes > self._queue_bytes):
                    self._cancel(move, "queue is full")
                    refused = True
                    continue
                self._queued[kind] += move.bytes
                taken.append(move)
        # The cache thread begins reads itself: that spares an engine the wait for a thread.
        left = [m for m in taken if m.kind is not MoveKind.READ or not self._begin(m)]
        with self._ready:
            for move in left:
                if self._closing:
                    self._queued[_class(move)] -= move.bytes
                    self._cancel(move, "closing")
                    refused = True
                else:
                    self._queues[_class(move)].append(move)
            if left:  # else every read would wake threads that have nothing to do
                self._ready.notify_all()
        if refused:
            self._wake()

    def later(self, call: Callable[[], None], *, waits: bool) -> None:
        """Have something done by a thread, before other things of its kind. `waits`: it may wait
        for a drive. At the end it is done at once."""
        with self._ready:
            if not self._closing:
                self._queues[_WRITING if waits else 0].appendleft(call)
                self._ready.notify_all()
                return
        call()

    def by_calls(self, move: Move) -> None:
        """Have a read that was submitted done by a thread itself."""
        self.later(lambda: self._carry_out(move), waits=False)

    def _begin(self, move: Move, *, patient: bool = False) -> bool:
        """Give a move to the rings, if they take it."""
        try:
            return self._flights is not None and self._flights.launch(move, patient=patient)
        except Exception as error:  # as in `Copier.execute`; it can still go the other way
            log.warning("a move was not begun", move=move.kind.value, error=str(error))
            return False

    def _deliver(self, move: Move, outcome: Outcome) -> None:
        """A move that was queued has ended."""
        with self._ready:
            self._queued[_class(move)] -= move.bytes
        self._done.append((move, outcome))
        self._wake()

    def _announce(self, move: Move, landed: Units) -> None:
        """Units of a move under way have landed."""
        self._news.append((move, landed))
        self._wake()

    def _cancel(self, move: Move, error: str) -> None:
        self._done.append((move, Outcome.uniform(move, MoveStatus.CANCELLED, error=error)))

    def collect(self) -> Done:
        """Finished moves since the last call. Never waits."""
        out: Done = []
        while True:
            try:
                out.append(self._done.popleft())
            except IndexError:
                return out

    def news(self) -> News:
        """What has landed since the last call of moves under way; of one that `collect` gave, it is
        old. Never waits."""
        out: News = []
        while self._news:
            out.append(self._news.popleft())
        return out

    def close(self) -> None:
        """End the threads after the move each is at. What is queued is cancelled, but for what says
        that pages are deleted: they would be found at the next start."""
        with self._ready:
            self._closing = True
            calls: list[Callable[[], None]] = []
            forget: list[Move] = []
            for queue in self._queues:
                while queue:
                    job = queue.popleft()
                    if isinstance(job, Move):
                        self._queued[_class(job)] -= job.bytes
                        if job.kind is MoveKind.FORGET:
                            forget.append(job)
                            continue
                        self._cancel(job, "closing")
                    else:
                        calls.append(job)
            self._ready.notify_all()
            self._ready.wait_for(lambda: not self._busy, CLOSE_SECONDS)
        for call in calls:
            call()
        for move in forget:
            self._done.append((move, self._copier.execute(move)))
        if self._flights is not None:
            self._flights.close(CLOSE_SECONDS)
        for heart in self._hearts:
            heart.stopping.set()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _take(self, heart: Heart) -> tuple[Job, bool] | None:
        while not self._closing and not heart.stopping.is_set():
            heart.beat()
            with self._ready:
                for number, queue in enumerate(self._queues):
                    writing = number == _WRITING
                    if queue and not (writing and self._writers >= self._max_writers):
                        self._writers += writing
                        self._busy += 1
                        return queue.popleft(), writing
                self._ready.wait(BEAT_SECONDS)
        return None

    def _run(self, heart: Heart) -> None:
        while (taken := self._take(heart)) is not None:
            job, writing = taken
            try:
                with heart.allowing(STUCK_SECONDS):
                    self._do(job)
            finally:
                with self._ready:
                    self._writers -= writing
                    self._busy -= 1
                    if self._closing or (writing and self._queues[_WRITING]):
                        self._ready.notify_all()
        while not heart.wait(BEAT_SECONDS):
            pass  # closed before its supervisor stopped it: that is in order

    def _do(self, job: Job) -> None:
        if not isinstance(job, Move):
            job()
            return
        if not self._begin(job, patient=True):
            self._carry_out(job)

    def _carry_out(self, move: Move) -> None:
        if self._closing and move.kind is MoveKind.READ:
            self._deliver(move, Outcome.uniform(move, MoveStatus.CANCELLED, error="closing"))
            return
        outcome = Outcome.uniform(move, MoveStatus.IO_ERROR, error="the mover died at it")
        try:
            outcome = self._copier.execute(move)
        finally:
            self._deliver(move, outcome)


def mover_of(
    settings: CoreSettings,
    copier: Copier,
    wake: Callable[[], None],
    start: Start | None,
    flights: Flights | None,
) -> Mover:
    """The mover of a trust domain. Its bound is far above what the cache hands out to be written,
    whatever that may be: a write that is cancelled is decided anew at once."""
    return Mover(
        copier,
        wake,
        threads=settings.mover_threads,
        queue_bytes=max(QUEUE_BYTES, 2 * settings.cache.write_queue_bytes),
        start=start,
        name=f"mover-{settings.domain}",
        flights=flights,
    )


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

    def news(self) -> News:
        """Nothing is under way between two calls."""
        return []

    def close(self) -> None:
        pass
