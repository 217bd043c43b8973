"""Pages through rings: a batch ends as it does by calls, and nothing is given back too early."""

import errno
import mmap
import threading
from pathlib import Path

import leftovers
import numpy as np
import pytest
import structlog
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier_agent.cache.arena import ShmArena
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus
from kvtier_agent.storage import drive_ring, recovery
from kvtier_agent.storage import l2 as l2_module
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.flights import HANG_SECONDS, STALL_SECONDS, Flights, flights_if_any
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import HEADER_BYTES, PageStamp
from kvtier_agent.storage.settings import CoreSettings
from kvtier_agent.storage.volume import Volume
from ring_faults import SHORT, RingFaultIO, why_no_ring

pytestmark = pytest.mark.skipif(bool(why_no_ring()), reason=why_no_ring())

PAGE = 8192
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
PAGES = 24
"""Rows of the arena with pages; as many behind them are read into."""
SLOTS = 60
OK, BAD, IO_ERROR = MoveStatus.OK, MoveStatus.BAD_PAGE, MoveStatus.IO_ERROR


class Stand:
    """An arena, an L2 on volumes in memory, and its flights, with a clock of the test's."""

    def __init__(self, folder, *, volumes=1, move_bytes=1 << 20):
        self.io = RingFaultIO()
        self.now = 0.0
        self.arena = ShmArena(folder / "arena", 1 << 22)
        self.arena.back_slots(np.arange(2 * PAGES, dtype=np.uint32), PAGE)
        self.rows = self.arena.rows(PAGE)
        for i in range(PAGES):
            self.rows[i] = np.random.default_rng(i).integers(0, 256, PAGE, dtype=np.uint8)
        self.pages = self.rows[:PAGES].copy()
        self.keys = np.random.default_rng(99).integers(0, 256, (PAGES, 16), dtype=np.uint8)
        self.sums = np.array([xxhash.xxh3_64_intdigest(p) for p in self.pages], dtype=np.uint64)
        self.volumes = []
        for i in range(volumes):
            (folder / f"data{i}").mkdir()
            self.volumes.append(
                Volume(f"data{i}", folder / f"data{i}", "d", allow_root_filesystem=True, io=self.io)
            )
        self.l2 = self.new_l2()
        self.flights = Flights(
            self.io, self.arena, lambda: self.l2, move_bytes=move_bytes, in_flight_bytes=1 << 20,
            clock=lambda: self.now,
        )  # fmt: skip
        self.delivered = {}
        self.more = threading.Event()
        self.flights.deliver = self._deliver
        self._next = 0

    def new_l2(self):
        l2 = L2(list(self.volumes), GEOMETRY, io=self.io)
        recovery.recover(l2)
        l2.limit(SLOTS * l2.stride + (1 << 16), 0, "async")
        return l2

    def _deliver(self, move, outcome):
        assert move.id not in self.delivered, "delivered twice"
        self.delivered[move.id] = outcome

    def move(self, kind, slots, rows, pages):
        self._next += 1
        slots, rows = np.array(slots, np.uint32), np.array(rows, np.uint32)
        source, target = (rows, slots) if kind is MoveKind.WRITE else (slots, rows)
        zeros = np.zeros(len(slots), np.uint32)
        return Move(
            self._next, kind, rows, source, target, self.keys[pages], self.keys[pages],
            self.sums[pages], zeros, zeros, zeros + SLOTS, PAGE, PAGE, 0.0,
        )  # fmt: skip

    def launch(self, kind, slots, pages, rows=None):
        """The move's number, once it has been begun."""
        move = self.move(kind, slots, pages if rows is None else rows, pages)
        assert self.flights.launch(move, patient=True)
        return move.id

    def wait(self, number):
        """Statuses of a move that was begun."""
        for _ in range(200):
            if number in self.delivered:
                outcome = self.delivered[number]
                return outcome.status.tolist()
            self.flights.round(0.5)
        raise AssertionError("it was not delivered")

    def write(self, slots, pages):
        return self.wait(self.launch(MoveKind.WRITE, slots, pages))

    def read(self, slots, pages):
        """Statuses, and the rows that were read into."""
        rows = np.arange(PAGES, PAGES + len(slots))
        self.rows[rows] = 0
        return self.wait(self.launch(MoveKind.READ, slots, pages, rows)), self.rows[rows]

    def oracle_write(self, slots, pages):
        stamp = PageStamp(
            self.keys[pages], self.keys[pages], np.zeros(len(pages), np.uint32), self.sums[pages]
        )
        rows = np.array(pages, np.uint32)
        return self.l2.write(np.array(slots, np.uint32), stamp, self.rows, rows)[0].tolist()

    def oracle_read(self, slots, pages):
        into = np.arange(PAGES, PAGES + len(slots), dtype=np.uint32)
        self.rows[into] = 0
        slots = np.array(slots, np.uint32)
        status, _ = self.l2.read(slots, self.keys[pages], self.sums[pages], self.rows, into)
        return status.tolist(), self.rows[into]

    def close(self):
        for ring in self.io.rings:
            ring.let_go()
        self.flights.close(30)
        self.l2.close()
        for volume in self.volumes:
            volume.close()
        self.arena.close()


