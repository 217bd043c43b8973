"""Which segment of L2 is emptied next, and which of its pages are worth moving. Pure.

The setting is that of a log-structured file system's cleaner (Rosenblum and Ousterhout, 1992), with
one difference: a page of a cache may be dropped. So what a segment costs is not only what has to be
copied out of it:

    rank of a page      its place among all pages of L2 by last touch: 0 the coldest, 1 the hottest
    the price of a move 1 - hot percent / 100, in ranks: a write, wear and time
    a cold page         its rank is at most that price: it is dropped, at the cost of its rank
    a hot page          is moved, at the price of a move
    a copy              of a page that lies in L1 too is dropped, at the cost of a page of its rank:
                        it is written again when the page leaves L1
    a dead slot         costs nothing

The victim is the segment with the least cost per slot that is gained by it. So one with dead slots
and cold pages goes before one that is warm all through, even if hot pages have to be moved out of
it: else its cold pages would stay for good, and warmer ones be dropped in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.float64]
Stamps = NDArray[np.uint64]


def ranks(sample: Stamps, stamps: Stamps) -> Ranks:
    """Rank of pages last touched at `stamps`, by an ascending sample of all pages' stamps."""
    if not sample.size:
        return np.zeros(len(stamps))
    return np.searchsorted(sample, stamps, side="right") / sample.size


def price_of_a_move(hot_percent: int) -> float:
    """Rank up to which a page is dropped rather than moved."""
    return (100 - hot_percent) / 100


def hot(rank: Ranks, hot_percent: int) -> NDArray[np.bool_]:
    """Which pages are worth moving; with 0 percent none."""
    worth: NDArray[np.bool_] = rank > price_of_a_move(hot_percent)
    return worth


def cost_per_slot(rank: Ranks, alone: NDArray[np.bool_], size: int, hot_percent: int) -> float:
    """Cost of emptying a segment of `size` slots per slot gained, at least 0; infinite when nothing
    is gained. `rank`: of its pages; `alone`: which of them lie in L2 only."""
    moved = alone & hot(rank, hot_percent)
    gained = size - int(moved.sum())
    price = price_of_a_move(hot_percent)
    return float(np.minimum(rank, price).sum()) / gained if gained > 0 else float("inf")


@dataclass(slots=True)
class Pace:
    """A bound on bytes per second: a bucket that holds what a second allows, or `least_bytes` if
    that is more, and is full at first. At 0 bytes per second nothing is ever allowed."""

    bytes_per_second: float
    least_bytes: int
    _bytes: float = -1.0
    _last: float = 0.0

    def allowed(self, now: float) -> int:
        """Bytes that may be written now."""
        full = max(self.bytes_per_second, self.least_bytes) if self.bytes_per_second > 0 else 0.0
        if self._bytes < 0:
            self._bytes = full
        grown = self.bytes_per_second * max(0.0, now - self._last)
        self._bytes = min(full, self._bytes + grown)
        self._last = max(self._last, now)
        return int(self._bytes)

    def spend(self, count: int) -> None:
        """So many were."""
        self._bytes -= min(count, self._bytes)
