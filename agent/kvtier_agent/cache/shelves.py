"""The shelves: table, slots, order and counts together, and the few operations on all of them.

Whatever changes where a page lies goes through here, so that for every page the record, the slots
taken and the LRU entries always tell the same story.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.counters import Counters
from kvtier_agent.cache.frozen import FrozenBook
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.quotas import Quotas
from kvtier_agent.cache.record import (
    MOVING,
    NO_ROW,
    NO_SLOT,
    Flag,
    Rows,
    State,
    check_transition,
)
from kvtier_agent.cache.replacement import Stamps, TouchLog
from kvtier_agent.cache.segment_pool import SegmentPool
from kvtier_agent.cache.slots import SlotPool
from kvtier_agent.cache.words import has_repeats

HAS_L2 = np.uint8(1 << 2)


class Shelves:
    """Owned by one thread. `pools`: per tier; `logs`: of L0 and L1. L2 has none: what leaves it is
    the pages of a segment, looked at one by one (`reclaim`)."""

    def __init__(self, table: PageTable, maxima: tuple[int, int, int]) -> None:
        self.table = table
        self.pool2 = SegmentPool(maxima[2])
        self.pools = (SlotPool(maxima[0]), SlotPool(maxima[1]), self.pool2)
        self.logs = (TouchLog(), TouchLog())
        self.copied = TouchLog()
        """Of the pages of L1 those whose copy lies in L2: to take their slot loses nothing."""
        self.frozen = FrozenBook()
        self.counters = Counters()
        self.quotas = Quotas(table)
        self.slots = (table.l0_slot, table.l1_slot, table.l2_slot)
        self._stamp = 1

    @property
    def engine_shape(self) -> bool:
        """No L0 of our own: L1 is the highest tier."""
        return self.pools[0].limit == 0

    # -- order ------------------------------------------------------------------------------

    def stamp(self, rows: Rows, *, cold: bool = False) -> Stamps:
        """Touch pages; the last one is the most recent. They (re)enter the log of the tier they
        lie in; with `cold` at its cold end."""
        stamps = np.arange(self._stamp, self._stamp + len(rows), dtype=np.uint64)
        self._stamp += len(rows)
        table = self.table
        table.touch[rows] = stamps
        state = table.state[rows]
        for tier, home in ((0, State.IN0), (1, State.IN1)):
            here = state == int(home)
            if here.any():
                enter = self.logs[tier].push_cold if cold else self.logs[tier].append
                enter(rows[here], stamps[here])
                if tier and (copied := (table.tiers[rows[here]] & HAS_L2) != 0).any():
                    self.copied.append(rows[here][copied], stamps[here][copied])
        if self.quotas.shares:
            self.quotas.stamped(rows, stamps, cold=cold)
        return stamps

    def have_copies(self, rows: Rows) -> None:
        """Pages of L1 have their copies in L2, that had none when they were touched; coldest
        first."""
        stamps = self.table.touch[rows]
        self.copied.append(rows, stamps)
        self.quotas.stamped(rows, stamps, tiers=(2,))

    def stamp_chain(self, rows: Rows) -> None:
        """Touch a chain given in prefix order, and what comes before it: tail first, head last."""
        if rows.size:
            self.stamp(np.concatenate([rows[::-1], self.ancestors(int(rows[0]))]))

    def ancestors(self, row: int) -> Rows:
        """The pages before `row`, nearest first, as far as they are held.

        The walk follows the rows noted at insertion; whether each is still the parent is checked
        for all of them at once. Where one is not, the index may know the parent's new row.
        """
        table = self.table
        parts: list[Rows] = []
        walked: set[int] = set()
        while row not in walked:  # parents are what clients say: they may form a ring
            links = self._links(row, walked)
            if links.size > 1:
                held = (table.key[links[1:]] == table.parent[links[:-1]]).all(axis=1)
                held &= table.state[links[1:]] != int(State.FREE)
                wrong = np.flatnonzero(~held)
                links = links[: wrong[0] + 1] if wrong.size else links
            parts.append(links[1:])
            walked.update(links.tolist())
            row = int(links[-1])
            noted = table.parent_row.item(row)
            if noted == NO_ROW:
                break
            found = int(table.find(table.parent[row : row + 1])[0])
            table.parent_row[row] = found
            if found == NO_ROW or found in walked:
                break
            parts.append(np.array([found], dtype=np.uint32))
            row = found
        return np.concatenate(parts)

    def _links(self, row: int, walked: set[int]) -> Rows:
        """`row` and the rows noted as its ancestors, unchecked, up to one that comes again."""
        step = self.table.parent_row.item
        out = {row: None}
        while (row := step(row)) != NO_ROW and row not in out and row not in walked:
            out[row] = None
        return np.fromiter(out, dtype=np.uint32, count=len(out))

    def victims(self, tier: int, count: int) -> Rows:
        """Up to `count` of the coldest pages that may leave L0 or L1; they leave its log."""
        return self.logs[tier].pop(count, (self._leaves0, self._leaves1)[tier])

    def copies(self, count: int) -> Rows:
        """Up to `count` pages that may leave L1 and have their copy in L2, those first that were
        touched longest ago."""
        rows = self.copied.pop(count, self._leaves1_copied)
        if has_repeats(rows):  # its copy was lost, and found again
            _, firsts = np.unique(rows, return_index=True)
            rows = rows[np.sort(firsts)]
        return rows

    def put_back(self, tier: int, rows: Rows) -> None:
        """Victims that could not leave after all: they are still the coldest."""
        self.logs[tier].push_cold(rows, self.table.touch[rows])

    def compact(self) -> None:
        tests = (self._leaves0, self._leaves1)
        for pool, log, test in zip(self.pools[:2], self.logs, tests, strict=True):
            log.compact(pool.used, test)
        self.copied.compact(self.pools[1].used, self._leaves1_copied)

    def _leaves(self, rows: Rows, stamps: Stamps, home: State) -> NDArray[np.bool_]:
        table = self.table
        flags = int(Flag.DOOMED)
        if home is (State.IN1 if self.engine_shape else State.IN0):
            flags |= int(Flag.EXEMPT)
        leaves: NDArray[np.bool_] = (
            (table.touch[rows] == stamps)
            & (table.state[rows] == int(home))
            & (table.pins[rows] == 0)
            & ((table.flags[rows] & flags) == 0)
        )
        return leaves

    def _leaves0(self, rows: Rows, stamps: Stamps) -> NDArray[np.bool_]:
        return self._leaves(rows, stamps, State.IN0)

    def _leaves1(self, rows: Rows, stamps: Stamps) -> NDArray[np.bool_]:
        return self._leaves(rows, stamps, State.IN1)

    def _leaves1_copied(self, rows: Rows, stamps: Stamps) -> NDArray[np.bool_]:
        copied: NDArray[np.bool_] = (self.table.tiers[rows] & HAS_L2) != 0
        return copied & self._leaves(rows, stamps, State.IN1)

    def limit(self, slots: tuple[int, int, int]) -> None:
        """New limits of the tiers."""
        self.pools[0].set_limit(slots[0])
        self.pools[1].set_limit(slots[1])
        self.pool2.set_limit(slots[2])

    # -- slots ------------------------------------------------------------------------------

    def own(self, rows: Rows, tier: int, slots: NDArray[np.uint32]) -> None:
        """These pages now own these slots of `tier` (valid bytes or not)."""
        field = self.slots[tier]
        if self.quotas.counting:  # not those that only move within the tier
            self.quotas.took(rows[field[rows] == NO_SLOT], tier)
        field[rows] = slots
        if tier == 2:
            self.pool2.own(slots, rows)

    def disown(self, rows: Rows, tier: int) -> None:
        """Give the pages' slots of `tier` back."""
        field = self.slots[tier]
        slots = field[rows]
        owned = slots != NO_SLOT
        self.pools[tier].give(slots[owned])
        if self.quotas.counting:
            self.quotas.took(rows[owned], tier, -1)
        field[rows[owned]] = NO_SLOT

    def settle(self, rows: Rows, state: State, tiers: int) -> None:
        """New state and the set of tiers with a valid copy, seen by readers as one change."""
        if rows.size:
            table = self.table
            check_transition(table.state[rows], state)
            with table.changing(rows):
                table.state[rows] = int(state)
                table.tiers[rows] = tiers

    # -- leaving the cache ------------------------------------------------------------------

    def forget(self, rows: Rows) -> None:
        """Drop pages that nobody holds and no mover works on."""
        if not rows.size:
            return
        for tier in (0, 1, 2):
            self.disown(rows, tier)
        self.frozen.remove(rows, self.table)
        indexed = ~self.table.has(rows, Flag.DOOMED)
        self.table.unlink(rows[indexed])
        self.table.free(rows)

    def doom(self, rows: Rows) -> None:
        """Pages that must not be found any more; what is idle goes at once, the rest when its last
        pin or move ends."""
        rows = rows[~self.table.has(rows, Flag.DOOMED)]
        self.mark(rows)
        self.bury(rows)

    def mark(self, rows: Rows) -> None:
        """From now on no lookup finds these pages; whoever holds them keeps them. `bury` drops them
        when they are idle."""
        self.table.unlink(rows)
        self.table.raise_flag(rows, Flag.DOOMED)

    def bury(self, rows: Rows) -> None:
        """Drop those of `rows` that are doomed and idle."""
        table = self.table
        state = table.state[rows]
        idle = (table.pins[rows] == 0) & ~MOVING[state] & (state != int(State.FREE))
        self.forget(rows[idle & table.has(rows, Flag.DOOMED)])

    def unpin(self, rows: Rows) -> Rows:
        """One pin less on each (a row may come twice). Returns the rows nobody holds now, in
        order; doomed ones among them are dropped."""
        table = self.table
        np.subtract.at(table.pins, rows, np.uint32(1))
        idle: Rows = rows[table.pins[rows] == 0]
        doomed = table.has(idle, Flag.DOOMED)
        if doomed.any():
            self.bury(np.unique(idle[doomed]))
            idle = idle[~doomed]
        self.frozen.stir(idle)
        return idle
