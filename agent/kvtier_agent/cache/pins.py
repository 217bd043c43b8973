"""Pins: pages that a client asks to be kept in memory until it says otherwise.

A pin counts in the record's `pins`, as a lease does: the page stays in its slot of HBM or DRAM, is
neither evicted nor demoted, and moves nowhere else either. A page that lies only in NVMe is read up
into DRAM for it; if that fails the pin is lost. A client pins a page once, however often it asks.

    bounded     `pin_percent` of the slots of L0 and of L1, all clients together, and
                `max_pins_per_client`
    alive       all pins of a client end when it does, and `pin_seconds` after the last thing that
                was heard from it (a client that waits for its load says nothing, and is there); a
                new agent process knows none
    lost        ended by the cache: a tier became smaller than its pins may be (the last ones made
                go first), a read from NVMe failed, or everything is dropped

A pin is on the page, by the key it had: of a page that was deleted it keeps the bytes, and one that
was put anew under the same key is another page, not pinned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.identity import KEY_BYTES, KeyArray
from kvtier_agent.cache.loads import Loads
from kvtier_agent.cache.record import (
    NO_ROW,
    READ_L0,
    READABLE,
    TIER_OF_STATE,
    Flag,
    Rows,
    State,
)
from kvtier_agent.cache.results import MISS, PinResult, PinStatus
from kvtier_agent.cache.settings import CacheSettings
from kvtier_agent.cache.shelves import Shelves
from kvtier_agent.cache.traffic import Traffic


@dataclass(slots=True)
class _Held:
    """A pinned page: the memory tier whose slot it keeps, and under which key each client did."""

    tier: int
    keys: dict[int, bytes] = field(default_factory=dict)


class Pins:
    """The part of `Cache` that keeps pages for clients. `held`: pinned pages of L0 and of L1."""

    def __init__(
        self, shelves: Shelves, traffic: Traffic, loads: Loads, settings: CacheSettings
    ) -> None:
        self.shelves = shelves
        self.traffic = traffic
        self.loads = loads
        self.settings = settings
        self.held = [0, 0]
        self.count = 0
        """Pins of all clients; more than pages where several pinned one."""
        self.rows: dict[int, _Held] = {}
        self._of: dict[int, dict[bytes, int]] = {}
        self._heard: dict[int, float] = {}

    # -- by clients -------------------------------------------------------------------------

    def pin(self, now: float, client: int, keys: KeyArray) -> PinResult:
        """See `Cache.pin`."""
        table = self.shelves.table
        rows = table.lookup(keys)
        there = rows != NO_ROW
        there[there] = READABLE[table.state[rows[there]]]
        status = np.full(len(keys), PinStatus.ABSENT, dtype=np.uint8)
        tier = np.full(len(keys), MISS, dtype=np.uint8)
        tier[there] = TIER_OF_STATE[table.state[rows[there]]]
        names = _names(keys)
        which = np.flatnonzero(there)
        memory = np.where(READ_L0[table.state[rows[which]]], 0, 1)
        self._end(client, self._outlived(client, names, rows, which))
        fresh = []
        for i, row, level in zip(
            which.tolist(), rows[which].tolist(), memory.tolist(), strict=True
        ):
            status[i], new = self._one(client, names[i], row, level)
            if new:
                fresh.append(i)
        new_rows = rows[fresh]
        table.pins[new_rows] += np.uint32(1)
        table.raise_flag(new_rows, Flag.PINNED)
        down = np.array(fresh, dtype=np.intp)[table.state[new_rows] == State.IN2]
        if down.size:
            over = down[self.traffic.read(now, rows[down]).size :]
            self._end(client, [names[i] for i in over.tolist()])
            status[over] = PinStatus.REFUSED_SPACE
        counters = self.shelves.counters
        counters.pinned += int((status[fresh] == PinStatus.PINNED).sum())
        counters.refused_pins += int((status >= PinStatus.REFUSED_SPACE).sum())
        if self._of.get(client):
            self._heard[client] = now
        else:
            self._of.pop(client, None)
        return PinResult(status, tier)

    def _outlived(
        self, client: int, names: list[bytes], rows: Rows, which: NDArray[np.intp]
    ) -> list[bytes]:
        """Of the pages that are there: keys that the client pinned when they were another page's,
        that was deleted since."""
        mine = self._of.get(client)
        if not mine:
            return []
        pairs = zip(which.tolist(), rows[which].tolist(), strict=True)
        return [names[i] for i, row in pairs if mine.get(names[i], row) != row]

    def _one(self, client: int, key: bytes, row: int, tier: int) -> tuple[PinStatus, bool]:
        """What becomes of one page that is there, and whether that is a new pin (to be noted in
        its record)."""
        mine = self._of.setdefault(client, {})
        if key in mine:
            return PinStatus.PINNED, False
        if len(mine) >= self.settings.max_pins_per_client:
            return PinStatus.REFUSED_LIMIT, False
        held = self.rows.get(row)
        if held is None:
            if self.held[tier] >= self._most(tier):
                return PinStatus.REFUSED_SPACE, False
            held = self.rows[row] = _Held(tier)
            self.held[tier] += 1
        held.keys[client] = key
        mine[key] = row
        self.count += 1
        return PinStatus.PINNED, True

    def unpin(self, client: int, keys: KeyArray) -> int:
        """See `Cache.unpin`."""
        return self._end(client, _names(keys))

    def heard(self, now: float, client: int) -> None:
        """A sign of life of a client: its pins go on."""
        if client in self._heard:
            self._heard[client] = now

    def end_all(self, client: int) -> int:
        """All pins of a client end. How many there were."""
        return self._end(client, list(self._of.get(client, ())))

    # -- by time and by the cache -----------------------------------------------------------

    def expire(self, now: float) -> None:
        """End the pins of clients that were silent for too long, and wait for nothing."""
        until = now - self.settings.pin_seconds
        for client in [client for client, heard in self._heard.items() if heard <= until]:
            if self.loads.book.waits(client):
                self.heard(now, client)
            else:
                self.shelves.counters.expired_pins += self.end_all(client)

    def next_due(self) -> float | None:
        """When the next client has been silent for too long."""
        if not self._heard:
            return None
        return min(self._heard.values()) + self.settings.pin_seconds

    def fit(self) -> None:
        """Where a tier has become too small for its pins, the last ones made are lost."""
        for tier in (0, 1):
            over = self.held[tier] - self._most(tier)
            if over > 0:
                rows = [row for row, held in reversed(self.rows.items()) if held.tier == tier]
                self.lose(np.array(rows[:over], dtype=np.uint32))

    def lose(self, rows: Rows) -> None:
        """Pins on these pages end; those that are not pinned are none of ours."""
        for row in rows.tolist():
            held = self.rows.get(row)
            for client, key in list(held.keys.items()) if held is not None else ():
                self.shelves.counters.lost_pins += self._end(client, [key])

    def lose_all(self) -> None:
        """Every pin ends."""
        self.lose(np.fromiter(self.rows, dtype=np.uint32))

    # -- books ------------------------------------------------------------------------------

    def _most(self, tier: int) -> int:
        """Pages of L0 or L1 that may be pinned."""
        return self.shelves.pools[tier].limit * self.settings.pin_percent // 100

    def _end(self, client: int, keys: Iterable[bytes]) -> int:
        mine = self._of.get(client, {})
        ended, free = [], []
        for key in keys:
            row = mine.pop(key, None)
            if row is None:
                continue
            ended.append(row)
            held = self.rows[row]
            del held.keys[client]
            if not held.keys:
                del self.rows[row]
                self.held[held.tier] -= 1
                free.append(row)
        if not mine:
            self._of.pop(client, None)
            self._heard.pop(client, None)
        if ended:
            self.count -= len(ended)
            self.shelves.table.clear_flag(np.array(free, dtype=np.uint32), Flag.PINNED)
            self.loads.unpin(np.array(ended, dtype=np.uint32))
        return len(ended)


def _names(keys: KeyArray) -> list[bytes]:
    raw = np.ascontiguousarray(keys).tobytes()
    return [raw[i : i + KEY_BYTES] for i in range(0, len(raw), KEY_BYTES)]
