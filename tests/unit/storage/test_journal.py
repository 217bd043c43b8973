"""The journal on a file system: what is promised, what fails, and a crash between any two steps."""

import errno
import threading

import numpy as np
import pytest
from kvtier_agent.storage import checkpoint as checkpoints
from kvtier_agent.storage.checkpoint import Checkpointer, write_checkpoint
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal import Journal
from kvtier_agent.storage.journal_files import JournalSettings, Space
from kvtier_agent.storage.journal_format import Identity
from kvtier_agent.storage.journal_reader import read_journal
from kvtier_agent.storage.segment import PageStamp, SegmentGoneError
from kvtier_agent.supervise import Heart

IDENTITY = Identity(b"f" * 16, 4, 12288)
SETTINGS = JournalSettings(least_log_bytes=4096)


class CrashError(BaseException):
    """The process ends here."""


class CountingIO(FileIO):
    """Every call that changes the disk may fail: `at` is the number of calls until `error`."""

    def __init__(self):
        self.calls = []
        self.at = None
        self.error = None
        self.short = False

    def _step(self, name):
        self.calls.append(name)
        if self.at is not None:
            self.at -= 1
            if self.at < 0:
                raise self.error

    def write(self, fd, buffers, offset):
        self._step("write")
        if self.short:
            return super().write(fd, [bytes(buffers[0])[:10]], offset)
        return super().write(fd, buffers, offset)

    def allocate(self, fd, offset, length):
        self._step("allocate")
        super().allocate(fd, offset, length)

    def truncate(self, fd, length):
        self._step("truncate")
        super().truncate(fd, length)

    def flush(self, fd):
        self._step("flush")
        super().flush(fd)

    def flush_folder(self, folder):
        self._step("flush_folder")
        super().flush_folder(folder)

    def rename(self, source, target):
        self._step("rename")
        super().rename(source, target)

    def unlink(self, path):
        self._step("unlink")
        super().unlink(path)


@pytest.fixture
def io():
    return CountingIO()


@pytest.fixture
def make(mount, io):
    made = []

    def build(space=1 << 20, io=io, **options):
        found = read_journal(mount, IDENTITY, io)
        journal = Journal(
            mount, IDENTITY, io, Space(space), SETTINGS, cap_bytes=1 << 20, old=found.old,
            number=found.number, **options,
        )  # fmt: skip
        made.append(journal)
        return journal

    yield build
    for one in made:
        one.close()


def put(journal, slots, *, lasting=False, generation=0, sequence=0):
    slots = np.array(slots, dtype=np.uint32)
    keys = np.repeat(slots.astype(np.uint8)[:, None], 16, axis=1)
    stamp = PageStamp(keys, keys, slots, slots.astype(np.uint64))
    generations = np.full(len(slots), generation, dtype=np.uint32)
    journal.put(slots, generations, stamp, sequence, lasting=lasting)


def put_until_full(journal):
    for _ in range(1000):
        put(journal, range(4))


def slots_in(mount):
    found = read_journal(mount, IDENTITY, FileIO())
    return [s for part in found.pages for s in part["slot"].tolist()]


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


def test_a_checkpoint_replaces_what_was_there(make, mount):
    journal = make()
    for slot in range(40):
        put(journal, [slot])
    journal.delete(np.arange(10, dtype=np.uint32), np.zeros(10, np.uint32))
    write_checkpoint(journal)
    put(journal, [50])
    assert sorted(p.name for p in mount.iterdir()) == [
        "checkpoint-00000002.kv",
        "journal-00000002.log",
    ]
    assert slots_in(mount) == [*range(10, 40), 50]
    write_checkpoint(journal)
    assert slots_in(mount) == [*range(10, 40), 50]
    held = sum(path.stat().st_blocks * 512 for path in mount.iterdir())
    assert journal.space.used_bytes == held


