"""A volume that takes no writes at the start is left out: the tier works without it and says so."""

import errno

import pytest
from agents_in_turn import GEOMETRY, Node, put, right
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage.core import CoreError
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.left_out import LeftOut
from kvtier_agent.storage.volume import VolumeError

PAGES = list(range(100))
READ_ONLY, FULL = "VolumeReadOnly", "VolumeFull"


class Drives(FileIO):
    """New files and writes on the volumes in `broken` fail with that error."""

    def __init__(self):
        self.broken = {}
        self.paths = {}

    def _fail(self, path):
        for name, error in self.broken.items():
            if name in path.parts:
                raise OSError(error, "injected")

    def open(self, path, *, create, direct):
        if create:
            self._fail(path)
        fd, bypasses = super().open(path, create=create, direct=direct)
        self.paths[fd] = path
        return fd, bypasses

    def write(self, fd, buffers, offset):
        self._fail(self.paths[fd])
        return super().write(fd, buffers, offset)


class Machine(Node):
    """Two volumes, of which some are broken; `now` is the clock by which they rest."""

    def __init__(self, folder):
        super().__init__(folder, volumes=("data0", "data1"))
        self.drives = self.io = Drives()
        self.now = 0.0

    def agent(self, maximum=256, **options):
        core = super().agent(maximum, keep_memory=False, **options)
        core.nvme.left_out = LeftOut(lambda: self.now)
        return core

    def segments(self, name):
        return list((self.folder / name).rglob("segment-*"))

    def troubles(self):
        return {name: reason for name, _, reason in self.core.volumes()}


@pytest.fixture
def machine(mount):
    made = Machine(mount)
    yield made
    if made.core is not None:
        made.core.close()


@pytest.mark.parametrize("first", ["client", "revision"])
@pytest.mark.parametrize(("error", "reason"), [(errno.EROFS, READ_ONLY), (errno.ENOSPC, FULL)])
def test_the_others_are_used_and_it_joins_when_it_is_well(machine, error, reason, first):
    machine.drives.broken["data1"] = error
    core = machine.agent()
    if first == "client":
        core.register(0.0, GEOMETRY)
    core.reconfigure(0.0, *machine.revision(40, 200))
    put(core, PAGES)
    assert right(core, PAGES) == PAGES, "the healthy volume takes what memory has no room for"
    assert machine.segments("data0")
    assert not machine.segments("data1")
    assert machine.troubles() == {"data0": "", "data1": reason}
    assert core.trouble("data1").reason == reason
    assert core.trouble("data0") is None
    assert [core.holds(name) for name in machine.volumes] == [True, False]

    machine.now = 100.0
    core.try_volumes_again()
    assert core.trouble("data1").reason == reason, "it is still broken"
    machine.drives.broken.clear()
    core.try_volumes_again()
    assert core.trouble("data1").reason == reason, "it rests"
    machine.now = 300.0
    core.try_volumes_again()
    assert core.trouble("data1") is None

    core.prepare(*machine.revision(40, 200))
    core.reconfigure(3.0, *machine.revision(40, 200))
    assert core.holds("data1")
    assert right(core, PAGES) == PAGES, "nothing is lost when it joins"
    assert machine.troubles() == {"data0": "", "data1": ""}
    check_books(core.cache)


def test_a_restart_finds_the_pages_of_the_other(machine):
    machine.volumes = ("data0",)
    put(machine.start(40, 200), PAGES)
    held = machine.core.cache.snapshot(1.0).tiers[2].pages
    assert held > 10
    machine.stop()
    machine.volumes = ("data0", "data1")
    machine.drives.broken["data1"] = errno.EROFS
    core = machine.start(40, 200)
    core.register(0.0, GEOMETRY)
    assert core.cache.snapshot(1.0).tiers[2].pages == held
    assert machine.troubles() == {"data0": "", "data1": READ_ONLY}
    check_books(core.cache)


def test_all_volumes_may_be_left_out(machine):
    machine.drives.broken = {"data0": errno.EROFS, "data1": errno.ENOSPC}
    core = machine.start(40, 200)
    put(core, PAGES[:6])
    assert right(core, PAGES[:6]) == PAGES[:6], "memory works"
    assert core.cache.snapshot(1.0).tiers[2].capacity_bytes == 0
    assert machine.troubles() == {"data0": READ_ONLY, "data1": FULL}


def test_whatever_else_is_wrong_is_refused(machine):
    machine.drives.broken["data1"] = errno.EIO
    core = machine.agent()
    core.register(0.0, GEOMETRY)
    with pytest.raises(CoreError) as caught:
        core.reconfigure(0.0, *machine.revision(40, 200))
    assert caught.value.reason == "VolumeUnusable"
    machine.drives.broken.clear()
    core.reconfigure(0.0, *machine.revision(40, 200))
    assert core.holds("data1")


def test_it_is_tried_ever_more_slowly_and_forgotten_when_nobody_names_it():
    clock = [0.0]
    left = LeftOut(lambda: clock[0])
    gaps = []
    for _ in range(10):
        left.add("data1", VolumeError("no", FULL))
        begun = clock[0]
        assert left.due() == []
        while not left.due():
            clock[0] += 1.0
        gaps.append(clock[0] - begun)
    assert gaps == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    with pytest.raises(VolumeError, match="mistake"):
        left.add("data1", VolumeError("a mistake"))
    assert left.trouble("data1") is None, "whoever opens it next says what is wrong"
    left.add("data1", VolumeError("no", READ_ONLY))
    assert set(left.all()) == {"data1"}
    left.keep(["data0"])
    assert left.all() == {}
