"""Pressure on L0: the control law.

Let u = slots of L0 in use (copies on their way included) and C its capacity.

    water marks   high = tightenPercent - 2, low = tightenPercent - 5 (percent of C).
                  Ordinary replacement: when u, less what is leaving already, passes `high`, the
                  coldest pages are demoted until it is at `low`. As both lie below tightenPercent,
                  replacement holds L0 there without help as long as demotion keeps up.
    newcomers     One reservation fills L0 at most up to the tighten line; what is left of it goes
                  to L1. So a single large put cannot raise the level by itself.
    Tighten       u > tightenPercent: warn, and only newcomers whose value density is at least the
                  median of those admitted recently still enter L0, up to the demote line; the
                  others go one tier lower. Nothing is promoted but frozen pages.
    Demote        u > demotePercent: every unpinned page of L0 that is not exempt is queued for
                  demotion in one batch, coldest first. Only frozen pages, pinned pages or a
                  smaller budget can bring L0 here.

The level has no memory; it cannot flap harmfully, because leaving Demote means L0 is nearly empty
and leaving Tighten only opens admission. With a capacity of a few slots the lines are rounded so
that low <= high < tighten <= demote <= C: at least one slot can be filled, and filling L0 up to the
tighten line always sets replacement going, so that L0 never fills up with what came first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

HIGH_BELOW_TIGHTEN = 2  # percent
LOW_BELOW_TIGHTEN = 5  # percent
RECENT_ADMISSIONS = 64  # batches whose densities make the median


class Level(Enum):
    NORMAL = "Normal"
    TIGHTEN = "Tighten"
    DEMOTE = "Demote"


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a tier, in slots."""

    low: int
    high: int
    tighten: int
    demote: int
    capacity: int

    def level(self, used: int) -> Level:
        """The level at `used` slots."""
        if used > self.demote:
            return Level.DEMOTE
        if used > self.tighten:
            return Level.TIGHTEN
        return Level.NORMAL


def lines(capacity: int, tighten_percent: int, demote_percent: int) -> Lines:
    """The lines of L0 for a capacity in slots."""
    if capacity <= 0:
        return Lines(0, 0, 0, 0, 0)
    demote = max(1, capacity * demote_percent // 100)
    tighten = min(demote, max(1, capacity * tighten_percent // 100))
    high = min(tighten - 1, capacity * (tighten_percent - HIGH_BELOW_TIGHTEN) // 100)
    low = min(high, capacity * (tighten_percent - LOW_BELOW_TIGHTEN) // 100)
    return Lines(low, high, tighten, demote, capacity)


class RecentValue:
    """Median value density of the newcomers admitted to L0 recently (microseconds per MiB)."""

    def __init__(self) -> None:
        self._batches: deque[float] = deque(maxlen=RECENT_ADMISSIONS)

    def admitted(self, density: NDArray[np.float64]) -> None:
        """Newcomers with these densities entered L0: each batch counts by its median."""
        if density.size:
            self._batches.append(float(np.median(density)))

    @property
    def median(self) -> float:
        """Minus infinity while nothing was admitted."""
        return float(np.median(self._batches)) if self._batches else float("-inf")
