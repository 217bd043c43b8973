"""What is known of the segments of L2, and the questions that can be asked about them.

`segment_pool` says what a segment is and what happens to it; this is the part that changes nothing.
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
NO_SLOTS: Slots = np.empty(0, dtype=np.uint32)


class SegmentBooks:
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
        self._free_slots = 0
        self._usable = 0
        """Slots of the free segments, and those of them that are usable: a segment that is opened
        has no more than `target`."""
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
        room = self.limit - self.backed - self.leaving + self._free_slots - self._usable
        return self._rest + self._usable + max(0, room)

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
    def suspects(self) -> list[int]:
        """Segments that get nothing new until they were tested, ascending."""
        found: list[int] = np.flatnonzero(self._suspect).tolist()
        return found

    # -- which lies where -----------------------------------------------------------------------

    def uses(self, slots: Slots) -> tuple[Slots, Slots]:
        """Epoch of each slot's segment, and how many slots this use of it has."""
        numbers = slots // self.per_segment
        return self._epoch[numbers], self._size[numbers].astype(np.uint32)

    def rows(self, segment: int) -> Rows:
        """The records whose pages lie in a segment, in the order of their slots."""
        start = segment * self.per_segment
        rows = self._rows[start : start + int(self._cursor[segment])]
        held: Rows = rows[rows != NO_ROW]
        return held

    def sample(self, count: int) -> Rows:
        """Records of about `count` pages, from all segments alike: some of those that are there."""
        used = np.flatnonzero((self._state == SEALED) | (self._state == OPEN))
        if not used.size:
            return NO_SLOTS
        used = used[:: max(1, used.size // count)]
        each = max(1, count // used.size)
        inside = np.arange(each) * self._cursor[used][:, None] // each
        rows = self._rows[(used[:, None] * self.per_segment + inside).ravel()]
        held: Rows = rows[rows != NO_ROW]
        return held

    # -- segments -------------------------------------------------------------------------------

    def sealed(self) -> tuple[Segments, NDArray[np.int64], NDArray[np.int64]]:
        """Segments that can be emptied, how many of their slots are dead, and when each was opened
        (numbers that only grow)."""
        which = np.flatnonzero((self._state == SEALED) & (self._live > 0))
        dead = self._size[which] - self._live[which]
        return which.astype(np.uint32), dead, self._opened[which]

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

    def tested(self, segment: int, epoch: int) -> bool:
        """Does it wait for its test, or for the rest of it, and is this still the use of its
        numbers that is meant?"""
        return int(self._state[segment]) == TESTED and int(self._epoch[segment]) == epoch

    def known(self, segment: int) -> bool:
        """May it have blocks that are not on their way back?"""
        return segment < len(self._state) and int(self._state[segment]) not in (HOLE, LEAVING)

    def _count_free(self, segment: int, sign: int) -> None:
        """One free segment more, or less."""
        size = int(self._size[segment])
        self._free_slots += sign * size
        self._usable += sign * min(size, self.target)

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
