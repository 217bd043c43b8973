"""The edge of one trust domain: revisions that cannot be applied, restarts, volumes that change."""

import errno
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage.core import Core, CoreError, CoreSettings

PAGE = 4096
DISK = 2 * PAGE
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(3).integers(0, 256, (200, 16), dtype=np.uint8)


@pytest.fixture
def make_core(mount):
    made = []

    def build(synchronous=True, maximum=256, **options):
        options.setdefault("keep_memory", False)  # L1 over a restart: test_warm_restart.py
        for name in ("data0", "data1", "arena"):
            (mount / name).mkdir(exist_ok=True)
        core = Core(
            CoreSettings(
                "d", mount / "arena", mount / "arena" / "d.table",
                {name: mount / name for name in ("data0", "data1")}, maximum * PAGE,
                maximum * PAGE, allow_root_filesystem=True, synchronous=synchronous,
                cache=CacheSettings(max_pages=4096), **options,
            )
        )  # fmt: skip
        made.append(core)
        return core

    yield build
    for core in made:
        core.close()


def budgets(l0=0, l1=40, l2=100, volumes=("data0",)) -> Budgets:
    return Budgets(l0 * PAGE, l1 * PAGE, l2 * DISK + 16384 if l2 else 0, volumes, 0)


def settle(core, now=1.0):
    tickets = []
    for _ in range(2000):
        core.pump()
        tickets += core.collect(now)
        if not core.cache.traffic.in_flight:
            return tickets
        time.sleep(0.002)
    raise AssertionError("traffic never comes to rest")


