"""Making room in L2: whole segments are emptied and used again.

    ahead       while less than one segment is available, the cheapest one (`compaction`) is
                emptied: its cold pages go at once, its hot ones are moved to the open segment, as
                far as the pace of compaction allows; the rest of them go too
    at once     when a write finds no slot, the cheapest segment that can be emptied now is: nothing
                is moved, nothing waited for
    shrinking   segments are emptied at once until the tier has its size; their blocks go

A page that is being moved stays where it is, readable, until the copy is there. Then its record is
switched to the new slot, unless the page has left the old one meanwhile or is being read: that copy
is given up. The segment itself is free only when nothing of it is taken, read or written any more
(`SegmentPool`); so it is waited for by looking at it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtier_agent.cache.compaction import Pace, cost_per_slot, hot, ranks
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus
from kvtier_agent.cache.record import NO_SLOT, Flag, Rows, State, as_u64_pairs
from kvtier_agent.cache.segment_pool import SegmentPool
from kvtier_agent.cache.shelves import HAS_L2

if TYPE_CHECKING:
    from kvtier_agent.cache.traffic import Traffic

CANDIDATES = 16
"""Segments looked at for a victim: so many with most dead slots, so many of the oldest."""
PAGES_LOOKED_AT = 256
"""... and so many pages of each."""
SAMPLE = 2048
"""Pages that stand for all of L2 when ranks are told."""
MOVES_IN_FLIGHT = 2
"""Compactions under way at a time, of `move_bytes` each."""

NOBODY: Rows = np.empty(0, dtype=np.uint32)


@dataclass(slots=True)
class Emptying:
    """A segment on its way to being empty. `waiting`: pages still to be moved, the hottest first;
    `moving`: moves under way; `gain`: slots there will be."""

    segment: int
    gain: int
    waiting: Rows
    moving: int = 0


class Reclaim:
    """The part of `Traffic` that empties segments. `at_stake`: slots of copies under way."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.shelves = traffic.shelves
        self.emptying: dict[int, Emptying] = {}
        self.at_stake = 0
        self._pace: Pace | None = None
        self._fruitless = False

    @property
    def pool(self) -> SegmentPool:
        return self.shelves.pool2

    # -- when -------------------------------------------------------------------------------

    def balance(self, now: float) -> None:
        """Empty what has to be, ahead of need."""
        for one in list(self.emptying.values()):
            self._go_on(now, one)
        if self.pool.excess:
            self._shrink(now)
        if self._fruitless or now < self.traffic.pause_until:
            return
        low = self.pool.target if self.pool.limit >= 8 else 0
        while self.pool.available + sum(one.gain for one in self.emptying.values()) < low:
            victims = self._cheapest(self.traffic.worth.settings.compaction_hot_percent)
            self._fruitless = not victims
            if not victims:
                return
            self._begin(now, victims[0])

    def at_once(self, count: int) -> None:
        """Make `count` slots available now, as far as that is possible without waiting."""
        found = True
        while found and self.pool.available < count:
            found = False
            for segment in (*self._cheapest(0), *self.emptying):
                if self._idle(segment):
                    self._evict(segment)
                    found = True
                    if self.pool.available >= count:
                        break

    def drop_pages(self, count: int) -> None:
        """Drop so many pages or more that lie only in L2, a segment at a time, as far as that is
        possible without waiting."""
        table = self.shelves.table
        goal = table.pages - count
        while table.pages > goal:
            for segment in self._cheapest(0):
                alone = table.state[self.pool.rows(segment)] == int(State.IN2)
                if alone.any() and self._idle(segment):
                    break
            else:
                return
            self._evict(segment)

    def lose(self, segments: set[int]) -> None:
        """These segments are gone with their volume, and so are the copies in them."""
        for segment in sorted(segments):
            if self.pool.known(segment):
                self._retire(segment)

    def stir(self) -> None:
        """Something has changed: look for victims again."""
        self._fruitless = False

    def _shrink(self, now: float) -> None:
        going = sum(self.pool.size(s) for s in self.emptying if self.pool.retired(s))
        while going < self.pool.excess:
            victims = self._cheapest(0) or [s for s in self.emptying if not self.pool.retired(s)]
            if not victims and self.pool.open >= 0:
                victims = [self.pool.open]
            if not victims:
                return
            for segment in victims:
                if going >= self.pool.excess:
                    break
                size = self.pool.size(segment)
                going += size
                self._retire(segment)
                if not self.pool.in_use(segment):
                    going -= size  # gone already

    def _retire(self, segment: int) -> None:
        """Nothing of it is kept or moved any more; what is being moved already still ends."""
        self.pool.retire(segment)
        before = self.emptying.get(segment)
        moving = before.moving if before is not None else 0
        self.emptying[segment] = Emptying(segment, 0, NOBODY, moving)
        self._evict(segment)

    # -- which ------------------------------------------------------------------------------

    def _cheapest(self, hot_percent: int) -> list[int]:
        """Some segments that it costs least to empty, the cheapest first."""
        segments, dead, opened = self.pool.sealed()
        free = ~np.isin(segments, list(self.emptying))
        segments, dead, opened = segments[free], dead[free], opened[free]
        if segments.size > 2 * CANDIDATES:
            most_dead = np.argpartition(-dead, CANDIDATES)[:CANDIDATES]
            oldest = np.argpartition(opened, CANDIDATES)[:CANDIDATES]
            segments = segments[np.union1d(most_dead, oldest)]
        table = self.shelves.table
        sample = np.sort(table.touch[self.pool.sample(SAMPLE)])
        costs = []
        for segment in segments.tolist():
            rows = self.pool.rows(segment)
            step = max(1, rows.size // PAGES_LOOKED_AT)
            some = rows[::step]
            alone = table.state[some] == int(State.IN2)
            size = self.pool.size(segment) // step
            rank = ranks(sample, table.touch[some])
            costs.append((cost_per_slot(rank, alone, size, hot_percent), segment))
        return [segment for cost, segment in sorted(costs) if cost < float("inf")]

    def _leaves(self, rows: Rows) -> Rows:
        """Those of these pages whose place in L2 can be given up now."""
        table = self.shelves.table
        state = table.state[rows]
        leaves = ((table.tiers[rows] & HAS_L2) != 0) & (
            ((state == int(State.IN2)) & (table.pins[rows] == 0))
            | (state == int(State.IN1))  # only the copy would leave: pins do not matter
            | (state == int(State.UP10))
        )
        leaving: Rows = rows[leaves & ((table.flags[rows] & int(Flag.DOOMED)) == 0)]
        return leaving

    def _idle(self, segment: int) -> bool:
        """Could all of it be given up at once?"""
        live = self.pool.live(segment)
        return (
            live > 0
            and not self.pool.held(segment)
            and self._leaves(self.pool.rows(segment)).size == live
        )

    # -- how --------------------------------------------------------------------------------

    def _evict(self, segment: int) -> None:
        self.traffic.leave_l2(self._leaves(self.pool.rows(segment)))
        if not self.pool.in_use(segment):
            self.emptying.pop(segment, None)

    def _begin(self, now: float, segment: int) -> None:
        table, settings = self.shelves.table, self.traffic.worth.settings
        page = self.traffic.worth.geometry.page_bytes
        rows = self._leaves(self.pool.rows(segment))
        rows = rows[table.state[rows] == int(State.IN2)]
        rows = rows[np.argsort(table.touch[rows])[::-1]]
        sample = np.sort(table.touch[self.pool.sample(SAMPLE)])
        warm = hot(ranks(sample, table.touch[rows]), settings.compaction_hot_percent)
        if self._pace is None:
            self._pace = Pace(settings.compaction_bytes_per_second, settings.move_bytes)
        count = min(int(warm.sum()), self.pool.available, self._pace.allowed(now) // page)
        self._pace.spend(count * page)
        one = Emptying(segment, self.pool.size(segment) - count, rows[:count])
        self.emptying[segment] = one
        gone = self._leaves(self.pool.rows(segment))
        self.traffic.leave_l2(gone[~np.isin(gone, one.waiting)])
        self._go_on(now, one)

    def _go_on(self, now: float, one: Emptying) -> None:
        """Move what waits; give up what else is left; done when nothing is."""
        table, segment = self.shelves.table, one.segment
        most = max(
            1, self.traffic.worth.settings.move_bytes // self.traffic.worth.geometry.page_bytes
        )
        while one.waiting.size and one.moving < MOVES_IN_FLIGHT:
            rows, one.waiting = one.waiting[:most], one.waiting[most:]
            rows = self._still_in(segment, rows)
            rows = rows[table.state[rows] == int(State.IN2)]
            slots = self.pool.take(rows.size)
            rows = rows[: slots.size]
            if rows.size:
                source = table.l2_slot[rows].copy()
                self.pool.hold(source)
                self.at_stake += rows.size
                one.moving += 1
                self.traffic.issue(now, MoveKind.COMPACT, rows, source, slots)
        if not one.waiting.size and not one.moving and self.pool.in_use(segment):
            self._evict(segment)
        if not self.pool.in_use(segment):
            self.emptying.pop(segment, None)

    def _still_in(self, segment: int, rows: Rows) -> Rows:
        slots = self.shelves.table.l2_slot[rows]
        there = (slots != NO_SLOT) & (slots // self.pool.per_segment == segment)
        return self._leaves(rows[there])

    # -- and then ---------------------------------------------------------------------------

    def finish(self, move: Move, status: np.ndarray) -> None:
        """Book a finished compaction. `status`: uint8 (n,) of MoveStatus."""
        shelves, table, pool = self.shelves, self.shelves.table, self.pool
        rows, ok = move.rows, status == MoveStatus.OK
        self.at_stake -= len(rows)
        segment = int(move.source[0]) // pool.per_segment
        one = self.emptying.get(segment)
        if one is not None:
            one.moving -= 1
        written = int(ok.sum())
        shelves.counters.compacted_pages += written
        shelves.counters.compacted_bytes += written * move.page_bytes
        shelves.counters.stored_l2 += written
        shelves.counters.stored_bytes_l2 += written * move.page_bytes
        state = table.state[rows]
        there = (table.l2_slot[rows] == move.source) & ~table.has(rows, Flag.DOOMED)
        there &= (table.key[rows] == as_u64_pairs(move.keys)).all(axis=1)
        there &= np.isin(state, (State.IN1, State.IN2, State.UP10))
        moved = rows[ok & there]
        pool.give(move.source[ok & there])
        with table.changing(moved):
            shelves.own(moved, 2, move.target[ok & there])
        pool.give(move.target[~(ok & there)])
        bad = np.isin(status, (MoveStatus.BAD_PAGE, MoveStatus.IO_ERROR))
        unwritten = status == MoveStatus.UNWRITTEN
        shelves.counters.quarantined_pages += self._lose(rows[bad & there], self.traffic.suspect)
        self._lose(rows[unwritten & there], self.traffic.unwritten)
        broken = move.target[status == MoveStatus.TARGET_ERROR]
        shelves.counters.suspected_segments += pool.suspect(broken)
        pool.abandon(move.target[np.isin(status, (MoveStatus.NO_SPACE, MoveStatus.READ_ONLY))])
        pool.let_go(move.source)
        if one is not None and (~ok & ~bad & ~unwritten).any():
            # The drive takes no writes, or the mover is closing: the rest stays where it is.
            one.waiting = NOBODY
            if not one.moving and not pool.retired(segment):
                del self.emptying[segment]

    def _lose(self, rows: Rows, say: Callable[[Rows], None]) -> int:
        """These pages could not be read to be moved; `say` takes note of their places. How many of
        them had no copy in L1, and are lost."""
        shelves, table = self.shelves, self.shelves.table
        alone = rows[table.state[rows] == int(State.IN2)]
        copies = rows[table.state[rows] != int(State.IN2)]
        say(copies)
        shelves.counters.l2_copies_dropped += copies.size
        table.tiers[copies] &= ~HAS_L2
        table.clear_flag(copies, Flag.L2_CLEAN)
        say(alone)
        with table.changing(alone):
            table.tiers[alone] = 0
        shelves.doom(alone)
        return int(alone.size)