@pytest.fixture
def make(monkeypatch):
    """Builds stands whose segments have 12 slots."""
    monkeypatch.setattr(l2_module, "slots_per_segment", lambda stride: 12)
    made = []
    with leftovers.folder_in_memory() as folder:

        def build(**options):
            place = Path(folder) / str(len(made))
            place.mkdir()
            made.append(Stand(place, **options))
            return made[-1]

        yield build
        for one in made:
            one.close()


def in_slots(draw_slots):
    return st.lists(draw_slots, min_size=1, max_size=PAGES, unique=True)


@given(data=st.data())
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_what_is_written_one_way_is_read_the_other(make, data):
    one = make(volumes=data.draw(st.sampled_from([1, 2])))
    slots = data.draw(in_slots(st.integers(0, SLOTS - 13)))
    if data.draw(st.booleans()):
        slots = sorted(slots)
    pages = data.draw(st.permutations(range(PAGES)))[: len(slots)]
    way = [(one.write, one.oracle_read), (one.oracle_write, one.read), (one.write, one.read)]
    write, read = data.draw(st.sampled_from(way))
    assert write(slots, pages) == [OK] * len(slots)
    status, rows = read(slots, pages)
    assert status == [OK] * len(slots)
    assert (rows == one.pages[pages]).all()
    # What the journal was told is what is there.
    one.l2.close()
    one.l2 = L2(list(one.volumes), GEOMETRY, io=one.io)
    found = recovery.recover(one.l2)
    assert sorted(found.slots.tolist()) == sorted(slots)
    assert one.flights._trays._free, "a tray was not given back"


@pytest.mark.parametrize(("fault", "expected"), [
    (errno.EIO, IO_ERROR), (SHORT, IO_ERROR), (errno.ECANCELED, MoveStatus.CANCELLED),
    (errno.EAGAIN, OK), (errno.EINVAL, OK),
])  # fmt: skip
def test_a_fault_of_a_read_costs_the_page_it_hit(make, fault, expected):
    one = make()
    pages = [0, 1, 2, 3]
    one.write([0, 1, 5, 13], pages)
    one.io.reads = [fault]
    status, rows = one.read([0, 1, 5, 13], pages)
    assert sorted(status) == sorted([OK] * 3 + [expected])
    for i in np.flatnonzero(np.array(status) == OK):
        assert (rows[i] == one.pages[pages[i]]).all()
    again = fault in (errno.EAGAIN, errno.EINVAL)
    assert one.io.calls == (1 if again else 0), "what the ring sent back goes by a call, once"
    counted = {errno.EIO: [("read", "EIO")], SHORT: [("read", "short")]}
    assert one.io.seen == counted.get(fault, [])


