"""Who holds what: leases on pages, reservations of slots, and when they run out.

A lease pins pages for a client; a reservation is a slot it is writing. Each ends by the client's
word (release, commit, abort), by its death (`client_gone`) or by time, so nothing stays taken for
ever. Both have one fixed lifetime, so they run out in the order they were made: a queue, no heap.

A lease whose pages are still on their way from L2 is *pending*. It is finished when the last page
landed or failed, or when its deadline passed; pages that are late are misses then, and unpinned.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.record import Rows
from kvtier_agent.cache.results import MISS, U8, U64, Ticket


@dataclass(slots=True, eq=False)
class Lease:
    """Mutable inside the cache; the answer is `ticket()`. `held[i]`: page i is pinned by it.

    Of `asked` keys the first `len(rows)` were found; the columns have their length: a client may
    ask for ever so many that are not there."""

    id: int
    client: int
    asked: int
    rows: Rows
    tier: U8
    arena: U8
    offset: U64
    checksum: U64
    held: np.ndarray[tuple[int], np.dtype[np.bool_]]
    waiting: int = 0
    deadline: float = 0.0
    layered: bool = False
    """It was answered at once, and its pages are read while they land."""

    def ticket(self) -> Ticket:
        """The answer as it stands, of the length that was asked."""
        arena, tier = self.arena, self.tier
        if not self.waiting and not self.held.all():
            arena = np.where(self.held, arena, np.uint8(MISS))
            tier = np.where(self.held, tier, np.uint8(MISS))
        return Ticket(
            self.id, self.client, not self.waiting, self._padded(tier, MISS),
            self._padded(arena, MISS), self._padded(self.offset, 0),
            self._padded(self.checksum, 0),
        )  # fmt: skip

    def _padded(self, column: NDArray[Any], fill: int) -> NDArray[Any]:
        if len(column) == self.asked:
            return column.copy()
        out = np.full(self.asked, fill, dtype=column.dtype)
        out[: len(column)] = column
        return out


@dataclass(slots=True)
class LeaseBook:
    """All leases and reservations."""

    lease_seconds: float
    leases: dict[int, Lease] = field(default_factory=dict)
    by_client: dict[int, set[int]] = field(default_factory=dict)
    waiters: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    reserved: dict[int, dict[int, int]] = field(default_factory=dict)
    """client -> row -> stamp of the reservation."""
    reservations: int = 0
    _next: int = 1
    _expiry: deque[tuple[float, int]] = field(default_factory=deque)
    _reserved_until: deque[tuple[float, int, list[tuple[int, int]]]] = field(default_factory=deque)
    _deadlines: list[tuple[float, int]] = field(default_factory=list)

    def open(self, now: float, client: int, rows: Rows, count: int, deadline: float) -> Lease:
        """A lease for `count` keys of which the first `len(rows)` are found; nothing held yet."""
        lease = Lease(
            id=self._next,
            client=client,
            asked=count,
            rows=rows.copy(),  # not a part of the answer for all that were asked
            tier=np.full(len(rows), MISS, dtype=np.uint8),
            arena=np.full(len(rows), MISS, dtype=np.uint8),
            offset=np.zeros(len(rows), dtype=np.uint64),
            checksum=np.zeros(len(rows), dtype=np.uint64),
            held=np.zeros(len(rows), dtype=bool),
            deadline=min(deadline, now + self.lease_seconds),
        )
        self._next += 1
        self.leases[lease.id] = lease
        self.by_client.setdefault(client, set()).add(lease.id)
        self._expiry.append((now + self.lease_seconds, lease.id))
        return lease

    def number_from(self, before: LeaseBook) -> None:
        """Never give a number that ``before`` gave."""
        self._next = before._next

    def of_client(self, client: int) -> int:
        """How many leases the client holds."""
        return len(self.by_client.get(client, ()))

    def waits(self, client: int) -> bool:
        """Does the client wait for pages that come up from L2?"""
        return any(self.leases[lease].waiting for lease in self.by_client.get(client, ()))

    def wait_for(self, lease: Lease, index: int, row: int) -> None:
        """Page `index` of the lease lands with `row`."""
        self.waiters.setdefault(row, []).append((lease.id, index))
        if not lease.waiting:
            heapq.heappush(self._deadlines, (lease.deadline, lease.id))
        lease.waiting += 1

    def landed(self, row: int) -> list[tuple[Lease, int]]:
        """Whoever still waits for `row`; they stop waiting."""
        found = []
        for lease_id, index in self.waiters.pop(row, ()):
            lease = self.leases.get(lease_id)
            if lease is not None and lease.waiting and lease.held[index]:
                lease.waiting -= 1
                found.append((lease, index))
        return found

    def late(self, now: float) -> list[Lease]:
        """Leases that still wait although their deadline has passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.leases.get(lease_id)
            if lease is not None and lease.waiting:
                late.append(lease)
        return late

    def close(self, client: int, lease_id: int) -> Lease | None:
        """Forget a lease of this client; None if it has no such lease."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.client != client:
            return None
        del self.leases[lease_id]
        mine = self.by_client[client]
        mine.discard(lease_id)
        if not mine:
            del self.by_client[client]
        return lease

    def expired(self, now: float) -> list[Lease]:
        """Leases whose time is over, still open."""
        out = []
        while self._expiry and self._expiry[0][0] <= now:
            lease = self.leases.get(self._expiry.popleft()[1])
            if lease is not None:
                out.append(lease)
        return out

    def reserve(self, now: float, client: int, rows: Rows, stamps: U64) -> None:
        """These rows are being written by `client`."""
        pairs = list(zip(rows.tolist(), stamps.tolist(), strict=True))
        self.reserved.setdefault(client, {}).update(pairs)
        self.reservations += len(pairs)
        self._reserved_until.append((now + self.lease_seconds, client, pairs))

    def settle(self, client: int, rows: Rows) -> None:
        """Reservations of `client` that ended (committed or given back)."""
        mine = self.reserved[client]
        for row in rows.tolist():
            del mine[row]
        self.reservations -= len(rows)
        if not mine:
            del self.reserved[client]

    def reserved_rows(self, client: int) -> Rows:
        return np.fromiter(self.reserved.get(client, ()), dtype=np.uint32)

    def expired_reservations(self, now: float) -> list[tuple[int, Rows]]:
        """(client, rows) of reservations whose time is over, still open."""
        out = []
        while self._reserved_until and self._reserved_until[0][0] <= now:
            _, client, pairs = self._reserved_until.popleft()
            mine = self.reserved.get(client, {})
            rows = [row for row, stamp in pairs if mine.get(row) == stamp]
            if rows:
                out.append((client, np.array(rows, dtype=np.uint32)))
        return out

    def clients(self) -> set[int]:
        """Clients that hold anything."""
        return set(self.by_client) | set(self.reserved)

    def next_due(self) -> float | None:
        """When the next lease, reservation or deadline runs out (may be one already closed)."""
        while self._expiry and self._expiry[0][1] not in self.leases:
            self._expiry.popleft()
        while self._deadlines and self._deadlines[0][1] not in self.leases:
            heapq.heappop(self._deadlines)
        while self._reserved_until and not any(
            self.reserved.get(self._reserved_until[0][1], {}).get(row) == stamp
            for row, stamp in self._reserved_until[0][2]
        ):
            self._reserved_until.popleft()
        heads = [queue[0][0] for queue in (self._expiry, self._deadlines) if queue]
        if self._reserved_until:
            heads.append(self._reserved_until[0][0])
        return min(heads) if heads else None
