"""Puts: where newcomers go, and the reservation between `reserve` and `commit`.

For each key exactly one status. An absent page is placed by `admission.place`, its slot is taken,
its record is in the table as WRITING and its client holds a reservation; `commit` makes it visible.
The record remembers the row of its parent, so that a later touch can walk up the chain.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache import admission
from kvtier_agent.cache.identity import NO_PARENT, KeyArray
from kvtier_agent.cache.leases import LeaseBook
from kvtier_agent.cache.pressure import RecentValue
from kvtier_agent.cache.quotas import NOBODY
from kvtier_agent.cache.record import NO_ROW, NO_SLOT, Flag, Rows, State, as_u64_pairs
from kvtier_agent.cache.results import MISS, U8, U64, CommitStatus, PutResult, PutStatus
from kvtier_agent.cache.shelves import Shelves
from kvtier_agent.cache.table_view import TableError
from kvtier_agent.cache.traffic import Traffic
from kvtier_agent.cache.words import has_repeats
from kvtier_agent.cache.worth import Worth

_NONE: Final[NDArray[np.float64]] = np.empty(0)


class Puts:
    """The part of `Cache` that takes pages in."""

    def __init__(self, shelves: Shelves, traffic: Traffic, worth: Worth, book: LeaseBook) -> None:
        self.shelves = shelves
        self.traffic = traffic
        self.worth = worth
        self.book = book
        self.recent = RecentValue()

    def reserve(
        self,
        now: float,
        client: int,
        keys: KeyArray,
        *,
        parent: bytes = NO_PARENT,
        depth: int = 0,
        partial_last: bool = False,
        frozen: str | None = None,
        tokens_per_second: float | None = None,
        tenant: int = NOBODY,
    ) -> PutResult:
        """See `Cache.reserve`."""
        count = len(keys)
        status = np.full(count, int(PutStatus.EXISTS), dtype=np.uint8)
        if tenant != NOBODY:
            self.shelves.quotas.counting = True
        result = PutResult(
            status, np.full(count, MISS, dtype=np.uint8), np.zeros(count, dtype=np.uint64)
        )
        if not count:
            return result
        if tokens_per_second is not None and tokens_per_second > 0:
            self.worth.rate = tokens_per_second
        table = self.shelves.table
        if self.worth.behaviour.admitting:
            self.traffic.table_room.make(now, count)  # before any row is looked up
        pairs = as_u64_pairs(keys)
        rows = table.find(pairs)
        absent = rows == NO_ROW
        busy = np.zeros(count, dtype=bool)
        busy[~absent] = table.state[rows[~absent]] == int(State.WRITING)
        status[busy] = int(PutStatus.BUSY)
        prefixes = self.shelves.frozen.numbers(frozen, keys)
        if prefixes is not None:
            held = ~absent & ~busy
            self.freeze(now, prefixes[held], rows[held])
        fresh = np.flatnonzero(absent)
        if fresh.size:
            if has_repeats(pairs[fresh, 0]):  # perhaps whole keys are equal too
                _, firsts = np.unique(pairs[fresh].view("V16").reshape(-1), return_index=True)
                status[np.delete(fresh, firsts)] = int(PutStatus.BUSY)
                fresh = np.sort(fresh[firsts])  # of the same key twice the first place counts
            chain = (as_u64_pairs(np.frombuffer(parent, dtype=np.uint8)), depth, partial_last)
            owner = (client, tenant)
            self._admit(now, owner, pairs, rows, fresh, chain, prefixes, result)
        counters = self.shelves.counters
        counts = np.bincount(status, minlength=7).tolist()
        counters.offered += counts[PutStatus.OFFERED]
        counters.refused_value += counts[PutStatus.REFUSED_VALUE]
        counters.refused_space += counts[PutStatus.REFUSED_SPACE]
        counters.refused_busy += counts[PutStatus.BUSY]
        counters.refused_closed += counts[PutStatus.REFUSED_CLOSED]
        if counts[PutStatus.REFUSED_QUOTA]:
            counters.refused_quota += counts[PutStatus.REFUSED_QUOTA]
            self.shelves.quotas.refused(tenant, counts[PutStatus.REFUSED_QUOTA])
        return result

    def _admit(
        self,
        now: float,
        owner: tuple[int, int],
        pairs: U64,
        rows: Rows,
        fresh: NDArray[np.intp],
        chain: tuple[U64, int, bool],
        prefixes: NDArray[np.uint16] | None,
        result: PutResult,
    ) -> None:
        """Give slots to the absent pages `fresh` (indexes into the chain). `rows` is completed.
        `owner`: client and tenant."""
        client, tenant = owner
        parent, depth, partial_last = chain
        status, shelves, table, worth = result.status, self.shelves, self.shelves.table, self.worth
        if not self.worth.behaviour.admitting:
            status[fresh] = int(PutStatus.REFUSED_CLOSED)
            return
        page = self.worth.geometry.page_tokens
        depths = depth + page * fresh
        partial = np.zeros(fresh.size, dtype=bool)
        partial[-1] = partial_last and fresh[-1] == len(status) - 1
        exempt = np.zeros(fresh.size, dtype=bool)
        if prefixes is not None:
            own = prefixes[fresh]
            for number in np.unique(own[own > 0]).tolist():
                mine_first = np.flatnonzero((own == number) & ~partial)
                exempt[mine_first[: shelves.frozen.room(number)]] = True
        ancestor = rows[fresh[0] - 1] if fresh[0] else table.find(parent)[0]
        density = _NONE
        if prefixes is None and not partial[-1] and self._takes_all(tenant):
            tier = np.ones(fresh.size, dtype=np.uint8)
        else:
            tier, density = self._weigh(now, tenant, ancestor, depths, exempt, partial)
        slots = self._slots_for(now, tier)
        status[fresh[tier == admission.VALUE]] = int(PutStatus.REFUSED_VALUE)
        status[fresh[tier == admission.SPACE]] = int(PutStatus.REFUSED_SPACE)
        status[fresh[tier == admission.QUOTA]] = int(PutStatus.REFUSED_QUOTA)
        placed = np.flatnonzero(tier < admission.REFUSED)
        if not placed.size:
            return
        where = fresh[placed]
        records = table.blank_records(where.size)
        records["key"], records["client"], records["last_access"] = pairs[where], client, now
        records["size"], records["depth"] = worth.geometry.page_bytes, depths[placed]
        records["tenant"] = tenant
        records["parent"] = np.concatenate([parent, pairs[:-1]])[where]
        records["flags"][partial[placed]] = int(Flag.PARTIAL)
        levels = tier[placed]
        for level, field in ((0, "l0_slot"), (1, "l1_slot")):
            records[field] = np.where(levels == level, slots, NO_SLOT)
        try:
            mine = table.insert_records(records, State.WRITING)
        except TableError:
            for level in (0, 1):
                shelves.pools[level].give(slots[levels == level])
            status[where] = int(PutStatus.REFUSED_SPACE)
            return
        rows[where] = mine
        before = np.concatenate([[NO_ROW], rows[:-1]]).astype(np.uint32)
        if ancestor != NO_ROW and not fresh[0]:
            before[0] = ancestor
        table.parent_row[mine] = before[where]
        if shelves.quotas.counting:
            for level in (0, 1):
                shelves.quotas.took(mine[levels == level], level)
        if prefixes is not None:
            own = np.where(partial[placed], 0, prefixes[where])
            for number in np.unique(own[own > 0]).tolist():
                shelves.frozen.add(number, mine[own == number], table)
        if density.size:
            self.recent.admitted(density[placed][(levels == 0) & ~exempt[placed]])
        self.book.reserve(now, client, mine, shelves.stamp(mine))
        status[where] = int(PutStatus.OFFERED)
        result.tier[where] = levels
        result.offset[where] = slots.astype(np.uint64) * np.uint64(self.worth.geometry.slot_bytes)

    def _takes_all(self, tenant: int) -> bool:
        """Do all ordinary pages of this tenant go to L1, whatever they are worth?"""
        floors = self.worth.behaviour.threshold_microseconds_per_mib
        shelves = self.shelves
        return (
            not floors[1]
            and shelves.engine_shape
            and shelves.pools[1].limit > 0
            and tenant not in shelves.quotas.shares
        )

    def _weigh(
        self,
        now: float,
        tenant: int,
        ancestor: int,
        depths: NDArray[np.intp],
        exempt: NDArray[np.bool_],
        partial: NDArray[np.bool_],
    ) -> tuple[U8, NDArray[np.float64]]:
        """Where `admission` puts pages at these depths, in prefix order, and their densities.
        `ancestor`: the nearest page before them that is held, or NO_ROW."""
        shelves, worth = self.shelves, self.worth
        chance = worth.prior
        if ancestor != NO_ROW:
            chance = float(worth.probability(shelves.table, np.array([ancestor]))[0])
        recompute = worth.recompute(depths)
        limits = [pool.limit > 0 for pool in shelves.pools]
        admits = [worth.admits(chance, recompute, tier) & limits[tier] for tier in (0, 1, 2)]
        admits[2] &= limits[1]  # the way to L2 is through L1
        density = worth.density(chance, recompute, 0)
        used = shelves.pools[0].used
        lines_ = self.traffic.lines
        room = admission.L0Room(
            lines_.tighten - used,
            lines_.demote - used,
            shelves.pools[0].available,
        )
        tier = admission.place(
            (admits[0], admits[1], admits[2]), exempt, partial, density, self.recent.median, room
        )
        if not limits[1]:
            tier[exempt & (tier == 1)] = admission.SPACE
        if tenant in shelves.quotas.shares:
            tier = self._within_quota(now, tenant, tier, admits[1] & ~partial, exempt)
        return admission.close_holes(tier, exempt), density

    def _within_quota(
        self,
        now: float,
        tenant: int,
        tier: NDArray[np.uint8],
        lower: NDArray[np.bool_],
        exempt: NDArray[np.bool_],
    ) -> NDArray[np.uint8]:
        """Places of a tenant's newcomers by its quotas; it makes room among its own pages of L1."""
        quotas = self.shelves.quotas
        room = quotas.room(tenant, 0)
        in_l1 = int((tier == 1).sum()) + max(0, int((tier == 0).sum()) - room)
        self.traffic.trimming.make_room(now, tenant, 1, in_l1)
        return admission.within_quota(tier, lower, exempt, (room, quotas.room(tenant, 1)))

    def _slots_for(self, now: float, tier: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """Slots for the pages placed in 0 and 1, in order; pages beyond L1's room become SPACE."""
        pools = self.shelves.pools
        in_l1 = np.flatnonzero(tier == 1)
        kept_for_loads = self.traffic.kept_for_loads
        short = in_l1.size + kept_for_loads - pools[1].available
        if in_l1.size and (short > 0 or self.traffic.ahead1):
            self.traffic.ahead1 = int(in_l1.size)
        if in_l1.size and short > 0:
            self.traffic.go_down(now, self.shelves.victims(1, short))
        room = max(0, pools[1].available - kept_for_loads)
        if in_l1.size > room:
            tier[in_l1[room] :][tier[in_l1[room] :] < admission.REFUSED] = admission.SPACE
        slots = np.zeros(len(tier), dtype=np.uint32)
        for level in (0, 1):
            here = np.flatnonzero(tier == level)
            slots[here] = pools[level].take(here.size)
        return slots[tier < admission.REFUSED]

    def commit(self, now: float, client: int, keys: KeyArray, checksums: U64) -> U8:
        """See `Cache.commit`."""
        table, shelves = self.shelves.table, self.shelves
        rows, mine = self._reserved(client, keys)
        status = np.full(len(rows), int(CommitStatus.UNKNOWN), dtype=np.uint8)
        status[mine] = int(CommitStatus.COMMITTED)
        done = rows[mine]
        if not done.size:
            return status
        self.book.settle(client, done)
        with table.changing(done):
            table.vouch(done, checksums[mine])
        in_l0 = table.l0_slot[done] != NO_SLOT
        for tier, state, here in ((0, State.IN0, in_l0), (1, State.IN1, ~in_l0)):
            pages = done[here]
            shelves.settle(pages, state, 1 << tier)
            size = pages.size * self.worth.geometry.page_bytes
            if tier == 0:
                self.shelves.counters.stored_l0 += pages.size
                self.shelves.counters.stored_bytes_l0 += size
            else:
                self.shelves.counters.stored_l1 += pages.size
                self.shelves.counters.stored_bytes_l1 += size
        self.shelves.counters.committed += done.size
        self.shelves.frozen.stir(done)
        shelves.stamp_chain(done)
        self.traffic.straight_down(now, done[~in_l0])
        return status

    def abort(self, client: int, keys: KeyArray) -> int:
        """See `Cache.abort`."""
        rows, mine = self._reserved(client, keys)
        self.give_up(client, rows[mine])
        return int(mine.sum())

    def _reserved(self, client: int, keys: KeyArray) -> tuple[Rows, NDArray[np.bool_]]:
        table = self.shelves.table
        rows = table.lookup(keys)
        mine = rows != NO_ROW
        there = rows[mine]
        mine[mine] = (table.state[there] == int(State.WRITING)) & (table.client[there] == client)
        if has_repeats(rows):
            _, firsts = np.unique(rows, return_index=True)
            once = np.zeros(len(rows), dtype=bool)
            once[firsts] = True
            mine &= once
        return rows, mine

    def give_up(self, client: int, rows: Rows) -> None:
        if rows.size:
            self.book.settle(client, rows)
            self.shelves.counters.aborted += rows.size
            self.shelves.forget(rows)

    def freeze(self, now: float, prefixes: NDArray[np.uint16], rows: Rows) -> None:
        """Pages that are held already and belong to a frozen prefix (0: to none)."""
        table = self.shelves.table
        new = (prefixes > 0) & (table.frozen[rows] == 0) & ~table.has(rows, Flag.PARTIAL)
        # A call may name a page twice: it joins, and is moved, once.
        rows, firsts = np.unique(rows[new], return_index=True)
        order = np.argsort(firsts)
        rows, prefixes = rows[order], prefixes[new][firsts[order]]
        for number in np.unique(prefixes).tolist():
            mine = rows[prefixes == number]
            self.shelves.frozen.add(number, mine, table)
            self.traffic.promote(now, mine[table.has(mine, Flag.EXEMPT)])
