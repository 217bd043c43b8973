"""A file system that hangs keeps its own thread, and nobody else."""

import errno
import os
import threading
import time

import pytest
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.io_errors import CountedIO, IOErrors
from kvtier_agent.storage.patient_io import PatientIO


class HangingIO(FileIO):
    """Allocation and removal wait for `answers`."""

    def __init__(self):
        self.answers = threading.Event()
        self.began = threading.Event()
        self.done = []

    def allocate(self, fd, offset, length):
        self.began.set()
        self.answers.wait(60)
        super().allocate(fd, offset, length)
        self.done.append("allocate")

    def write(self, fd, buffers, offset):
        self.done.append("write")
        return super().write(fd, buffers, offset)

    def unlink(self, path):
        super().unlink(path)
        self.done.append("unlink")


def test_what_hangs_is_given_up_and_the_rest_is_refused_at_once(tmp_path):
    inner = HangingIO()
    io = PatientIO(inner, seconds=0.05)
    fd, _ = io.open(tmp_path / "a", create=True, direct=False)
    with pytest.raises(OSError, match="does not answer") as refused:
        io.allocate(fd, 0, 4096)
    assert refused.value.errno == errno.ETIMEDOUT
    assert inner.began.is_set()
    io._seconds = 60
    with pytest.raises(OSError, match="does not answer"):
        io.write(fd, [b"x"], 0)  # at once, or this would take a minute
    with pytest.raises(OSError, match="does not answer"):
        io.unlink(tmp_path / "a")
    assert io.read(fd, [bytearray(1)], 0) == 0, "reads go on"
    gone = threading.Event()
    inner.answers.set()
    while not gone.wait(0.01):
        try:
            assert io.write(fd, [b"y"], 0) == 1
            gone.set()
        except OSError as error:
            if error.errno != errno.ETIMEDOUT:
                raise
    assert inner.done == ["allocate", "unlink", "write"], "in order, and no write that was refused"
    assert not (tmp_path / "a").exists()
    assert os.pread(fd, 1, 0) == b"y"
    io.close(fd)
    io.end()


def test_a_call_that_hangs_is_one_fault_and_those_that_are_not_made_are_none(tmp_path):
    inner, errors = HangingIO(), IOErrors()
    patient = PatientIO(inner, seconds=0.05)
    io = CountedIO(patient, errors, slow_seconds=60)
    fd, _ = io.open(tmp_path / "a", create=True, direct=False)
    for call in (
        lambda: io.allocate(fd, 0, 4096),
        lambda: io.write(fd, [b"x"], 0),
        lambda: io.flush(fd),
        lambda: io.unlink(tmp_path / "a"),
    ):
        with pytest.raises(OSError, match="does not answer"):
            call()
    assert errors.counts() == {("allocate", "slow"): 1}
    inner.answers.set()
    io.close(fd)
    patient.end()


def test_a_removal_is_asked_for_once_and_its_error_counts_though_nobody_waits(tmp_path):
    class Failing(HangingIO):
        def unlink(self, path):
            self.done.append("unlink")
            raise OSError(errno.EIO, "broken")

    inner, errors = Failing(), IOErrors()
    patient = PatientIO(inner, seconds=0.05, failed_late=errors.failed_late)
    io = CountedIO(patient, errors, slow_seconds=60)
    fd, _ = io.open(tmp_path / "a", create=True, direct=False)
    with pytest.raises(OSError, match="does not answer"):
        io.allocate(fd, 0, 4096)
    for _ in range(5):
        with pytest.raises(OSError, match="does not answer"):
            io.unlink(tmp_path / "a")
    inner.answers.set()
    end = time.monotonic() + 10
    while ("unlink", "EIO") not in errors.counts() and time.monotonic() < end:
        time.sleep(0.01)
    assert inner.done == ["allocate", "unlink"]
    assert errors.counts() == {("allocate", "slow"): 1, ("unlink", "EIO"): 1}
    io.close(fd)
    patient.end()


def test_errors_are_those_of_the_call(tmp_path):
    io = PatientIO(FileIO())
    with pytest.raises(FileNotFoundError):
        io.unlink(tmp_path / "none")
    with pytest.raises(OSError, match="Is a directory"):
        io.open(tmp_path, create=True, direct=False)
    io.end()


def test_a_long_call_keeps_no_other_of_the_same_file_system(tmp_path):
    inner = HangingIO()
    io = PatientIO(inner, seconds=60)
    fd, _ = io.open(tmp_path / "a", create=True, direct=False)
    long = threading.Thread(target=io.allocate, args=(fd, 0, 4096))
    long.start()
    assert inner.began.wait(60)
    assert io.write(fd, [b"x"], 0) == 1
    inner.answers.set()
    long.join(60)
    assert inner.done == ["write", "allocate"]
    io.close(fd)
    io.end()


def test_a_file_that_was_opened_too_late_is_closed(tmp_path):
    class SlowOpening(FileIO):
        def __init__(self):
            self.answers, self.closed = threading.Event(), threading.Event()

        def open(self, path, *, create, direct):
            self.answers.wait(60)
            return super().open(path, create=create, direct=direct)

        def close(self, fd):
            super().close(fd)
            self.closed.set()

    inner = SlowOpening()
    io = PatientIO(inner, seconds=0.05)
    with pytest.raises(OSError, match="does not answer"):
        io.open(tmp_path / "a", create=True, direct=False)
    inner.answers.set()
    assert inner.closed.wait(60)
    io.end()
