"""Volumes that join a tier in use are cleared before another one leaves, off the cache thread."""

import errno

import pytest
from agents_in_turn import GEOMETRY, Node, put, right
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage.core import CoreError
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.left_out import LeftOut

PAGES = list(range(80))


class Drives(FileIO):
    """Writes on `broken` fail with its error, or its folders cannot be listed (`no_names`).
    `touched`: files that were opened or removed, per volume."""

    def __init__(self):
        self.broken, self.no_names, self.paths, self.touched = {}, "", {}, []

    def _fail(self, path):
        for name, error in self.broken.items():
            if name in path.parts:
                raise OSError(error, "injected")

    def open(self, path, *, create, direct):
        self.touched.append(path)
        fd, bypasses = super().open(path, create=create, direct=direct)
        self.paths[fd] = path
        return fd, bypasses

    def write(self, fd, buffers, offset):
        self._fail(self.paths[fd])
        return super().write(fd, buffers, offset)

    def unlink(self, path):
        self.touched.append(path)
        super().unlink(path)

    def names(self, folder):
        if self.no_names and self.no_names in folder.parts:
            raise OSError(errno.EIO, "injected")
        return super().names(folder)


class Machine(Node):
    """Two volumes, of which a revision names some."""

    def __init__(self, folder):
        super().__init__(folder, volumes=("data0", "data1"))
        self.drives = self.io = Drives()

    def agent(self, maximum=256, **options):
        named, self.volumes = self.volumes, ("data0", "data1")
        core = super().agent(maximum, keep_memory=False, **options)
        self.volumes = named
        core.nvme.left_out = LeftOut(lambda: self.now)
        return core

    now = 0.0

    def segments(self, name):
        return set((self.folder / name).rglob("segment-*"))


@pytest.fixture
def machine(mount):
    made = Machine(mount)
    yield made
    if made.core is not None:
        made.core.close()


@pytest.mark.parametrize("what", ["write", "names"])
def test_a_revision_whose_volume_cannot_be_cleared_costs_the_one_in_force_nothing(machine, what):
    machine.volumes = ("data0",)
    core = machine.start(8, 200)
    put(core, PAGES)
    held = machine.segments("data0")
    assert held
    machine.volumes = ("data1",)
    if what == "write":
        machine.drives.broken = {"data1": errno.EIO}
    else:
        machine.drives.no_names = "data1"
    for _ in range(3):
        with pytest.raises(CoreError, match="injected") as caught:
            core.reconfigure(1.0, *machine.revision(8, 200))
        assert caught.value.reason == "VolumeUnusable"
    assert machine.segments("data0") == held
    assert right(core, PAGES) == PAGES
    machine.drives.broken, machine.drives.no_names = {}, ""
    core.reconfigure(1.0, *machine.revision(8, 200))
    assert core.holds("data1")
    assert not machine.segments("data0")
    check_books(core.cache)


def test_nothing_is_lost_either_where_only_the_first_client_makes_it_join(machine):
    machine.volumes = ("data0",)
    put(machine.start(8, 200), PAGES)
    machine.stop()
    core = machine.start(8, 200)
    held = machine.segments("data0")
    assert held
    machine.volumes = ("data1",)
    core.reconfigure(1.0, *machine.revision(8, 200))
    machine.drives.broken = {"data1": errno.EIO}
    with pytest.raises(CoreError, match="injected"):
        core.register(1.0, GEOMETRY)
    assert machine.segments("data0") == held
    machine.drives.broken = {}
    assert core.register(1.0, GEOMETRY).accepted


def test_old_pages_are_removed_before_the_cache_thread_takes_the_volume_in(machine):
    machine.volumes = ("data0", "data1")
    put(machine.start(8, 200), PAGES)
    machine.stop()
    assert machine.segments("data1")
    machine.drives.broken = {"data1": errno.ENOSPC}
    core = machine.start(8, 200)
    put(core, range(100, 120))
    assert machine.segments("data1"), "it is left out"
    machine.drives.broken, machine.now = {}, 100.0
    core.try_volumes_again()
    seen = []
    core.prepare(*machine.revision(8, 200), lambda: seen.append(machine.segments("data1")))
    assert not machine.segments("data1")
    assert len(set(map(len, seen))) > 1, "a sign of life for each file"
    machine.drives.touched.clear()
    core.reconfigure(1.0, *machine.revision(8, 200))
    assert [path for path in machine.drives.touched if "data1" in path.parts] == []
    assert core.holds("data1")
    put(core, range(120, 200))
    assert machine.segments("data1")
    assert right(core, range(120, 200)) == list(range(120, 200))
    check_books(core.cache)
