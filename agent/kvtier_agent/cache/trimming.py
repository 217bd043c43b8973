"""Tenants at their quota make room among their own pages, the coldest first.

    ahead       after each call of the cache: what is above a line near the quota goes down; where
                that could not go (it is leased, or finds no slot below or no room in the write
                queue), after the next call again
    at once     before pages of the tenant enter a tier that has no room for them in its quota

What goes down takes the ways of all pages (`Traffic`): from HBM to DRAM, from DRAM to NVMe where
that admits it, from NVMe out of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.record import Rows, State

if TYPE_CHECKING:
    from kvtier_agent.cache.traffic import Traffic


class Trimming:
    """The part of `Traffic` that keeps tenants within their quotas."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._shelves = traffic.shelves
        self._quotas = traffic.shelves.quotas

    def balance(self, now: float) -> None:
        """Tenants that used more since the last call, or had not given up all, do so now."""
        stirred, self._quotas.stirred = self._quotas.stirred, set()
        for number in sorted(stirred & self._quotas.shares.keys()):
            for tier in (0, 1, 2):
                self._give_up(now, number, tier, self._ahead(now, number, tier))
            self._quotas.compact(number)
            if any(self._quotas.excess(number, tier) for tier in (0, 1, 2)):
                self._quotas.stirred.add(number)

    def _ahead(self, now: float, number: int, tier: int) -> int:
        """Slots that the tenant gives up ahead of need. What is still within its quota of L1 waits
        there for room in the write queue."""
        excess = self._quotas.excess(number, tier)
        if tier == 1 and excess and self._shelves.pools[2].limit:
            room = self._traffic.room_to_write(now)
            excess = max(min(excess, room), self._quotas.beyond(number, 1))
        return excess

    def beyond(
        self, now: float, rows: Rows, tier: int, *, keep_last: bool = False
    ) -> NDArray[np.bool_]:
        """Which of these pages, about to enter `tier`, are more than their tenants' quotas allow,
        after room was made: the last ones, or with `keep_last` the first ones."""
        for number, count in self._quotas.lacking(rows, tier).items():
            self._give_up(now, number, tier, count, at_once=True)
        fits = self._quotas.within(rows, tier, keep_last=keep_last)
        return ~fits

    def make_room(self, now: float, number: int, tier: int, count: int) -> None:
        """Room for `count` more pages of a tenant in `tier`, as far as its own pages can go."""
        self._give_up(now, number, tier, count - self._quotas.room(number, tier))

    def drop(self, rows: Rows) -> None:
        """These idle pages are lost for the sake of a quota."""
        if rows.size:
            self._quotas.dropped(rows)
            self._shelves.counters.quota_evicted += rows.size
            self._shelves.forget(rows)

    def _give_up(
        self, now: float, number: int, tier: int, count: int, *, at_once: bool = False
    ) -> None:
        if count <= 0:
            return
        traffic = self._traffic
        rows = self._quotas.victims(number, tier, count)
        if not rows.size:
            return
        if tier == 0:
            self._quotas.put_back(number, 0, traffic.demote(now, rows))
        elif tier == 1:
            traffic.go_down(now, rows, at_once=at_once)
        else:
            lost = rows[self._shelves.table.state[rows] == int(State.IN2)]  # the rest are copies
            self._quotas.dropped(lost)
            self._shelves.counters.quota_evicted += lost.size
            traffic.leave_l2(rows)
