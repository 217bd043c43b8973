"""Rows of the page table as what runs out: the coldest pages of the lowest tier make room.

A page needs a record as well as a slot. Where the table can grow no further (`max_pages`, or no
memory for it), newcomers would be refused for ever although every tier has slots: so before a put
pages are dropped until it has the rows it may need, and some more, so that this is not done for
each put anew. L2 goes by segments (`reclaim`), L1 and L0 by their order; what is pinned, moving or
frozen stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier_agent.cache.table_view import TableError

if TYPE_CHECKING:
    from kvtier_agent.cache.traffic import Traffic

SPARE_PART = 64
"""One in so many rows, at most SPARE_MOST, is free after pages were dropped."""
SPARE_MOST = 4096
RETRY_SECONDS = 5.0
"""Between two tries to grow a table that found no memory."""


class TableRoom:
    """The part of `Traffic` that keeps rows free."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._table = traffic.shelves.table
        self._grow_at = 0.0

    def make(self, now: float, count: int) -> None:
        """Room for `count` more rows, as far as there are pages that may go."""
        table = self._table
        if table.free_rows >= count:
            return
        if now >= self._grow_at:
            try:
                table.grow_for(count)
            except TableError:
                self._grow_at = now + RETRY_SECONDS
        if table.free_rows < count:
            self._drop(count + min(table.capacity // SPARE_PART, SPARE_MOST))

    def _drop(self, wanted: int) -> None:
        traffic, table = self._traffic, self._table
        shelves, counters = traffic.shelves, traffic.shelves.counters
        traffic.reclaim.drop_pages(wanted - table.free_rows)
        for tier in (1, 0):
            need = wanted - table.free_rows
            if need <= 0:
                return
            rows = shelves.victims(tier, need)
            if tier == 1:
                counters.evicted_l1 += rows.size
            else:
                counters.evicted_l0 += rows.size
            shelves.forget(rows)
