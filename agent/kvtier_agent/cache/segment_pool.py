"""The slots of L2: taken in order, given back one by one, used again a whole segment at a time.

A segment is a run of slot numbers (`per_segment` of them: one file). It is written once from front
to back, and nothing in it is written again before all of it is:

    hole      no blocks on a drive
    free      blocks, nothing in it; may be opened
    open      slots are taken at its cursor; there is one at most
    sealed    all of its slots were handed out (or it may not be written to any more)
    tested    it held a bad page and is empty: free only after a test (`Quarantine`)
    leaving   empty; its blocks are being given back

A sealed segment with nothing in it, and which no compaction reads from, is free at once, and its
*epoch* has gone up: the next use of the same slot numbers is told from the last one by it. A slot
that is given back before that is *dead*: taken by nobody, usable by nobody.

What has a limit is the number of slots that have blocks. So a use of a segment has a size of its
own, at most `per_segment`, that is settled when it is opened: small tiers get small segments, and
what is left of the limit makes a short one.

    used + dead + available = limit at rest; after a shrink `excess` says what is too much, until
    whole segments have left
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.segment_sizes import segment_slots

Slots = NDArray[np.uint32]
Segments = NDArray[np.uint32]
Rows = NDArray[np.uint32]

HOLE, FREE, OPEN, SEALED, TESTED, LEAVING = range(6)
NO_ROW = np.uint32(0xFFFFFFFF)
_NONE: Slots = np.empty(0, dtype=np.uint32)


class SegmentPool:
    """`maximum`: slot numbers that exist at all. Segments and slots are named by their numbers."""

    def __init__(self, maximum: int, per_segment: int = 1) -> None:
        self.maximum = maximum
        self.limit = 0
        self.used = 0
        self.per_segment = 0
        self.shape(per_segment)

    def shape(self, per_segment: int) -> None:
        """Slots per segment; before the first slot is taken."""
        if per_segment == self.per_segment:
            return
        if self.used:
            raise AssertionError("the segments of a tier in use have their size")
        self.per_segment = per_segment
        self.open = -1
        self.backed = 0
        """Slots that have blocks, used or not."""
        self.leaving = 0
        """Slots of segments whose blocks are being given back."""
        self._state = np.zeros(0, dtype=np.uint8)
        self._size = np.zeros(0, dtype=np.int64)
        self._cursor = np.zeros(0, dtype=np.int64)
        self._live = np.zeros(0, dtype=np.int64)
        self._held = np.zeros(0, dtype=np.int64)
        self._epoch = np.zeros(0, dtype=np.uint32)
        self._opened = np.zeros(0, dtype=np.int64)
        self._suspect = np.zeros(0, dtype=bool)
        self._retired = np.zeros(0, dtype=bool)
        self._taken = np.zeros(0, dtype=bool)
        self._rows: Rows = np.zeros(0, dtype=np.uint32)
        self._free: list[int] = []
        self._holes: list[int] = []
        self._uses = 0
        self._claimed: set[int] = set()
        self._to_punch: list[int] = []
        self._to_test: list[int] = []
        self._given: list[tuple[Slots, Slots]] = []

    # -- how much there is ----------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Slots that `take` can give right now."""
        room = self.limit - self.backed - self.leaving
        usable = 0
        if self._free:
            sizes = self._size[self._free]
            usable = int(np.minimum(sizes, self.target).sum())
            room += int(sizes.sum()) - usable
        return self._rest + usable + max(0, room)

    @property
    def _rest(self) -> int:
        """Slots left in the open segment."""
        return int(self._size[self.open] - self._cursor[self.open]) if self.open >= 0 else 0

    @property
    def dead(self) -> int:
        """Slots that hold nothing and wait for the rest of their segment, or for its test."""
        closed = (self._state == SEALED) | (self._state == TESTED)
        dead = int((self._size[closed] - self._live[closed]).sum())
        if self.open >= 0:
            dead += int(self._cursor[self.open] - self._live[self.open])
        return dead

    @property
    def excess(self) -> int:
        """Slots with blocks beyond the limit."""
        return max(0, self.backed - self.limit)

    @property
    def target(self) -> int:
        """Slots that a segment opened now is given."""
        return segment_slots(self.limit, self.per_segment)

    @property
    def suspects(self) -> int:
        """Segments that get nothing new until they were tested."""
        return int(self._suspect.sum())

    def set_limit(self, limit: int) -> None:
        """Slots that may have blocks. After a shrink free segments leave at once, the others as
        they are emptied."""
        self.limit = min(limit, self.maximum)
        self._trim()

    # -- slots ----------------------------------------------------------------------------------

    def take(self, count: int) -> Slots:
        """Up to `count` slots, in the order in which they are to be written."""
        parts: list[Slots] = []
        self._claimed.clear()
        while count > 0 and (self.open >= 0 or self._open_next()):
            segment = self.open
            first = int(self._cursor[segment])
            some = min(count, self._rest)
            start = segment * self.per_segment + first
            parts.append(np.arange(start, start + some, dtype=np.uint32))
            self._taken[start : start + some] = True
            self._cursor[segment] += some
            self._live[segment] += some
            self.used += some
            count -= some
            if not self._rest:
                self._seal(segment)
        return np.concatenate(parts) if parts else _NONE

    def own(self, slots: Slots, rows: Rows) -> None:
        """These records' pages lie in these slots, or will."""
        self._rows[slots] = rows

    def give(self, slots: Slots) -> None:
        """Give slots back: they are dead. Giving a slot back twice is a bug and raises."""
        if not slots.size:
            return
        if not self._taken[slots].all() or np.unique(slots).size < slots.size:
            raise AssertionError("a slot was given back that was not taken")
        self._taken[slots] = False
        self._rows[slots] = NO_ROW
        self.used -= len(slots)
        numbers = slots // self.per_segment
        self._given.append((slots, self._epoch[numbers]))
        segments, counts = np.unique(numbers, return_counts=True)
        self._live[segments] -= counts
        for segment in segments.tolist():
            self._empty(segment)

    def claim(self, slots: Slots) -> NDArray[np.bool_]:
        """Take these very slots: pages found on a volume at start, those worth least first. True
        where it was taken. A segment keeps its slots up to the last one that was. May be called
        again until the first `take`."""
        taken = np.zeros(len(slots), dtype=bool)
        _, wanted = np.unique(slots, return_index=True)  # ascending, each slot once
        wanted = wanted[slots[wanted] < self.maximum // self.per_segment * self.per_segment]
        if not wanted.size:
            return taken
        numbers = slots[wanted] // self.per_segment
        self._reach(int(numbers[-1]))
        starts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        best = np.maximum.reduceat(wanted, starts)
        parts = np.split(wanted, starts[1:])
        for which in np.argsort(best)[::-1].tolist():  # the segment of the best page first
            segment = int(numbers[starts[which]])
            room = self.limit - self.backed - self.leaving
            mine = parts[which]
            inside = slots[mine] % self.per_segment
            inside = inside[~self._taken[slots[mine]]]
            mine = mine[~self._taken[slots[mine]]]
            size = int(self._size[segment])
            mine, inside = mine[inside < size + room], inside[inside < size + room]
            if not mine.size or not (self._state[segment] == HOLE or segment in self._claimed):
                continue
            self._claimed.add(segment)
            size = max(size, int(inside[-1]) + 1)
            self.backed += size - int(self._size[segment])
            self._size[segment] = self._cursor[segment] = size
            self._state[segment] = SEALED
            self._live[segment] += mine.size
            self._uses += 1
            self._opened[segment] = self._uses
            self._taken[slots[mine]] = True
            self.used += mine.size
            taken[mine] = True
        self._holes = sorted(set(self._holes) - self._claimed)
        return taken

    def uses(self, slots: Slots) -> tuple[Slots, Slots]:
        """Epoch of each slot's segment, and how many slots this use of it has."""
        numbers = slots // self.per_segment
        return self._epoch[numbers], self._size[numbers].astype(np.uint32)

    def take_given(self) -> tuple[Slots, Slots]:
        """Slots given back since the last call, and the epoch of each."""
        if not self._given:
            return _NONE, _NONE
        slots, epochs = zip(*self._given, strict=True)
        self._given.clear()
        return np.concatenate(slots), np.concatenate(epochs)

    # -- segments -------------------------------------------------------------------------------

    def sealed(self) -> tuple[Segments, NDArray[np.int64], NDArray[np.int64]]:
        """Segments that can be emptied, how many of their slots are dead, and when each was opened
        (numbers that only grow)."""
        which = np.flatnonzero((self._state == SEALED) & (self._live > 0))
        dead = self._size[which] - self._live[which]
        return which.astype(np.uint32), dead, self._opened[which]

    def sample(self, count: int) -> Rows:
        """Records of about `count` pages, from all segments alike: some of those that are there."""
        used = np.flatnonzero((self._state == SEALED) | (self._state == OPEN))
        if not used.size:
            return _NONE
        used = used[:: max(1, used.size // count)]
        each = max(1, count // used.size)
        inside = np.arange(each) * self._cursor[used][:, None] // each
        rows = self._rows[(used[:, None] * self.per_segment + inside).ravel()]
        held: Rows = rows[rows != NO_ROW]
        return held

    def rows(self, segment: int) -> Rows:
        """The records whose pages lie in a segment, in the order of their slots."""
        start = segment * self.per_segment
        rows = self._rows[start : start + int(self._cursor[segment])]
        held: Rows = rows[rows != NO_ROW]
        return held

    def size(self, segment: int) -> int:
        """Slots of a segment, in this use of it."""
        return int(self._size[segment])

    def live(self, segment: int) -> int:
        """Slots of a segment that are taken."""
        return int(self._live[segment])

    def held(self, segment: int) -> bool:
        """Does a compaction read from it?"""
        return bool(self._held[segment])

    def retired(self, segment: int) -> bool:
        """Will its blocks go when it is empty?"""
        return bool(self._retired[segment])

    def in_use(self, segment: int) -> bool:
        """Is it open or sealed?"""
        return int(self._state[segment]) in (OPEN, SEALED)

    def known(self, segment: int) -> bool:
        """May it have blocks that are not on their way back?"""
        return segment < len(self._state) and int(self._state[segment]) not in (HOLE, LEAVING)

    def hold(self, slots: Slots) -> None:
        """A compaction reads these slots: their segments stay as they are until `let_go`."""
        np.add.at(self._held, slots // self.per_segment, 1)

    def let_go(self, slots: Slots) -> None:
        numbers = slots // self.per_segment
        np.subtract.at(self._held, numbers, 1)
        for segment in np.unique(numbers).tolist():
            self._empty(segment)

    def suspect(self, slots: Slots) -> int:
        """These slots held bad pages. How many segments are suspect now that were not before."""
        fresh = 0
        for segment in np.unique(slots // self.per_segment).tolist():
            fresh += not self._suspect[segment]
            self._suspect[segment] = True
            if segment == self.open:
                self._seal(segment)
        return fresh

    def abandon(self, slots: Slots) -> None:
        """The volume of these slots takes nothing more: if one of them is in the open segment, that
        is written no further."""
        if self.open >= 0 and (slots // self.per_segment == self.open).any():
            self._seal(self.open)

    def take_tests(self) -> list[int]:
        """Suspect segments that are empty now: they are to be tested."""
        out, self._to_test = self._to_test, []
        return out

    def healed(self, segment: int, epoch: int) -> bool:
        """The test of a suspect segment succeeded. False: it means nothing, since that was another
        use of its numbers."""
        if self._state[segment] != TESTED or self._epoch[segment] != epoch:
            return False
        self._suspect[segment] = False
        self._rest_or_leave(segment)
        return True

    def retire(self, segment: int) -> None:
        """It gets nothing new, and its blocks go when it is empty."""
        self._retired[segment] = True
        if segment == self.open:
            self._seal(segment)
        elif self._state[segment] in (FREE, TESTED):
            self._leave(segment)
        else:
            self._empty(segment)

    def take_punches(self) -> Segments:
        """Segments whose blocks are to be given back; call `punched` when that is done."""
        out, self._to_punch = self._to_punch, []
        return np.array(out, dtype=np.uint32)

    def punched(self, segments: Segments) -> None:
        """The blocks of these segments are gone."""
        for segment in segments.tolist():
            self.leaving -= int(self._size[segment])
            self._size[segment] = 0
            self._state[segment] = HOLE
            self._retired[segment] = self._suspect[segment] = False
            heapq.heappush(self._holes, segment)

    def punch_again(self, segments: Segments) -> None:
        """Giving back the blocks of these was not tried: they wait for it anew."""
        self._to_punch += segments.tolist()

    # -- life of a segment ----------------------------------------------------------------------

    def _open_next(self) -> bool:
        """Open the free segment with the lowest number, else a hole."""
        own = 0
        if self._free:
            segment = heapq.heappop(self._free)
            own = int(self._size[segment])
        else:
            if self.limit - self.backed - self.leaving <= 0:
                return False
            if not self._holes:
                self._reach(len(self._state))
            if not self._holes:
                return False
            segment = heapq.heappop(self._holes)
        self.backed -= own
        room = self.limit - self.backed - self.leaving
        self._begin(segment, min(self.target, max(own, room)))
        self.open = segment
        return True

    def _begin(self, segment: int, size: int) -> None:
        self._state[segment] = OPEN
        self._size[segment] = size
        self._cursor[segment] = 0
        self.backed += size
        self._uses += 1
        self._opened[segment] = self._uses

    def _seal(self, segment: int) -> None:
        self._state[segment] = SEALED
        self.open = -1
        self._empty(segment)

    def _empty(self, segment: int) -> None:
        """If nothing is left in a sealed segment, its next life begins."""
        if self._state[segment] != SEALED or self._live[segment] or self._held[segment]:
            return
        self._epoch[segment] += 1
        self._cursor[segment] = 0
        if self._suspect[segment] and not self._goes(segment):
            self._state[segment] = TESTED
            self._to_test.append(segment)
        else:
            self._rest_or_leave(segment)

    def _goes(self, segment: int) -> bool:
        return bool(self._retired[segment]) or self.backed > self.limit

    def _rest_or_leave(self, segment: int) -> None:
        if self._goes(segment):
            self._leave(segment)
        else:
            self._state[segment] = FREE
            heapq.heappush(self._free, segment)

    def _leave(self, segment: int) -> None:
        """The blocks of an empty segment are to be given back."""
        if self._state[segment] == FREE:
            self._free.remove(segment)
            heapq.heapify(self._free)
        self._state[segment] = LEAVING
        self._epoch[segment] += 1  # a test that is still under way must not take it for its own
        self.backed -= int(self._size[segment])
        self.leaving += int(self._size[segment])
        self._to_punch.append(segment)

    def _trim(self) -> None:
        """What is empty leaves while there is too much, suspect segments and high numbers first."""
        if self.excess:
            tested = np.flatnonzero(self._state == TESTED).tolist()
            for segment in tested[::-1] + sorted(self._free, reverse=True):
                if self.excess:
                    self._leave(segment)

    def _reach(self, segment: int) -> None:
        """Keep books on segments up to this number, and on some more."""
        have = len(self._state)
        if segment < have:
            return
        count = min(max(segment + 1, have * 5 // 4, 8), self.maximum // self.per_segment) - have
        if count <= 0:
            return
        for name in (
            *("_state", "_size", "_cursor", "_live", "_held", "_epoch", "_opened", "_suspect"),
            *("_retired",),
        ):
            old = getattr(self, name)
            setattr(self, name, np.append(old, np.zeros(count, dtype=old.dtype)))
        slots = count * self.per_segment
        self._taken = np.append(self._taken, np.zeros(slots, dtype=bool))
        self._rows = np.append(self._rows, np.full(slots, NO_ROW, dtype=np.uint32))
        for number in range(have, have + count):
            heapq.heappush(self._holes, number)
