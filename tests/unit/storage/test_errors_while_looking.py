"""An error while a volume is looked through at the start removes nothing of what lies there."""

import errno
from pathlib import Path

import pytest
from agents_in_turn import GEOMETRY, Node, put, right
from descriptors import open_files
from kvtier_agent.storage import recovery
from kvtier_agent.storage.checkpoint import write_checkpoint
from kvtier_agent.storage.core import CoreError
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.unreadable import Unreadable, UnreadableError, unreadable
from kvtier_agent.storage.volume import VolumeError
from kvtier_agent.storage.volume_health import LASTING_SECONDS


class Looking(FileIO):
    """The calls that look at files, counted; `at`: the one that fails, with `error`. `bad`: names
    that are never readable, and from where on."""

    def __init__(self):
        self.at, self.error, self.calls = None, errno.EIO, 0
        self.bad = {}
        self.paths = {}

    def _look(self):
        self.calls += 1
        if self.at is not None and self.calls > self.at:
            self.at = None
            raise OSError(self.error, "injected")

    def open(self, path, *, create, direct):
        if not create:
            self._look()
        fd, bypasses = super().open(path, create=create, direct=direct)
        self.paths[fd] = path
        return fd, bypasses

    def read(self, fd, buffers, offset):
        self._look()
        for name, start in self.bad.items():
            if self.paths[fd].name.startswith(name) and offset >= start:
                raise OSError(errno.EIO, "injected")
        return super().read(fd, buffers, offset)

    def size(self, fd):
        self._look()
        return super().size(fd)

    def names(self, folder):
        self._look()
        return super().names(folder)


def names_in(folder: Path) -> set[str]:
    """Of what counts: a try that fails may leave a log that says nothing."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE])
def test_one_error_at_any_step_removes_nothing_and_leaves_nothing_open(make_l2, error):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([0, 1, 2])
    write_checkpoint(one.l2.journals.all()[0])
    one.write([9, 10])
    one.l2.close()
    files = {path.name: path.read_bytes() for path in one.folder.iterdir() if path.name != "lock"}
    failures = 0
    for step in range(100):
        io = Looking()
        again = make_l2(io=io)
        for path in again.folder.glob("*-*"):
            path.unlink()
        for name, data in files.items():
            (again.folder / name).write_bytes(data)
        io.at, io.error, io.calls = step, error, 0
        before, there = open_files(again.folder), names_in(again.folder)
        try:
            found = recovery.recover(again.l2)
        except UnreadableError:
            failures += 1
            assert open_files(again.folder) == before
            assert names_in(again.folder) >= there
            found = recovery.recover(again.l2)
            assert found.slots.tolist() == [0, 1, 2, 9, 10], step
        else:
            assert found.slots.tolist() == [0, 1, 2, 9, 10], step
            if io.at is not None:
                break
    assert failures == step > 8


def test_a_manifest_that_cannot_be_read_is_not_one_that_makes_no_sense(make_l2, monkeypatch):
    one = make_l2()
    recovery.recover(one.l2)
    one.write([3])
    again = make_l2()

    def fails(path, *_, **__):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        for look in (recovery.geometry_of, lambda v: recovery.clear(v, one.l2)):
            with pytest.raises(VolumeError, match=r"cannot read .*layout\.json: Input"):
                look(again.volume)
        with pytest.raises(VolumeError, match=r"cannot read .*layout\.json: Input"):
            recovery.recover(again.l2)
        recovery.sweep("data0", again.folder.parents[1], "d", again.io)
    assert recovery.recover(again.l2).slots.tolist() == [3]


def test_what_stays_unreadable_is_given_up_after_a_while(mount):
    node = Node(mount)
    put(node.start(4, 200, keep_memory=False), list(range(60)))
    node.stop()
    node.io = Looking()
    node.io.bad = {"journal": 0}
    core, now = node.agent(256, keep_memory=False), [0.0]
    core.nvme.unreadable = Unreadable(lambda: now[0])
    segments = set(mount.rglob("segment-*"))
    assert segments
    while True:
        with pytest.raises(CoreError, match="cannot read the journal in"):
            core.prepare(*node.revision(4, 200))
        assert set(mount.rglob("segment-*")) == segments
        if now[0] >= LASTING_SECONDS:
            break
        now[0] += 5.0
    core.prepare(*node.revision(4, 200))
    core.reconfigure(0.0, *node.revision(4, 200))
    core.register(0.0, GEOMETRY)
    assert not set(mount.rglob("segment-*"))
    put(core, list(range(60)))
    assert right(core, list(range(60))) == list(range(60))
    core.close()


def test_tries_far_apart_and_limits_of_our_own_are_no_reason_to_give_up(make_l2):
    volume, now = make_l2().volume, [0.0]
    tries = Unreadable(lambda: now[0])
    for _ in range(10):
        tries.note(unreadable(volume, "x", OSError(errno.EMFILE, "x")))
        now[0] += 10.0
    assert not tries.given_up()
    for _ in range(10):
        tries.note(unreadable(volume, "x", OSError(errno.EIO, "x")))
        now[0] += 2 * LASTING_SECONDS
    assert not tries.given_up()
    for _ in range(5):
        tries.note(unreadable(volume, "x", OSError(errno.EIO, "x")))
        now[0] += 10.0
    assert tries.given_up() == {"data0"}
    tries.forget("data0")
    assert not tries.given_up()
