"""Rules of the cache, one scene each. Moves are carried out at once, with real bytes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import leftovers
import numpy as np
import pytest
import xxhash
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.results import MISS, PutStatus
from kvtier_agent.cache.settings import (
    Behaviour,
    BehaviourError,
    Budgets,
    CacheSettings,
    FrozenPrefix,
)
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.storage.core import Core, CoreSettings

PAGE = 4096
DISK = PAGE + 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)


def keys_of(chain: int, count: int) -> np.ndarray:
    digests = b"".join(xxhash.xxh3_128_digest(b"%d/%d" % (chain, i)) for i in range(count))
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, 16)


@pytest.fixture
def world():
    """Builds a cache; everything is closed and its books are checked at the end."""
    made = []

    def build(l0=10, l1=20, l2=40, **behaviour):
        folder = leftovers.folder_in_memory()
        path = Path(folder.name)
        (path / "data0").mkdir()
        core = Core(
            CoreSettings(
                "d", path, path / "d.table", {"data0": path / "data0"}, 64 * PAGE, 256 * PAGE,
                allow_root_filesystem=True, synchronous=True,
                cache=CacheSettings(max_pages=1024, lease_seconds=30),
            )
        )  # fmt: skip
        world = SimpleNamespace(core=core, cache=core.cache, now=1.0, folder=folder)
        world.behaviour = Behaviour(**{"cool_down_seconds": 0, **behaviour})

        def configure(l0, l1, l2, **changes):
            if changes:
                world.behaviour = Behaviour(**{"cool_down_seconds": 0, **behaviour, **changes})
            nvme = l2 * DISK + 16384 if l2 else 0
            names = ("data0",) if l2 else ()
            core.reconfigure(
                world.now, world.behaviour, Budgets(l0 * PAGE, l1 * PAGE, nvme, names, 0)
            )
            settle()

        def settle():
            tickets = []
            while True:
                core.pump()
                if not core._mover._done:
                    return tickets
                tickets += core.collect(world.now)

        def put(chain, count, start=0, **options):
            """Statuses of all pages of a chain, committed where offered."""
            world.now += 0.01
            keys = keys_of(chain, count)[start:]
            result = core.cache.reserve(world.now, 1, keys, depth=16 * start, **options)
            arenas = core._l0.rows(PAGE), core._l1.rows(PAGE)
            offered = np.flatnonzero(result.status == PutStatus.OFFERED)
            for i in offered:
                row = arenas[result.tier[i]][int(result.offset[i]) // PAGE]
                row[:] = np.frombuffer(keys[i].tobytes() * 256, dtype=np.uint8)
            sums = np.array(
                [xxhash.xxh3_64_intdigest(keys[i].tobytes() * 256) for i in offered],
                dtype=np.uint64,
            )
            core.cache.commit(world.now, 1, keys[offered], sums)
            settle()
            return result

        def load(chain, count, release=True, client=1):
            world.now += 0.01
            ticket = core.cache.load(world.now, client, keys_of(chain, count), world.now + 5)
            later = {t.lease: t for t in settle()}
            ticket = ticket if ticket.done else later[ticket.lease]
            assert ticket.done
            if release:
                assert core.cache.release(world.now, client, ticket.lease)
                settle()
            return ticket

        def where(chain, count):
            return core.cache.lookup(keys_of(chain, count)).tiers.tolist()

        for function in (configure, settle, put, load, where):
            setattr(world, function.__name__, function)
        configure(l0, l1, l2)
        assert core.register(world.now, GEOMETRY).accepted
        made.append(world)
        return world

    yield build
    for one in made:
        one.settle()
        check_books(one.cache)
        one.core.close()
        one.folder.cleanup()


def test_a_put_goes_to_the_highest_tier_with_room(world):
    w = world(l0=10)
    assert w.put(1, 6).tier.tolist() == [0] * 6
    assert w.where(1, 7) == [0] * 6 + [MISS]


def test_one_large_put_does_not_raise_the_pressure(world):
    w = world(l0=10, l1=40)
    result = w.put(1, 20)
    assert result.tier.tolist() == [0] * 9 + [1] * 11
    assert w.cache.snapshot(w.now).counters["tightened"] == 0


def test_without_an_l0_puts_go_to_l1(world):
    w = world(l0=0)
    assert w.put(1, 4).tier.tolist() == [1] * 4


def test_the_leaf_leaves_before_its_parents(world):
    w = world(l0=10, l1=100)
    w.put(1, 8)
    w.put(2, 6)
    tiers = w.where(1, 8)
    assert tiers == sorted(tiers)
    assert tiers[0] == 0
    assert tiers[-1] == 1


def test_a_child_put_later_is_still_colder_than_its_parents(world):
    w = world(l0=10, l1=100)
    w.put(1, 4)
    w.put(1, 6, start=4, parent=keys_of(1, 4)[3].tobytes())
    w.put(2, 4)
    tiers = w.where(1, 6)
    assert tiers == sorted(tiers)
    assert 1 in tiers


def test_the_least_recently_used_chain_goes_down_first(world):
    w = world(l0=10, l1=100)
    w.put(1, 3)
    w.put(2, 3)
    w.load(1, 3)
    w.put(3, 3)
    assert w.where(1, 3) == [0, 0, 0]
    assert w.where(2, 3)[-1] == 1


def test_pages_pass_down_to_nvme_and_out_at_the_end(world):
    w = world(l0=4, l1=8, l2=10)
    for chain in range(12):
        w.put(chain, 3)
    snapshot = w.cache.snapshot(w.now)
    assert [t.pages > 0 for t in snapshot.tiers] == [True, True, True]
    assert snapshot.counters["evicted_l2"] > 0
    assert w.where(0, 3) == [MISS] * 3


def test_a_hit_in_nvme_is_served_from_dram_and_then_promoted(world):
    w = world(l0=10, l1=10, l2=100)
    for chain in range(12):
        w.put(chain, 3)
    assert w.where(0, 3) == [2, 2, 2]
    ticket = w.load(0, 3, release=False)
    assert ticket.tier.tolist() == [2, 2, 2]
    assert ticket.arena.tolist() == [1, 1, 1]
    assert w.where(0, 3) == [1, 1, 1]
    w.cache.release(w.now, 1, ticket.lease)
    w.settle()
    assert 0 in w.where(0, 3)


def test_a_clean_copy_is_not_written_twice(world):
    w = world(l0=0, l1=20, l2=200)
    for chain in range(12):
        w.put(chain, 3)
    assert w.where(0, 3) == [2, 2, 2]
    w.load(0, 3)
    assert w.where(0, 3) == [1, 1, 1]
    for chain in range(20, 45):
        w.put(chain, 3)
    assert w.where(0, 3) == [2, 2, 2]
    snapshot = w.cache.snapshot(w.now)
    assert snapshot.counters["evicted_l2"] == 0
    assert snapshot.counters["stored_l2"] == snapshot.tiers[2].pages  # each was written once


def test_a_page_just_demoted_does_not_come_back_before_its_cool_down(world):
    w = world(l0=10, l1=100, cool_down_seconds=5)
    for chain in range(6):
        w.put(chain, 3)
    assert w.where(0, 3) == [1, 1, 1]
    w.load(0, 3)
    assert w.where(0, 3) == [1, 1, 1]
    w.now += 6
    w.load(0, 3)
    assert 0 in w.where(0, 3)


def test_a_partial_page_is_never_below_l0(world):
    w = world(l0=10, l1=100)
    w.put(1, 3, partial_last=True)
    assert w.where(1, 3) == [0, 0, 0]
    for chain in range(2, 8):
        w.put(chain, 3)
    assert w.where(1, 3) == [1, 1, MISS]


def test_a_page_below_every_threshold_is_refused(world):
    w = world(threshold_microseconds_per_mib=(10**9,) * 3)
    assert (w.put(1, 3).status == PutStatus.REFUSED_VALUE).all()


def test_a_page_for_nvme_only_passes_straight_through(world):
    w = world(threshold_microseconds_per_mib=(10**9, 10**9, 0))
    assert w.put(1, 3).tier.tolist() == [1, 1, 1]
    assert w.where(1, 3) == [2, 2, 2]


def test_frozen_pages_ask_no_threshold_and_stay_in_l0(world):
    w = world(frozen=(FrozenPrefix("bot", 3 * PAGE),))
    w.put(1, 5, frozen="bot")
    for chain in range(2, 9):
        w.put(chain, 4)
    assert w.where(1, 3) == [0, 0, 0]
    assert w.where(1, 5)[4] != 0  # past the budget: ordinary
    (frozen,) = w.cache.snapshot(w.now).frozen
    assert (frozen.exempt_pages, frozen.exempt_bytes) == (3, 3 * PAGE)
    w.configure(10, 20, 40, threshold_microseconds_per_mib=(10**9,) * 3)
    assert w.put(20, 2, frozen="nobody").status.tolist() == [PutStatus.REFUSED_VALUE] * 2


def test_a_frozen_page_that_began_in_dram_is_promoted_when_there_is_room(world):
    w = world(l0=0, l1=50, frozen=(FrozenPrefix("bot", 8 * PAGE),))
    w.put(1, 3, frozen="bot")
    assert w.where(1, 3) == [1, 1, 1]
    w.configure(10, 50, 40)
    assert w.where(1, 3) == [0, 0, 0]


def test_above_the_demote_line_everything_that_may_leaves_l0(world):
    w = world(l0=20, l1=100, frozen=(FrozenPrefix("bot", 2 * PAGE),))
    w.put(1, 2, frozen="bot")
    w.put(2, 4)
    w.put(3, 4)
    pinned = w.load(2, 4, release=False)
    w.configure(10, 100, 40, tighten_percent=40, demote_percent=50)
    assert w.where(1, 2) == [0, 0]
    assert w.where(2, 4) == [0] * 4
    assert w.where(3, 4) == [1] * 4
    w.cache.release(w.now, 1, pinned.lease)


def test_tightened_l0_takes_only_newcomers_of_value(world):
    frozen = (FrozenPrefix("bot", 36 * PAGE),)
    w = world(l0=40, l1=100, tighten_percent=70, demote_percent=80, frozen=frozen)
    w.put(1, 9, start=8)  # admitted before, at depths 128 to 272: the measure of value
    w.put(2, 30, frozen="bot")
    assert w.cache.snapshot(w.now).pressure == "Tighten"
    assert w.put(3, 1).tier.tolist() == [1]  # shallow: cheap to recompute
    assert w.put(4, 60, start=59).tier.tolist() == [0]  # deep: dear
    w.put(5, 3, frozen="bot")
    assert w.cache.snapshot(w.now).pressure == "Demote"
    assert w.put(6, 60, start=59).tier.tolist() == [1]


def test_no_policy_serves_and_admits_nothing(world):
    w = world()
    w.put(1, 3)
    w.configure(10, 20, 40, admitting=False)
    assert (w.put(2, 2).status == PutStatus.REFUSED_CLOSED).all()
    assert (w.put(1, 3).status == PutStatus.EXISTS).all()
    assert w.load(1, 3).tier.tolist() == [0, 0, 0]
    assert w.cache.drop_all(w.now) == 3
    assert w.where(1, 3) == [MISS] * 3


def test_tiers_shrink_without_losing_what_still_fits(world):
    w = world(l0=10, l1=40, l2=100)
    for chain in range(10):
        w.put(chain, 4)
    w.configure(4, 10, 100)
    assert all(MISS not in w.where(chain, 4) for chain in range(10))
    used = [t.used_bytes for t in w.cache.snapshot(w.now).tiers]
    assert used[0] <= 4 * PAGE
    assert used[1] <= 10 * PAGE
    assert w.core._l1.backed_bytes <= 10 * PAGE
    w.configure(10, 40, 100)
    assert w.put(50, 9).tier.tolist().count(0) >= 4


def test_a_second_geometry_is_refused_with_its_reason(world):
    w = world()
    assert w.core.register(w.now, GEOMETRY).accepted
    answer = w.core.register(w.now, Geometry.of_page_bytes(8192, 16))
    assert not answer.accepted
    assert "use another trust domain" in answer.reason


def test_two_clients_cannot_write_the_same_page(world):
    w = world()
    keys = keys_of(1, 2)
    w.cache.reserve(w.now, 1, keys)
    assert (w.cache.reserve(w.now, 2, keys).status == PutStatus.BUSY).all()
    assert w.cache.lookup(keys).prefix == 0
    assert w.cache.abort(w.now, 2, keys) == 0
    w.cache.client_gone(w.now, 1)
    assert (w.cache.reserve(w.now, 2, keys).status == PutStatus.OFFERED).all()
    w.now += 31
    w.cache.tick(w.now)
    assert w.cache.snapshot(w.now).reservations == 0


def test_the_same_key_twice_in_one_put_counts_once(world):
    w = world()
    twice = np.concatenate([keys_of(1, 2), keys_of(1, 2)])
    status = w.cache.reserve(w.now, 1, twice).status.tolist()
    assert status == [PutStatus.OFFERED] * 2 + [PutStatus.BUSY] * 2
    w.cache.client_gone(w.now, 1)


def test_a_pinned_page_does_not_move(world):
    w = world(l0=10, l1=100)
    w.put(1, 4)
    ticket = w.load(1, 4, release=False)
    for chain in range(2, 8):
        w.put(chain, 4)
    assert w.where(1, 4) == [0] * 4
    w.cache.release(w.now, 1, ticket.lease)


def test_a_hole_ends_a_load(world):
    w = world()
    w.put(1, 2)
    w.put(1, 5, start=3)
    ticket = w.load(1, 5)
    assert ticket.tier.tolist() == [0, 0, MISS, MISS, MISS]


def test_hits_and_their_tokens_are_counted_by_tier(world):
    w = world()
    w.put(1, 3)
    w.load(1, 5)
    w.cache.record_misses(2, 32)
    counters = w.cache.snapshot(w.now).counters
    assert (counters["hits_l0"], counters["hit_tokens"]) == (3, 48)
    assert (counters["misses"], counters["miss_tokens"]) == (2, 32)


@pytest.mark.parametrize(("changes", "says"), [
    ({"prior_reuse_percent": 101}, "write a value from 0 to 100"),
    ({"tighten_percent": 96, "demote_percent": 95}, "demote_percent is 95; write a value from 96"),
    ({"cool_down_seconds": -1}, "write a value from 0"),
])  # fmt: skip
def test_a_behaviour_out_of_bounds_says_what_to_write(changes, says):
    with pytest.raises(BehaviourError, match=says):
        Behaviour(**changes)
