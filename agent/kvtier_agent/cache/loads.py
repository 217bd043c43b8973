"""Loads: leases on pages, from the pin to the unpin.

A load is of a prefix: pages behind the first one that is not there are not pinned. A hit in L0 is
leased from L0; one in L1 or L2 is leased from L1, and promoted when it is released.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.identity import KeyArray
from kvtier_agent.cache.leases import Lease, LeaseBook
from kvtier_agent.cache.progress import NOT_COMING, Units
from kvtier_agent.cache.record import (
    NO_ROW,
    READ_L0,
    READ_L1,
    READABLE,
    TIER_OF_STATE,
    Flag,
    Rows,
    State,
)
from kvtier_agent.cache.results import MISS, Ticket
from kvtier_agent.cache.shelves import Shelves
from kvtier_agent.cache.traffic import Traffic
from kvtier_agent.cache.words import has_repeats
from kvtier_agent.cache.worth import Worth


class Loads:
    """The part of `Cache` that hands pages out."""

    def __init__(self, shelves: Shelves, traffic: Traffic, worth: Worth, book: LeaseBook) -> None:
        self.shelves = shelves
        self.traffic = traffic
        self.worth = worth
        self.book = book

    def load(
        self,
        now: float,
        client: int,
        keys: KeyArray,
        deadline: float,
        *,
        layered: bool = False,
    ) -> Ticket:
        """See `Cache.load`."""
        table = self.shelves.table
        rows = table.lookup(keys)
        good = rows != NO_ROW
        good[good] = READABLE[table.state[rows[good]]]
        bad = np.flatnonzero(~good)
        found = int(bad[0]) if bad.size else len(rows)
        if self.book.of_client(client) >= self.worth.settings.max_leases_per_client:
            found = 0
        rows = rows[:found]
        if has_repeats(rows):  # no chain has the same page twice
            _, firsts = np.unique(rows, return_index=True)
            found = int(np.delete(np.arange(found), firsts)[0])
            rows = rows[:found]
        state = table.state[rows]
        # Pin first: making room for what comes from L2 must not push out what is already here.
        table.pins[rows] += np.uint32(1)
        down = np.flatnonzero(state == int(State.IN2))
        if down.size:
            read = self.traffic.read(now, rows[down], layered=layered)
            if read.size < down.size:
                found = int(down[read.size])
                self.unpin(rows[found:])
                rows, state = rows[:found], state[:found]
        lease = self.book.open(now, client, rows, len(keys), deadline)
        lease.layered = layered
        table.hits[rows] += np.uint32(1)
        table.last_access[rows] = now
        lease.held[:] = True
        lease.tier[:] = TIER_OF_STATE[state]
        lease.checksum[:] = table.checksum[rows]
        self._point(lease, np.arange(found), rows, state)
        for index in np.flatnonzero(
            (state == int(State.IN2)) | (state == int(State.UP21))
        ).tolist():
            self.book.wait_for(lease, index, int(rows[index]))
        if not lease.waiting:
            self._count(lease)
        return self._on_their_way(lease) if layered and lease.waiting else lease.ticket()

    def _on_their_way(self, lease: Lease) -> Ticket:
        """The answer as it stands, with the places of pages that are landing."""
        ticket = lease.ticket()
        coming = np.flatnonzero(lease.held & (lease.arena == MISS))
        slots = self.shelves.table.l1_slot[lease.rows[coming]].astype(np.uint64)
        ticket.arena[coming] = 1
        ticket.offset[coming] = slots * np.uint64(self.worth.geometry.slot_bytes)
        return ticket

    def units(self, client: int, lease_id: int) -> Units | None:
        """See `Cache.units`."""
        lease = self.book.leases.get(lease_id)
        return None if lease is None or lease.client != client else self._landed(lease)

    def _landed(self, lease: Lease) -> Units:
        landed = np.full(lease.asked, NOT_COMING, dtype=np.uint16)
        found = landed[: len(lease.rows)]
        there = lease.held & (lease.arena != MISS)
        found[there] = self.worth.geometry.units
        if lease.waiting:
            coming = lease.held & ~there
            found[coming] = self.traffic.progress.of(lease.rows[coming])
        return landed

    def _point(
        self, lease: Lease, indexes: NDArray[np.integer], rows: Rows, state: NDArray[np.uint8]
    ) -> None:
        """Say where the bytes of these pages of a lease are."""
        slot_bytes = np.uint64(self.worth.geometry.slot_bytes)
        for arena, readable, field in (
            (0, READ_L0, self.shelves.table.l0_slot),
            (1, READ_L1, self.shelves.table.l1_slot),
        ):
            here = readable[state]
            lease.arena[indexes[here]] = arena
            lease.offset[indexes[here]] = field[rows[here]].astype(np.uint64) * slot_bytes

    def _count(self, lease: Lease) -> None:
        """A lease was answered: its pages are hits."""
        got = lease.held
        if lease.waiting:  # layered, and given back before all of it was there
            got = got & (self._landed(lease)[: len(got)] == self.worth.geometry.units)
        counts = np.bincount(lease.tier[got], minlength=3)
        page = self.worth.geometry.page_tokens
        counters = self.shelves.counters
        counters.hits_l0 += int(counts[0])
        counters.hits_l1 += int(counts[1])
        counters.hits_l2 += int(counts[2])
        counters.hit_tokens_l0 += int(counts[0]) * page
        counters.hit_tokens_l1 += int(counts[1]) * page
        counters.hit_tokens_l2 += int(counts[2]) * page
        counters.hit_tokens += int(counts[:3].sum()) * page

    def release(self, now: float, client: int, lease: int) -> bool:
        """See `Cache.release`."""
        closed = self.book.close(client, lease)
        if closed is None:
            return False
        if closed.layered and closed.waiting:
            self._count(closed)
        self.give_back(now, closed)
        return True

    def give_back(self, now: float, lease: Lease) -> None:
        idle = self.unpin(lease.rows[lease.held])
        if idle.size:
            self.traffic.promote(now, idle)

    def unpin(self, rows: Rows) -> Rows:
        """Unpin pages in prefix order; the idle ones stand in the order again, with all that comes
        before them."""
        idle = self.shelves.unpin(rows)
        self.shelves.stamp_chain(idle)
        return idle

    def report_bad(self, client: int, lease: int, indexes: NDArray[np.integer]) -> int:
        """See `Cache.report_bad`."""
        found = self.book.leases.get(lease)
        if found is None or found.client != client:
            return 0
        indexes = np.unique(indexes)
        indexes = indexes[(indexes >= 0) & (indexes < len(found.rows))]
        rows = found.rows[indexes[found.held[indexes]]]
        rows = rows[~self.shelves.table.has(rows, Flag.DOOMED)]
        if rows.size:
            self.shelves.counters.quarantined_pages += rows.size
            self.shelves.doom(rows)
        return int(rows.size)

    def scrubbed(self, read: int, rows: Rows, seqs: NDArray[np.uint32]) -> None:
        """See `Cache.scrubbed`."""
        shelves = self.shelves
        table, counters = shelves.table, shelves.counters
        same = (table.seq[rows] == seqs) & READ_L1[table.state[rows]]
        bad = rows[same & ~table.has(rows, Flag.DOOMED)]
        counters.scrubbed_pages += read
        counters.scrub_bad_pages += bad.size
        counters.quarantined_pages += bad.size
        shelves.doom(bad)

    def landed(self, landed: Rows, failed: Rows) -> list[Ticket]:
        """Pages came up from L2, or did not: the tickets that are finished by it."""
        places: dict[int, tuple[Lease, list[int], list[int]]] = {}
        complete = []
        for row in landed.tolist():
            for lease, index in self.book.landed(row):
                _, indexes, rows = places.setdefault(lease.id, (lease, [], []))
                indexes.append(index)
                rows.append(row)
                if not lease.waiting:
                    complete.append(lease)
        for lease, indexes, rows in places.values():
            at = np.array(rows, dtype=np.uint32)
            self._point(lease, np.array(indexes), at, self.shelves.table.state[at])
        tickets = [self._answer(lease) for lease in complete]
        let_go = []
        for row in failed.tolist():
            for lease, index in self.book.landed(row):
                lease.held[index] = False
                let_go.append(row)
                if not lease.waiting:
                    tickets.append(self._answer(lease))
        if let_go:
            self.unpin(np.array(let_go, dtype=np.uint32))
        return tickets

    def time_out(self, now: float) -> list[Ticket]:
        """Tickets whose deadline has passed: what has not landed is a miss."""
        tickets = []
        for lease in self.book.late(now):
            waiting = lease.held & (lease.arena == MISS)
            lease.held[waiting] = False
            lease.waiting = 0
            self.shelves.counters.late_pages += int(waiting.sum())
            self.unpin(lease.rows[waiting])
            tickets.append(self._answer(lease))
        return tickets

    def expire(self, now: float) -> None:
        """Take back leases whose time is over."""
        for lease in self.book.expired(now):
            self.shelves.counters.expired_leases += 1
            self.book.close(lease.client, lease.id)
            self.give_back(now, lease)

    def _answer(self, lease: Lease) -> Ticket:
        self._count(lease)
        return lease.ticket()
