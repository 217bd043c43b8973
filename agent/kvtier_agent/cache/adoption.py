"""Pages that were there before the cache: in L2, found by recovery, and in L1, of the process
before. Before any client; both rebuild the links of chains, and believe no index."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.identity import KeyArray
from kvtier_agent.cache.page_table import AT_ONCE, PageTable
from kvtier_agent.cache.record import (
    NO_ROW,
    NO_SLOT,
    Flag,
    Rows,
    State,
    as_u64_pairs,
    seals,
)
from kvtier_agent.cache.results import U64
from kvtier_agent.cache.shelves import HAS_L2, Shelves
from kvtier_agent.cache.table_view import TableError
from kvtier_agent.cache.warm import HAS_L1, Survivors

Taken = NDArray[np.bool_]


def adopt(
    shelves: Shelves,
    page_bytes: int,
    keys: KeyArray,
    parents: KeyArray,
    depths: NDArray[np.uint32],
    checksums: U64,
    slots: NDArray[np.uint32],
    tenants: NDArray[np.uint16] | None = None,
) -> Taken:
    """Pages found in L2, each key once (`lasts`), oldest first. True: taken in. Of a page that is
    in L1 already the copy is taken in if it is the same page, to the byte as far as checksums
    tell."""
    table = shelves.table
    pairs = as_u64_pairs(keys)
    held = table.find(pairs)
    copies = _take_copies(shelves, held, held != NO_ROW, checksums, slots)
    taken = held == NO_ROW
    room = table.max_pages - table.pages
    taken &= np.cumsum(taken[::-1])[::-1] <= room  # the newest, if not all
    taken[taken] = shelves.pool2.claim(slots[taken])
    some = np.flatnonzero(taken)
    try:
        table.grow_for(some.size)
    except TableError:  # no memory for their records: they are not kept
        shelves.pool2.give(slots[some])
        return copies
    rows: Rows = np.empty(some.size, dtype=np.uint32)
    above = as_u64_pairs(parents)
    for first in range(0, some.size, AT_ONCE):
        which = some[first : first + AT_ONCE]
        records = table.blank_records(which.size)
        records["tiers"], records["flags"] = HAS_L2, Flag.L2_CLEAN
        records["key"], records["parent"] = pairs[which], above[which]
        records["checksum"], records["depth"] = checksums[which], depths[which]
        records["size"] = page_bytes
        records["l2_slot"] = slots[which]
        if tenants is not None:
            records["tenant"] = tenants[which]
        records["seal"] = seals(records)
        rows[first : first + AT_ONCE] = table.insert_records(records, State.IN2)
    table.parent_row[rows] = table.find(above[some])
    shelves.pool2.own(slots[some], rows)
    shelves.stamp(rows)
    both: Taken = taken | copies
    return both


def lasts(pairs: U64) -> Taken:
    """Which rows of (n, 2) are the last with their value. Keys are hashes: mostly no two of them
    share a word, and sorting one is enough; only rows that share it are compared whole."""
    words = np.sort(pairs[:, 0])
    if not (words[1:] == words[:-1]).any():
        return np.ones(len(pairs), dtype=bool)
    order = np.argsort(pairs[:, 0], kind="stable")
    first = pairs[order, 0]
    again = np.flatnonzero(first[1:] == first[:-1])
    alike = np.zeros(len(pairs), dtype=bool)
    alike[order[again]] = alike[order[again + 1]] = True
    some = np.flatnonzero(alike)
    if some.size:
        _, lasts = np.unique(pairs[some][::-1], axis=0, return_index=True)
        alike[some[some.size - 1 - lasts]] = False
    return ~alike


def _take_copies(
    shelves: Shelves,
    held: Rows,
    which: Taken,
    checksums: U64,
    slots: NDArray[np.uint32],
) -> Taken:
    table = shelves.table
    taken = which.copy()
    wanted = held[which]
    taken[which] = (
        (table.state[wanted] == State.IN1)
        & (table.l2_slot[wanted] == NO_SLOT)
        & (table.checksum[wanted] == checksums[which])
    )
    taken[taken] = shelves.pool2.claim(slots[taken])
    rows = held[taken]
    shelves.own(rows, 2, slots[taken])
    with table.changing(rows):
        table.tiers[rows] |= HAS_L2
        table.raise_flag(rows, Flag.L2_CLEAN)
    shelves.have_copies(rows[np.argsort(table.touch[rows], kind="stable")])
    return taken


def insert_survivors(table: PageTable, survivors: Survivors) -> Rows:
    """Rows of the pages of L1 that are taken over, in a new table, in their order. Raises
    TableError when there is no memory for them."""
    table.grow_for(len(survivors))
    rows: Rows = np.empty(len(survivors), dtype=np.uint32)
    for first in range(0, len(rows), AT_ONCE):
        records = survivors.records(first, AT_ONCE)
        seen: NDArray[Any] = records["last_access"]
        records["last_access"] = np.where(np.isfinite(seen) & (seen > 0.0), seen, 0.0)
        records["tiers"] = HAS_L1
        records["l0_slot"] = records["l2_slot"] = NO_SLOT
        for void in ("seq", "flags", "arm", "pins", "client", "demoted_at"):
            records[void] = 0
        rows[first : first + AT_ONCE] = table.insert_records(records, State.IN1)
    table.parent_row[rows] = table.find(table.parent[rows])
    return rows


def take_over(shelves: Shelves, rows: Rows, names: list[str], backed: tuple[int, int]) -> None:
    """A new cache starts with these pages in L1, least recently used first. `names`: of the frozen
    prefixes that records number from 1 on; `backed`: slots at the start of L0 and L1 that have
    memory behind them. All of it is within limits until the first `reconfigure`."""
    table, pools = shelves.table, shelves.pools
    for pool, used, first in zip(
        pools[:2], (table.l0_slot[rows[:0]], table.l1_slot[rows]), backed, strict=True
    ):
        pool.take_over(used, min(first, pool.maximum))
    shelves.stamp(rows)
    shelves.frozen.take_over(names, rows, table)
