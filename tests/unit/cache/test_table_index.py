"""The index of the page table: the native extension and numpy give the same answers, and what the
one wrote the other reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_agent import native
from kvtier_agent.cache.index_hash import EARLY_PROBES, MOST_PROBES, home
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import NO_ROW, State, as_u64_pairs
from kvtier_agent.cache.table_index import NativeIndex, NumpyIndex, TableIndex
from kvtier_agent.cache.table_reader import TableReader
from kvtier_agent.cache.table_view import index_layout

needs_extension = pytest.mark.skipif(
    native.NATIVE is None, reason=f"without the extension: {native.WHY_NOT}"
)
ROOM = 200
SEED = 7


def by_numpy(table: PageTable) -> NumpyIndex:
    return NumpyIndex(table._buffer, index_layout(table.max_pages))


def by_extension(table: PageTable) -> NativeIndex:
    return NativeIndex(native.NATIVE, table._buffer, index_layout(table.max_pages))


def both(table: PageTable) -> list[TableIndex]:
    return [by_numpy(table), by_extension(table)]


def crowding_keys(slots: int, wanted: int) -> np.ndarray:
    """Keys (wanted, 2) uint64, many of them with the same few homes in an index of `slots`."""
    some = np.random.default_rng(5).integers(0, 1 << 63, (1 << 14, 2)).astype(np.uint64)
    first = home(some, SEED, slots) % 16
    few = some[first < 2][: wanted // 2]
    return np.concatenate([few, some[first >= 2][: wanted - len(few)]])


SLOTS = 1 << (2 * ROOM - 1).bit_length()
KEYS = crowding_keys(SLOTS, 240)
batches = st.lists(
    st.tuples(
        st.sampled_from(["put", "drop"]),
        st.lists(st.integers(0, len(KEYS) - 1), unique=True, max_size=80),
    ),
    max_size=12,
)


@needs_extension
@settings(max_examples=150, deadline=None)
@given(steps=batches, asked=st.lists(st.integers(0, len(KEYS) - 1), max_size=300))
def test_both_tell_the_same_story_whoever_wrote_it(
    steps: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    tables = [PageTable(max_pages=ROOM) for _ in range(2)]
    for table, make in zip(tables, (by_numpy, by_extension), strict=True):
        table.header["hash_seed"] = SEED
        table._index = make(table)
    held: dict[int, int] = {}
    for what, named in steps:
        if what == "put":
            fresh = [one for one in named if one not in held][: ROOM - len(held)]
            rows = [table.insert(KEYS[fresh].view(np.uint8)) for table in tables]
            assert rows[0].tolist() == rows[1].tolist()
            for table in tables:
                table.set_state(rows[0], State.WRITING)
            held.update(zip(fresh, rows[0].tolist(), strict=True))
        else:
            gone = np.array([held.pop(one) for one in named if one in held], dtype=np.uint32)
            for table in tables:
                table.unlink(gone)
                table.free(gone)
        assert tables[0]._tombs == tables[1]._tombs or tables[0].pages == 0
    wanted = [held.get(one, NO_ROW) for one in asked]
    states = [State.WRITING if one in held else State.FREE for one in asked]
    pairs = KEYS[asked]
    for table in tables:
        for index in both(table):
            assert index.find(pairs).tolist() == wanted
            assert index.states(pairs).tolist() == states


@needs_extension
@pytest.mark.parametrize("count", [1, 31, 32, 33, 1024, 20_000])
def test_batches_of_any_size(count: int) -> None:
    table = PageTable(max_pages=1 << 15)
    rng = np.random.default_rng(count)
    keys = rng.integers(0, 256, (count, 16), dtype=np.uint8)
    rows = table.insert(keys[: count // 2 + 1])
    table.state[rows] = rng.integers(1, 9, len(rows))
    pairs = as_u64_pairs(keys)
    expected = np.full(count, NO_ROW, dtype=np.uint32)
    expected[: len(rows)] = rows
    for index in both(table):
        assert (index.find(pairs) == expected).all()
        found = index.states(pairs)
        assert (found[: len(rows)] == table.state[rows]).all()
        assert not found[len(rows) :].any()


@pytest.mark.parametrize("make", [by_numpy, pytest.param(by_extension, marks=needs_extension)])
def test_a_crowd_is_given_up_unless_one_is_patient(make) -> None:
    table = PageTable(max_pages=4096)
    table.header["hash_seed"] = SEED
    slots = int(table.header["index_slots"][0])
    index = make(table)
    rng = np.random.default_rng(1)
    some = rng.integers(0, 1 << 63, (1 << 20, 2)).astype(np.uint64)
    same = some[home(some, SEED, slots) < 2]
    assert len(same) > EARLY_PROBES + 100
    rows = np.arange(len(same), dtype=np.uint32)
    table.key[rows] = same
    few = rows[: EARLY_PROBES + 60]  # fewer than may be late
    assert index.link(few, patient=False) == (True, 0)
    done, tombs = index.link(rows[len(few) :], patient=False)
    assert not done
    assert not tombs
    table.index[:slots] = 0xFFFFFFFF
    assert index.link(rows, patient=True) == (True, 0)
    assert (index.find(same) == rows).all()
    index.unlink(rows[::2])
    assert (index.find(same[::2]) == NO_ROW).all()
    assert (index.find(same[1::2]) == rows[1::2]).all()
    assert index.link(rows[::2], patient=True) == (True, len(rows[::2]))


@pytest.mark.parametrize("make", [by_numpy, pytest.param(by_extension, marks=needs_extension)])
def test_one_that_finds_no_place_within_bounds_is_given_up(make) -> None:
    table = PageTable(max_pages=4096)
    slots = int(table.header["index_slots"][0])
    seed = int(table.header["hash_seed"][0])
    key = np.random.default_rng(2).integers(0, 1 << 63, (1, 2)).astype(np.uint64)
    start = int(home(key, seed, slots)[0])
    for steps, placed in ((MOST_PROBES - 1, True), (MOST_PROBES, False)):
        table.index[:slots] = 0xFFFFFFFF
        table.index[(start + np.arange(steps)) % slots] = 9  # others
        table.key[0] = key
        assert make(table).link(np.zeros(1, np.uint32), patient=False) == (placed, 0)


@pytest.mark.parametrize("make", [by_numpy, pytest.param(by_extension, marks=needs_extension)])
def test_a_row_that_is_not_in_it_cannot_leave_it(make) -> None:
    table = PageTable(max_pages=64)
    rows = table.insert(np.arange(32, dtype=np.uint8).reshape(2, 16))
    index = make(table)
    index.unlink(rows[:1])
    with pytest.raises(AssertionError, match="not in the index"):
        index.unlink(rows[:1])


@needs_extension
def test_the_extension_looks_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = PageTable(path, max_pages=64)
    index = by_extension(table)
    bare = index._find.__self__
    rows = np.empty(2, np.uint32)
    keys = np.zeros((2, 2), np.uint64)
    with pytest.raises(ValueError, match="16 bytes each"):
        bare.find(np.zeros(17, np.uint8), rows)
    with pytest.raises(ValueError, match="2 elements of 4 bytes"):
        bare.find(keys, np.empty(3, np.uint32))
    with pytest.raises(ValueError, match="2 elements of 4 bytes"):
        bare.find(keys, np.empty(2, np.uint64))
    with pytest.raises(ValueError, match="overlap"):
        bare.find(keys, keys.view(np.uint32).reshape(-1)[:2])
    with pytest.raises(IndexError, match="no byte 128"):
        bare.bytes(keys, 128, np.empty(2, np.uint8))
    with pytest.raises(IndexError, match="row 64 of a table of 64 pages"):
        index.link(np.array([64], np.uint32), patient=True)
    table.index[: int(table.header["index_slots"][0])] = 70  # a row that there is not
    assert index.find(keys).tolist() == [NO_ROW, NO_ROW]
    with pytest.raises(RuntimeError, match="full"):
        index.link(np.zeros(1, np.uint32), patient=True)
    reader = TableReader(path)
    with pytest.raises(ValueError, match="may only read"):
        by_extension(reader).unlink(np.zeros(1, np.uint32))  # type: ignore[arg-type]
    for slots in (0, 3, 1 << 40):
        table.header["index_slots"] = slots
        with pytest.raises(IndexError, match=f"index has {slots} slots"):
            index.find(keys)
    table.close()
