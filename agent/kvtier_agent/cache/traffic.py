"""Traffic between the tiers: what goes down, what comes up, and what becomes of it.

    put ─► L0 ──demote──► L1 ──write──► L2 ──► gone
           ▲                │ ▲           │
           └────promote─────┘ └───read────┘

Everything is a batch and nothing is waited for. A page stays readable at its source until the copy
is done; only then its old slot is free. A page that got pinned while it was being moved stays
where its reader found it, and the copy is thrown away.

L1 leaves in this order of preference, for each of its coldest pages: it has a clean copy in L2 and
just gives its slot back; L2 admits it and it is queued for writing; else it is dropped. Writes that
are queued or under way are bounded: by 90 % of `write_queue_bytes` and by half of L1's slots; while
NVMe is failing there are none. Past that, pages that leave ahead of need wait in L1 (`leaving`);
where a slot is needed now the coldest are dropped instead of queued (emergency eviction), so memory
never runs out whatever the drive does, and puts go on. A read from L2 that finds no free slot takes
that of a page with a copy in L2, and only where there is none that of the coldest: reading a long
past must not cost what was never written.

L2 full: whole segments are emptied (`reclaim`). If a page of one lies in L1 as well, only its copy
goes and the page itself stays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.leaving import L1Lines, going_down, kept_for_loads, l1_lines, queue_room
from kvtier_agent.cache.moves import Move, MoveKind, layered_pages
from kvtier_agent.cache.pressure import Level, Lines, lines
from kvtier_agent.cache.progress import Progress
from kvtier_agent.cache.quarantine import Quarantine
from kvtier_agent.cache.reclaim import Reclaim
from kvtier_agent.cache.record import NO_SLOT, Flag, Rows, State, as_bytes_keys
from kvtier_agent.cache.replacement import cooled_down
from kvtier_agent.cache.shelves import HAS_L2, Shelves
from kvtier_agent.cache.table_room import TableRoom
from kvtier_agent.cache.trimming import Trimming
from kvtier_agent.cache.worth import Worth

NOBODY: Rows = np.empty(0, dtype=np.uint32)

LEAVING_PART = 0.5
"""Part of L1's slots that may be on their way to L2, whatever `write_queue_bytes` says."""

AHEAD_PART = 8
"""Room is made ahead of a put in at most this part of L1."""

PUNCH_SLOTS = 4096
"""Slots that one order names at most: no bytes are copied for it, and a tier that shrinks by a
terabyte must not become a hundred thousand orders."""


