"""Is there a second agent under this node's name? Pure; seconds are monotonic and passed in.

Two agents under one name (on two machines, or in two folders of one) write their status in turns,
each believing itself alone. The boot id of the other, found where the own one was written, gives it
away. A predecessor does that once, with a report that was under way when it ended; an agent that
lives does it after each report of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["Rival"]

REPORTS: Final = 2
"""So many of the own reports must have been written over."""
PATIENCE_INTERVALS: Final = 3
"""A rival that was not heard of for so many report intervals is gone."""
LEAST_PATIENCE_SECONDS: Final = 10.0
"""However short the interval is: a write may be slow."""


@dataclass(frozen=True, slots=True)
class Rival:
    """What is known of it. ``boot_id``: the last one seen; ``reports``: of ours that it wrote over;
    ``waiting``: ours was the last report; ``seen_at``: seconds."""

    boot_id: str = ""
    reports: int = 0
    waiting: bool = False
    seen_at: float = 0.0

    def wrote(self) -> Rival:
        """A report of ours was taken."""
        return replace(self, waiting=True)

    def saw(self, mine: str, theirs: str, interval: float, now: float) -> Rival:
        """The object has the report of ``theirs``; ``mine`` is empty before the first own one."""
        if not mine or theirs in ("", mine):
            return self
        before = self.reports if self._fresh(interval, now) else 0
        return Rival(theirs, before + self.waiting, False, now)

    def present(self, interval: float, now: float) -> str:
        """Its boot id; empty while there is none."""
        there = self.reports >= REPORTS and self._fresh(interval, now)
        return self.boot_id if there else ""

    def _fresh(self, interval: float, now: float) -> bool:
        patience = max(PATIENCE_INTERVALS * interval, LEAST_PATIENCE_SECONDS)
        return now - self.seen_at <= patience