@pytest.mark.parametrize(("fault", "expected", "trouble"), [
    (errno.EIO, IO_ERROR, "VolumeUnusable"), (SHORT, IO_ERROR, "VolumeUnusable"),
    (errno.ENOSPC, MoveStatus.NO_SPACE, "VolumeFull"),
    (errno.EROFS, MoveStatus.READ_ONLY, "VolumeReadOnly"),
    (errno.ECANCELED, MoveStatus.CANCELLED, ""), (errno.EAGAIN, OK, ""),
])  # fmt: skip
def test_a_fault_of_a_write_costs_the_page_it_hit(make, fault, expected, trouble):
    one = make()
    slots, pages = [0, 1, 2, 3], [4, 5, 6, 7]
    one.io.writes = [fault]
    status = one.write(slots, pages)
    assert sorted(status) == sorted([OK] * 3 + [expected])
    good = [i for i in range(4) if status[i] == OK]
    health = one.volumes[0].health.trouble
    assert (health.reason if health else "") == trouble
    one.l2.close()
    one.l2 = L2(list(one.volumes), GEOMETRY, io=one.io)
    assert sorted(recovery.recover(one.l2).slots.tolist()) == [slots[i] for i in good]
    status, rows = one.read([slots[i] for i in good], [pages[i] for i in good])
    assert status == [OK] * len(good)
    assert (rows == one.pages[[pages[i] for i in good]]).all()


def test_bytes_that_do_not_match_are_never_written(make):
    one = make()
    one.rows[1, 100] ^= 1
    assert one.write([0, 1, 2], [0, 1, 2]) == [OK, BAD, OK]
    assert one.read([0, 1, 2], [0, 1, 2])[0] == [OK, BAD, OK]


@pytest.mark.parametrize("offset", [0, 16, 60, HEADER_BYTES, HEADER_BYTES + PAGE - 1])
def test_a_flipped_bit_of_header_or_payload_is_a_bad_page(make, offset):
    one = make()
    one.write([4, 5, 6], [4, 5, 6])
    path = next(one.volumes[0].folder.glob("segment-*"))
    with path.open("r+b") as file:
        file.seek(5 * one.l2.stride + offset)
        byte = file.read(1)
        file.seek(5 * one.l2.stride + offset)
        file.write(bytes([byte[0] ^ 1]))
    status, rows = one.read([4, 5, 6], [4, 5, 6])
    assert status == [OK, BAD, OK]
    assert (rows[[0, 2]] == one.pages[[4, 6]]).all()
    assert one.read([4], [7])[0] == [BAD], "another page's key"


def test_a_segment_that_is_gone_is_an_outcome(make):
    one = make()
    one.write([0, 13], [0, 1])
    one.l2.give_back(np.array([1], np.uint32))
    assert one.read([0, 13], [0, 1])[0] == [OK, IO_ERROR]
    assert one.read([40], [0])[0] == [IO_ERROR]


def test_a_drive_that_hangs_keeps_its_slots_and_nobody_else(make):
    one = make(volumes=2)
    one.write([0, 13], [0, 1])
    homes = [one.l2.segments[n][1] for n in (0, 1)]
    assert homes[0] is not homes[1]
    one.io.hangs = True
    hung = one.launch(MoveKind.READ, [0], [0], [PAGES])
    one.io.hangs = False
    for _ in range(3):
        assert one.read([13], [1])[0] == [OK]
    one.now += HANG_SECONDS + 2
    one.flights.round(0)
    assert hung not in one.delivered
    assert homes[0].health.trouble.message == "the drive does not answer"
    assert homes[1].health.trouble is None
    # Its volume leaves; the file stays open for as long as the drive may write to the arena.
    segment = one.l2.segments[0][0]
    assert one.l2.withdraw({homes[0].name}) == {0}
    assert segment.fd >= 0
    for ring in one.io.rings:
        ring.let_go()
    assert one.wait(hung) == [OK]
    assert (one.rows[PAGES] == one.pages[0]).all()
    assert segment.fd == -1
    homes[0].close()
    one.volumes.remove(homes[0])


