"""Tiers that come late, shrink early or leave in the middle of a transfer: nothing is left behind
and nothing is written where it does not belong."""

import os
import threading
import time

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage import recovery
from kvtier_agent.storage.core import Core, CoreError, CoreSettings
from kvtier_agent.storage.fileio import FileIO

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(3).integers(0, 256, (200, 16), dtype=np.uint8)


@pytest.fixture
def make_core(mount):
    made = []

    def build(io=None, maximum=1024):
        for name in ("data0", "arena"):
            (mount / name).mkdir(exist_ok=True)
        core = Core(
            CoreSettings(
                "d", mount / "arena", mount / "arena" / "d.table", {"data0": mount / "data0"},
                maximum * PAGE, maximum * PAGE, allow_root_filesystem=True, synchronous=True,
                keep_memory=False, cache=CacheSettings(max_pages=4096),
            ),
            io=io,
        )  # fmt: skip
        made.append(core)
        return core

    yield build
    for core in made:
        core.close()


def budgets(l1=20, l2=60, size=PAGE) -> Budgets:
    volumes = ("data0",) if l2 else ()
    return Budgets(0, l1 * size, l2 * (size + 4096) + 16384 if l2 else 0, volumes, 0)


def settle(core):
    tickets = []
    core.pump()
    while core.cache.traffic.in_flight:
        tickets += core.collect(1.0)
        core.pump()
    return tickets


def put(core, count, page_bytes=PAGE):
    import xxhash

    page = np.zeros(page_bytes, dtype=np.uint8)
    for i in range(count):
        key = KEYS[i : i + 1]
        result = core.cache.reserve(1.0, 1, key)
        assert (result.status == 0).all()
        page[:] = i
        offset = int(result.offset[0])
        core._l1.bytes[offset : offset + page_bytes] = page
        sums = np.array([xxhash.xxh3_64_intdigest(page)], dtype=np.uint64)
        core.cache.commit(1.0, 1, key, sums)
        settle(core)


def hits(core, count):
    found = 0
    for i in range(count):
        ticket = core.cache.load(2.0, 1, KEYS[i : i + 1], 30.0)
        ticket = {t.lease: t for t in settle(core)}.get(ticket.lease, ticket)
        found += int(ticket.tier[0] != MISS)
        core.cache.release(2.0, 1, ticket.lease)
        settle(core)
    return found


def left_behind(make_core) -> int:
    """An agent stores pages and ends; how many of them lie on NVMe."""
    core = make_core()
    core.reconfigure(0.0, Behaviour(), budgets())
    core.register(0.0, GEOMETRY)
    put(core, 60)
    held = core.cache.snapshot(1.0).tiers[2].pages
    assert held > 20
    core.close()
    return held


def test_an_nvme_tier_that_comes_late_takes_in_what_an_earlier_agent_left(make_core):
    held = left_behind(make_core)
    core = make_core()
    core.reconfigure(0.0, Behaviour(), budgets(l2=0))
    core.register(0.0, GEOMETRY)
    core.reconfigure(1.0, Behaviour(), budgets())
    assert core.cache.snapshot(1.0).tiers[2].pages == held
    assert core._l2 is not None
    laid = sum(int(segment.laid.sum()) for segment, _ in core._l2.segments.values())
    assert laid == held
    assert hits(core, 60) == held
    check_books(core.cache)


def test_a_smaller_nvme_tier_keeps_what_fits_and_counts_the_rest(make_core):
    held = left_behind(make_core)
    core = make_core()
    core.reconfigure(0.0, Behaviour(), budgets(l2=15))
    core.register(0.0, GEOMETRY)
    counters = core.cache.counters
    assert counters.found_pages == core.cache.snapshot(1.0).tiers[2].pages > 0
    assert counters.dropped_found_pages == held - counters.found_pages > 0


