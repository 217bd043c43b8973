"""Checkpoints of the journal: what they replace, what fails, and a crash between any two steps."""

import errno

import numpy as np
import pytest
from agents_in_turn import Node
from agents_in_turn import put as put_pages
from journal_work import CountingIO, CrashError, put, put_until_full, slots_in
from kvtier_agent.storage import checkpoint as checkpoints
from kvtier_agent.storage.checkpoint import Checkpointer, write_checkpoint
from kvtier_agent.storage.journal_files import JournalSettings
from kvtier_agent.supervise import Heart


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


@pytest.fixture
def loop(make, monkeypatch):
    """A loop over one journal, `seconds(n)`: five at a time, a step each."""
    journal = make(space=1 << 20)
    journal.settings = JournalSettings(bytes_per_second=16 << 30, least_log_bytes=4096)
    now, heart = [0.0], Heart(lambda: 0.0)
    heart.wait = lambda *_: False
    made = Checkpointer(lambda: [journal], lambda: now[0])

    def seconds(count):
        for _ in range(0, count, 5):
            now[0] += 5.0
            made.step(heart)

    made.journal, made.seconds = journal, seconds
    return made


def make_due(journal, slots=range(40)):
    while not journal.due:
        put(journal, slots)


def unreadable(io, names, at):
    """Reads of files whose names begin so fail from this offset on."""
    paths, real = {}, type(io)

    def open_(path, **options):
        fd, bypasses = real.open(io, path, **options)
        paths[fd] = path.name
        return fd, bypasses

    def read(fd, buffers, offset):
        if paths.get(fd, "").startswith(names) and offset >= at:
            raise OSError(errno.EIO, "a bad sector")
        return real.read(io, fd, buffers, offset)

    io.open, io.read = open_, read


@pytest.mark.parametrize("at", [0, 128])
@pytest.mark.parametrize("names", ["checkpoint", "journal-00000002"])
def test_a_bad_sector_in_old_files_ends_neither_checkpoints_nor_events(loop, io, mount, at, names):
    journal = loop.journal
    put(journal, range(100, 140))
    write_checkpoint(journal)
    make_due(journal)
    unreadable(io, names, at)
    loop.seconds(10)
    assert loop.trouble(mount) is None, "it may be a hiccup"
    loop.seconds(15)
    assert loop.failures == 5
    assert "a bad sector" in str(loop.trouble(mount))
    assert {p.name for p in mount.glob("checkpoint-*")} == {"checkpoint-00000002.kv"}
    put(journal, [200])
    loop.seconds(15)
    assert loop.trouble(mount) is None
    assert loop.checkpoints == 1
    assert not journal.due
    put(journal, [201])
    lost = range(100, 140) if names == "checkpoint" else range(40)
    kept = {*range(100, 140), *range(40), 200, 201} - set(lost)
    assert set(slots_in(mount)) == kept
    held = sum(path.stat().st_blocks * 512 for path in mount.iterdir())
    assert journal.space.used_bytes == held


def test_errors_that_pass_cost_no_record(loop, io, mount):
    put(loop.journal, range(100, 140))
    write_checkpoint(loop.journal)
    make_due(loop.journal)
    unreadable(io, "checkpoint", 128)
    loop.seconds(20)
    del io.read, io.open
    loop.seconds(5)
    assert loop.checkpoints == 1
    assert slots_in(mount) == [*range(40), *range(100, 140)]
    # Room is short for a minute, and then there is one error more.
    make_due(loop.journal)
    allocate, io.allocate = io.allocate, no_room
    loop.seconds(60)
    io.allocate = allocate
    unreadable(io, "checkpoint", 128)
    loop.seconds(5)
    del io.read, io.open
    loop.seconds(5)
    assert loop.checkpoints == 2
    assert slots_in(mount) == [*range(40), *range(100, 140)]


def no_room(*_):
    raise OSError(errno.ENOSPC, "no room")


def test_logs_that_have_filled_what_is_set_aside_do_not_keep_it_so(loop, io, mount):
    journal = loop.journal
    make_due(journal)
    allocate, io.allocate = io.allocate, no_room  # the volume is full for a while
    loop.seconds(25)
    io.allocate = allocate
    journal.space.limit_bytes = 65536
    with pytest.raises(OSError, match="part of the tier is full"):
        put_until_full(journal)
    loop.seconds(5)
    assert loop.checkpoints == 0
    assert "no room" in str(loop.trouble(mount)), "not what follows from it"
    loop.seconds(5)
    assert loop.checkpoints == 1
    assert loop.trouble(mount) is None
    assert journal.space.used_bytes < journal.space.limit_bytes
    put(journal, [50])
    assert slots_in(mount) == [*range(40), 50]


def test_a_volume_whose_journal_gets_no_checkpoint_is_said(mount):
    machine = Node(mount)
    machine.io = io = CountingIO()
    core = machine.start(4, 200, keep_memory=False, journal=JournalSettings(least_log_bytes=4096))
    put_pages(core, range(150))
    assert core.nvme.journal().checkpoints
    assert core.trouble("data0") is None
    unreadable(io, ("journal", "checkpoint"), 0)
    put_pages(core, range(150, 250))
    trouble = core.trouble("data0")
    assert trouble.message == "no checkpoint of its journal: a bad sector"
    assert (trouble.reason, trouble.lost) == ("VolumeUnusable", False)
    core.close()


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
