"""A power cut under `async` keeps pages from their slots though the journal has them. They are
misses, counted apart, and no reason to suspect a drive; anything else that is wrong is."""

import numpy as np
import pytest
from agents_in_turn import GEOMETRY, KEYS, PAGE, put, right, settle
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.cache.record import as_bytes_keys
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage import recovery
from kvtier_agent.storage.segment import HEADER_BYTES, PageStamp

OK, BAD, UNWRITTEN = MoveStatus.OK, MoveStatus.BAD_PAGE, MoveStatus.UNWRITTEN


def segment_of(one):
    (path,) = one.folder.glob("segment-*")
    return path


def put_back(path, stride, slot, what):
    """As if the write to the slot had not reached the drive."""
    with path.open("r+b") as file:
        file.seek(slot * stride)
        file.write(what)


@pytest.fixture
def after_a_cut(make_l2):
    """Three pages whose slot 1 lost the write; `what`: is there instead."""

    def build(what, *, durability="async"):
        one = make_l2(durability=durability)
        recovery.recover(one.l2)
        assert (one.write([0, 1, 2])[0] == OK).all()
        one.l2.close()
        put_back(segment_of(one), one.l2.stride, 1, what)
        again = make_l2(durability=durability)
        assert recovery.recover(again.l2).slots.tolist() == [0, 1, 2]
        return again

    return build


def test_a_blank_slot_was_never_written(after_a_cut):
    one = after_a_cut(bytes(HEADER_BYTES))
    status, error, _ = one.read([0, 1, 2])
    assert status.tolist() == [OK, UNWRITTEN, OK]
    assert error == "1 pages failed verification"


def test_a_payload_that_arrived_without_its_header_is_of_no_use(after_a_cut):
    one = after_a_cut(bytes(HEADER_BYTES) + b"payload")
    assert one.read([1])[0].tolist() == [UNWRITTEN]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(b"\x01" + bytes(HEADER_BYTES - 1), id="rubbish"),
        pytest.param(bytes(HEADER_BYTES - 1) + b"\x01", id="nearly blank"),
        pytest.param(b"\x00", id="a header with a wrong byte"),
    ],
)
def test_anything_else_is_a_bad_page(after_a_cut, what):
    assert after_a_cut(what).read([0, 1, 2])[0].tolist() == [OK, BAD, OK]


def test_under_sync_a_blank_slot_is_a_drive_that_lied(after_a_cut):
    one = after_a_cut(bytes(HEADER_BYTES), durability="sync")
    assert one.read([0, 1, 2])[0].tolist() == [OK, BAD, OK]


def test_what_this_process_wrote_cannot_be_blank(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1, 2])
    put_back(segment_of(one), one.l2.stride, 1, bytes(HEADER_BYTES))
    assert one.read([0, 1, 2])[0].tolist() == [OK, BAD, OK]


@pytest.mark.parametrize("broken", [False, True])
def test_the_page_of_the_segments_last_use_is_still_there(make_l2, broken):
    one = make_l2()
    recovery.recover(one.l2)
    rows = np.arange(3, dtype=np.uint32)
    one.write(rows)
    first = segment_of(one).read_bytes()[one.l2.stride : 2 * one.l2.stride]
    others = rows + np.uint32(10)
    stamp = PageStamp(one.keys[others], one.keys[others], others, one.sums[others])
    uses = (np.ones(3, dtype=np.uint32), np.full(3, 3, dtype=np.uint32))
    assert (one.l2.write(rows, stamp, one.arena, others, uses)[0] == OK).all()
    one.l2.close()
    if broken:
        first = first[:40] + bytes([first[40] ^ 1]) + first[41:]
    put_back(segment_of(one), one.l2.stride, 1, first)
    again = make_l2()
    recovery.recover(again.l2)
    expected = [OK, BAD if broken else UNWRITTEN, OK]
    assert again.read([0, 1, 2], rows=[10, 11, 12])[0].tolist() == expected


PAGES = list(range(30))


@pytest.fixture
def cut(node):
    """A power cut kept three pages from their slots; these, and the others that L2 has."""
    core = node.start(l1=4, l2=60)
    put(core, PAGES)
    held = in_l2(core)
    node.stop()
    path = min((node.folder / "data0").rglob("segment-*"))
    for slot in range(3):
        put_back(path, PAGE + HEADER_BYTES, slot, bytes(HEADER_BYTES))
    core = node.start(l1=4, l2=60, keep_memory=False)
    core.register(1.0, GEOMETRY)
    assert in_l2(core) == held
    return held[:3], held[3:]


def in_l2(core):
    """Which pages lie in L2, in the order in which they were written."""
    table = core.table
    rows = table.live_rows()
    rows = rows[table.tiers[rows] & 4 != 0]
    keys = as_bytes_keys(table.key[rows[np.argsort(table.l2_slot[rows])]])
    return [int(np.flatnonzero((key == KEYS).all(axis=1))[0]) for key in keys]


def test_their_segment_is_not_suspect_and_the_rest_of_it_serves(node, cut):
    (lost, others), core = cut, node.core
    assert right(core, lost) == []
    assert right(core, others) == others
    counters = core.cache.counters
    assert counters.unwritten_pages == 3
    assert counters.quarantined_pages == counters.quarantined_slots == 0
    assert counters.suspected_segments == 0
    assert core.cache.snapshot(3.0).suspected_segments == 0
    check_books(core.cache)
    put(core, lost)
    assert right(core, lost) == lost
    check_books(core.cache)


def test_compaction_meets_them_too(node, cut):
    (lost, _), core = cut, node.core
    core.reconfigure(3.0, *node.revision(l1=4, l2=20))  # less than there is: segments are emptied
    for now in range(3, 40):
        core.cache.tick(float(now))
        settle(core)
    assert core.cache.snapshot(40.0).tiers[2].pages <= 20
    counters = core.cache.counters
    assert counters.suspected_segments == counters.quarantined_pages == 0
    assert right(core, lost) == []
    check_books(core.cache)
