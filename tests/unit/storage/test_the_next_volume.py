"""A volume that is full, small or broken does not stop the tier: the next one is used."""

import errno

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage import l2 as l2_module
from kvtier_agent.storage import recovery
from kvtier_agent.storage.checkpoint import write_checkpoint
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import PageStamp
from kvtier_agent.storage.volume import Volume
from kvtier_agent.storage.volume_health import (
    HANG_REST_SECONDS,
    LASTING,
    LASTING_SECONDS,
    LONGEST_REST_SECONDS,
    VolumeHealth,
)

PAGE = 4096
PER_SEGMENT = 4
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
SUMS = np.full(32, xxhash.xxh3_64_intdigest(bytes(PAGE)), dtype=np.uint64)
KEYS = np.arange(32 * 16, dtype=np.uint8).reshape(32, 16)


class Drives(FileIO):
    """`room`: bytes by volume; `broken`: volumes whose calls fail with that error; `hiccups`: so
    many flushes are not answered; `meanwhile`: called while pages are on their way to data0."""

    def __init__(self):
        self.room = {}
        self.broken = {}
        self.hiccups = 0
        self.meanwhile = lambda: None
        self.paths = {}
        self.asked = []

    def _fail(self, path):
        for name, error in self.broken.items():
            if name in path.parts:
                raise OSError(error, "injected")

    def open(self, path, *, create, direct):
        if create:
            self.asked.append(path.parts[-4])
            self._fail(path)
        fd, bypasses = super().open(path, create=create, direct=direct)
        self.paths[fd] = path
        return fd, bypasses

    def write(self, fd, buffers, offset):
        if "data0" in self.paths[fd].parts and self.paths[fd].name.startswith("segment-"):
            self.meanwhile()
        self._fail(self.paths[fd])
        return super().write(fd, buffers, offset)

    def flush(self, fd):
        if self.hiccups:
            self.hiccups -= 1
            raise OSError(errno.ETIMEDOUT, "the drive does not answer")
        super().flush(fd)

    def free(self, folder):
        return self.room.get(folder.parts[-3], 1 << 30), 1 << 30


@pytest.fixture
def tier(mount, monkeypatch):
    """Two volumes, segments of four slots, and a clock that the test sets."""
    monkeypatch.setattr(l2_module, "slots_per_segment", lambda stride: PER_SEGMENT)
    drives, volumes, clock = Drives(), [], [0.0]
    for name in ("data0", "data1"):
        (mount / name).mkdir()
        volumes.append(Volume(name, mount / name, "d", allow_root_filesystem=True, io=drives))
    l2 = L2(volumes, GEOMETRY, io=drives, clock=lambda: clock[0])
    recovery.recover(l2)
    l2.limit(1 << 20, 0, "async")
    flat = np.zeros(33 * PAGE, dtype=np.uint8)
    start = -flat.ctypes.data % 4096
    arena = flat[start : start + 32 * PAGE].reshape(32, PAGE)

    def write(segment, epoch=0):
        """Fill a segment in this use of it; the statuses, as a set."""
        rows = np.arange(PER_SEGMENT, dtype=np.uint32)
        slots = rows + np.uint32(segment * PER_SEGMENT)
        stamp = PageStamp(KEYS[rows], KEYS[rows], rows, SUMS[rows])
        uses = (np.full_like(slots, epoch), np.full_like(slots, PER_SEGMENT))
        return set(l2.write(slots, stamp, arena, rows, uses)[0].tolist())

    def on():
        return {number: volume.name for number, (_, volume) in sorted(l2.segments.items())}

    yield l2, drives, write, on, clock
    l2.close()
    for volume in volumes:
        volume.close()


OK = {int(MoveStatus.OK)}


@pytest.mark.parametrize("why", ["reserve", errno.ENOSPC, errno.EIO, errno.EROFS, errno.ENOENT])
def test_the_next_volume_is_used(tier, why):
    l2, drives, write, on, _ = tier
    if why == "reserve":
        drives.room = {"data0": 0}
        l2.limit(1 << 20, 5, "async")
    else:
        drives.broken = {"data0": why}
    assert [write(segment) for segment in range(4)] == [OK] * 4
    assert set(on().values()) == {"data1"}
    assert l2.volumes[0].health.trouble is not None
    assert l2.volumes[1].health.trouble is None


def test_a_volume_that_refused_rests_ever_longer_and_is_taken_back(tier):
    l2, drives, write, on, clock = tier
    drives.broken = {"data0": errno.ENOENT}
    health, waited = l2.volumes[0].health, []
    for segment in range(5):
        before = len(drives.asked)
        assert write(2 * segment) == OK
        assert "data0" in drives.asked[before:]
        waited.append(health.trouble.until - clock[0])
        before = len(drives.asked)
        assert write(2 * segment + 1) == OK
        assert "data0" not in drives.asked[before:], "it rests"
        clock[0] = health.trouble.until
    assert waited == [1, 2, 4, 8, 16]
    drives.broken = {}
    assert write(10) == OK
    assert on()[10] == "data0"
    assert health.trouble is None


def test_a_segment_begun_anew_leaves_a_drive_that_fails_and_comes_back_to_one_that_is_well(tier):
    l2, drives, write, on, clock = tier
    assert write(0) == OK
    assert on() == {0: "data0"}
    drives.broken = {"data0": errno.EIO}
    assert write(0) == {int(MoveStatus.IO_ERROR)}
    assert write(0, epoch=1) == OK
    assert on() == {0: "data1"}
    drives.broken = {}
    clock[0] = 100.0
    assert write(0, epoch=2) == OK
    assert on() == {0: "data0"}
    assert l2.volumes[0].health.trouble is None


