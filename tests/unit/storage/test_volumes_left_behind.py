"""Pages on volumes that a later revision does not name: after a restart they count against no cap,
so they are removed; what is not ours to remove stays."""

import json

import numpy as np
import pytest
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.native import copier
from kvtier_agent.storage import recovery
from kvtier_agent.storage.core import Core, CoreError, CoreSettings
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import PageStamp
from kvtier_agent.storage.volume import Volume, VolumeError

GEOMETRY = Geometry.of_page_bytes(4096, 16)


@pytest.fixture
def mounts(mount):
    for name in ("data0", "data1", "arena"):
        (mount / name).mkdir(exist_ok=True)
    return mount


@pytest.fixture
def left_behind(mounts):
    """A folder on data1 with a page of an earlier process."""
    volume = Volume("data1", mounts / "data1", "d", allow_root_filesystem=True)
    l2 = L2([volume], GEOMETRY)
    l2.limit(1 << 20, 0, "async")
    recovery.recover(l2)
    one = np.zeros((1, 16), np.uint8)
    arena = np.zeros((1, 4096), np.uint8)
    sums = np.array([copier.checksum(arena[0])], np.uint64)
    stamp = PageStamp(one, one, np.zeros(1, np.uint32), sums)
    assert l2.write(np.zeros(1, np.uint32), stamp, arena, np.zeros(1, np.uint32))[0][0] == 0
    l2.close()
    volume.close()
    return volume.folder


@pytest.fixture
def prepare(mounts):
    made = []

    def start(volumes):
        core = Core(
            CoreSettings(
                "d", mounts / "arena", mounts / "arena" / "d.table",
                {name: mounts / name for name in ("data0", "data1")},
                1 << 20, 1 << 20, allow_root_filesystem=True, synchronous=True,
                keep_memory=False, cache=CacheSettings(max_pages=4096),
            )
        )  # fmt: skip
        made.append(core)
        core.prepare(Behaviour(), Budgets(0, 1 << 19, 1 << 20 if volumes else 0, volumes, 0))

    yield start
    for core in made:
        core.close()


def segments(folder):
    return [path.name for path in folder.glob("segment-*")]


def test_a_volume_that_the_tier_no_longer_has_is_emptied(left_behind, prepare):
    (left_behind / "somebody-elses").write_text("stays")
    assert segments(left_behind)
    prepare(("data0",))
    assert segments(left_behind) == []
    assert (left_behind / "somebody-elses").exists()


def test_what_the_tier_has_or_may_have_soon_stays(left_behind, prepare):
    prepare(())
    assert segments(left_behind)


def test_what_another_agent_holds_stays(left_behind, mounts, prepare):
    other = Volume("data1", mounts / "data1", "d", allow_root_filesystem=True)
    prepare(("data0",))
    other.close()
    assert segments(left_behind)


def test_what_a_newer_version_wrote_stays(left_behind, prepare):
    (left_behind / recovery.MANIFEST_NAME).write_text(json.dumps({"layout": 99}))
    prepare(("data0",))
    assert segments(left_behind)


@pytest.fixture
def core(mounts):
    made = Core(
        CoreSettings(
            "d", mounts / "arena", mounts / "arena" / "d.table", {"data0": mounts / "data0"},
            1 << 20, 1 << 20, allow_root_filesystem=True, synchronous=True,
            keep_memory=False, cache=CacheSettings(max_pages=4096),
        )
    )  # fmt: skip
    yield made
    made.close()


NO_ROOM, SOME_ROOM = (Budgets(0, 1 << 19, size, ("data0",), 0) for size in (0, 1 << 20))


def test_a_volume_without_room_is_checked_and_stays_locked(mounts, core):
    """No byte for L2 says that there is no room now, not that the volume is somebody else's."""
    other = Volume("data0", mounts / "data0", "d")
    with pytest.raises(CoreError, match="in use by another agent"):
        core.prepare(Behaviour(), NO_ROOM)
    other.close()
    core.register(0.0, GEOMETRY)
    # Room goes and comes: never is there a moment in which another agent could take it.
    for now, budgets in enumerate((NO_ROOM, SOME_ROOM, NO_ROOM, SOME_ROOM)):
        core.reconfigure(float(now), Behaviour(), budgets)
        with pytest.raises(VolumeError, match="in use by another agent"):
            Volume("data0", mounts / "data0", "d")
    core.reconfigure(9.0, Behaviour(), Budgets(0, 1 << 19))
    Volume("data0", mounts / "data0", "d").close()


def test_a_volume_mounted_read_only_keeps_no_memory_tier_from_working(core, monkeypatch):
    def refuse(*_, **__):
        raise VolumeError("volume data0: mounted read-only", "VolumeReadOnly")

    core.register(0.0, GEOMETRY)
    with monkeypatch.context() as patched:
        patched.setattr("kvtier_agent.storage.volume.check_mount", refuse)
        core.reconfigure(1.0, Behaviour(), NO_ROOM)
        assert core.cache.budgets.l1_bytes == 1 << 19
        assert core.nvme.volumes == {}
        core.reconfigure(1.5, Behaviour(), SOME_ROOM)
        assert core.nvme.volumes == {}
        assert core.cache.snapshot(1.5).tiers[2].capacity_bytes == 0
        assert core.volumes() == [("data0", 0, "VolumeReadOnly")]
    core.reconfigure(2.0, Behaviour(), SOME_ROOM)
    assert set(core.nvme.volumes) == {"data0"}
