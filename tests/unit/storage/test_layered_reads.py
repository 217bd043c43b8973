"""Layered reads, by rings and by calls: what is announced, in which order, and never too much."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from kvtier_agent.cache import geometry as geometries
from kvtier_agent.cache.arena import ShmArena
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus
from kvtier_agent.cache.progress import Progress
from kvtier_agent.native import TRANSFER_COLUMNS
from kvtier_agent.storage import recovery
from kvtier_agent.storage.copier import Copier
from kvtier_agent.storage.flights import HANG_SECONDS, Flights
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.mover import Mover
from kvtier_agent.storage.segment import HEADER_BYTES, PageStamp
from kvtier_agent.storage.units import pieces
from kvtier_agent.storage.volume import Volume
from ring_faults import SHORT, RingFaultIO, why_no_ring

OK, BAD, IO_ERROR = int(MoveStatus.OK), int(MoveStatus.BAD_PAGE), int(MoveStatus.IO_ERROR)
CANCELLED = int(MoveStatus.CANCELLED)
PAGES = 6
needs_rings = pytest.mark.skipif(bool(why_no_ring()), reason=why_no_ring())


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometries, "UNIT_BYTES", 12_000)


class CallFaultIO(RingFaultIO):
    """The same faults for calls."""

    def read(self, fd, buffers, offset):
        done = super().read(fd, buffers, offset)
        fault = self.reads.pop(0) if self.reads else None
        if fault:
            raise OSError(fault, "injected")
        return done if fault is None else done - 4096


class Stand:
    """Pages on one or two volumes, and room in the arena to read them into."""

    def __init__(self, folder, *, rings, volumes=1, unit=12_000):
        geometries.UNIT_BYTES = unit
        self.geometry = Geometry(7, 1, 160, 1, 16)
        self.io = RingFaultIO() if rings else CallFaultIO()
        self.now = 0.0
        slot = self.geometry.slot_bytes
        self.arena = ShmArena(folder / "arena", 2 * PAGES * slot)
        self.arena.back_slots(np.arange(2 * PAGES, dtype=np.uint32), slot)
        self.rows = self.arena.rows(slot)
        dice = np.random.default_rng(3)
        self.pages = dice.integers(0, 256, (PAGES, self.geometry.page_bytes), np.uint8)
        self.rows[:PAGES, : self.geometry.page_bytes] = self.pages
        self.keys = dice.integers(0, 256, (PAGES, 16), np.uint8)
        self.volumes = []
        for i in range(volumes):
            (folder / f"data{i}").mkdir()
            self.volumes.append(
                Volume(f"data{i}", folder / f"data{i}", "d", allow_root_filesystem=True, io=self.io)
            )
        self.l2 = L2(self.volumes, self.geometry, io=self.io)
        recovery.recover(self.l2)
        self.l2.limit(4 << 20, 0, "async")
        self.form = self.l2.form
        first = np.arange(PAGES, dtype=np.uint32)
        self.sums = self.form.checksums(self.form.of_rows(self.rows, first))
        self.slots = first.copy()
        if volumes > 1:  # a segment each
            self.slots[PAGES // 2 :] += np.uint32(self.l2.per_segment)
        zeros = np.zeros(PAGES, np.uint32)
        stamp = PageStamp(self.keys, self.keys, zeros, self.sums)
        uses = zeros, np.full(PAGES, self.l2.per_segment, np.uint32)
        assert not self.l2.write(self.slots, stamp, self.rows, first, uses)[0].any()
        self.told: list[list[int]] = []
        self.outcome = None
        self.copier = Copier()
        self.copier.l1, self.copier.l2 = self.arena, self.l2
        self.copier.announce = self._announce
        self.flights = None
        if rings:
            self.flights = Flights(
                self.io, self.arena, lambda: self.l2, move_bytes=1 << 16, in_flight_bytes=1 << 20,
                clock=lambda: self.now,
            )  # fmt: skip
            self.flights.deliver = self._deliver
            self.flights.announce = self._announce
        self.move = Move(
            1, MoveKind.READ, first, self.slots, first + PAGES, self.keys, self.keys, self.sums,
            zeros, zeros, zeros, self.geometry.page_bytes, slot, 0.0, layered=True,
        )  # fmt: skip

    def _announce(self, move, landed):
        assert move is self.move
        # What is announced can be had, and verified by what lies behind the page.
        into = move.target
        sums = self.form.left(self.rows, into)
        there = self.form.of_rows(self.rows, into)
        for page, count in enumerate(landed.tolist()):
            assert there[page, :count].tolist() == sums[page, :count].tolist()
            end = self.form.start(count)
            assert np.array_equal(self.rows[into[page], :end], self.pages[page, :end])
        self.told.append(landed.tolist())

    def _deliver(self, move, outcome):
        assert self.outcome is None
        self.outcome = outcome

    def read(self):
        """Statuses of the pages."""
        if self.flights is None:
            self.outcome = self.copier.execute(self.move)
        else:
            assert self.flights.launch(self.move, patient=True)
            for _ in range(200):
                if self.outcome is not None:
                    break
                self.flights.round(0.2)
        status = self.outcome.status.tolist()
        for page in np.flatnonzero(self.outcome.status == OK).tolist():
            row = self.rows[PAGES + page]
            assert np.array_equal(row[: self.geometry.page_bytes], self.pages[page])
        good = self.move.target[self.outcome.status == OK]
        assert np.array_equal(self.form.left(self.rows, good), self.form.of_rows(self.rows, good))
        for before, after in zip(self.told, self.told[1:], strict=False):
            assert all(a <= b for a, b in zip(before, after, strict=True))
        return status

    def close(self):
        if self.flights is not None:
            self.flights.close(5)
        self.l2.close()
        for volume in self.volumes:
            volume.close()
        self.arena.close()


@pytest.fixture
def make_stand(mount):
    made = []

    def make(rings, **options):
        made.append(Stand(mount, rings=rings, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=[pytest.param(True, id="rings", marks=needs_rings), False], ids=str)
def stand(request, make_stand):
    return make_stand(request.param)


def test_pieces_are_aligned_and_cover_their_units(make_stand) -> None:
    one = make_stand(False)
    cuts = pieces(one.form)
    assert cuts.tolist() == [0, 12288, 20480, 32768, 36864]
    assert all(cuts[k] >= one.form.start(k) for k in range(5))


def test_all_of_it_lands_and_is_announced_in_order(stand) -> None:
    assert stand.read() == [OK] * PAGES
    assert stand.told[-1] == [4] * PAGES
    if stand.flights is None:
        assert stand.told == [[k] * PAGES for k in (1, 2, 3, 4)]


@needs_rings
def test_a_ring_is_given_the_first_units_of_all_pages_first(make_stand, monkeypatch) -> None:
    one = make_stand(True)
    given = []
    rings = one.flights._rings
    drive = rings.of(one.volumes[0], patient=True)
    submit = drive.submit
    monkeypatch.setattr(drive, "submit", lambda rows: given.append(np.array(rows)) or submit(rows))
    assert one.read() == [OK] * PAGES
    column = {name: i for i, name in enumerate(TRANSFER_COLUMNS)}
    assert [len(rows) for rows in given] == [PAGES] * 4
    cuts = pieces(one.form).tolist()
    for unit, rows in enumerate(given):
        header = 0 if unit else HEADER_BYTES
        assert set(rows[:, column["header_length"]].tolist()) == {header}
        assert set(rows[:, column["length"]].tolist()) == {cuts[unit + 1] - cuts[unit]}
        starts = [PAGES + i for i in range(PAGES)]
        slot = one.geometry.slot_bytes
        assert rows[:, column["offset"]].tolist() == [s * slot + cuts[unit] for s in starts]
        behind = HEADER_BYTES + cuts[unit] if unit else 0
        offsets = [int(s) * one.l2.stride + behind for s in one.slots]
        assert rows[:, column["file_offset"]].tolist() == offsets


@pytest.mark.parametrize("rings", [pytest.param(True, marks=needs_rings), False])
def test_units_smaller_than_a_block_land_with_the_one_before(make_stand, rings) -> None:
    one = make_stand(rings, unit=5120 // 2)  # one layer each; some blocks hold the ends of two
    one_unit = one.geometry.unit_bytes
    assert (one.form.units, one_unit) == (7, 5120)
    assert one.read() == [OK] * PAGES
    assert one.told[-1] == [7] * PAGES


@pytest.mark.parametrize("rings", [pytest.param(True, marks=needs_rings), False])
@pytest.mark.parametrize("fault", [errno.EIO, SHORT])
@pytest.mark.parametrize("piece", [0, 1, 3])
def test_a_piece_that_fails(make_stand, rings, fault, piece) -> None:
    one = make_stand(rings)
    one.io.reads = [None] * (piece * PAGES + 2) + [fault]
    status = one.read()
    assert sorted(status) == [OK] * (PAGES - 1) + [IO_ERROR]
    failed = status.index(IO_ERROR)
    assert max((told[failed] for told in one.told), default=0) <= 3
    assert one.told[-1].count(4) == PAGES - 1
    if not rings:
        assert failed == 2
        assert one.told[-1][2] == piece
    if rings or fault == SHORT:  # an error of a call is counted where it is raised
        assert len(one.io.seen) == 1


@needs_rings
def test_what_a_ring_sends_back_is_read_by_calls(make_stand) -> None:
    one = make_stand(True)
    one.io.reads = [None, errno.EAGAIN, None, errno.EINVAL]
    assert one.read() == [OK] * PAGES
    assert one.io.calls == 1 + 2  # the first one wrote them
    assert not one.io.seen


@needs_rings
def test_a_ring_that_takes_nothing(make_stand, monkeypatch) -> None:
    one = make_stand(True)
    drive = one.flights._rings.of(one.volumes[0], patient=True)
    monkeypatch.setattr(drive, "submit", lambda rows: OSError(errno.EAGAIN, "full"))
    assert one.read() == [OK] * PAGES  # each by a call
    assert one.io.calls == 1 + PAGES
    assert drive.waiting == 0
    assert not one.flights._flights


@needs_rings
def test_a_drive_that_hangs_is_called_back(make_stand) -> None:
    one = make_stand(True, volumes=1)
    one.io.hangs = True
    assert one.flights.launch(one.move, patient=True)
    one.now = HANG_SECONDS + 1
    one.flights.round(0.01)
    assert one.outcome is None
    assert one.told == []
    flight = next(iter(one.flights._flights.values()))
    assert flight.numbers().size == flight.left == 4 * PAGES
    for ring in one.io.rings:
        ring.let_go()
    for _ in range(100):
        if one.outcome is None:
            one.flights.round(0.1)
    assert one.outcome.status.tolist() == [OK] * PAGES
    assert not one.flights._flights


@pytest.mark.parametrize("rings", [pytest.param(True, marks=needs_rings), False])
def test_pages_of_two_volumes_of_which_one_leaves(make_stand, rings) -> None:
    one = make_stand(rings, volumes=2)
    held = {int(s) // one.l2.per_segment for s in one.slots}
    assert {one.l2.segments.get(n)[1].name for n in held} == {"data0", "data1"}
    gone = one.l2.segments.get(0)[1].name
    one.l2.withdraw({gone})
    status = one.read()
    assert status == [IO_ERROR] * (PAGES // 2) + [OK] * (PAGES // 2)
    assert one.told[-1] == [0] * (PAGES // 2) + [4] * (PAGES // 2)


def test_a_page_of_another_key_is_never_announced(stand) -> None:
    stand.move.keys[1] ^= 1
    stand.move.checksums[4] ^= np.uint64(1)
    status = stand.read()
    assert status == [OK, BAD, OK, OK, BAD, OK]
    assert stand.told[-1] == [4, 0, 4, 4, 0, 4]


def test_news_of_a_move_that_has_ended_is_old() -> None:
    progress = Progress()
    one = type("One", (), {"id": 5, "rows": np.array([3, 9], np.uint32)})()
    landed = np.array([2, 4], np.uint16)
    assert progress.heard(one, landed, 4) == 0
    progress.begin(one)
    assert progress.heard(one, landed, 4) == 2 + 3  # the last unit of a page is no early one
    assert progress.heard(one, landed, 4) == 0
    assert progress.of(np.array([9, 1, 3], np.uint32)).tolist() == [4, 0, 2]
    progress.end(one)
    assert progress.heard(one, landed, 4) == 0
    assert progress.of(np.array([9, 1, 3], np.uint32)).tolist() == [0, 0, 0]


def test_a_mover_says_what_it_heard_once(make_stand) -> None:
    one = make_stand(False)
    woken = []
    mover = Mover(one.copier, lambda: woken.append(1))
    mover.submit([one.move])
    told, done = [], []
    for _ in range(1000):
        told += mover.news()
        done += mover.collect()
        if done:
            break
        mover._ready.acquire()
        mover._ready.wait(0.01)
        mover._ready.release()
    told += mover.news()
    assert [landed.tolist() for _, landed in told] == [[k] * PAGES for k in (1, 2, 3, 4)]
    assert done[0][1].status.tolist() == [OK] * PAGES
    assert mover.news() == []
    mover.close()
