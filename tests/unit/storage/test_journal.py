"""The journal on a file system: what is promised, what fails, and a crash between any two steps."""

import errno
import threading

import numpy as np
import pytest
from journal_work import IDENTITY, SETTINGS, put, put_until_full, slots_in
from kvtier_agent.storage.checkpoint import write_checkpoint
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal import Journal
from kvtier_agent.storage.journal_files import JournalSettings, Space
from kvtier_agent.storage.journal_format import Identity
from kvtier_agent.storage.journal_reader import read_journal
from kvtier_agent.storage.segment import SegmentGoneError


def test_what_was_said_is_read_back(make, mount):
    journal = make()
    journal.reset(1, 3)
    put(journal, [4, 5, 9], generation=3, sequence=100)
    journal.delete(np.array([5], np.uint32), np.array([3], np.uint32))
    found = read_journal(mount, IDENTITY, FileIO())
    pages = np.concatenate(found.pages)
    assert pages["slot"].tolist() == [4, 9]
    assert pages["sequence"].tolist() == [100, 102]
    assert (pages["key"][1] == 9).all()
    assert pages["depth"].tolist() == [4, 9]
    assert found.generations == {1: 3, 2: 3}
    assert found.dropped_bytes == 0, "room that was laid out ahead is nothing lost"


def test_only_what_is_to_last_is_flushed(make, io):
    journal = make()
    io.calls.clear()
    put(journal, [1])
    journal.delete(np.array([1], np.uint32), np.array([0], np.uint32))
    assert "flush" not in io.calls
    put(journal, [2], lasting=True)
    assert io.calls.count("flush") == 1
    journal.reset(3, 1)
    assert io.calls.count("flush") == 2


def test_threads_that_wait_share_one_flush(make, io):
    """Nine append while a flush is under way: one more flush serves them all."""
    journal = make()
    io.calls.clear()
    entered, go = threading.Event(), threading.Event()
    flush = io.flush

    def slow(fd):
        entered.set()
        assert go.wait(30)
        flush(fd)

    io.flush = slow
    threads = [threading.Thread(target=put, args=(journal, [0]), kwargs={"lasting": True})]
    threads[0].start()
    assert entered.wait(30)
    appended = threading.Semaphore(0)
    write = io.write

    def counted(fd, buffers, offset):
        done = write(fd, buffers, offset)
        appended.release()
        return done

    io.write = counted
    for slot in range(1, 10):
        thread = threading.Thread(target=put, args=(journal, [slot]), kwargs={"lasting": True})
        thread.start()
        threads.append(thread)
    for _ in range(9):
        assert appended.acquire(timeout=30)
    go.set()
    for thread in threads:
        thread.join(30)
    assert io.calls.count("flush") == 2


def test_a_full_drive_refuses_the_event_and_no_other(make, io, mount):
    journal = make()
    put(journal, [1])
    io.at, io.error = 0, OSError(errno.ENOSPC, "full")
    with pytest.raises(OSError, match="full"):
        put(journal, [2])
    io.at = None
    put(journal, [3])
    assert slots_in(mount) == [1, 3]


def test_a_short_write_is_an_error_and_is_written_over(make, io, mount):
    journal = make()
    io.short = True
    with pytest.raises(OSError, match="short write"):
        put(journal, [1, 2, 3])
    io.short = False
    put(journal, [4])
    assert slots_in(mount) == [4]
    assert read_journal(mount, IDENTITY, FileIO()).dropped_bytes == 0


def test_the_journal_keeps_to_its_space(make, mount):
    journal = make(space=12288)
    with pytest.raises(OSError, match="part of the tier is full") as caught:
        put_until_full(journal)
    assert caught.value.errno == errno.ENOSPC
    assert sum(path.stat().st_blocks * 512 for path in mount.iterdir()) <= 12288
    assert journal.space.used_bytes <= 12288