def test_writes_that_hang_are_seen_though_reads_go_on(make):
    one = make(volumes=2)
    one.write([0, 13], [0, 1])
    homes = [one.l2.segments[n][1] for n in (0, 1)]
    one.io.hangs = True
    hung = one.launch(MoveKind.WRITE, [1, 14], [2, 3])
    one.io.hangs = False
    # The other volume's half of the same move is answered: what waits is not its fault.
    hanging = one.flights._rings.of(homes[0], patient=False).ring
    for ring in one.io.rings:
        if ring is not hanging:
            ring.let_go()
    with structlog.testing.capture_logs() as said:
        while one.now < 2 * HANG_SECONDS + 5:
            one.now += 1
            assert one.read([0, 13], [0, 1])[0] == [OK, OK]
    assert homes[0].health.trouble.message == "the drive does not answer"
    assert homes[1].health.trouble is None
    assert sum(entry["event"] == "a drive leaves transfers unanswered" for entry in said) == 2
    assert hung not in one.delivered
    # Nothing more is put behind what hangs; the other volume's pages are written.
    assert sorted(one.write([2, 15], [4, 5])) == [OK, MoveStatus.NO_SPACE]
    for ring in one.io.rings:
        ring.let_go()
    assert one.wait(hung) == [OK, OK]


def test_a_drive_that_answers_no_read_gets_no_more_of_them_meanwhile(make):
    one = make(volumes=2)
    one.write([0, 13], [0, 1])
    one.io.hangs = True
    hung = one.launch(MoveKind.READ, [0], [0], [2 * PAGES - 1])
    one.io.hangs = False
    one.now = 5.0
    assert one.read([0, 13], [0, 1])[0] == [OK, OK]
    one.now = 5.0 + STALL_SECONDS - 1
    one.flights.round(0)
    one.io.reads = [errno.ECANCELED]
    assert one.read([0], [0])[0] == [MoveStatus.CANCELLED], "it was asked, and this is no answer"
    one.now = 5.0 + STALL_SECONDS + 1
    one.flights.round(0)
    drive = one.flights._rings.of(one.l2.segments[0][1], patient=False)
    assert one.read([0, 13], [0, 1])[0] == [MoveStatus.CANCELLED, OK]
    assert drive.waiting == 1, "nothing is put behind what hangs"
    for ring in one.io.rings:
        ring.let_go()
    assert one.wait(hung) == [OK]
    one.now += 2
    one.flights.round(0)
    assert one.read([0, 13], [0, 1])[0] == [OK, OK]


def test_reads_beyond_the_trays_wait_for_one_and_keep_no_thread(make, monkeypatch):
    monkeypatch.setattr("kvtier_agent.storage.trays.MOST_TRAYS", 4)
    one = make()
    one.write(range(PAGES), range(PAGES))
    one.io.hangs = True
    numbers = [one.launch(MoveKind.READ, [i], [i], [PAGES + i]) for i in range(6)]
    one.io.hangs = False
    numbers += [one.launch(MoveKind.READ, [i], [i], [PAGES + i]) for i in range(6, PAGES)]
    one.flights.round(0)
    assert one.delivered.keys() == {1}, "all trays are out"
    one.io.rings[0].let_go()
    assert [one.wait(number) for number in numbers] == [[OK]] * PAGES
    assert (one.rows[PAGES : 2 * PAGES] == one.pages).all()
    assert one.io.calls == 0
    assert len(one.flights._trays._free) == 4


