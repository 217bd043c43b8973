"""Layered loads: leases that are answered at once and read while they land, and who waits for them.

A lease is *open* here from its answer until the last of its pages has landed or is given up. Until
then nobody knows which of its pages are hits: the accounts are told at the end, or when the lease
is given back before.

Runs on the cache thread. Nothing waits here: an ``Await`` that cannot be answered is put aside, one
a lease (a client that asks anew has given up the answer), and looked at when pages have landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.progress import Units
from kvtier_agent.cache.results import MISS, U8, Ticket
from kvtier_agent.server import protocol as p
from kvtier_agent.server.accounting import Accounts
from kvtier_agent.server.sessions import Session

Mine = tuple[int, int]
"""A client's number and its lease's: nobody waits for a lease of another, nor ends it."""


class Answer(Protocol):
    """Sends a reply and its buffers to a client."""

    def __call__(self, identity: bytes, reply: p.Reply, *buffers: bytes) -> None: ...


class LayeredLoads:
    """Of one trust domain."""

    def __init__(self, cache: Callable[[], Cache], accounts: Accounts, answer: Answer) -> None:
        """``cache``: the one in use."""
        self._cache, self._accounts, self._answer = cache, accounts, answer
        self._open: dict[Mine, U8] = {}
        """Where the pages of these leases were when they were answered."""
        self._waiting: dict[Mine, tuple[Session, p.Await]] = {}

    def began(self, session: Session, ticket: Ticket) -> bytes:
        """A layered load is being answered. The column of what has landed."""
        landed = self._landed(session, ticket.lease)
        if not ticket.done:
            self._open[(session.number, ticket.lease)] = ticket.tier
        return landed.tobytes()

    def wait(self, now: float, session: Session, request: p.Await) -> None:
        """Answer now, or when there is something to say."""
        mine = (session.number, request.lease)
        self._waiting[mine] = (session, request)
        self._look_at(now, mine)

    def look(self, now: float, tickets: Sequence[Ticket] = ()) -> None:
        """Pages may have landed, and these tickets are done: answer who waits for that."""
        for ticket in tickets:
            if self._open.pop((ticket.client, ticket.lease), None) is not None:
                self._accounts.corrected(ticket.lease, ticket.tier)
        for mine in list(self._waiting):
            self._look_at(now, mine)

    def ending(self, session: Session, lease: int) -> None:
        """A client is about to give a lease back, or is gone: what is there now is all that it
        got."""
        mine = (session.number, lease)
        self._waiting.pop(mine, None)
        tiers = self._open.pop(mine, None)
        if tiers is not None:
            units = self._cache().geometry.units
            got = self._landed(session, lease) == units
            tiers = np.where(got, tiers, np.uint8(MISS)) if got.size else got.astype(np.uint8)
            self._accounts.corrected(lease, tiers)

    def over(self, session: Session) -> None:
        """The client is gone; before the cache takes its leases back."""
        for mine in [*self._open, *self._waiting]:
            if mine[0] == session.number:
                self.ending(session, mine[1])

    @property
    def waiting(self) -> int:
        """Requests that wait for pages to land."""
        return len(self._waiting)

    def _landed(self, session: Session, lease: int) -> Units:
        landed = self._cache().units(session.number, lease)
        return np.empty(0, dtype=np.uint16) if landed is None else landed

    def _look_at(self, now: float, mine: Mine) -> None:
        session, request = self._waiting[mine]
        landed = self._landed(session, request.lease)
        if (landed >= min(request.units, self._cache().geometry.units)).all():
            del self._waiting[mine]
            # It could say nothing while it waited; its time to speak begins now.
            self._cache().pins.heard(now, session.number)
            reply = p.Landed(request.id)
            self._answer(session.identity, reply, landed.astype("<u2").tobytes())
