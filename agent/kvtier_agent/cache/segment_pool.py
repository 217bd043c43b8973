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

from kvtier_agent.cache.segment_books import (
    FREE,
    HOLE,
    LEAVING,
    NO_ROW,
    NO_SLOTS,
    OPEN,
    SEALED,
    TESTED,
    Rows,
    SegmentBooks,
    Segments,
    Slots,
)
from kvtier_agent.cache.words import has_repeats


class SegmentPool(SegmentBooks):
    """The books, and all that is written into them."""

    def set_limit(self, limit: int) -> None:
        """Slots that may have blocks. After a shrink free segments leave at once, the others as
        they are emptied."""
        self.limit = min(limit, self.maximum)
        self._usable = int(np.minimum(self._size[self._free], self.target).sum())
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
        return np.concatenate(parts) if parts else NO_SLOTS

    def own(self, slots: Slots, rows: Rows) -> None:
        """These records' pages lie in these slots, or will."""
        self._rows[slots] = rows

    def give(self, slots: Slots) -> None:
        """Give slots back: they are dead. Giving a slot back twice is a bug and raises."""
        if not slots.size:
            return
        if not self._taken[slots].all() or has_repeats(slots):
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
        ends = np.append(starts[1:], numbers.size)
        order = np.argsort(np.maximum.reduceat(wanted, starts))[::-1]  # the best page's first
        done = self._claim_whole(numbers[starts], slots[wanted[ends - 1]], ends - starts, order)
        whole = np.zeros(starts.size, dtype=bool)
        whole[order[:done]] = True
        mine = wanted[np.repeat(whole, ends - starts)]
        self._taken[slots[mine]] = taken[mine] = True
        for which in order[done:].tolist():
            segment = int(numbers[starts[which]])
            room = self.limit - self.backed - self.leaving
            mine = wanted[starts[which] : ends[which]]
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

    def _claim_whole(
        self, segments: Segments, lasts: Slots, counts: NDArray[np.intp], order: NDArray[np.intp]
    ) -> int:
        """Claim holes up to the last slot that is wanted of each, in this order, as long as all of
        it fits. How many segments that were; `counts`: slots wanted of each. A tier of many small
        segments is nearly all of that kind."""
        sizes = lasts.astype(np.int64) % self.per_segment + 1
        room = self.limit - self.backed - self.leaving
        fits = (self._state[segments] == HOLE)[order] & (np.cumsum(sizes[order]) <= room)
        lead = order[: fits.size if fits.all() else int(fits.argmin())]
        mine = segments[lead]
        self.backed += int(sizes[lead].sum())
        self._size[mine] = self._cursor[mine] = sizes[lead]
        self._state[mine] = SEALED
        self._live[mine] = counts[lead]
        self._opened[mine] = np.arange(self._uses + 1, self._uses + 1 + lead.size)
        self._uses += lead.size
        self.used += int(counts[lead].sum())
        self._claimed.update(mine.tolist())
        return int(lead.size)

    def take_given(self) -> tuple[Slots, Slots]:
        """Slots given back since the last call, and the epoch of each."""
        if not self._given:
            return NO_SLOTS, NO_SLOTS
        slots, epochs = zip(*self._given, strict=True)
        self._given.clear()
        return np.concatenate(slots), np.concatenate(epochs)

    # -- segments -------------------------------------------------------------------------------

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
        """Suspect segments that are empty now: they are to be tested. Not those that have left
        meanwhile: their numbers may be in use again when the test comes."""
        out, self._to_test = self._to_test, []
        return [segment for segment in out if self._state[segment] == TESTED]

    def healed(self, segment: int, epoch: int) -> bool:
        """The test of a suspect segment succeeded. False: it means nothing, since that was another
        use of its numbers."""
        if not self.tested(segment, epoch):
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
            self._count_free(segment, -1)
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
            self._count_free(segment, 1)

    def _leave(self, segment: int) -> None:
        """The blocks of an empty segment are to be given back."""
        if self._state[segment] == FREE:
            self._free.remove(segment)
            heapq.heapify(self._free)
            self._count_free(segment, -1)
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