def test_what_waits_for_a_tray_goes_on_when_a_drive_answers_no_read(make, monkeypatch):
    monkeypatch.setattr("kvtier_agent.storage.trays.MOST_TRAYS", 4)
    one = make(volumes=2)
    one.write([0, 1, 2, 3, 13], [0, 1, 2, 3, 4])
    by_calls = []
    one.flights.by_calls = by_calls.append
    one.io.hangs = True
    hung = [one.launch(MoveKind.READ, [i], [i], [PAGES + i]) for i in range(4)]
    one.io.hangs = False
    both = [one.launch(MoveKind.READ, [0], [0], [40]), one.launch(MoveKind.READ, [13], [4], [41])]
    one.now = STALL_SECONDS
    one.flights.round(0)
    assert not by_calls
    one.now = STALL_SECONDS + 2
    one.flights.round(0), one.flights.round(0)
    assert one.delivered.keys() == {1, both[0]}
    assert one.delivered[both[0]].status.tolist() == [MoveStatus.CANCELLED]
    assert [move.id for move in by_calls] == [both[1]]
    late = one.move(MoveKind.READ, [13], [42], [4])
    assert not one.flights.launch(late, patient=True), "nor does anything new wait"
    assert one.wait(one.launch(MoveKind.READ, [0], [0], [43])) == [MoveStatus.CANCELLED]
    one.io.rings[0].let_go(), one.io.rings[1].let_go()
    assert [one.wait(number) for number in hung] == [[OK]] * 4


def test_what_waits_for_a_tray_at_the_end_is_cancelled(make, monkeypatch):
    monkeypatch.setattr("kvtier_agent.storage.trays.MOST_TRAYS", 4)
    one = make()
    one.write([0], [0])
    one.io.hangs = True
    for i in range(4):
        one.launch(MoveKind.READ, [0], [0], [PAGES + i])
    waits = one.launch(MoveKind.READ, [0], [0], [PAGES + 4])
    one.flights.close(0.01)
    assert one.delivered[waits].status.tolist() == [MoveStatus.CANCELLED]
    for ring in one.io.rings:
        ring._hanging.clear()


def test_a_drive_that_is_slow_at_writes_does_not_hang(make):
    one = make()
    one.write([0], [0])
    one.io.hangs = True
    slow = one.launch(MoveKind.WRITE, [1], [1])
    one.io.hangs = False
    while one.now < 3 * STALL_SECONDS:
        one.now += 5
        assert one.write([2], [2]) == [OK], "others of its kind are ended"
    assert one.volumes[0].health.trouble is None
    one.now = drive_ring.SLOW_FACTOR * STALL_SECONDS + 1
    one.flights.round(0)
    assert one.write([3], [3]) == [MoveStatus.NO_SPACE], "but one is not waited for for ever"
    assert one.volumes[0].health.trouble.hangs
    one.io.rings[0].let_go()
    assert one.wait(slow) == [OK]


def test_closing_does_not_wait_for_a_drive_that_hangs(make):
    one = make()
    one.write([0], [0])
    one.io.hangs = True
    hung = one.launch(MoveKind.READ, [0], [0], [PAGES])
    one.flights.close(0.01)
    assert hung not in one.delivered
    assert not one.flights.launch(one.move(MoveKind.READ, [0], [1], [0]), patient=True)
    for ring in one.io.rings:
        ring._hanging.clear()


def test_what_was_not_begun_is_cancelled_at_the_end(make):
    one = make()
    one.write(range(24), range(24))
    numbers = [one.launch(MoveKind.READ, [i], [i], [PAGES + i]) for i in range(24)]
    one.flights.close(30)
    seen = {one.delivered[n].status.tolist()[0] for n in numbers}
    assert seen <= {OK, MoveStatus.CANCELLED}
    assert set(numbers) <= one.delivered.keys()


def test_memory_is_let_go_before_it_is_given_back(make, monkeypatch):
    monkeypatch.setattr(drive_ring, "PIECE_BYTES", 5 * PAGE)
    one = make()
    one.write([0], [0])
    for _ in range(20):
        one.flights.round(0)
    (ring,) = one.io.rings
    if not ring.pinned:
        pytest.skip("memory cannot be registered here (RLIMIT_MEMLOCK)")
    assert ring.pinned[0] == (0, 5 * PAGE)
    assert sum(length for _, length in ring.pinned) == 2 * PAGES * PAGE
    assert one.read([0], [0])[0] == [OK]
    seen = []
    monkeypatch.setattr(
        "kvtier_agent.cache.arena.punch_hole",
        lambda fd, offset, length: seen.append((offset, list(ring.pinned))) or True,
    )
    one.arena.punch(np.array([30, 31, 40], np.uint32), PAGE)
    assert seen
    for offset, pinned in seen:
        assert all(start + length <= offset for start, length in pinned)
    assert ring.pinned, "what lies before it stays registered"
    monkeypatch.undo()
    one.arena.back_slots(np.array([30, 31, 40], np.uint32), PAGE)
    for _ in range(20):
        one.now += 2
        one.flights.round(0)
    assert sum(length for _, length in ring.pinned) == 2 * PAGES * PAGE