class Traffic:
    """Moves between tiers. `lines`, `lines1`: of L0 and of L1."""

    def __init__(self, shelves: Shelves, worth: Worth) -> None:
        self.shelves = shelves
        self.worth = worth
        self.lines = Lines(0, 0, 0, 0, 0)
        self.lines1 = L1Lines(0, 0, 0)
        self.falling1 = False
        self.ahead1 = 0
        """Slots of L1 that the next put will want: the last one found it full. 0: there is room."""
        self.leaving0 = 0
        self.leaving1 = 0
        self.write_queue_bytes = 0
        self.quarantine = Quarantine()
        self.moves: list[Move] = []
        self.progress = Progress()
        self.in_flight = 0
        self._next_move = 1
        self.pause_until = 0.0
        self.reclaim = Reclaim(self)
        self.table_room = TableRoom(self)
        self.trimming = Trimming(self)

    # -- down -------------------------------------------------------------------------------

    def demote(self, now: float, rows: Rows) -> Rows:
        """L0 -> L1 for idle pages in IN0, coldest first. What neither L1 nor L2 admits is dropped.
        The pages that found no slot in L1: they are still the coldest of L0."""
        shelves = self.shelves
        keep = self.worth.keeps(shelves.table, rows, 1)
        if not keep.all() and shelves.pools[2].limit:
            keep |= self.worth.keeps(shelves.table, rows, 2)
        if not shelves.pools[1].limit:
            keep[:] = False
        lost = rows[~keep]
        shelves.counters.evicted_l0 += lost.size
        shelves.forget(lost)
        rows = rows[keep]
        if shelves.quotas.shares:
            over = self.trimming.beyond(now, rows, 1)
            shelves.counters.evicted_l0 += rows[over].size
            self.trimming.drop(rows[over])
            rows = rows[~over]
        slots = self.take_l1(now, rows.size)
        moving = rows[: slots.size]
        if moving.size:
            shelves.table.set_state(moving, State.DOWN01)
            source = shelves.table.l0_slot[moving]
            shelves.own(moving, 1, slots)
            self.leaving0 += moving.size
            shelves.quotas.leaves(moving, 0)
            self.issue(now, MoveKind.DEMOTE, moving, source, slots)
        return rows[slots.size :]

    def take_l1(self, now: float, count: int) -> NDArray[np.uint32]:
        """Up to `count` slots of L1, after making room if need be."""
        pool = self.shelves.pools[1]
        if pool.available < count:
            self.go_down(now, self.shelves.victims(1, count - pool.available))
        return pool.take(count)

    def go_down(self, now: float, rows: Rows, *, at_once: bool = False) -> None:
        """The coldest idle pages of L1 leave it, each in the cheapest way; `at_once`: without
        being written first."""
        shelves, table = self.shelves, self.shelves.table
        if not rows.size:
            return
        clean = (table.tiers[rows] & HAS_L2) != 0
        copied = rows[clean]
        if copied.size:
            shelves.disown(copied, 1)
            shelves.settle(copied, State.IN2, 1 << 2)
            table.demoted_at[copied] = now
            shelves.quotas.stamped(copied, table.touch[copied])
            shelves.counters.demoted_l1 += copied.size
        rows = rows[~clean]
        if not rows.size:
            return
        wanted = self.worth.keeps(table, rows, 2)
        if at_once or shelves.pools[2].limit == 0:
            wanted[:] = False
        lost, rows = rows[~wanted], rows[wanted]
        shelves.counters.evicted_l1 += lost.size
        shelves.forget(lost)
        self.write(now, rows)

    def write(self, now: float, rows: Rows) -> None:
        """L1 -> L2 for idle pages in IN1; past the bound, or while NVMe fails, they are dropped."""
        shelves = self.shelves
        if shelves.quotas.shares:
            over = self.trimming.beyond(now, rows, 2, keep_last=True)
            shelves.counters.evicted_l1 += rows[over].size
            self.trimming.drop(rows[over])
            rows = rows[~over]
        room = self.room_to_write(now)
        if shelves.pool2.available < min(rows.size, room):
            self.reclaim.at_once(min(rows.size, room))
        slots = shelves.pool2.take(min(rows.size, room))
        # The coldest are dropped, the warmest written: they are worth more.
        lost, rows = rows[: rows.size - slots.size], rows[rows.size - slots.size :]
        if lost.size:
            shelves.counters.evicted_l1 += lost.size
            shelves.counters.emergency_evicted += lost.size
            shelves.forget(lost)
        if rows.size:
            shelves.table.set_state(rows, State.DOWN12)
            shelves.own(rows, 2, slots)
            self.leaving1 += rows.size
            shelves.quotas.leaves(rows, 1)
            self.write_queue_bytes += rows.size * self.worth.geometry.page_bytes
            self.issue(now, MoveKind.WRITE, rows, shelves.table.l1_slot[rows], slots)

    def room_to_write(self, now: float) -> int:
        """Pages that `write` takes now."""
        if now < self.pause_until:
            return 0
        bound, page = self.worth.settings.write_queue_bytes, self.worth.geometry.page_bytes
        room = queue_room(bound, self.write_queue_bytes, page)
        # While a drive hangs, what is on its way holds its slots: puts live off the rest.
        pool = self.shelves.pools[1]
        if pool.used <= pool.limit:  # a tier that shrinks is emptied as fast as the bytes allow
            room = min(room, max(0, max(1, int(pool.limit * LEAVING_PART)) - self.leaving1))
        return room

    def leave_l2(self, rows: Rows) -> None:
        """These copies leave L2; pages that lie only there are gone."""
        shelves, table = self.shelves, self.shelves.table
        alone = table.state[rows] == int(State.IN2)
        lost, copies = rows[alone], rows[~alone]
        shelves.counters.evicted_l2 += lost.size
        shelves.forget(lost)
        if copies.size:
            shelves.counters.l2_copies_dropped += copies.size
            table.tiers[copies] &= ~HAS_L2
            table.clear_flag(copies, Flag.L2_CLEAN)
            shelves.disown(copies, 2)

    # -- up ---------------------------------------------------------------------------------

    def promote(self, now: float, rows: Rows) -> None:
        """L1 -> L0 for idle pages in prefix order: those that L0 admits, that have cooled down and
        for which there is room below the tighten line. Exempt pages ask only for room."""
        shelves, table = self.shelves, self.shelves.table
        pool = shelves.pools[0]
        if not pool.available or not rows.size:
            return
        good = (table.state[rows] == int(State.IN1)) & (table.pins[rows] == 0)
        good &= (table.flags[rows] & int(Flag.DOOMED)) == 0
        rows = rows[good]
        exempt = table.has(rows, Flag.EXEMPT)
        cool = self.worth.behaviour.cool_down_seconds
        ready = cooled_down(table.demoted_at[rows], now, cool)
        ordinary = rows[ready & ~exempt & self.worth.keeps(table, rows, 0)]
        rows = rows[exempt][: pool.available]
        room = max(0, self.lines.tighten - pool.used - rows.size)
        if shelves.quotas.shares:
            ordinary = ordinary[shelves.quotas.within(ordinary, 0)]
        rows = np.concatenate([rows, ordinary[:room]])
        slots = pool.take(rows.size)
        rows = rows[: slots.size]
        if rows.size:
            table.set_state(rows, State.UP10)
            shelves.own(rows, 0, slots)
            self.issue(now, MoveKind.PROMOTE, rows, table.l1_slot[rows], slots)

    def read(self, now: float, rows: Rows, *, layered: bool = False) -> Rows:
        """L2 -> L1 for distinct pages in IN2; those (from the front) that found a slot. `layered`:
        unit by unit, where they have several."""
        shelves = self.shelves
        pool = shelves.pools[1]
        if shelves.quotas.shares:
            over = self.trimming.beyond(now, rows, 1)
            rows = rows[: int(over.argmax())] if over.any() else rows
        if pool.available < rows.size:
            # An engine waits for these. What was read before and has its copy below makes room
            # first; else the coldest do at once, instead of being written.
            self.go_down(now, shelves.copies(rows.size - pool.available))
        if pool.available < rows.size:
            self.go_down(now, shelves.victims(1, rows.size - pool.available), at_once=True)
        slots = pool.take(rows.size)
        rows = rows[: slots.size]
        if rows.size:
            shelves.table.set_state(rows, State.UP21)
            shelves.own(rows, 1, slots)
            source = shelves.table.l2_slot[rows]
            self.issue(now, MoveKind.READ, rows, source, slots, layered=layered)
        return rows

    # -- balance ----------------------------------------------------------------------------

    def set_lines(self, limits: list[int]) -> None:
        """Water marks for tiers of so many slots, by the behaviour in force."""
        behaviour = self.worth.behaviour
        self.lines = lines(limits[0], behaviour.tighten_percent, behaviour.demote_percent)
        self.lines1 = l1_lines(limits[1], limits[2] > 0, self.worth.settings)

    def balance(self, now: float) -> Level:
        """Bring the tiers back below their water marks. The pressure level of L0 before it."""
        shelves = self.shelves
        used0 = shelves.pools[0].used
        level = self.lines.level(used0)
        staying = used0 - self.leaving0
        if level is Level.DEMOTE or (self.lines.capacity == 0 and staying):
            shelves.put_back(0, self.demote(now, shelves.victims(0, staying)))
        elif staying > self.lines.high:
            cold = shelves.victims(0, staying - self.lines.low)
            shelves.put_back(0, self.demote(now, cold))
        staying = shelves.pools[1].used - self.leaving1
        count, self.falling1 = going_down(
            self.lines1, staying, self.room_to_write(now), self.falling1
        )
        if count:
            self.go_down(now, shelves.victims(1, count))
        if shelves.quotas.stirred:
            self.trimming.balance(now)
        self.reclaim.balance(now)
        return level

    def make_room(self, now: float) -> None:
        """Where a full L1 has nothing below it, and so no water marks: drop as much as a put like
        the last one would drop. Called when nobody waits for an answer."""
        pool = self.shelves.pools[1]
        if not self.ahead1 or self.shelves.pools[2].limit:
            return
        free = pool.available - self.kept_for_loads
        if free > 2 * self.ahead1:  # the tier has grown, or pages have left it
            self.ahead1 = 0
        elif free < min(self.ahead1, pool.limit // AHEAD_PART):
            short = min(self.ahead1, pool.limit // AHEAD_PART) - free
            self.go_down(now, self.shelves.victims(1, short))

    @property
    def kept_for_loads(self) -> int:
        """Slots of L1 that puts may not take."""
        return kept_for_loads(self.shelves.pools[1].limit, self.worth.settings)

    def straight_down(self, now: float, rows: Rows) -> None:
        """Pages that just entered L1 although only L2 admits them pass through; those that find no
        room in the write queue, the last ones, leave when they are cold."""
        if self.worth.behaviour.threshold_microseconds_per_mib[1] == 0:
            return
        table = self.shelves.table
        passing = rows[~self.worth.keeps(table, rows, 1) & (table.pins[rows] == 0)]
        waits = self.worth.keeps(table, passing, 2) & (self.shelves.pools[2].limit > 0)
        waits &= np.cumsum(waits) > self.room_to_write(now)
        self.go_down(now, passing[~waits])

    def suspect(self, rows: Rows) -> None:
        """The places of these pages in L2 are bad: they are dead, and their segments suspect."""
        field = self.shelves.table.l2_slot
        slots = field[rows]
        slots = slots[slots != NO_SLOT]
        self.shelves.counters.quarantined_slots += slots.size
        self.shelves.counters.suspected_segments += self.shelves.pool2.suspect(slots)
        self.shelves.disown(rows, 2)

    def unwritten(self, rows: Rows) -> None:
        """A power cut kept these pages from their places in L2, which are dead now, and sound."""
        self.shelves.counters.unwritten_pages += rows.size
        self.shelves.disown(rows, 2)

    # -- orders about empty slots -----------------------------------------------------------

    def orders(self, now: float) -> None:
        """Give memory of dropped slots and blocks of empty segments back, say which slots of L2 are
        given up, test suspect segments that are due."""
        pool = self.shelves.pool2
        for kind, slots in zip(
            (MoveKind.PUNCH_L0, MoveKind.PUNCH_L1, MoveKind.PUNCH_L2),
            [pool.take_punches() for pool in self.shelves.pools],
            strict=True,
        ):
            if slots.size:
                self.issue(now, kind, np.full_like(slots, NO_SLOT), slots, slots)
        slots, epochs = pool.take_given()
        if slots.size:
            self.issue(now, MoveKind.FORGET, np.full_like(slots, NO_SLOT), slots, slots, epochs)
        for segment in pool.take_tests():
            first = np.array([segment * pool.per_segment], dtype=np.uint32)
            self.quarantine.add(now, segment, int(pool.uses(first)[0][0]))
        step = max(1, self.worth.settings.move_bytes // self.worth.geometry.page_bytes)
        for segment, epoch, start in self.quarantine.due(now):
            here = np.arange(start, min(start + step, pool.size(segment)), dtype=np.uint32)
            slots = here + np.uint32(segment * pool.per_segment)
            if not slots.size or not pool.tested(segment, epoch):
                self.quarantine.end(segment, epoch)
            else:
                self.issue(now, MoveKind.SCRUB, np.full_like(slots, NO_SLOT), slots, slots)

    def issue(
        self,
        now: float,
        kind: MoveKind,
        rows: Rows,
        source: NDArray[np.uint32],
        target: NDArray[np.uint32],
        epochs: NDArray[np.uint32] = NOBODY,
        *,
        layered: bool = False,
    ) -> None:
        """Hand out a move, or several: for pages of `rows`, or an order. `epochs`: of an order
        about an earlier use of segments. `layered`: of a read."""
        table, geometry = self.shelves.table, self.worth.geometry
        layered = layered and geometry.units > 1
        step = PUNCH_SLOTS
        if kind.carries_pages or kind is MoveKind.SCRUB:
            step = max(1, self.worth.settings.move_bytes // geometry.page_bytes)
        if layered:
            step = layered_pages(geometry.page_bytes)
        sizes = NOBODY
        if kind in (MoveKind.WRITE, MoveKind.COMPACT, MoveKind.SCRUB):
            epochs, sizes = self.shelves.pool2.uses(target)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            some = rows[part]
            real = some if kind.carries_pages else NOBODY
            self.moves.append(
                Move(
                    id=self._next_move,
                    kind=kind,
                    rows=some,
                    source=source[part].copy(),
                    target=target[part].copy(),
                    keys=as_bytes_keys(table.key[real]),
                    parents=as_bytes_keys(table.parent[real]),
                    checksums=table.checksum[real],
                    depths=table.depth[real],
                    tenants=table.tenant[real],
                    epochs=epochs[part],
                    sizes=sizes[part],
                    page_bytes=geometry.page_bytes,
                    slot_bytes=geometry.slot_bytes,
                    created=now,
                    layered=layered,
                )
            )
            if layered:
                self.progress.begin(self.moves[-1])
            self._next_move += 1
            self.in_flight += 1
