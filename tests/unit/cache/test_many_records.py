"""Very many records at once: what is taken in by pieces is as if it were one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvtier_agent.bench.machine import heap_bytes
from kvtier_agent.cache import adoption
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.page_table import AT_ONCE, PageTable
from kvtier_agent.cache.record import NO_ROW, RECORD, State, StateError, as_bytes_keys, seals
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.cache.warm import Survivors
from kvtier_agent.cache.words import has_repeats, take_records

PAGE = 4096
COUNT = 2 * AT_ONCE + 17
MANY = 120_000
"""Not just above a power of two, to which tables grow."""


def some_records(count: int) -> np.ndarray:
    chance = np.random.default_rng(2)
    records = PageTable.blank_records(count)
    records["key"] = chance.integers(0, 1 << 63, (count, 2))
    records["parent"][1:] = records["key"][:-1]
    records["size"], records["depth"] = PAGE, np.arange(count)
    records["checksum"] = chance.integers(0, 1 << 63, count)
    records["l1_slot"] = chance.permutation(count)
    records["touch"] = chance.permutation(count)
    records["seal"] = seals(records)
    return records


def test_records_are_written_whole_and_found() -> None:
    table = PageTable(max_pages=1 << 17)
    records = some_records(COUNT)
    rows = table.insert_records(records, State.IN1)
    assert not has_repeats(rows)
    assert (table.find(np.ascontiguousarray(records["key"])) == rows).all()
    for name in set(RECORD.names or ()) - {"seq"}:
        assert (table.records[name][rows] == records[name]).all(), name
    assert not (table.seq[rows] % 2).any(), "no record is left as one that is being changed"
    assert table.pages == COUNT
    with pytest.raises(StateError):
        table.insert_records(some_records(3), State.IN0)


def test_survivors_are_put_in_their_order() -> None:
    table = PageTable(max_pages=1 << 17)
    records = some_records(COUNT)
    order = np.argsort(records["touch"])[5:]
    rows = adoption.insert_survivors(table, Survivors(records, order, {}))
    assert (table.key[rows] == records["key"][order]).all()
    parents = table.parent_row[rows]
    held = np.isin(np.arange(COUNT) - 1, order)[order]
    assert (table.key[parents[held]] == records["parent"][order][held]).all()
    assert (parents[~held] == NO_ROW).all()


def test_a_page_costs_at_most_100_bytes_of_heap_and_160_of_shared_memory(tmp_path: Path) -> None:
    """Heap is what a process of its own took; what was laid out and never touched costs nothing."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "d.table")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    heap, shared = map(float, done.stdout.split())
    assert heap <= 100
    assert 128 <= shared <= 160


def costs(path: Path) -> tuple[float, float]:
    """Bytes a page, of heap and of the table's file, with pages that lie on a volume."""
    records = some_records(MANY)
    keys, parents = as_bytes_keys(records["key"]), as_bytes_keys(records["parent"])
    slots = np.arange(MANY, dtype=np.uint32)
    before = heap_bytes(os.getpid())
    cache = Cache(PageTable(path, max_pages=1 << 17), Geometry.of_page_bytes(PAGE, 16))
    room = Budgets(0, 0, MANY * cache.geometry.nvme_slot_bytes, ("data0",))
    cache.reconfigure(0.0, Behaviour(), room, l2_slots=MANY)
    assert cache.adopt(keys, parents, records["depth"], records["checksum"], slots).all()
    gc.collect()
    return (heap_bytes(os.getpid()) - before) / MANY, path.stat().st_blocks * 512 / MANY


def test_pages_of_a_volume_are_taken_in_by_pieces() -> None:
    cache = Cache(PageTable(None, max_pages=1 << 17), Geometry.of_page_bytes(PAGE, 16))
    slots = COUNT + 100
    budgets = Budgets(0, 100 * PAGE, slots * cache.geometry.nvme_slot_bytes, ("data0",))
    cache.reconfigure(0.0, Behaviour(), budgets, l2_slots=slots)
    records = some_records(COUNT)
    keys, parents = as_bytes_keys(records["key"]), as_bytes_keys(records["parent"])
    taken = cache.adopt(
        keys, parents, records["depth"], records["checksum"], np.arange(COUNT, dtype=np.uint32)
    )
    assert taken.all()
    assert (cache.lookup(keys).tiers == 2).all()
    rows = cache.table.lookup(keys)
    assert (cache.table.checksum[rows] == records["checksum"]).all()
    assert (cache.table.seal[rows] == seals(take_records(cache.table.records, rows))).all()
    assert (cache.table.parent_row[rows[1:]] == rows[:-1]).all()
    check_books(cache)


if __name__ == "__main__":
    print(*costs(Path(sys.argv[1])))
