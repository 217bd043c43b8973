"""The link of a client to whatever agent is there: it breaks, and mends itself.

A ``Link`` holds at most one ``Connection``. Calls go through ``asking``, which hands out the
connection to one call at a time and turns ``AgentError`` into the caller's fallback answer; the
wait for the turn counts into the call's time. A background thread (the keeper) notices a lost
agent, takes late answers in, and looks for a new agent with a back-off from 0.1 s to 2 s; it dials
without the turn, so that calls made meanwhile answer at once. It knows its link by a weak reference
only: a link that nobody holds any more says goodbye and ends its keeper.

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
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import CommitStatus
from kvtier_agent.server import protocol as p
from kvtier_agent.server.answers import ClientCounters, Stored
from kvtier_agent.server.asking import Asking
from kvtier_agent.server.connection import (
    AgentError,
    AgentGoneError,
    AgentTimeoutError,
    Connection,
    RefusedError,
)
from kvtier_agent.server.turns import Turn, Turns

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


class _Held:
    """What a link holds in one process, apart from it: its finalizer can let go of it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.turns = Turns()
        self.closing = threading.Event()
        self.connection: Connection | None = None

    def part(self) -> None:
        """Say goodbye to the agent, if there is one; in the turn, or when no call can be made."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.send(p.Bye(0))
            connection.close()


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
        rank: int = 0,
        tenant: str = "",
    ) -> None:
        """Tries once to connect, for at most ``timeout_seconds``; then the keeper goes on."""
        self.path = path
        self.timeout_seconds = timeout_seconds
        self.counters = ClientCounters()
        self._geometry = p.GeometryInfo.of(geometry)
        self._name = name
        self._probe = probe
        self._kv_pool_bytes = kv_pool_bytes
        self._rank = rank
        self._tenant = tenant
        self._raise = raise_errors
        self._silent = 0
        self._rest_until = 0.0
        self._begin()
        with contextlib.suppress(AgentError):
            self._connect(timeout_seconds)

    @property
    def connection(self) -> Connection | None:
        """The connection in use; see ``here``."""
        return self._held.connection

    def here(self) -> Connection | None:
        """The connection in use, if any. In a forked child it is the child's own: none at first,
        for the parent's is not to be touched, and a keeper that looks for one."""
        if os.getpid() != self._held.pid:
            self._finalizer.detach()
            self._begin()
        return self.connection

    def close(self) -> None:
        """Say goodbye and end the keeper; a call that is being made in another thread is waited
        for no longer than ``timeout_seconds``, and says goodbye then. A second call does nothing.
        """
        held = self._held
        held.closing.set()
        if os.getpid() != held.pid:
            return
        with held.turns.turn(self.timeout_seconds) as mine:
            if mine:
                held.part()
        if self._keeper is not threading.current_thread():
            self._keeper.join(0.5)  # it may be dialing; it ends by itself then

    def _begin(self) -> None:
        """Turns and keeper of this process (again after a fork)."""
        self._noting = threading.Lock()
        self._held = _Held()
        self._finalizer = weakref.finalize(self, _let_go, self._held)
        self._finalizer.atexit = False
        self._keeper = threading.Thread(
            target=_keep, args=(weakref.ref(self), self._held.closing), name="kvtier-client",
            daemon=True,
        )  # fmt: skip
        self._keeper.start()

    def _connect(self, timeout_seconds: float) -> None:
        """One attempt, without the turn: calls meanwhile answer at once. Raises ``AgentError``."""
        held = self._held
        try:
            connection = Connection(
                self.path, self._geometry, name=self._name, probe=self._probe,
                kv_pool_bytes=self._kv_pool_bytes, rank=self._rank, tenant=self._tenant,
                timeout_seconds=timeout_seconds,
            )  # fmt: skip
        except AgentError as error:
            self._note(error)
            raise
        except Exception as error:  # whatever it is: an engine starts, and runs, without a cache
            gone = AgentGoneError(f"cannot connect to {self.path}: {_said(error)}")
            self._note(gone)
            raise gone from None
        with held.turns.turn(PATIENT_SECONDS) as mine:
            if not mine or held.closing.is_set() or held.connection is not None:
                connection.close()
                return
            held.connection = connection
            self.answered()
            self.counters.connects += 1

    def _drop(self) -> None:
        held = self._held
        connection, held.connection = held.connection, None
        if connection is not None:
            self.counters.losses += 1
            connection.close()

    def _note(self, error: AgentError) -> None:
        counters = self.counters
        with self._noting:
            counters.last_error = str(error)
            if isinstance(error, AgentTimeoutError):
                counters.timeouts += 1
            elif isinstance(error, RefusedError):
                counters.refusals += 1
                counters.by_code[error.code] = counters.by_code.get(error.code, 0) + 1

    def answered(self) -> None:
        self._silent = 0
        self._rest_until = 0.0

    def _unanswered(self) -> None:
        self._silent += 1
        if self._silent >= MOST_SILENT:
            rest = FIRST_REST_SECONDS * 2 ** min(self._silent - MOST_SILENT, 10)
            self._rest_until = time.monotonic() + min(rest, LAST_REST_SECONDS)

    def resting(self, anyway: bool) -> bool:
        return not anyway and not self._raise and time.monotonic() < self._rest_until

    def asking(self, seconds: float, *, anyway: bool = False) -> Asking:
        """The connection for one call that has ``seconds``, and how many of them are left of the
        wait for its turn; an ``AgentError`` inside becomes the caller's fallback. ``anyway``: also
        while the link rests."""
        return Asking(self, seconds, anyway)

    def turn(self, seconds: float) -> Turn:
        """The turn of one call; see ``Turns``."""
        return self._held.turns.turn(seconds)

    def part_if_closing(self) -> None:
        """At the end of a call that ``close`` could not wait for. In the turn."""
        if self._held.closing.is_set():
            self._held.part()

    def without(self, seconds: float, *, late: bool) -> None:
        """A call has no connection; ``late``: its turn did not come. Raises, as ``failed``."""
        if late:
            error = AgentTimeoutError(f"other calls of this client took all of its {seconds:g} s")
            self._note(error)
            if self._raise:
                raise error
        elif self._raise:
            raise AgentGoneError(self.counters.last_error or "no agent")

    def failed(
        self, error: Exception, connection: Connection | None, left: float, seconds: float
    ) -> None:
        """A call came to nothing. Raises what it is to its caller, where that wants errors."""
        problem = error if isinstance(error, AgentError) else AgentGoneError(str(error))
        self._note(problem)
        # One that had hardly any time left after the others' turns tells nothing.
        if isinstance(problem, AgentTimeoutError) and left > seconds / 2:
            self._unanswered()
        lost = isinstance(problem, AgentGoneError) or (
            isinstance(problem, RefusedError)
            and problem.code in (p.Code.UNKNOWN_CLIENT, p.Code.STALE_BOOT)
        )
        if lost and self.connection is connection:
            self._drop()
        if self._raise:
            raise problem from None

    def look(self, backoff: float) -> tuple[float, float]:
        """The keeper's turn: notice a lost agent, take late answers in, find a new agent. Seconds
        until it should look again, and the next back-off."""
        try:
            if self.connection is None:
                self._connect(max(self.timeout_seconds, PATIENT_SECONDS))
            else:
                self._look_after()
        except Exception as error:  # a keeper that ended would be missed only by the next agent
            if not isinstance(error, AgentError):  # those are noted where they are raised
                self._note(AgentGoneError(_said(error)))
            return backoff, min(LAST_BACKOFF_SECONDS, backoff * 2)
        return KEEPER_SECONDS, FIRST_BACKOFF_SECONDS

    def _look_after(self) -> None:
        with self._held.turns.turn(0.0) as mine:
            connection = self.connection
            if not mine or connection is None:
                return  # whoever has the turn would notice
            before = connection.late_answers
            if not connection.alive():
                self._note(AgentGoneError("the agent is gone"))
                self._drop()
            elif connection.late_answers > before:
                self.answered()
            if self.connection is connection:
                connection.keep_pins()

    def outgrown(self, connection: Connection | None) -> None:
        """The agent has memory that this connection does not map: connect anew."""
        if not self._is_used(connection):
            return
        with self._held.turns.turn(self.timeout_seconds) as mine:
            if mine and self._is_used(connection):
                self._note(AgentGoneError("the agent's arenas grew; connecting anew"))
                self._drop()

    def end_lease(self, connection: Connection, lease: int, bad: NDArray[Any]) -> None:
        """Release a lease, naming the pages that were bad; nothing where its agent is gone."""
        self.counters.bad_pages += len(bad)
        self.post(connection, p.Release(0, connection.welcome.boot, lease), bad.tobytes())

    def abort(self, connection: Connection, keys: NDArray[np.uint8]) -> None:
        """Give reserved slots back; nothing where their agent is gone."""
        self.post(connection, p.Abort(0, connection.welcome.boot), keys.tobytes())

    def post(self, connection: Connection, message: p.Request, buffer: bytes) -> None:
        """A message that wants no reply; nothing where its agent is gone."""
        if self._is_used(connection):
            self._held.turns.post(connection, message, (buffer,))

    def _is_used(self, connection: Connection | None) -> bool:
        """Is this the connection in use, of this process?"""
        held = self._held
        return connection is not None and connection is held.connection and os.getpid() == held.pid

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
        with self.asking(self.timeout_seconds, anyway=True) as (current, left):
            if current is not None and connection is current:
                _, columns = connection.request(
                    p.Commit(connection.next_id(), connection.welcome.boot),
                    (np.ascontiguousarray(keys[offered]).data, sums[offered].tobytes()),
                    left, p.Committed,
                )  # fmt: skip
                done = p.column(columns[0], "u1", len(offered)) == CommitStatus.COMMITTED
                result[offered[done]] = Stored.STORED
                return result
            if connection is None or not self._is_used(connection):
                return result
            self.abort(connection, keys[offered])  # its turn did not come in time
        result[offered] = Stored.NO_AGENT
        return result


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _let_go(held: _Held) -> None:
    """Nobody holds the link any more, so nobody can be in the middle of a call."""
    held.closing.set()
    if os.getpid() == held.pid:
        held.part()


def _keep(link: weakref.ref[Link], closing: threading.Event) -> None:
    """The keeper, in a thread of its own, for as long as somebody holds the link."""
    wait, backoff = KEEPER_SECONDS, FIRST_BACKOFF_SECONDS
    while not closing.wait(wait):
        mine = link()
        if mine is None:
            return
        wait, backoff = mine.look(backoff)
        del mine  # not held while waiting
