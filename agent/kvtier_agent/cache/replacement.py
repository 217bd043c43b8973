"""Tiered LRU: one order per tier, victims from its cold end, and the cool-down.

The order is a log. Touching a batch of pages gives each a new stamp (a number that only grows,
kept in the record) and appends (rows, stamps) to the log of the tier; nothing is searched and
nothing is unlinked. An entry whose stamp is no longer the record's is stale and is skipped when
the cold end is read. So a touch costs a few numpy operations for a whole chain, and a victim a few
for a whole batch. When stale entries outnumber the rest, the log is compacted.

A chain is touched tail to head: the head is the most recent, so leaves go before their parents.

Only pages that may leave stand in a log: whoever is pinned, moving or exempt is dropped from it
when the cold end is read, and stamped anew when that ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.record import Rows

Stamps = NDArray[np.uint64]
Valid = Callable[[Rows, Stamps], NDArray[np.bool_]]

LOOK_AHEAD = 1024
"""Entries looked at together, at least."""


class TouchLog:
    """The order of one tier, coldest first."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[Rows, Stamps]] = deque()
        self.entries = 0

    def append(self, rows: Rows, stamps: Stamps) -> None:
        """These are now the most recent, the last one most of all."""
        if rows.size:
            self._chunks.append((rows, stamps))
            self.entries += rows.size

    def push_cold(self, rows: Rows, stamps: Stamps) -> None:
        """Put pages at the cold end, the first one coldest: they go next."""
        if rows.size:
            self._chunks.appendleft((rows, stamps))
            self.entries += rows.size

    def pop(self, count: int, valid: Valid) -> Rows:
        """Up to `count` valid pages from the cold end, coldest first; they leave the log."""
        taken: list[Rows] = []
        while count > 0 and self._chunks:
            rows, stamps = self._chunks.popleft()
            self.entries -= rows.size
            if rows.size > (some := max(LOOK_AHEAD, 4 * count)):  # a chunk may be the whole tier
                self.push_cold(rows[some:], stamps[some:])
                rows, stamps = rows[:some], stamps[:some]
            good = np.flatnonzero(valid(rows, stamps))
            if good.size > count:
                rest = int(good[count])
                self.push_cold(rows[rest:], stamps[rest:])
                good = good[:count]
            if good.size:
                taken.append(rows[good])
                count -= good.size
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.uint32)

    def compact(self, live: int, valid: Valid) -> None:
        """Drop stale entries if they are most of the log. `live`: pages that can be in it."""
        if self.entries <= 4 * live + 4096:
            return
        rows = np.concatenate([chunk[0] for chunk in self._chunks])
        stamps = np.concatenate([chunk[1] for chunk in self._chunks])
        keep = valid(rows, stamps)
        self._chunks.clear()
        self.entries = 0
        self.append(rows[keep], stamps[keep])


def cooled_down(
    demoted_at: NDArray[np.float64], now: float, cool_down_seconds: float
) -> NDArray[np.bool_]:
    """Which pages may come back up: never demoted (0), or demoted long enough ago."""
    ready: NDArray[np.bool_] = (demoted_at == 0.0) | (now - demoted_at >= cool_down_seconds)
    return ready
