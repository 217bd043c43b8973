"""Fixed-size slots of one tier: batches taken and given back, a limit that moves while in use.

A slot is a position in the tier's arena (or in its segment files). Positions are never relocated:
what has a limit is their *number*. So a tier shrinks without moving a pinned page: the coldest
pages go elsewhere until `used <= limit`, and positions that fall free beyond the limit give their
memory back ("punched"), wherever they lie.

    used     taken by a page, a reservation or a move
    free     backed by memory, ready
    punching their memory is being given back; not reusable until that is done
    holes    no memory behind them

used + free = limit at rest, or less while a growth waits for positions that are being punched;
right after a shrink `used` alone may exceed it until pages have left.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.words import has_repeats

Slots = NDArray[np.uint32]

_NONE: Slots = np.empty(0, dtype=np.uint32)


class SlotPool:
    """The slots of one tier. `maximum`: positions that exist at all."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self.limit = 0
        self.used = 0
        self._free = np.empty(64, dtype=np.uint32)
        self.free_count = 0
        self._next = 0
        self._holes: list[int] = []
        self._to_punch: list[Slots] = []
        self._taken = np.zeros(64, dtype=bool)

    @property
    def available(self) -> int:
        """Slots that `take` can give right now."""
        return self.free_count

    def missing(self, limit: int) -> Slots:
        """Positions that need memory behind them before `set_limit(limit)` may grow."""
        need = min(limit, self.maximum) - self.used - self.free_count
        if need <= 0:
            return _NONE
        holes = sorted(self._holes)[:need]
        fresh = range(self._next, min(self._next + need - len(holes), self.maximum))
        return np.array([*holes, *fresh], dtype=np.uint32)

    def set_limit(self, limit: int) -> None:
        """Grow (memory behind `missing(limit)` must be there) or shrink. Shrinking drops free
        positions at once; used ones leave as they are given back."""
        limit = min(limit, self.maximum)
        grown = self.missing(limit)
        self.limit = limit
        self.take_in(grown)
        self._trim()

    def take_in(self, grown: Slots) -> None:
        """Some of `missing(limit)`, its first ones; there is memory behind them now."""
        if grown.size:
            new = set(grown.tolist())
            self._holes = [h for h in self._holes if h not in new]
            self._next = max(self._next, int(grown.max()) + 1)
            self._push(grown[::-1])

    def take(self, count: int) -> Slots:
        """Up to `count` free slots, lowest positions first after a fresh start."""
        count = min(count, self.free_count)
        if count <= 0:
            return _NONE
        end = self.free_count
        slots = self._free[end - count : end][::-1].copy()
        self.free_count -= count
        self.used += count
        self._taken[slots] = True
        return slots

    def give(self, slots: Slots) -> None:
        """Give slots back. Giving a slot back twice is a bug and raises."""
        if not slots.size:
            return
        if not self._taken[slots].all() or has_repeats(slots):
            raise AssertionError("a slot was given back that was not taken")
        self._taken[slots] = False
        self.used -= len(slots)
        self._push(slots[::-1])
        self._trim()

    def take_over(self, used: Slots, backed: int) -> None:
        """A fresh pool of a tier that has pages already: the distinct positions `used` are taken,
        the rest of the first `backed` positions have memory behind them and are free. The limit is
        what there is, until `set_limit`."""
        self._next = max(int(used.max()) + 1 if used.size else 0, backed)
        taken = np.zeros(self._next, dtype=bool)
        taken[used] = True
        self._push(np.flatnonzero(~taken[:backed])[::-1].astype(np.uint32))
        self._taken = taken if taken.size > self._taken.size else self._taken
        self._taken[used] = True
        self._holes = (backed + np.flatnonzero(~taken[backed:])).tolist()
        self.used = int(used.size)
        self.limit = self.used + self.free_count

    def take_punches(self) -> Slots:
        """Positions whose memory is to be given back; call `punched` when that is done."""
        if not self._to_punch:
            return _NONE
        slots = np.concatenate(self._to_punch)
        self._to_punch.clear()
        return slots

    def punched(self, slots: Slots) -> None:
        """The memory behind `slots` is gone: they are holes that a later growth may use."""
        self._holes.extend(slots.tolist())

    def punch_again(self, slots: Slots) -> None:
        """Giving back the memory behind `slots` was not tried: they wait for it anew."""
        if slots.size:
            self._to_punch.append(slots)

    def _push(self, slots: Slots) -> None:
        need = self.free_count + len(slots)
        if need > self._free.size:
            self._free = np.resize(self._free, max(need, 2 * self._free.size))
        top = int(slots.max()) + 1 if slots.size else 0
        if top > self._taken.size:
            grown = np.zeros(max(top, 2 * self._taken.size), dtype=bool)
            grown[: self._taken.size] = self._taken
            self._taken = grown
        self._free[self.free_count : need] = slots
        self.free_count = need

    def _trim(self) -> None:
        excess = min(self.used + self.free_count - self.limit, self.free_count)
        if excess <= 0:
            return
        free = np.sort(self._free[: self.free_count])[::-1]  # highest first: they go
        self._to_punch.append(free[:excess].copy())
        rest = free[excess:]
        self._free[: rest.size] = rest
        self.free_count = int(rest.size)