def test_what_was_found_goes_with_its_volume_also_before_any_client(make_core, mount):
    left_behind(make_core)
    folder = mount / "data0" / "kvtier" / "d"
    assert list(folder.glob("segment-*"))
    core = make_core()
    core.reconfigure(0.0, Behaviour(), budgets())
    core.reconfigure(1.0, Behaviour(), budgets(l2=0))
    end = time.monotonic() + 10
    while list(folder.glob("segment-*")) and time.monotonic() < end:
        time.sleep(0.01)
    assert list(folder.glob("*-*.*")) == [], "segments and journals"
    assert core.nvme.volumes == {}
    core.register(2.0, GEOMETRY)
    assert hits(core, 60) == 0
    core.reconfigure(3.0, Behaviour(), budgets())
    put(core, 60)
    assert hits(core, 60) > 20
    check_books(core.cache)


@pytest.mark.parametrize("first", ["client", "headers"])
def test_a_client_that_comes_before_the_revision_does_not_cost_the_pages_on_nvme(make_core, first):
    """Engines find a restarted agent at once; its revision takes longer."""
    held = left_behind(make_core)
    core = make_core()
    if first == "headers":
        core.prepare(Behaviour(), budgets())
    assert core.register(0.0, GEOMETRY).accepted
    core.prepare(Behaviour(), budgets())
    core.reconfigure(1.0, Behaviour(), budgets())
    assert hits(core, 60) == held > 20
    check_books(core.cache)


def test_an_nvme_tier_that_comes_late_does_not_take_on_the_geometry_of_old_pages(make_core):
    core = make_core()
    core.reconfigure(0.0, Behaviour(), budgets(size=2 * PAGE))
    core.register(0.0, Geometry.of_page_bytes(2 * PAGE, 16))
    put(core, 60, 2 * PAGE)
    core.close()
    core = make_core()
    core.reconfigure(0.0, Behaviour(), budgets(l2=0))
    core.register(0.0, GEOMETRY)
    core.reconfigure(1.0, Behaviour(), budgets())
    put(core, 40)
    snapshot = core.cache.snapshot(1.0)
    assert snapshot.tiers[2].pages > 20
    assert snapshot.counters["quarantined_pages"] == 0
    assert hits(core, 40) == snapshot.pages


def test_memory_prepared_before_the_first_client_goes_back_when_the_budget_shrinks(make_core):
    core = make_core()
    core.reconfigure(0.0, Behaviour(), budgets(l1=800, l2=0))
    core.reconfigure(1.0, Behaviour(), budgets(l1=100, l2=0))
    assert core._l1.backed_bytes == 100 * PAGE


def test_memory_is_asked_for_before_the_cache_thread_needs_it_and_only_once(make_core, monkeypatch):
    """Asking again takes the kernel a second for some GiB, and clients wait meanwhile."""
    core = make_core()
    asked = []
    real = os.posix_fallocate

    def count(fd, offset, length):
        if fd == core._l1.fd:
            asked.append(length)
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", count)
    core.prepare(Behaviour(), budgets(l1=100, l2=0))
    core.reconfigure(0.0, Behaviour(), budgets(l1=100, l2=0))
    core.register(0.0, GEOMETRY)
    assert sum(asked) == 100 * PAGE
    core.prepare(Behaviour(), budgets(l1=300, l2=0))
    core.reconfigure(0.0, Behaviour(), budgets(l1=300, l2=0))
    assert sum(asked) == 300 * PAGE
    core.reconfigure(0.0, Behaviour(), budgets(l1=50, l2=0))
    settle(core)
    assert core._l1.backed_bytes == 50 * PAGE
    core.reconfigure(0.0, Behaviour(), budgets(l1=100, l2=0))
    assert sum(asked) == 350 * PAGE
    assert core._l1.backed_bytes == 100 * PAGE


def test_a_tier_that_grows_before_its_memory_has_gone_gets_it_again_in_pieces(
    make_core, monkeypatch
):
    """The cache thread has other things to do than to wait for all of it at once."""
    monkeypatch.setattr("kvtier_agent.storage.core.REGROW_BYTES", 4 * PAGE)
    core = make_core(maximum=40)
    core.reconfigure(0.0, Behaviour(), budgets(l1=40, l2=0))
    core.register(0.0, GEOMETRY)
    core.reconfigure(1.0, Behaviour(), budgets(l1=10, l2=0))
    core.reconfigure(2.0, Behaviour(), budgets(l1=40, l2=0))
    pool = core.cache.shelves.pools[1]
    assert pool.available == 10
    settle(core)
    sizes = [pool.available]
    while pool.available < 40:
        core.collect(3.0)
        sizes.append(pool.available)
        assert 0 < sizes[-1] - sizes[-2] <= 4
    assert len(sizes) >= 7
    put(core, 40)
    assert hits(core, 40) == 40
    check_books(core.cache)