def test_after_a_failed_flush_nothing_is_believed_until_a_new_log(make, io, mount):
    journal = make()
    put(journal, [1], lasting=True)
    io.at, io.error = 1, OSError(errno.EIO, "flush failed")
    with pytest.raises(OSError, match="flush failed"):
        put(journal, [2], lasting=True)
    io.at = None
    with pytest.raises(OSError, match="could not be flushed"):
        put(journal, [3])
    assert journal.due
    write_checkpoint(journal)
    put(journal, [4], lasting=True)
    assert {1, 4} <= set(slots_in(mount))
    assert 3 not in slots_in(mount)


def test_a_torn_tail_is_cut_and_counted_once(make, io, mount):
    journal = make()
    put(journal, [1])
    put(journal, [2])
    journal.close()
    path = next(mount.glob("journal-*"))
    path.write_bytes(path.read_bytes()[:-5])
    found = read_journal(mount, IDENTITY, io)
    assert 0 < found.dropped_bytes <= 16 + 64 - 5
    again = make()
    put(again, [3])
    assert read_journal(mount, IDENTITY, io).dropped_bytes == 0
    assert slots_in(mount) == [1, 3]


def test_a_log_without_a_whole_header_is_nothing(make, mount):
    make().close()
    (mount / "journal-00000007.log").write_bytes(b"KVTIERJL\x01")
    journal = make()
    assert journal.number == 8
    put(journal, [1])
    assert slots_in(mount) == [1]


def test_another_identity_is_a_reason_not_a_guess(make, mount):
    put(make(), [1])
    for other, words in (
        (Identity(b"g" * 16, 4, 12288), "another model"),
        (Identity(b"f" * 16, 8, 12288), "8 of 12288"),
    ):
        found = read_journal(mount, other, FileIO())
        assert not found.pages
        assert words in found.reason


def test_a_drive_that_cannot_be_read_costs_records_and_no_file(make, io, mount):
    journal = make()
    put(journal, [1])
    journal.close()
    size = next(mount.glob("journal-*")).stat().st_size
    read, reads = io.read, []

    def failing(fd, buffers, offset):
        reads.append(offset)
        if offset:
            raise OSError(errno.EIO, "injected")
        return read(fd, buffers, offset)

    io.read = failing
    found = read_journal(mount, IDENTITY, io)
    assert not found.pages
    assert found.dropped_bytes
    io.read = read
    assert next(mount.glob("journal-*")).stat().st_size == size
    assert slots_in(mount) == [1]


def test_closed_is_closed(make, mount):
    journal = make()
    put(journal, [1])
    journal.close(remove=True)
    assert not list(mount.iterdir())
    assert journal.space.used_bytes == 0
    with pytest.raises(SegmentGoneError):
        put(journal, [2])
    write_checkpoint(journal)
    assert not list(mount.iterdir())


@pytest.mark.parametrize(
    "wrong",
    [{"log_percent": 4}, {"log_percent": 101}, {"least_log_bytes": 1}, {"bytes_per_second": 0}],
)
def test_settings_have_bounds(wrong):
    with pytest.raises(ValueError, match=r"is \d+; give \d+ to \d+"):
        JournalSettings(**wrong)


def test_the_space_suffices_for_a_checkpoint_of_a_full_tier(mount, io):
    """Every slot in use, a log at its limit, a checkpoint on the way: still inside the space."""
    for slots in (20, 500, 5000):
        cap = slots * IDENTITY.stride
        space = Space(SETTINGS.space_bytes(slots, IDENTITY.per_segment, 1, cap))
        folder = mount / str(slots)
        folder.mkdir()
        journal = Journal(folder, IDENTITY, io, space, SETTINGS, cap_bytes=cap)
        for _ in range(3):
            for start in range(0, slots, 50):
                put(journal, range(start, min(slots, start + 50)))
                if journal.due:
                    write_checkpoint(journal)
        write_checkpoint(journal)
        write_checkpoint(journal)
        assert space.used_bytes <= space.limit_bytes
        assert len(slots_in(folder)) == slots
        journal.close()
