"""Pages found on a volume: their chains are known again, and odd ones do no harm."""

import threading
import time

import numpy as np
import pytest
from kvtier_agent.cache.adoption import lasts
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.quarantine import (
    FIRST_TEST_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Quarantine,
)
from kvtier_agent.cache.record import State
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.cache.table_reader import TableReader
from kvtier_agent.cache.table_view import TableError

PAGE = 4096
KEYS = np.random.default_rng(8).integers(0, 256, (64, 16), dtype=np.uint8)


def make() -> Cache:
    cache = Cache(PageTable(None, max_pages=4096), Geometry.of_page_bytes(PAGE, 16))
    cache.reconfigure(
        0.0,
        Behaviour(),
        Budgets(0, 100 * PAGE, 100 * 2 * PAGE, ("data0",)),
        l2_slots=100,
    )
    return cache


def adopt(cache: Cache, parents: np.ndarray, count: int) -> np.ndarray:
    numbers = np.arange(count, dtype=np.uint32)
    return cache.adopt(
        KEYS[:count], parents[:count], numbers * 16, numbers.astype(np.uint64), numbers
    )


def test_a_leaf_knows_its_ancestors_after_a_restart():
    cache = make()
    parents = np.concatenate([np.zeros((1, 16), np.uint8), KEYS[:9]])
    assert adopt(cache, parents, 10).all()
    rows = cache.table.lookup(KEYS[:10])
    assert cache.shelves.ancestors(int(rows[9])).tolist() == rows[8::-1].tolist()


@pytest.mark.parametrize("length", [1, 2, 7])
def test_pages_that_are_each_others_parents_are_walked_once(length):
    cache = make()
    adopt(cache, np.roll(KEYS[:length], 1, axis=0), length)
    rows = cache.table.lookup(KEYS[:length])
    assert sorted(cache.shelves.ancestors(int(rows[0]))) == sorted(rows[1:])


def test_a_walk_into_a_ring_ends():
    cache = make()
    parents = np.concatenate([KEYS[1:4], KEYS[1:2]])  # 0 -> 1 -> 2 -> 3 -> 1
    adopt(cache, parents, 4)
    rows = cache.table.lookup(KEYS[:4])
    assert cache.shelves.ancestors(int(rows[0])).tolist() == rows[1:].tolist()


def test_pages_without_memory_for_their_records_leave_their_slots_free(monkeypatch):
    cache = make()

    def no_memory(_):
        raise TableError("no memory for the page table")

    with monkeypatch.context() as patch:
        patch.setattr(cache.table, "grow_for", no_memory)
        assert not adopt(cache, KEYS[::-1], 10).any()
    check_books(cache)
    assert adopt(cache, KEYS[::-1], 10).all()


def test_of_more_pages_than_there_are_records_the_newest_are_kept():
    cache = make()
    room = cache.table.max_pages - 10  # the table is nearly full
    chance = np.random.default_rng(9)
    others = cache.table.insert(chance.integers(0, 256, (room, 16), dtype=np.uint8))
    cache.table.set_state(others, State.WRITING)
    taken = adopt(cache, KEYS[::-1], 40)
    assert taken.tolist() == [False] * 30 + [True] * 10


def test_a_segment_is_tested_in_steps_and_a_failure_is_tried_again_ever_more_rarely():
    quarantine = Quarantine()
    quarantine.add(0.0, 7, 3)
    assert quarantine.next_due() == FIRST_TEST_SECONDS
    assert quarantine.due(FIRST_TEST_SECONDS) == [(7, 3, 0)]
    assert quarantine.next_due() is None, "a step is under way"
    quarantine.step(6.0, 7, 3, 4, ok=True)
    assert quarantine.due(6.0) == [(7, 3, 4)]
    now, pauses = 6.0, []
    for _ in range(6):
        quarantine.step(now, 7, 3, 1, ok=False)
        pauses.append(quarantine.next_due() - now)
        now += pauses[-1]
        ((_, _, slot),) = quarantine.due(now)
    assert slot == 4 + 6
    assert pauses == sorted(pauses)
    assert pauses[0] > FIRST_TEST_SECONDS
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    quarantine.end(7, 2)  # of another use of the segment
    quarantine.step(now, 7, 3, 1, ok=True)
    quarantine.end(7, 3)
    assert quarantine.next_due() is None


def test_a_reader_waits_for_a_rebuild_and_does_not_look_into_it(tmp_path):
    table = PageTable(tmp_path / "table", max_pages=4096)
    rows = table.insert(KEYS)
    table.set_state(rows, State.WRITING)
    reader = TableReader(tmp_path / "table")
    table.header["index_seq"] += np.uint64(1)
    held = table.index[:8192].copy()
    table.index[:8192] = 0  # a probe would never find an end in this

    def finish():
        time.sleep(0.1)
        table.index[:8192] = held
        table.header["index_seq"] += np.uint64(1)

    writer = threading.Thread(target=finish)
    writer.start()
    assert (reader.lookup(KEYS)["state"] == State.WRITING).all()
    writer.join()
    table.close()


def test_of_pages_found_more_than_once_the_last_counts():
    chance = np.random.default_rng(5)
    for count in (0, 1, 2, 50, 400):
        pairs = chance.integers(0, 12, (count, 2)).astype(np.uint64)
        last = {tuple(pair): i for i, pair in enumerate(pairs.tolist())}
        expected = [last[tuple(pair)] == i for i, pair in enumerate(pairs.tolist())]
        assert lasts(pairs).tolist() == expected
