"""A volume that was away for a while does not beat what the others have stored meanwhile."""

import errno
import json

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.storage import l2 as l2_module
from kvtier_agent.storage import recovery
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.left_behind import geometry_left
from kvtier_agent.storage.manifest import MANIFEST_NAME, Manifest, away, parse
from kvtier_agent.storage.nvme import NvmeTier
from kvtier_agent.storage.segment import PageStamp
from kvtier_agent.storage.settings import CoreSettings
from kvtier_agent.storage.volume import VolumeError

PAGE, PER = 4096, 4
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
SUMS = np.full(32, xxhash.xxh3_64_intdigest(bytes(PAGE)), dtype=np.uint64)
OK = {int(MoveStatus.OK)}
BOTH = ("data0", "data1")


class Drives(FileIO):
    """`full`: the volume that has no room; `stays`: the file that cannot be removed; `after`: what
    happens after a rename in that volume."""

    def __init__(self):
        self.full, self.stays, self.after, self.paths = "", "", ("", lambda: None), {}

    def open(self, path, *, create, direct):
        fd, bypasses = super().open(path, create=create, direct=direct)
        self.paths[fd] = path
        return fd, bypasses

    def write(self, fd, buffers, offset):
        if self.full in self.paths[fd].parts:
            raise OSError(errno.ENOSPC, "full")
        return super().write(fd, buffers, offset)

    def unlink(self, path):
        if path.name == self.stays:
            raise OSError(errno.EIO, "injected")
        super().unlink(path)

    def rename(self, source, target):
        super().rename(source, target)
        if self.after[0] in target.parts:
            self.after[1]()


class Tier:
    """Agents follow upon each other on two volumes, with segments of four slots."""

    def __init__(self, mount):
        self.mount, self.io, self.now = mount, Drives(), None
        for name in BOTH:
            (mount / name).mkdir()
        self.settings = CoreSettings(
            "d", mount, mount / "t", {name: mount / name for name in BOTH}, 0, 0,
            allow_root_filesystem=True, synchronous=True,
        )  # fmt: skip
        flat = np.zeros(33 * PAGE, dtype=np.uint8)
        start = -flat.ctypes.data % 4096
        self.arena = flat[start : start + 32 * PAGE].reshape(32, PAGE)
        self.nvme = None

    def start(self, volumes=BOTH, geometry=GEOMETRY):
        """The next agent: what it finds, as a set of (segment, tag)."""
        self.stop()
        self.nvme = nvme = NvmeTier(self.settings, self.io)
        self.budgets = Budgets(0, 0, 1 << 20, tuple(volumes))
        self.prepare(geometry)
        nvme.change(Behaviour(), self.budgets, geometry or GEOMETRY, lambda _: None)
        nvme.limit(Behaviour(), self.budgets)
        found = nvme.take_found()
        if found is None:
            return set()
        recovery.keep_only(nvme.l2, found.slots)
        return {(int(key[0]), int(key[1])) for key in found.keys}

    def prepare(self, geometry=GEOMETRY):
        opened = self.nvme.open(self.budgets)
        try:
            self.nvme.find(opened, Behaviour(), geometry)
        except BaseException:
            for volume in opened.values():
                volume.close()
            raise
        self.nvme.keep(opened, self.budgets)

    def stop(self):
        if self.nvme is not None:
            self.nvme.close()
            self.nvme = None

    def write(self, segment, tag, epoch=0):
        rows = np.arange(PER, dtype=np.uint32)
        slots = rows + np.uint32(segment * PER)
        keys = np.zeros((PER, 16), np.uint8)
        keys[:, 0], keys[:, 1], keys[:, 2] = segment, tag, rows
        stamp = PageStamp(keys, keys, rows, SUMS[rows])
        uses = (np.full_like(slots, epoch), np.full_like(slots, PER))
        return set(self.nvme.l2.write(slots, stamp, self.arena, rows, uses)[0].tolist())

    def on(self, name):
        held = self.nvme.l2.segments
        return {number for number, (_, volume) in list(held.items()) if volume.name == name}

    def manifest(self, name):
        return self.mount / name / "kvtier" / "d" / MANIFEST_NAME


@pytest.fixture
def tier(mount, monkeypatch):
    monkeypatch.setattr(l2_module, "slots_per_segment", lambda stride: PER)
    made = Tier(mount)
    yield made
    made.stop()


@pytest.fixture
def used(tier):
    """Both volumes hold segments, begun several times."""
    tier.start()
    for epoch in (0, 1, 2):
        for segment in range(4):
            assert tier.write(segment, epoch, epoch) == OK
    assert tier.on("data0") == {0, 2}
    assert tier.on("data1") == {1, 3}
    return tier