def test_a_client_that_could_not_be_served_leaves_no_trace_for_one_of_another_size(
    make_core, monkeypatch
):
    core = make_core(maximum=120)
    core.reconfigure(0.0, Behaviour(), budgets(l1=102, l2=0))

    def full(*_):
        raise OSError(28, "No space left on device")

    core._l1.keep_first(0)  # so that memory is asked for just then
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CoreError, match="No space left"):
            core.register(0.0, Geometry.of_page_bytes(3 * PAGE, 16))
    assert core.register(0.0, GEOMETRY).accepted
    put(core, 90)
    assert hits(core, 90) == 90
    assert core._l1.backed_bytes == 102 * PAGE
    check_books(core.cache)


def test_a_volume_that_fails_while_it_is_looked_through_can_be_tried_again(make_core, monkeypatch):
    left_behind(make_core)
    core = make_core()

    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "recover", fails)
        with pytest.raises(CoreError, match="Input/output error"):
            core.prepare(Behaviour(), budgets())
    core.prepare(Behaviour(), budgets())


def test_a_file_stays_open_until_the_last_transfer_has_ended(make_l2):
    """Else its number could be another file's when the system call is made."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(FileIO):
        def __init__(self):
            self.segments = set()

        def open(self, path, *, create, direct):
            fd, bypasses = super().open(path, create=create, direct=direct)
            if direct:
                self.segments.add(fd)
            return fd, bypasses

        def write(self, fd, buffers, offset):
            if fd in self.segments:
                entered.set()
                assert go_on.wait(10)
                os.fstat(fd)
            return super().write(fd, buffers, offset)

    one = make_l2(io=Slow())
    answers = []
    writer = threading.Thread(target=lambda: answers.append(one.write([0])))
    writer.start()
    assert entered.wait(10)
    (descriptor,) = [segment.fd for segment, _ in one.l2.segments.values()]
    assert one.l2.withdraw({"data0"}) == {0}
    os.fstat(descriptor)
    go_on.set()
    writer.join()
    assert answers[0][0].tolist() == [MoveStatus.CANCELLED], "the volume is gone by now"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_sync_makes_a_new_file_last_before_its_first_page_counts(make_l2):
    calls = []

    class Recorder(FileIO):
        def __init__(self):
            self.segments = set()

        def open(self, path, *, create, direct):
            fd, bypasses = super().open(path, create=create, direct=direct)
            (self.segments.add if direct else self.segments.discard)(fd)
            return fd, bypasses

        def flush(self, fd):
            calls.append("pages" if fd in self.segments else "journal")
            super().flush(fd)

        def flush_folder(self, folder):
            calls.append("folder")
            super().flush_folder(folder)

    one = make_l2(io=Recorder(), durability="sync")
    calls.clear()
    one.write([0])
    one.write([1])
    assert calls == [
        *("journal", "folder"),  # the journal itself
        "journal",  # the segment is about to be written
        *("pages", "folder", "journal"),
        *("pages", "journal"),
    ]


def test_blocks_past_the_cap_go_back_and_pages_that_have_theirs_are_still_written(make_l2):
    class Greedy(FileIO):
        extra = 0

        def allocated(self, fd):
            return super().allocated(fd) + self.extra

    one = make_l2(slots=8, io=Greedy())
    one.l2.limit_slots = 2
    assert (one.write([0, 1])[0] == MoveStatus.OK).all()
    one.l2.segment_cap_bytes = one.l2.segment_bytes + one.l2.stride
    one.io.extra = 4096
    assert one.write([5])[0].tolist() == [MoveStatus.NO_SPACE]
    assert one.l2.allocated_bytes <= one.l2.cap_bytes
    assert (one.write([0, 1])[0] == MoveStatus.OK).all()