def put(core, picks, now=1.0):
    for start in range(0, len(picks), 4):
        keys = KEYS[picks[start : start + 4]]
        result = core.cache.reserve(now, 1, keys)
        assert (result.status == 0).all()
        arenas = core._l0.rows(PAGE), core._l1.rows(PAGE)
        for i, key in enumerate(keys):
            arenas[result.tier[i]][int(result.offset[i]) // PAGE] = np.tile(key, PAGE // 16)
        sums = [xxhash.xxh3_64_intdigest(np.tile(key, PAGE // 16)) for key in keys]
        core.cache.commit(now, 1, keys, np.array(sums, dtype=np.uint64))
        settle(core)


def loads_right(core, picks, now=2.0) -> int:
    """Loads pages one by one; how many were there. Their bytes are compared."""
    hits = 0
    for pick in picks:
        ticket = core.cache.load(now, 1, KEYS[pick : pick + 1], now + 30)
        later = {t.lease: t for t in settle(core, now)}
        ticket = later.get(ticket.lease, ticket)
        if ticket.tier[0] != MISS:
            hits += 1
            arena = (core._l0, core._l1)[ticket.arena[0]].rows(PAGE)
            row = arena[int(ticket.offset[0]) // PAGE]
            assert (row == np.tile(KEYS[pick], PAGE // 16)).all()
        core.cache.release(now, 1, ticket.lease)
        settle(core, now)
    return hits


def start(core, behaviour=None, **sizes):
    core.reconfigure(0.0, behaviour or Behaviour(), budgets(**sizes))
    assert core.register(0.0, GEOMETRY).accepted


@pytest.mark.parametrize("durability", ["async", "sync"])
def test_a_restart_finds_the_pages_of_l2_and_no_others(make_core, durability):
    core = make_core()
    start(core, Behaviour(durability=durability))
    put(core, range(80))
    held = core.cache.snapshot(1.0).tiers[2].pages
    assert held > 30
    core.close()
    again = make_core()
    start(again, Behaviour(durability=durability))
    snapshot = again.cache.snapshot(1.0)
    assert snapshot.tiers[2].pages == snapshot.pages == held
    assert loads_right(again, range(80)) == held
    check_books(again.cache)


def test_without_durability_a_restart_starts_cold(make_core, mount):
    core = make_core()
    start(core, Behaviour(durability="none"))
    put(core, range(80))
    core.close()
    assert not list(mount.glob("data0/kvtier/d/segment-*"))
    again = make_core()
    start(again, Behaviour(durability="none"))
    assert again.cache.snapshot(1.0).pages == 0


def test_another_model_after_a_restart_finds_nothing(make_core):
    core = make_core()
    start(core)
    put(core, range(80))
    core.close()
    again = make_core()
    again.reconfigure(0.0, Behaviour(), budgets())
    other = Geometry.of_page_bytes(PAGE, 16, weights="another")
    assert again.register(0.0, other).accepted
    assert again.cache.snapshot(1.0).pages == 0
    assert again._l2.segment_bytes == 0


def test_a_smaller_cap_after_a_restart_holds_at_once(make_core):
    core = make_core()
    start(core)
    put(core, range(80))
    core.close()
    again = make_core()
    start(again, l2=10)
    assert 0 < again.cache.snapshot(1.0).tiers[2].pages <= 11
    assert again._l2.allocated_bytes <= again._l2.cap_bytes
    check_books(again.cache)


@pytest.mark.parametrize(("wrong", "reason", "says"), [
    (budgets(volumes=("data7",)), "VolumeUnknown", "--volume data7=DIR"),
    (budgets(volumes=()), "VolumeUnknown", "name at least one"),
    (budgets(l1=5000), "OutOfMemory", "ask for less"),
])  # fmt: skip
def test_a_revision_that_cannot_be_applied_changes_nothing(make_core, wrong, reason, says):
    core = make_core()
    start(core)
    put(core, range(8))
    before = core.cache.snapshot(1.0)
    with pytest.raises(CoreError, match=says) as caught:
        core.prepare(Behaviour(), wrong)
    assert caught.value.reason == reason
    with pytest.raises(CoreError):
        core.reconfigure(1.0, Behaviour(), wrong)
    assert core.cache.snapshot(1.0) == before
    assert loads_right(core, range(8)) == 8


def test_a_second_agent_on_the_same_folder_is_refused(make_core, mount):
    core = make_core()
    start(core)
    (mount / "arena2").mkdir()
    other = Core(
        CoreSettings(
            "d", mount / "arena2", mount / "arena2" / "t", {"data0": mount / "data0"}, PAGE * 9,
            PAGE * 99, allow_root_filesystem=True,
        )
    )  # fmt: skip
    with pytest.raises(CoreError, match="in use by another agent") as caught:
        other.prepare(Behaviour(), budgets())
    assert caught.value.reason == "VolumeInUse"
    other.close()


def test_memory_that_is_not_there_is_an_error_and_not_a_signal(make_core, monkeypatch):
    core = make_core()
    start(core, l1=10)
    real, calls = __import__("os").posix_fallocate, []

    def full(fd, offset, length):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, offset, length)

    monkeypatch.setattr("kvtier_agent.cache.arena.BACK_STEP", 8 * PAGE)
    monkeypatch.setattr("os.posix_fallocate", full)
    backed = core._l1.backed_bytes
    with pytest.raises(CoreError, match="make the tier smaller or the tmpfs larger"):
        core.prepare(Behaviour(), budgets(l1=60))
    assert core._l1.backed_bytes == backed


def test_volumes_join_and_leave_while_in_use(make_core, mount):
    core = make_core()
    start(core)
    put(core, range(80))
    core.reconfigure(1.0, Behaviour(), budgets(volumes=("data0", "data1")))
    settle(core)
    core.reconfigure(1.0, Behaviour(), budgets(volumes=("data1",)))
    settle(core)
    assert not list(mount.glob("data0/kvtier/d/segment-*"))
    check_books(core.cache)
    put(core, range(100, 180))
    assert core.cache.snapshot(1.0).tiers[2].pages > 0
    assert list(mount.glob("data1/kvtier/d/segment-*"))
    assert loads_right(core, range(100, 180)) > 60


def test_l2_may_come_and_go(make_core):
    core = make_core()
    start(core, l2=0)
    put(core, range(20))
    core.reconfigure(1.0, Behaviour(), budgets(l2=100))
    put(core, range(20, 80))
    assert core.cache.snapshot(1.0).tiers[2].pages > 0
    core.reconfigure(1.0, Behaviour(), budgets(l2=0))
    settle(core)
    assert core.cache.snapshot(1.0).tiers[2].pages == 0
    check_books(core.cache)


def test_files_that_clients_map(make_core, mount):
    core = make_core()
    assert core.layout() is None
    start(core, l0=4)
    layout = core.layout()
    assert [a.tier for a in layout.arenas] == [0, 1]
    for arena in layout.arenas:
        path = Path(arena.path)
        assert path.stat().st_mode & 0o777 == 0o660
        assert path.stat().st_size == arena.size_bytes
        assert path.stat().st_blocks * 512 <= 44 * PAGE
    core.close()
    assert not list((mount / "arena").iterdir())


def test_with_threads_everything_comes_to_rest_and_is_right(make_core):
    core = make_core(synchronous=False)
    start(core, l0=8, l1=60, l2=150)
    put(core, range(160))
    assert loads_right(core, range(160)) > 100
    check_books(core.cache)
    assert core.movers_alive()