def test_large_checkpoints_are_merged_in_pieces(make, mount, monkeypatch):
    monkeypatch.setattr(checkpoints, "FRAME_EVENTS", 7)
    monkeypatch.setattr("kvtier_agent.storage.journal_reader.READ_BYTES", 500)
    journal = make()
    expected = set()
    for round_ in range(5):
        some = np.random.default_rng(round_).integers(0, 200, 60, dtype=np.uint32)
        put(journal, some)
        journal.delete(some[:10], np.zeros(10, np.uint32))
        expected = (expected | set(some.tolist())) - set(some[:10].tolist())
        write_checkpoint(journal)
        assert slots_in(mount) == sorted(expected)


def test_a_crash_between_any_two_steps_of_a_checkpoint_is_harmless(make, io, mount):
    """Crash at step 0, 1, 2, ... until one runs through; each time a new process goes on."""
    expected = list(range(20))
    journal = make()
    put(journal, range(20))
    write_checkpoint(journal)
    crashes = 0
    for step in range(1000):
        journal = make()
        put(journal, [100 + step])
        expected.append(100 + step)
        io.at, io.error = step, CrashError()
        try:
            write_checkpoint(journal)
        except CrashError:
            crashes += 1
        else:
            break
        finally:
            io.at = None
        assert slots_in(mount) == expected
    assert crashes > 10
    assert slots_in(mount) == expected


def test_an_error_at_any_step_of_a_checkpoint_is_harmless(make, io, mount):
    journal = make()
    put(journal, range(20))
    failures = 0
    for step in range(1000):
        io.at, io.error = step, OSError(errno.EIO, "injected")
        before = len(io.calls)
        try:
            write_checkpoint(journal)
            if len(io.calls) - before <= step:
                break
        except OSError:
            failures += 1
        finally:
            io.at = None
        if journal.failed:
            write_checkpoint(journal)
        assert slots_in(mount) == list(range(20))
        put(journal, [1], lasting=True)
    assert failures > 5
    write_checkpoint(journal)
    held = sum(path.stat().st_blocks * 512 for path in mount.iterdir())
    assert slots_in(mount) == list(range(20))
    assert journal.space.used_bytes == held, "what could not be removed counts until it is"


def test_without_room_no_logs_pile_up(make, mount):
    journal = make(space=16384)
    with pytest.raises(OSError, match="part of the tier is full"):
        put_until_full(journal)
    for _ in range(3):
        with pytest.raises(OSError, match="part of the tier is full"):
            write_checkpoint(journal)
    assert [p.name for p in mount.iterdir()] == ["journal-00000001.log"]
    journal.space.limit_bytes = 1 << 20
    write_checkpoint(journal)
    put(journal, [7])
    assert slots_in(mount) == [0, 1, 2, 3, 7]


def test_the_loop_writes_what_is_due_and_says_what_fails(make, io, mount):
    journal = make()
    loop, heart = Checkpointer(lambda: [journal]), Heart(lambda: 0.0)
    journal.settings = JournalSettings(bytes_per_second=16 << 30, least_log_bytes=4096)
    heart.wait = lambda *_: False
    assert loop.step(heart)
    assert loop.checkpoints == 0
    while not journal.due:
        put(journal, range(40))
    io.at, io.error = 0, OSError(errno.EIO, "injected")
    assert not loop.step(heart)
    assert "injected" in loop.error
    assert (loop.checkpoints, loop.failures) == (0, 1)
    io.at = None
    assert loop.step(heart)
    assert (loop.checkpoints, loop.failures, loop.error) == (1, 1, "")
    assert not journal.due


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


def test_many_restarts_make_a_checkpoint_due(make, mount):
    for slot in range(8):
        journal = make(space=1 << 30)
        journal.settings, journal.cap_bytes = JournalSettings(), 1 << 40
        assert not journal.due
        put(journal, [slot])
        journal.close()
    journal = make(space=1 << 30)
    journal.settings, journal.cap_bytes = JournalSettings(), 1 << 40
    assert journal.due
    write_checkpoint(journal)
    assert slots_in(mount) == list(range(8))
    assert not journal.due


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
