"""Deleting: pages are marked, so that no lookup finds them, and collected later, in batches.

A mark takes effect at once and for a whole call; giving slots and records back costs more, so that
a call that names very many pages does not hold up the others. What somebody still reads, pins or
moves goes when the last of them is done with it, as every doomed page does (`Shelves.bury`).

Deleting frees room, it erases nothing: the bytes of a page on NVMe lie there until they are written
over, and a kill or a power cut soon after may bring the page back, verified.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvtier_agent.cache.identity import KeyArray
from kvtier_agent.cache.record import MOVING, NO_ROW, READABLE, Rows, State
from kvtier_agent.cache.results import U8, DeleteStatus
from kvtier_agent.cache.shelves import HAS_L2, Shelves
from kvtier_agent.cache.traffic import Traffic

COLLECTED_AT_ONCE = 4096
"""Pages collected with each call of the cache: some milliseconds."""


class Deletion:
    """The part of `Cache` that deletes. `waiting`: marked pages that nobody holds."""

    def __init__(self, shelves: Shelves, traffic: Traffic) -> None:
        self._shelves = shelves
        self._traffic = traffic
        self._batches: deque[Rows] = deque()
        self.waiting = 0

    def delete(self, keys: KeyArray) -> U8:
        """See `Cache.delete`."""
        shelves, table = self._shelves, self._shelves.table
        status = np.full(len(keys), DeleteStatus.ABSENT, dtype=np.uint8)
        rows = table.lookup(keys)
        there = rows != NO_ROW
        there[there] = READABLE[table.state[rows[there]]]
        named = rows[there]
        busy = (table.pins[named] > 0) | MOVING[table.state[named]]
        status[there] = np.where(busy, DeleteStatus.MARKED, DeleteStatus.DELETED)
        pages = np.unique(named)
        idle = np.unique(named[~busy])
        # A copy in NVMe is of no use to those who read the page in memory: it goes first.
        upper = np.isin(table.state[pages], (State.IN1, State.UP10))
        self._traffic.leave_l2(pages[upper & ((table.tiers[pages] & HAS_L2) != 0)])
        shelves.mark(pages)
        shelves.counters.deleted_pages += pages.size
        if idle.size:
            self._batches.append(idle)
            self.waiting += idle.size
        return status

    def collect(self, most: int = COLLECTED_AT_ONCE) -> None:
        """Give back what marked pages hold, up to so many of them."""
        while most > 0 and self._batches:
            rows = self._batches.popleft()
            if rows.size > most:
                self._batches.appendleft(rows[most:])
                rows = rows[:most]
            # What went otherwise meanwhile (everything was dropped) is not doomed any more.
            self._shelves.bury(rows)
            self.waiting -= rows.size
            most -= rows.size
