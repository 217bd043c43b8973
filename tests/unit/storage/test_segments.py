"""L2: what is written comes back, what is damaged does not, and limits are never passed."""

import errno
import fcntl
import os

import numpy as np
import pytest
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.segment import HEADER, HEADER_BYTES, Segment

OK, BAD = MoveStatus.OK, MoveStatus.BAD_PAGE


def u32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def flip(path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_pages_come_back_byte_for_byte(make_l2):
    one = make_l2()
    slots = [0, 1, 2, 7, 3, 19, 18]
    status, error = one.write(slots)
    assert error == ""
    assert (status == OK).all()
    status, error, rows = one.read(slots)
    assert error == ""
    assert (status == OK).all()
    assert (rows == one.arena[slots]).all()


def test_files_are_private_and_laid_out_before_use(make_l2):
    one = make_l2()
    one.write([0])
    (path,) = one.folder.glob("segment-*")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= 20 * one.l2.stride
    assert one.l2.allocated_bytes <= one.l2.cap_bytes


@pytest.mark.parametrize("offset", [
    0, 8, 12, 16, 40, 60, HEADER.itemsize - 1, HEADER_BYTES, HEADER_BYTES + 5000,
    HEADER_BYTES + 8191,
])  # fmt: skip
def test_a_flipped_bit_anywhere_is_a_bad_page_and_only_that_one(make_l2, offset):
    one = make_l2()
    one.write([4, 5, 6])
    flip(next(one.folder.glob("segment-*")), 5 * one.l2.stride + offset)
    status, error, rows = one.read([4, 5, 6])
    assert status.tolist() == [OK, BAD, OK]
    assert "1 pages failed verification" in error
    assert (rows[[0, 2]] == one.arena[[4, 6]]).all()


def test_another_page_in_the_slot_is_a_bad_page(make_l2):
    one = make_l2()
    one.write([4])
    status, _, _ = one.read([4], rows=[5])
    assert status.tolist() == [BAD]


def test_bytes_that_do_not_match_their_checksum_are_never_written(make_l2):
    one = make_l2()
    one.arena[1, 100] ^= 1
    status, _ = one.write([0, 1, 2])
    assert status.tolist() == [OK, BAD, OK]
    status, _, _ = one.read([0, 1, 2])
    assert status.tolist() == [OK, BAD, OK]


@pytest.mark.parametrize(("fault", "expected"), [
    (errno.EIO, MoveStatus.IO_ERROR), (errno.ENOSPC, MoveStatus.NO_SPACE),
    (errno.EROFS, MoveStatus.READ_ONLY), (0, MoveStatus.IO_ERROR),
    (errno.EDQUOT, MoveStatus.NO_SPACE),
])  # fmt: skip
def test_a_failed_write_is_an_outcome_and_touches_only_its_run(make_l2, fault, expected):
    one = make_l2()
    one.io.writes = [None, fault]
    status, error = one.write([0, 1, 5, 6, 9])
    assert status.tolist() == [OK, OK, expected, expected, OK]
    assert error
    status, _, _ = one.read([0, 1, 9])
    assert (status == OK).all()


@pytest.mark.parametrize("fault", [errno.EIO, 0])
def test_a_failed_or_short_read_is_an_outcome(make_l2, fault):
    one = make_l2()
    one.write([0, 1, 5])
    one.io.reads = [fault]
    status, error, _ = one.read([0, 1, 5])
    assert status.tolist() == [MoveStatus.IO_ERROR, MoveStatus.IO_ERROR, OK]
    assert error


def test_reading_a_segment_that_is_gone_is_an_outcome(make_l2):
    one = make_l2()
    status, error, _ = one.read([3])
    assert status.tolist() == [MoveStatus.IO_ERROR]
    assert "gone" in error


def test_the_cap_holds_before_the_write(make_l2):
    one = make_l2(slots=4)
    assert (one.write([0, 1, 2, 3])[0] == OK).all()
    second = one.l2.per_segment + np.arange(4)
    assert (one.write(second, rows=[4, 5, 6, 7])[0] == MoveStatus.NO_SPACE).all()
    assert one.l2.allocated_bytes <= one.l2.cap_bytes
    one.l2.give_back(u32(0))
    assert (one.write(second, rows=[4, 5, 6, 7])[0] == OK).all()
    assert one.l2.allocated_bytes <= one.l2.cap_bytes


def test_a_cap_that_shrank_lets_nothing_more_in(make_l2):
    one = make_l2(slots=8)
    one.write([0, 1])
    one.l2.limit(0, 0, "async")
    assert one.write([0])[0].tolist() == [MoveStatus.NO_SPACE]


def test_the_reserve_holds_before_the_write(make_l2):
    one = make_l2(reserve=10)
    one.io.free_bytes = (109, 1000)
    assert one.write([0])[0].tolist() == [MoveStatus.NO_SPACE]
    assert not list(one.folder.glob("segment-*"))
    one.io.free_bytes = None
    assert (one.write([0])[0] == OK).all()
    one.l2.limit_slots = 1
    one.io.free_bytes = (99, 1000)
    assert (one.write([0])[0] == OK).all(), "its blocks are there already"
    held = one.l2.allocated_bytes
    assert one.write([25])[0].tolist() == [MoveStatus.NO_SPACE]
    assert one.l2.allocated_bytes == held


def test_no_space_while_laying_out_is_an_outcome(make_l2):
    one = make_l2()
    one.io.allocations = [errno.ENOSPC] * 2  # for all of the segment, for the slot
    assert one.write([0])[0].tolist() == [MoveStatus.NO_SPACE]
    assert (one.write([0])[0] == OK).all()


def test_a_segment_that_is_given_back_goes(make_l2):
    one = make_l2()
    one.write([0, 1, 2])
    one.l2.give_back(u32(0, 7))
    assert one.l2.segment_bytes == 0
    assert not list(one.folder.glob("segment-*"))


def test_a_scrub_tells_a_good_slot_from_a_bad_one(make_l2):
    one = make_l2()
    one.write([0, 1])
    one.io.writes = [errno.EIO]
    status = one.l2.scrub(np.array([0, 1], dtype=np.uint32))
    assert status.tolist() == [MoveStatus.IO_ERROR, OK]
    assert one.read([1])[0].tolist() == [BAD]


def test_sync_flushes_each_batch(make_l2):
    one = make_l2(durability="sync")
    one.write([0, 1])
    assert one.io.flushes == 1


def test_pages_spread_over_volumes_and_a_volume_can_leave(make_l2, tmp_path):
    from kvtier_agent.storage.volume import Volume

    one = make_l2(slots=10)
    second = tmp_path / "data1"
    second.mkdir()
    other = Volume("data1", second, "d", allow_root_filesystem=True)
    one.l2.add(other)
    one.l2.per_segment = 2
    one.limit(16)
    assert (one.write(range(8))[0] == OK).all()
    assert len(list(one.folder.glob("segment-*"))) == 2
    assert len(list(other.folder.glob("segment-*"))) == 2
    lost = one.l2.withdraw({"data1"})
    assert len(lost) == 2
    assert not list(other.folder.glob("segment-*"))
    status = one.read(range(8))[0].reshape(4, 2)
    for number in range(4):
        expected = MoveStatus.IO_ERROR if number in lost else OK
        assert (status[number] == expected).all()
    other.close()


def test_a_file_on_its_way_out_neither_takes_pages_nor_the_name_of_the_next(tmp_path):
    """A volume that comes back is written to while what it held is still being removed."""
    path = tmp_path / "segment-00000003.kv"
    old = Segment(path, 3, 4, 4096, FileIO(), create=True)
    old.lay_out(0, 4)
    new = Segment(path, 3, 4, 4096, FileIO(), create=True)
    assert new.allocated == 0, "no blocks of the old file"
    new.lay_out(0, 1)
    old.remove()
    assert path.stat().st_ino == os.fstat(new.fd).st_ino
    new.remove()
    assert not path.exists()


def test_the_bytes_of_all_segments_are_the_sum_of_what_each_takes(make_l2):
    one = make_l2()
    one.l2.per_segment = 4
    one.limit(16)

    def summed():
        return sum(segment.allocated for segment, _ in one.l2.segments.values())

    one.write([0, 1, 5, 9])
    assert one.l2.segment_bytes == summed() > 0
    one.l2.segments[0][0].punch(0, 2)
    assert one.l2.segment_bytes == summed()
    gone = one.l2.segments[1][0]
    one.l2.give_back(u32(1))
    assert one.l2.segment_bytes == summed()
    one.l2.segments[7] = (gone, one.volume)  # and once more under a number that is taken
    one.l2.segments[7] = (gone, one.volume)
    assert one.l2.segment_bytes == summed()
    assert one.l2.segments.pop(8) is None
    one.l2.segments.pop(7)
    one.l2.withdraw({"data0"})
    assert one.l2.segment_bytes == summed() == 0


def test_segments_bypass_the_page_cache_where_the_file_system_can(tmp_path):
    """The kernel says so of the open file."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        pytest.skip("no O_DIRECT on the file system of the temporary folder")
    path = tmp_path / "segment-00000000.kv"
    for create in (True, False):
        segment = Segment(path, 0, 4, 8192, FileIO(), create=create, generation=1)
        try:
            assert segment.direct
            assert fcntl.fcntl(segment.fd, fcntl.F_GETFL) & os.O_DIRECT
        finally:
            segment.close()