@pytest.mark.parametrize("why", ["full", "not named"])
@pytest.mark.parametrize("order", [BOTH, BOTH[::-1]])
def test_what_was_stored_meanwhile_is_found(used, why, order):
    if why == "full":
        used.io.full, names = "data1", BOTH
    else:
        names = ("data0",)
        used.settings.volumes.pop("data1")  # else it would be swept
    assert used.start(names) == {(0, 2), (2, 2)}
    for segment in (1, 3):
        assert used.write(segment, 9) == OK
    for _ in range(2):  # a restart while it is away costs nothing
        assert used.start(names) == {(0, 2), (2, 2), (1, 9), (3, 9)}
    used.io.full = ""
    used.settings.volumes["data1"] = used.mount / "data1"
    assert used.start(order) == {(0, 2), (2, 2), (1, 9), (3, 9)}
    assert used.write(7, 9) == OK
    assert used.on("data1") == {7}, "it is of use again, from empty"
    assert used.start() == {(0, 2), (2, 2), (1, 9), (3, 9), (7, 9)}


def test_volumes_that_were_away_in_turns(used):
    for there in BOTH:
        for name in BOTH:
            used.settings.volumes.pop(name, None)
        used.settings.volumes[there] = used.mount / there
        used.start((there,))
        for segment in range(4):
            assert used.write(segment, 7 if there == "data0" else 8, 5) == OK
        used.stop()
        held = json.loads(used.manifest(there).read_text())
        # As if a day had passed.
        held["start"] += 86400 * BOTH.index(there)
        used.manifest(there).write_text(json.dumps(held))
    used.settings.volumes.update({name: used.mount / name for name in BOTH})
    assert used.start() == {(segment, 8) for segment in range(4)}, "the last one's"


def test_a_restart_a_join_and_an_older_agent_cost_no_page(used):
    all_of_it = {(segment, 2) for segment in range(4)}
    for _ in range(3):
        assert used.start() == all_of_it
    used.stop()
    for name in BOTH:  # as an agent writes it that knows nothing of starts
        held = json.loads(used.manifest(name).read_text())
        used.manifest(name).write_text(
            json.dumps({"layout": held["layout"], "geometry": held["geometry"]}, indent=1)
        )
    assert used.start() == all_of_it
    used.io.full = "data1"
    used.start()
    used.io.full = ""
    used.prepare()
    used.nvme.change(Behaviour(), used.budgets, GEOMETRY, lambda _: None)
    for segment in (1, 3):
        assert used.write(segment, 9) == OK
    assert used.on("data1")
    assert used.start() == {(0, 2), (2, 2), (1, 9), (3, 9)}


def test_an_end_between_two_manifests_is_no_absence(used):
    class KilledError(BaseException):
        pass

    def killed():
        raise KilledError

    used.stop()
    before = json.loads(used.manifest("data1").read_text())["start"]
    used.io.after = ("data0", killed)
    with pytest.raises(KilledError):
        used.start()
    used.io.after = ("", lambda: None)
    starts = [json.loads(used.manifest(name).read_text())["start"] for name in BOTH]
    assert starts[0] > starts[1] == before
    assert used.start() == {(segment, 2) for segment in range(4)}


def test_a_journal_that_cannot_be_removed_is_not_believed_later(used):
    used.io.full = "data1"
    used.start()
    assert used.write(1, 9) == OK
    used.io.full = ""
    used.stop()
    used.io.stays = next(used.manifest("data1").parent.glob("journal-*")).name
    with pytest.raises(VolumeError, match="cannot write to"):
        used.start()
    used.io.stays = ""
    assert used.start() == {(0, 2), (1, 9), (2, 2)}


def test_the_pages_that_were_written_last_say_of_which_model_they_are(used):
    other = Geometry.of_page_bytes(PAGE, 16, weights="another model")
    used.stop()
    used.settings.volumes.pop("data0")
    used.start(("data1",), other)
    assert used.write(0, 5) == OK
    used.stop()
    used.settings.volumes["data0"] = used.mount / "data0"
    mounts = [used.mount / name for name in BOTH]
    assert geometry_left(mounts, "d") == other
    nvme = used.nvme = NvmeTier(used.settings, used.io)
    opened = nvme.open(used.budgets)
    opened |= nvme.open(Budgets(0, 0, 1 << 20, ("data0",)))
    nvme.find({name: opened[name] for name in BOTH}, Behaviour(), None)
    nvme.keep(opened, used.budgets)
    assert nvme.l2.geometry == other
    assert len(nvme.take_found().slots) == PER


def test_who_was_away_is_told_from_starts_and_names():
    def of(start, *names):
        return Manifest(GEOMETRY, "", start, frozenset(names))

    assert away({}) == set()
    assert away({"a": of(0), "b": of(0)}) == set()
    assert away({"a": of(5, "a"), "b": of(0)}) == {"b"}
    assert away({"a": of(5, "a", "b"), "b": of(4, "a", "b")}) == set()
    assert away({"a": of(5, "a"), "b": of(5, "a", "b")}) == set(), "b joined later"
    assert away({"a": of(3, "a", "b"), "b": of(9, "b")}) == {"a"}


@pytest.mark.parametrize("fields", [{"start": "x"}, {"volumes": 7}, {"start": None}])
def test_a_manifest_with_a_start_that_makes_no_sense(fields):
    assert parse(json.dumps({"layout": 2, "geometry": {}, **fields})).reason
