"""A drive that takes no writes is noticed without a probe; one that hangs holds up no revision."""

import errno
import threading

import pytest
from kvtier_agent.storage import recovery
from kvtier_agent.storage.fileio import FileIO


class Drive(FileIO):
    """Refuses what it is told to refuse; `hang` keeps an allocation until it is set."""

    def __init__(self):
        self.refuses = set()
        self.hang = None
        self.reached = threading.Event()

    def _pass(self, what):
        if what in self.refuses:
            raise OSError(errno.EROFS, "Read-only file system")

    def open(self, path, *, create, direct):
        if create:
            self._pass("create")
        return super().open(path, create=create, direct=direct)

    def write(self, fd, buffers, offset):
        self._pass("write")
        return super().write(fd, buffers, offset)

    def allocate(self, fd, offset, length):
        self.reached.set()
        if self.hang is not None:
            self.hang.wait(10)
        super().allocate(fd, offset, length)


@pytest.mark.parametrize("what", ["create", "write"])
def test_a_volume_knows_that_its_last_write_was_refused(make_l2, what):
    drive = Drive()
    one = make_l2(io=drive)
    recovery.recover(one.l2)
    (volume,) = one.l2.volumes
    assert not volume.read_only
    drive.refuses = {what}
    one.write([1])
    assert volume.read_only
    drive.refuses = set()
    one.write([1])
    assert not volume.read_only


def test_new_limits_do_not_wait_for_a_drive_that_hangs(make_l2):
    drive = Drive()
    one = make_l2(io=drive)
    recovery.recover(one.l2)
    drive.hang = threading.Event()
    writer = threading.Thread(target=one.write, args=([1],))
    writer.start()
    assert drive.reached.wait(10)
    limited = threading.Thread(target=one.l2.limit, args=(1 << 20, 10, "async"))
    limited.start()
    limited.join(5)
    in_time = not limited.is_alive()
    drive.hang.set()
    writer.join(10)
    assert in_time
    assert one.l2.cap_bytes == 1 << 20


def test_a_volume_leaves_at_once_though_its_drive_hangs(make_l2):
    drive = Drive()
    one = make_l2(io=drive)
    recovery.recover(one.l2)
    one.write([1])
    (path,) = [segment.path for segment, _ in one.l2.segments.values()]
    per_segment = one.l2.per_segment
    drive.hang = threading.Event()
    drive.reached.clear()
    one.l2.limit_slots, one.l2.segment_cap_bytes = 3 * per_segment, 1 << 40
    writer = threading.Thread(target=one.write, args=([per_segment],), kwargs={"rows": [0]})
    writer.start()
    assert drive.reached.wait(10)
    lost: list[set[int]] = []
    leaving = threading.Thread(target=lambda: lost.append(one.l2.withdraw({"data0"})))
    leaving.start()
    leaving.join(5)
    in_time = not leaving.is_alive()
    drive.hang.set()
    writer.join(10)
    assert in_time
    assert lost == [{0, 1}]
    assert one.l2.volumes == []
    assert one.l2.segments == {}
    assert not path.exists()


def test_a_file_that_has_the_name_of_a_removed_one_stays(make_l2):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([1])
    (segment,) = [segment for segment, _ in one.l2.segments.values()]
    segment.path.unlink()
    segment.path.write_bytes(b"of the volume that joined again")
    segment.remove()
    assert segment.path.exists()
    assert segment.fd == -1