def test_without_memory_to_lock_pages_go_all_the_same_and_it_is_said_once(make):
    one = make()
    one.io.pin_error = errno.ENOMEM
    with structlog.testing.capture_logs() as said:
        one.write([0], [0])
        for _ in range(5):
            one.now += 2
            one.flights.round(0)
    assert sum("cannot be registered" in entry["event"] for entry in said) == 1
    assert one.read([0], [0])[0] == [OK]


def test_what_cannot_go_this_way_is_left_to_calls(make):
    one = make(move_bytes=4 * PAGE)
    many = one.move(MoveKind.WRITE, range(5), range(5), list(range(5)))
    assert not one.flights.launch(many, patient=True), "no tray is large enough"
    one.io.full = True
    few = one.move(MoveKind.WRITE, [0], [0], [0])
    assert not one.flights.launch(few, patient=True), "the ring has no place for the file"
    one.io.full = False
    assert one.write([0], [0]) == [OK]
    one.io.rings[0].broken = errno.EIO
    assert not one.flights.launch(few, patient=True), "the kernel gave the ring up"
    assert one.delivered.keys() == {3}
    # Nothing of those that were refused was kept.
    one.io.rings[0].broken = 0
    assert one.read([0], [0])[0] == [OK]
    one.l2.give_back(np.array([0], np.uint32))
    assert not one.l2.segments


def test_an_impatient_caller_makes_no_ring(make):
    one = make()
    one.oracle_write([0], [0])
    move = one.move(MoveKind.READ, [0], [PAGES], [0])
    assert not one.flights.launch(move, patient=False)
    assert one.io.rings == []
    assert one.flights.launch(move, patient=True)
    assert one.wait(move.id) == [OK]
    assert one.flights.launch(one.move(MoveKind.READ, [0], [PAGES], [0]), patient=False)


def test_pages_of_another_size_get_trays_when_nothing_is_under_way(make):
    one = make()
    assert one.write([0], [0]) == [OK]
    one.l2.close()
    geometry = Geometry.of_page_bytes(4096, 16)
    one.l2 = L2(list(one.volumes), geometry, io=one.io)
    recovery.recover(one.l2)
    one.l2.limit(SLOTS * one.l2.stride + (1 << 16), 0, "async")
    sums = np.array([xxhash.xxh3_64_intdigest(one.rows[0, :4096])], np.uint64)
    zeros = np.zeros(1, np.uint32)
    for number, kind in enumerate((MoveKind.WRITE, MoveKind.READ)):
        move = Move(
            900 + number, kind, zeros, zeros, zeros, one.keys[:1], one.keys[:1], sums, zeros,
            zeros, zeros + SLOTS, 4096, 4096, 0.0,
        )  # fmt: skip
        assert one.flights.launch(move, patient=True)
        assert one.wait(move.id) == [OK]


def test_where_there_is_no_io_uring_it_is_said_and_calls_are_used(tmp_path):
    arena = ShmArena(tmp_path / "arena", mmap.PAGESIZE)
    ours = CoreSettings("d", tmp_path, tmp_path / "table", {}, 0, 0)
    before = arena.on_backed
    with structlog.testing.capture_logs() as said:
        assert flights_if_any(FileIO(), arena, lambda: None, ours) is None
    (entry,) = said
    assert entry["event"] == "pages go to NVMe by preadv and pwritev"
    assert entry["why_not_io_uring"] == "transfers go by calls here"
    assert arena.on_backed is before
    arena.close()
