"""Quarantine of L2 slots: a slot that held a bad or unreadable page is not used again until a scrub
(write, read back, compare) succeeded on it. It stays out for good after `MAX_TRIES` failures.

The page itself is gone at once: it is out of the index, and the next put stores it anew elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.uint32]

FIRST_SCRUB_SECONDS = 5.0
MAX_TRIES = 3


@dataclass(slots=True)
class Quarantine:
    """Slot -> (due, failed tries). A slot being scrubbed has no due time."""

    _slots: dict[int, tuple[float | None, int]] = field(default_factory=dict)
    _lost: int = 0

    @property
    def count(self) -> int:
        """Slots out of use, for now or for good."""
        return len(self._slots) + self._lost

    def add(self, now: float, slots: Slots) -> None:
        for slot in slots.tolist():
            self._slots[slot] = (now + FIRST_SCRUB_SECONDS, 0)

    def due(self, now: float) -> Slots:
        """Slots to scrub now."""
        out = [slot for slot, (when, _) in self._slots.items() if when is not None and when <= now]
        for slot in out:
            self._slots[slot] = (None, self._slots[slot][1])
        return np.array(out, dtype=np.uint32)

    def next_due(self) -> float | None:
        return min((when for when, _ in self._slots.values() if when is not None), default=None)

    def scrubbed(self, now: float, slots: Slots, ok: NDArray[np.bool_]) -> Slots:
        """Outcome of a scrub; the slots that may be used again."""
        for slot, good in zip(slots.tolist(), ok.tolist(), strict=True):
            tries = self._slots.pop(slot)[1] + 1
            if not good and tries < MAX_TRIES:
                self._slots[slot] = (now + FIRST_SCRUB_SECONDS * 6**tries, tries)
            elif not good:
                self._lost += 1
        return slots[ok]
