"""One trust domain on the wire: its message socket, its lifelines, its dispatcher."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvtier_agent.cache.moves import Move, MoveKind, Outcome
from kvtier_agent.server import protocol as p
from kvtier_agent.server.dispatch import Dispatcher
from kvtier_agent.server.latency import Latency
from kvtier_agent.server.lifelines import Lifelines
from kvtier_agent.server.rundir import RunDir
from kvtier_agent.server.sessions import Session, Sessions
from kvtier_agent.server.settings import ServerSettings, TrustDomain
from kvtier_agent.server.snapshot import (
    DomainSnapshot,
    VolumeFigures,
    merged_counters,
    statistics,
)
from kvtier_agent.server.tracing import Tracing
from kvtier_agent.server.wire import send_frames

_POLLIN = int(zmq.POLLIN)
_ENDED = zmq.EVENT_DISCONNECTED
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

REST_SECONDS_PER_PAGE = 2e-6
"""A snapshot passes over the page table, some 40 ms for a million pages; publishing one every two
seconds then, the loop spends two percent of its time on it."""

_PAIRS = {
    MoveKind.DEMOTE: (0, 1),
    MoveKind.PROMOTE: (1, 0),
    MoveKind.WRITE: (1, 2),
    MoveKind.READ: (2, 1),
}


class Channel:
    """See the module's story. Everything here runs on the cache thread."""

    def __init__(
        self,
        domain: TrustDomain,
        settings: ServerSettings,
        boot: int,
        run_dir: RunDir,
        context: zmq.Context[zmq.Socket[bytes]],
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        clock: Callable[[], float],
        tracing: Tracing,
        version: str,
    ) -> None:
        """Binds the sockets; ``ServerError`` where that cannot be."""
        self.domain = domain
        self.core = domain.core
        self.dropped_replies = 0
        self.latency: dict[tuple[int, int], Latency] = {}
        self._settings = settings
        self._clock = clock
        self._last: DomainSnapshot | None = None
        self.socket = run_dir.message_socket(context, domain.name, domain.gid, settings)
        self.connections = Counter[str]()
        """Connections that ended, and handshakes that failed: what ZeroMQ drops by itself."""
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_ENDED | _FAILED)
        sessions = Sessions(1, settings.lifeline_grace_seconds)
        self.lifelines = Lifelines(
            run_dir.lifeline_socket(domain.name, domain.gid),
            sessions,
            self._open_arenas,
            watch,
            unwatch,
            settings.lifeline_grace_seconds,
            settings.max_clients,
        )
        self.sessions = sessions
        self.dispatcher = Dispatcher(
            domain, settings, boot, sessions, self._send, self._statistics, tracing, version
        )

    def receive(self) -> None:
        """Messages that wait on the socket, up to a round's share."""
        for _ in range(self._settings.messages_per_round):
            # An exception for the end of the queue would cost more than looking.
            if not int(self.socket.getsockopt(zmq.EVENTS)) & _POLLIN:
                return
            try:
                identity, frames = self._next_message()
            except zmq.Again:
                return
            session = self.dispatcher.handle(self._clock(), identity, frames)
            if session is not None:
                self.over(self._clock(), session)

    def monitor_events(self) -> None:
        """ZeroMQ ended connections: peers that left, broke its protocol or sent too much."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self.connections["ended" if event == _ENDED else "failed"] += 1

    def lifeline_event(self, now: float, descriptor: int) -> None:
        """A lifeline of this domain is readable."""
        session = self.lifelines.readable(descriptor)
        if session is not None:
            self.over(now, session)

    def over(self, now: float, session: Session) -> None:
        """The client is gone."""
        self.lifelines.close(session)
        self.dispatcher.over(now, session)

    def tick(self, now: float) -> None:
        """What is due by the clock."""
        self.dispatcher.finished(now, self.core.cache.tick(now))
        for session in self.sessions.overdue(now):
            self.over(now, session)

    def settle(self, now: float) -> None:
        """What may wait half a second: abandoned questions, strangers on the lifeline's socket."""
        self.dispatcher.accounts.expire(now)
        self.lifelines.expire(now)

    def next_due(self) -> float | None:
        """When ``tick`` has something to do, seconds; None: nothing waits for the clock."""
        dues = [self.core.cache.next_due(), self.sessions.next_due()]
        return min((due for due in dues if due is not None), default=None)

    def collect(self, now: float) -> None:
        """The mover finished something."""
        self.dispatcher.finished(now, self.core.collect(now))

    def observe(self, now: float, move: Move, outcome: Outcome) -> None:
        """A move ended: note how long it took from the decision to the landed bytes."""
        pair = _PAIRS.get(move.kind)
        if pair is not None and not outcome.status.any():
            self.latency.setdefault(pair, Latency()).observe(
                max(0.0, now - move.created), move.bytes
            )

    def figures(self, now: float) -> DomainSnapshot:
        """The figures to publish: taken now, or some time ago where there are very many pages."""
        last = self._last
        if last is None or now - last.cache.now >= REST_SECONDS_PER_PAGE * last.cache.pages:
            last = self._last = self.snapshot(now)
        return last

    def snapshot(self, now: float) -> DomainSnapshot:
        """A copy for other threads, taken now: one pass over the page table."""
        dispatcher = self.dispatcher
        cache = self.core.cache.snapshot(now)
        self.core.note_suspects()
        return DomainSnapshot(
            name=self.domain.name,
            geometry=dispatcher.geometry,
            cache=cache,
            counters=merged_counters(cache.counters, dispatcher.accounts.tally),
            latency={pair: latency.frozen() for pair, latency in self.latency.items()},
            clients=len(self.sessions),
            engine_pool_bytes=self.sessions.pool_bytes,
            parked_loads=dispatcher.parked,
            open_questions=dispatcher.accounts.open_questions,
            messages=dispatcher.messages,
            refused_messages=dict(dispatcher.refused),
            dropped_replies=self.dropped_replies,
            refused_lifelines=self.lifelines.refused,
            ended_connections=self.connections["ended"],
            failed_handshakes=self.connections["failed"],
            volumes=tuple(VolumeFigures(*figures) for figures in self.core.volumes()),
            io_faults=self.core.io_faults(),
            nvme_engine=self.core.nvme_engine,
            journal=self.core.nvme.journal(),
            lost_memory=self.core.lost_memory(),
            restart=self.core.memory.restart.say(),
        )

    def close(self, now: float) -> None:
        """Let every client go, then the sockets."""
        for session in self.sessions:
            self.over(now, session)
        self.lifelines.close_all()
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def _next_message(self) -> tuple[bytes, list[Any]]:
        """One message; what it has beyond the allowed frames is read and thrown away."""
        identity = self.socket.recv(zmq.NOBLOCK)
        frames: list[Any] = []
        more = self.socket.getsockopt(zmq.RCVMORE)
        while more:
            frame = self.socket.recv(zmq.NOBLOCK)
            if len(frames) <= p.MAX_FRAMES:
                frames.append(frame)
            more = self.socket.getsockopt(zmq.RCVMORE)
        return identity, frames

    def _send(self, identity: bytes, frames: list[Any]) -> None:
        try:
            send_frames(self.socket, [identity, *frames])
        except zmq.ZMQError:
            # Gone, or so slow that its queue is full: its lifeline or its timeout tells.
            self.dropped_replies += 1

    def _statistics(self) -> dict[str, Any]:
        return statistics(self.snapshot(self._clock()))

    def _open_arenas(self) -> list[int]:
        layout = self.core.layout()
        if layout is None:
            return []
        files: list[int] = []
        try:
            for arena in layout.arenas:
                if arena.kind == "shm":
                    files.append(os.open(Path(arena.path), os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            for file in files:
                os.close(file)
            raise
        return files
