"""What a cache is made for: the geometry of its pages, the policy in force, the tiers' sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache import adoption
from kvtier_agent.cache.counters import Counters
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.identity import KeyArray
from kvtier_agent.cache.leases import LeaseBook
from kvtier_agent.cache.leaving import l1_lines
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.pins import Pins
from kvtier_agent.cache.record import Rows
from kvtier_agent.cache.results import U64, Registration
from kvtier_agent.cache.segment_sizes import slots_per_segment
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.shelves import Shelves
from kvtier_agent.cache.traffic import Traffic
from kvtier_agent.cache.worth import Worth
from kvtier_agent.value.costs import CostModel


def _nothing() -> bool:
    return False


class Shaping:
    """A part of `Cache`."""

    table: PageTable
    shaped: bool
    geometry: Geometry
    settings: CacheSettings
    behaviour: Behaviour
    budgets: Budgets
    l2_slots: int | None
    shelves: Shelves
    counters: Counters
    costs: CostModel
    worth: Worth
    traffic: Traffic
    book: LeaseBook
    pins: Pins

    def _balance(self, now: float) -> None:
        raise NotImplementedError

    def succeed(self, before: Shaping) -> None:
        """Carry on for a cache that held pages of another geometry and is empty now: under the
        same behaviour and budgets, counting on where it stopped. Before anything is registered."""
        self.behaviour, self.budgets = before.behaviour, before.budgets
        self.counters = self.shelves.counters = before.counters
        self.book.number_from(before.book)

    def register(
        self, now: float, geometry: Geometry, take_in: Callable[[], bool] = _nothing
    ) -> Registration:
        """Accept a client's geometry: one per trust domain. The first one sizes the slots (memory
        and volumes are there already: `Core.register`); another is refused with a reason.
        `take_in`: as for `reconfigure`."""
        if not self.shaped:
            self.shaped = True
            self.geometry = self.worth.geometry = geometry
            self.reconfigure(
                now, self.behaviour, self.budgets, l2_slots=self.l2_slots, take_in=take_in
            )
        if geometry == self.geometry:
            return Registration(True)
        mine = self.geometry
        return Registration(
            False,
            f"this trust domain holds pages of {mine.page_bytes} bytes and {mine.page_tokens}"
            f" tokens (fingerprint {mine.fingerprint.hex()[:8]}), the client's are"
            f" {geometry.page_bytes} bytes and {geometry.page_tokens} tokens (fingerprint"
            f" {geometry.fingerprint.hex()[:8]}); use another trust domain for it",
        )

    def missing_slots(self, budgets: Budgets) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Positions of L0 and L1 that need memory behind them before `reconfigure(budgets)`, or
        before the `register` that sizes the slots."""
        wanted = self._limits(budgets)
        pools = self.shelves.pools
        return pools[0].missing(wanted[0]), pools[1].missing(wanted[1])

    def _limits(self, budgets: Budgets) -> tuple[int, int, int]:
        slot = self.geometry.slot_bytes
        return budgets.l0_bytes // slot, budgets.l1_bytes // slot, budgets.l2_bytes // slot

    def reconfigure(
        self,
        now: float,
        behaviour: Behaviour,
        budgets: Budgets,
        *,
        l2_slots: int | None = None,
        take_in: Callable[[], bool] = _nothing,
    ) -> None:
        """A new revision, live: what still fits stays. The memory for it is there already
        (`Core.reconfigure` sees to that). `l2_slots`: how many slots the volumes can hold.
        `take_in`: called when the tiers have their sizes and no page has moved yet, for those who
        `adopt`; a page on its way down would take a slot in which one of them lies. Did it?"""
        self.behaviour, self.budgets, self.l2_slots = behaviour, budgets, l2_slots
        self.worth.behaviour = behaviour
        self.costs.transfer_bytes = behaviour.transfer_bytes
        if not self.shaped:
            return
        limits = list(self._limits(budgets))
        if l2_slots is not None:
            limits[2] = min(limits[2], l2_slots)
        # A page has a slot and a record: L2 gets no more slots than there are records for.
        limits[2] = min(limits[2], max(0, self.table.max_pages - limits[0] - limits[1]))
        self.shelves.pool2.shape(slots_per_segment(self.geometry.nvme_slot_bytes))
        self.shelves.limit((limits[0], limits[1], limits[2]))
        self.shelves.quotas.configure(behaviour.quotas, (limits[0], limits[1], limits[2]))
        self.traffic.set_lines(limits)
        self.pins.fit()
        back = self.shelves.frozen.configure(
            behaviour.frozen,
            self.geometry.slot_bytes,
            self.table,
            self.geometry.tp,
            (limits[0], limits[1]),
        )
        self.shelves.stamp(back)
        if not take_in():  # else what was found is looked at as it is; the next tick balances
            self._balance(now)

    def regrow(self, most_bytes: int, back: Callable[[int, NDArray[np.uint32]], None]) -> bool:
        """Take in positions that a growth missed, of each tier as many as `most_bytes` are.
        `back(tier, positions)` puts memory behind them. Is there more to take in?"""
        most, more = max(1, most_bytes // self.geometry.slot_bytes), False
        for tier, pool in enumerate(self.shelves.pools[:2]):
            missing = pool.missing(pool.limit)
            if missing.size:
                back(tier, missing[:most])
                pool.take_in(missing[:most])
                more |= missing.size > most
        return more

    def adopt(
        self,
        keys: KeyArray,
        parents: KeyArray,
        depths: NDArray[np.uint32],
        checksums: U64,
        slots: NDArray[np.uint32],
        tenants: NDArray[np.uint16] | None = None,
    ) -> NDArray[np.bool_]:
        """Pages found in L2 at start, oldest first; before any client and any move (`take_in` of
        `reconfigure`). True: taken in."""
        size = self.geometry.page_bytes
        taken = adoption.adopt(self.shelves, size, keys, parents, depths, checksums, slots, tenants)
        if tenants is not None and tenants.any():
            self.shelves.quotas.count_all()
        self.counters.found_pages += int(taken.sum())
        self.counters.dropped_found_pages += int((~taken).sum())
        return taken

    def take_over(self, rows: Rows, names: list[str], backed: tuple[int, int]) -> None:
        """Pages of the process before, already in the table, in L1; right after construction. See
        `adoption.take_over`."""
        adoption.take_over(self.shelves, rows, names, backed)
        self.shelves.quotas.count_all()
        self.traffic.lines1 = l1_lines(self.shelves.pools[1].limit, False, self.settings)

    def lose_segments(self, now: float, segments: set[int]) -> None:
        """These segments of L2 are gone with their volume, and so are the copies in them. What is
        just being read or written fails by itself."""
        self.traffic.reclaim.lose(segments)
        self._balance(now)
