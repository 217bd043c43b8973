"""The page table: index, records, growth, transitions, and readers in another process."""

import subprocess
import sys

import numpy as np
import pytest
from kvtier_agent.cache.index_hash import MOST_PROBES, home
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import (
    NO_ROW,
    RECORD,
    TRANSITIONS,
    State,
    StateError,
    as_u64_pairs,
)
from kvtier_agent.cache.table_reader import TableReader
from kvtier_agent.cache.table_view import TableError


def keys(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def alike_keys(count: int) -> np.ndarray:
    """The first half of all is the same."""
    out = np.zeros((count, 16), dtype=np.uint8)
    out[:, 8:12] = np.arange(count, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return out


def clashing_keys(table: PageTable, count: int, places: int = 1) -> np.ndarray:
    """Chosen against the table's seed: all searches begin at the first places of the index."""
    seed, slots = int(table.header["hash_seed"][0]), int(table.header["index_slots"][0])
    found: list[np.ndarray] = []
    for number in range(10_000):
        some = keys(1_000_000 + number, 1 << 16)  # none that a test takes itself
        found.append(some[home(as_u64_pairs(some), seed, slots) < places])
        if sum(map(len, found)) >= count:
            return np.concatenate(found)[:count]
    raise AssertionError("none found")


def store(table: PageTable, some: np.ndarray) -> np.ndarray:
    rows = table.insert(some)
    table.set_state(rows, State.WRITING)
    return rows


def _patch(path, offset: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[offset : offset + len(data)] = data
    path.write_bytes(whole)


def test_a_record_is_128_bytes():
    assert RECORD.itemsize == 128


@pytest.mark.parametrize("make", [lambda n: keys(3, n), alike_keys])
def test_what_is_inserted_is_found_and_what_is_removed_is_not(make):
    table = PageTable(max_pages=2000)
    some = make(1000)
    assert (table.lookup(some) == NO_ROW).all()
    rows = store(table, some)
    assert len(set(rows.tolist())) == 1000
    assert (table.lookup(some) == rows).all()
    gone = rows[::3]
    table.unlink(gone)
    table.free(gone)
    kept = np.ones(1000, dtype=bool)
    kept[::3] = False
    found = table.lookup(some)
    assert (found[kept] == rows[kept]).all()
    assert (found[~kept] == NO_ROW).all()
    assert table.pages == kept.sum()


def test_keys_chosen_to_clash_are_stored_and_found_under_another_seed():
    table = PageTable(max_pages=5000)
    others = keys(1, 500)
    rows = store(table, others)
    seed = int(table.header["hash_seed"][0])
    chosen = clashing_keys(table, 1000, places=2)
    at_once = store(table, chosen[:700])
    assert int(table.header["hash_seed"][0]) != seed
    assert int(table.header["index_seq"][0]) % 2 == 0
    assert (table.lookup(others) == rows).all()
    assert (table.lookup(chosen[:700]) == at_once).all()
    table.unlink(at_once[::2])
    table.free(at_once[::2])
    later = store(table, chosen[700:])
    assert (table.lookup(chosen[700:]) == later).all()
    assert (table.lookup(chosen[:700:2]) == NO_ROW).all()
    assert (table.lookup(others) == rows).all()


def test_keys_that_clash_one_by_one_are_met_before_a_search_gets_long():
    table = PageTable(max_pages=2000)
    seed = int(table.header["hash_seed"][0])
    chosen = clashing_keys(table, MOST_PROBES + 1)
    for i in range(len(chosen)):
        store(table, chosen[i : i + 1])
    assert int(table.header["hash_seed"][0]) != seed
    assert (table.lookup(chosen) != NO_ROW).all()


def test_against_a_dictionary_through_tombstones_and_growth():
    table = PageTable(max_pages=1 << 14)
    rng = np.random.default_rng(7)
    pool = keys(11, 12_000)
    held: dict[int, int] = {}
    for _ in range(300):
        pick = rng.choice(len(pool), 200, replace=False)
        new = np.array([i for i in pick if i not in held][:150], dtype=int)
        rows = store(table, pool[new])
        held.update(zip(new.tolist(), rows.tolist(), strict=True))
        drop = rng.choice(list(held), min(len(held), 120), replace=False)
        rows = np.array([held.pop(i) for i in drop], dtype=np.uint32)
        table.unlink(rows)
        table.free(rows)
        found = table.lookup(pool[pick])
        assert found.tolist() == [held.get(int(i), NO_ROW) for i in pick]
    assert table.pages == len(held)
    assert table.capacity > 4096


def test_a_full_table_says_so_and_stays_whole():
    table = PageTable(max_pages=100)
    rows = store(table, keys(1, 100))
    with pytest.raises(TableError, match="full at 100 pages"):
        table.insert(keys(2, 1))
    assert (table.lookup(keys(1, 100)) == rows).all()


def test_states_move_along_the_table_only():
    allowed = {(old, new) for old, news in TRANSITIONS.items() for new in news}
    for old in State:
        for new in State:
            table = PageTable(max_pages=16)
            row = table.insert(keys(1, 1))
            table.state[row] = old
            if (old, new) in allowed:
                table.set_state(row, new)
                assert table.state[row[0]] == new
            else:
                with pytest.raises(StateError, match=f"{old.name} -> {new.name}"):
                    table.set_state(row, new)
                assert table.state[row[0]] == old


def test_a_reader_sees_what_the_writer_did(tmp_path):
    path = tmp_path / "table"
    table = PageTable(path, max_pages=1 << 13, boot_id=b"boot-id-16-bytes")
    reader = TableReader(path)
    assert reader.boot_id == b"boot-id-16-bytes"
    some = keys(5, 6000)  # past the first capacity: the index moved under the reader
    rows = store(table, some)
    table.depth[rows] = np.arange(6000)
    records = reader.lookup(some[:1024])
    assert (records["state"] == State.WRITING).all()
    assert (records["depth"] == np.arange(1024)).all()
    assert (reader.lookup(keys(6, 10))["state"] == State.FREE).all()
    assert len(reader.scan()) == 6000
    table.close()
    assert not path.exists()
    assert len(reader.scan()) == 6000  # who mapped it keeps it


def test_a_reader_never_shows_a_half_written_record(tmp_path):
    """A process changes two fields of its records together, again and again; a reader never sees
    one without the other."""
    path = tmp_path / "table"
    writer = (
        "import sys, time, numpy as np\n"
        "from pathlib import Path\n"
        "from kvtier_agent.cache.page_table import PageTable\n"
        "from kvtier_agent.cache.record import State\n"
        "table = PageTable(Path(sys.argv[1]), max_pages=256)\n"
        "some = np.arange(64 * 16, dtype=np.uint16).astype(np.uint8).reshape(64, 16)\n"
        "some[:, 0] = np.arange(64)\n"
        "rows = table.insert(some)\n"
        "table.set_state(rows, State.WRITING)\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 1.0\n"
        "value = 0\n"
        "while time.monotonic() < end:\n"
        "    value += 1\n"
        "    with table.changing(rows):\n"
        "        table.checksum[rows] = value\n"
        "        table.depth[rows] = value\n"
        "print(value, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", writer, str(path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "ready\n"
        reader = TableReader(path)
        seen = set()
        while process.poll() is None:
            records = reader.scan(attempts=10_000)
            assert (records["checksum"] == records["depth"]).all()
            seen.update(records["depth"].tolist())
            if len(seen) > 1 and process.stdout.readable() and reader.scan().size:
                break
        assert len(seen) > 1
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("damage", "says"), [
    (lambda p: p.write_bytes(b"hello"), "too short"),
    (lambda p: p.write_bytes(bytes(8192)), "no page table of kvtier"),
    (lambda p: p.write_bytes(p.read_bytes()[:5000]), "cut short"),
    (lambda p: _patch(p, 8, b"\x09"), "layout version 9"),
    (lambda p: p.unlink(), "cannot open"),
])  # fmt: skip
def test_a_file_that_is_no_table_is_refused_in_a_sentence(tmp_path, damage, says):
    path = tmp_path / "table"
    table = PageTable(path, max_pages=64)
    damage(path)
    with pytest.raises(TableError, match=says):
        TableReader(path)
    table.close()


def test_the_files_mode_lets_the_group_read(tmp_path):
    table = PageTable(tmp_path / "table", max_pages=64)
    assert (tmp_path / "table").stat().st_mode & 0o777 == 0o640
    table.close()


@pytest.mark.parametrize("start", [0, 5000, "end"], ids=str)
def test_long_clusters_holes_and_the_end_of_the_index(start: int | str) -> None:
    """A hundred keys that all want the same slot, among them removed ones and absent ones."""
    table = PageTable(None, max_pages=4096)
    slots = int(table.header["index_slots"][0])
    wanted = slots - 1 if start == "end" else int(start)
    pairs = np.zeros((200, 2), dtype=np.uint64)
    pairs[:, 0] = wanted
    pairs[:, 1] = np.arange(200)
    pairs[::2, 0] += np.uint64(slots) * np.arange(100, dtype=np.uint64)
    here, absent = pairs[:150], pairs[150:]
    rows = table.insert(here.view(np.uint8))
    table.set_state(rows, State.WRITING)
    gone = np.arange(0, 150, 7)
    table.unlink(rows[gone])
    expected = rows.copy()
    expected[gone] = NO_ROW
    for asked, wanted_rows in (
        (here, expected),
        (absent, np.full(50, NO_ROW, dtype=np.uint32)),
        (pairs[::-1], np.concatenate([np.full(50, NO_ROW, dtype=np.uint32), expected[::-1]])),
        (here[149:], expected[149:]),
    ):
        assert table.find(np.ascontiguousarray(asked)).tolist() == wanted_rows.tolist()
