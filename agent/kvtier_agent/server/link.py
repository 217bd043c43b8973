"""The link of a client to whatever agent is there: it breaks, and mends itself.

A ``Link`` holds at most one ``Connection``. Calls go through ``asking``, which hands out the
connection under a lock and turns ``AgentError`` into the caller's fallback answer. A background
thread (the keeper) notices a lost agent, takes late answers in, and looks for a new agent with a
back-off from 0.1 s to 2 s; it dials without the lock, so that calls made meanwhile answer at once.

An agent that is there and does not answer costs each call its whole deadline, which would make an
engine slower than it is without a cache. So after `MOST_SILENT` calls in a row without an answer
the link rests: calls answer at once, until one of the late answers comes in or the rest is over.
(Who wants errors wants every call tried, and gets no rest.)
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import zmq
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import CommitStatus
from kvtier_agent.server import protocol as p
from kvtier_agent.server.answers import ClientCounters, Stored
from kvtier_agent.server.connection import (
    AgentError,
    AgentGoneError,
    AgentTimeoutError,
    Connection,
    RefusedError,
)

KEEPER_SECONDS: Final = 0.2
"""How often the background thread looks for late answers and for a lost agent."""
FIRST_BACKOFF_SECONDS: Final = 0.1
LAST_BACKOFF_SECONDS: Final = 2.0
PATIENT_SECONDS: Final = 10.0
"""How long the keeper waits for a welcome: the agent may be laying out its tiers just then."""


MOST_SILENT: Final = 3
FIRST_REST_SECONDS: Final = 0.5
"""Doubles with every further call that is not answered."""
LAST_REST_SECONDS: Final = 8.0

BROKEN: Final = (p.MalformedError, zmq.ZMQError, OSError)
"""What else can go wrong on a connection (out of descriptors, an answer that makes no sense): the
same to a caller as an agent that is gone, and no reason to stop looking for one."""


class Link:
    """See the module's story."""

    def __init__(
        self,
        path: Path,
        geometry: Geometry,
        *,
        timeout_seconds: float,
        name: str,
        probe: bool,
        raise_errors: bool,
        kv_pool_bytes: int = 0,
    ) -> None:
        """Tries once to connect, for at most ``timeout_seconds``; then the keeper goes on."""
        self.path = path
        self.timeout_seconds = timeout_seconds
        self.counters = ClientCounters()
        self.connection: Connection | None = None
        self._geometry = p.GeometryInfo.of(geometry)
        self._name = name
        self._probe = probe
        self._kv_pool_bytes = kv_pool_bytes
        self._raise = raise_errors
        self._silent = 0
        self._rest_until = 0.0
        self._begin()
        with contextlib.suppress(AgentError):
            self._connect(timeout_seconds)

    def here(self) -> Connection | None:
        """The connection in use, if any. In a forked child it is the child's own: none at first,
        for the parent's is not to be touched, and a keeper that looks for one."""
        if os.getpid() != self._pid:
            self.connection = None
            self._begin()
        return self.connection

    def close(self) -> None:
        """Say goodbye and end the keeper. A second call does nothing."""
        self._closing.set()
        if os.getpid() != self._pid:
            return
        with self._lock:
            connection, self.connection = self.connection, None
            if connection is not None:
                connection.send(p.Bye(0))
                connection.close()
        if self._keeper is not threading.current_thread():
            self._keeper.join(0.5)  # it may be dialing; it ends by itself then

    def _begin(self) -> None:
        """Lock and keeper of this process (again after a fork)."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="kvtier-client", daemon=True)
        self._keeper.start()

    def _connect(self, timeout_seconds: float) -> None:
        """One attempt, without the lock: calls meanwhile answer at once. Raises ``AgentError``."""
        try:
            connection = Connection(
                self.path, self._geometry, name=self._name, probe=self._probe,
                kv_pool_bytes=self._kv_pool_bytes, timeout_seconds=timeout_seconds,
            )  # fmt: skip
        except AgentError as error:
            self._note(error)
            raise
        except BROKEN as error:
            gone = AgentGoneError(f"cannot connect to {self.path}: {error}")
            self._note(gone)
            raise gone from None
        with self._lock:
            if self._closing.is_set() or self.connection is not None:
                connection.close()
                return
            self.connection = connection
            self._answered()
            self.counters.connects += 1

    def _drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            self.counters.losses += 1
            connection.close()

    def _note(self, error: AgentError) -> None:
        counters = self.counters
        counters.last_error = str(error)
        if isinstance(error, AgentTimeoutError):
            counters.timeouts += 1
        elif isinstance(error, RefusedError):
            counters.refusals += 1
            counters.by_code[error.code] = counters.by_code.get(error.code, 0) + 1

    def _answered(self) -> None:
        self._silent = 0
        self._rest_until = 0.0

    def _unanswered(self) -> None:
        self._silent += 1
        if self._silent >= MOST_SILENT:
            rest = FIRST_REST_SECONDS * 2 ** min(self._silent - MOST_SILENT, 10)
            self._rest_until = time.monotonic() + min(rest, LAST_REST_SECONDS)

    @contextlib.contextmanager
    def asking(self, *, anyway: bool = False) -> Iterator[Connection | None]:
        """The connection for one call; an ``AgentError`` inside becomes the caller's fallback.
        ``anyway``: also while the link rests."""
        self.here()
        with self._lock:
            connection = self.connection
            if not anyway and not self._raise and time.monotonic() < self._rest_until:
                connection = None
            if connection is None and self._raise:
                raise AgentGoneError(self.counters.last_error or "no agent")
            try:
                yield connection
                if connection is not None:
                    self._answered()
            except (AgentError, *BROKEN) as error:
                problem = error if isinstance(error, AgentError) else AgentGoneError(str(error))
                self._note(problem)
                if isinstance(problem, AgentTimeoutError):
                    self._unanswered()
                lost = isinstance(problem, AgentGoneError) or (
                    isinstance(problem, RefusedError)
                    and problem.code in (p.Code.UNKNOWN_CLIENT, p.Code.STALE_BOOT)
                )
                if lost and self.connection is connection:
                    self._drop()
                if self._raise:
                    raise problem from None

    def _keep(self) -> None:
        """Background: notice a lost agent, take late answers in, find a new agent."""
        backoff = FIRST_BACKOFF_SECONDS
        wait = KEEPER_SECONDS
        while not self._closing.wait(wait):
            wait = KEEPER_SECONDS
            try:
                if self.connection is None:
                    self._connect(max(self.timeout_seconds, PATIENT_SECONDS))
                    backoff = FIRST_BACKOFF_SECONDS
                else:
                    self._look_after()
            except (AgentError, *BROKEN):
                wait = backoff
                backoff = min(LAST_BACKOFF_SECONDS, backoff * 2)

    def _look_after(self) -> None:
        with self._lock:
            if self.connection is None:
                return
            before = self.connection.late_answers
            if not self.connection.alive():
                self._note(AgentGoneError("the agent is gone"))
                self._drop()
            elif self.connection.late_answers > before:
                self._answered()

    def outgrown(self, connection: Connection | None) -> None:
        """The agent has memory that this connection does not map: connect anew."""
        with self._only_here(connection) as mine:
            if mine is not None:
                self._note(AgentGoneError("the agent's arenas grew; connecting anew"))
                self._drop()

    def end_lease(self, connection: Connection, lease: int, bad: NDArray[Any]) -> None:
        """Release a lease, naming the pages that were bad; nothing where its agent is gone."""
        self.counters.bad_pages += len(bad)
        with self._only_here(connection) as mine:
            if mine is not None:
                mine.send(p.Release(0, mine.welcome.boot, lease), (bad.tobytes(),))

    def abort(self, connection: Connection, keys: NDArray[np.uint8]) -> None:
        """Give reserved slots back; nothing where their agent is gone."""
        with self._only_here(connection) as mine:
            if mine is not None:
                mine.send(p.Abort(0, mine.welcome.boot), (np.ascontiguousarray(keys).data,))

    @contextlib.contextmanager
    def _only_here(self, connection: Connection | None) -> Iterator[Connection | None]:
        """``connection``, if it is still the one in use and belongs to this process."""
        if os.getpid() != self._pid:
            yield None
            return
        with self._lock:
            yield connection if connection is self.connection else None

    def commit(
        self,
        connection: Connection | None,
        status: NDArray[np.uint8],
        offered: NDArray[np.intp],
        keys: NDArray[np.uint8],
        sums: NDArray[np.uint64],
    ) -> NDArray[np.uint8]:
        result = status.copy()
        if not offered.size:
            return result
        result[offered] = Stored.LOST
        with self.asking(anyway=True) as current:
            if connection is not None and connection is current:
                _, columns = connection.request(
                    p.Commit(connection.next_id(), connection.welcome.boot),
                    (np.ascontiguousarray(keys[offered]).data, sums[offered].tobytes()),
                    self.timeout_seconds, p.Committed,
                )  # fmt: skip
                done = p.column(columns[0], "u1", len(offered)) == CommitStatus.COMMITTED
                result[offered[done]] = Stored.STORED
                return result
            return result
        result[offered] = Stored.NO_AGENT
        return result