def test_a_cap_that_is_reached_is_no_volumes_fault(tier):
    l2, _, write, _, _ = tier
    l2.limit(l2.allocated_bytes + l2.stride, 0, "async")
    assert write(0) == {int(MoveStatus.NO_SPACE)}
    assert [volume.health.trouble for volume in l2.volumes] == [None, None]


def refused_until_lost(tier):
    """Data0 refuses what is written to segments 8, 9 and so on until what lies there is given up:
    the numbers of its segments, and how often it refused."""
    l2, drives, write, _, clock = tier
    drives.broken = {"data0": errno.EIO}
    for count in range(1, 20):
        assert write(7 + count) == OK
        if lost := l2.give_up_lost():
            return lost, count
        clock[0] = l2.volumes[0].health.trouble.until
    raise AssertionError("it was not given up")


def test_what_lies_on_a_drive_that_goes_on_failing_is_given_up(tier):
    l2, _, write, on, clock = tier
    for segment in range(4):
        write(segment)
    there = {number for number, name in on().items() if name == "data0"}
    assert there
    began = clock[0]
    lost, refusals = refused_until_lost(tier)
    assert lost == there
    assert clock[0] - began >= LASTING_SECONDS
    assert refusals >= LASTING
    assert "data0" not in on().values()
    assert l2.held_bytes()["data0"] == 0


def test_a_lost_drive_that_is_well_joins_again_whatever_ends_meanwhile(tier):
    l2, drives, write, on, clock = tier
    write(0), write(1)
    refused_until_lost(tier)
    volume, given_up = l2.volumes[0], []
    drives.broken = {}
    clock[0] = volume.health.trouble.until
    # The outcome of another move is collected while the first write of its trial is under way.
    drives.meanwhile = lambda: given_up.append(l2.give_up_lost())
    assert write(30) == OK
    assert given_up == [set()]
    assert on()[30] == "data0"
    assert volume.health.trouble is None


def test_a_refusal_is_the_volumes_though_its_segment_left_meanwhile(tier):
    l2, drives, write, on, _ = tier

    def leave():
        l2.drop_segment(0)
        drives.broken = {"data0": errno.EIO}

    drives.meanwhile = leave
    assert write(0) == {int(MoveStatus.IO_ERROR)}
    assert on() == {}
    assert l2.volumes[0].health.trouble.times == 1


def test_the_rest_is_bounded_and_refusals_during_it_count_once():
    health, now = VolumeHealth("data0"), 0.0
    for _ in range(12):
        health.refused(now, OSError(errno.EIO, "x"), placing=True)
        health.refused(now, OSError(errno.EIO, "x"), placing=True)
        now = health.trouble.until
    assert health.trouble.times == 12
    assert health.trouble.rest == LONGEST_REST_SECONDS
    health.refused(now, OSError(errno.EMFILE, "x"), placing=True)
    assert health.trouble.times == 12, "our own limit on open files is not the drive's fault"


def test_a_short_look_does_not_call_a_full_volume_well(tier):
    l2, drives, write, _, clock = tier
    l2.limit(1 << 20, 5, "async")
    assert write(0) == OK
    drives.room = {"data0": 0}
    write(1), write(2)
    health = l2.volumes[0].health
    assert health.trouble.reason == "VolumeFull"
    assert write(0) == OK, "into blocks that are there"
    assert health.trouble.reason == "VolumeFull"
    clock[0], drives.room = 100.0, {}
    assert write(0) == OK
    assert health.trouble is None


def test_hiccups_of_a_full_volume_are_over_with_the_first_good_write(tier):
    l2, drives, write, _, clock = tier
    l2.withdraw({"data1"})
    (volume,) = l2.volumes
    for segment in range(4):
        assert write(segment) == OK
    for epoch in range(1, 2 * LASTING):
        drives.hiccups = 1
        assert write(0, epoch) == {int(MoveStatus.NO_SPACE)}
        assert volume.health.trouble.hangs
        for journal in l2.journals.all():  # what their loop does half a second later
            write_checkpoint(journal)
        clock[0] += HANG_REST_SECONDS + 1
        assert write(1, epoch) == OK, "begun anew, in its blocks"
        assert volume.health.trouble is None
        clock[0] += 3600.0
    assert l2.give_up_lost() == set()
    assert len(l2.segments) == 4


def refusals(health, times):
    for now in times:
        health.refused(now, OSError(errno.EIO, "x"), placing=True)
    return health.trouble


def test_refusals_long_ago_say_nothing_of_a_drive_that_nobody_asked_since():
    health = VolumeHealth("data0")
    assert not refusals(health, [0, 3600, 3602.1]).lost
    after = refusals(health, [3606.2, 3614.3, 3632])
    assert (after.since, after.times) == (3600, 5)
    assert after.lost


def test_a_write_that_succeeds_between_refusals_ends_their_row():
    health = VolumeHealth("data0")
    refusals(health, [0, 1, 3, 7])
    health.served()
    assert health.rests(7.5), "it proves nothing of what was refused"
    later = refusals(health, [16, 33])
    assert (later.since, later.times) == (16, 2)
    assert refusals(health, [70]).lost
