"""Puts that need no weighing go a shorter way to one end. A full DRAM tier makes room ahead."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import RECORD
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
KEYS = np.random.default_rng(3).integers(0, 256, (400, 16), dtype=np.uint8)
SUMS = np.arange(400, dtype=np.uint64)


def make(slots: int, *, l0: int = 0, l2: int = 0, floor: int = 0) -> Cache:
    cache = Cache(PageTable(None, max_pages=4096), Geometry.of_page_bytes(PAGE, 16))
    behaviour = Behaviour(threshold_microseconds_per_mib=(0, floor, 0))
    budgets = Budgets(l0 * PAGE, slots * PAGE, l2 * 2 * PAGE, ("data0",) if l2 else ())
    cache.reconfigure(0.0, behaviour, budgets, l2_slots=l2)
    return cache


def put(cache: Cache, now: float, first: int, count: int, **more) -> np.ndarray:
    keys = KEYS[first : first + count]
    result = cache.reserve(now, 1, keys, **more)
    offered = result.status == PutStatus.OFFERED
    cache.commit(now, 1, np.ascontiguousarray(keys[offered]), SUMS[first : first + count][offered])
    return result


puts = st.lists(
    st.tuples(st.integers(0, 380), st.integers(0, 20), st.booleans(), st.booleans()), max_size=12
)


@settings(max_examples=80, deadline=None)
@given(steps=puts, slots=st.integers(1, 60), l2=st.sampled_from([0, 40]))
def test_the_short_way_leads_to_the_same_end(steps, slots: int, l2: int) -> None:
    short, long = make(slots, l2=l2), make(slots, l2=l2)
    assert short.puts._takes_all(0)
    long.puts._takes_all = lambda _: False
    for now, (first, count, partial, deep) in enumerate(steps):
        more = {"partial_last": partial, "depth": 160 if deep else 0}
        results = [put(cache, float(now), first, count, **more) for cache in (short, long)]
        for name in ("status", "tier", "offset"):
            assert getattr(results[0], name).tolist() == getattr(results[1], name).tolist()
    for name in RECORD.names:
        assert (short.table.records[name] == long.table.records[name]).all(), name
    check_books(short)


def test_pages_are_weighed_where_that_matters() -> None:
    for cache in (make(10, floor=5), make(10, l0=10), make(0)):
        assert not cache.puts._takes_all(0)


def free_after(cache: Cache) -> int:
    cache.make_room()
    cache.take_moves()
    return cache.shelves.pools[1].available


def test_a_tier_holds_as_many_pages_as_it_has_slots() -> None:
    cache = make(100)
    for first in range(0, 98, 14):
        assert put(cache, 1.0, first, 14).status.tolist() == [PutStatus.OFFERED] * 14
        assert free_after(cache) == 100 - first - 14
    check_books(cache)


def test_once_it_is_full_the_next_put_finds_room() -> None:
    cache = make(100)
    for first in range(0, 280, 14):
        put(cache, 1.0, first, 14)
        free = free_after(cache)
    kept = 100 * cache.settings.dram_load_reserve_percent // 100
    assert free == kept + 12  # an eighth of the tier at most
    assert (cache.lookup(KEYS[280 - 84 : 280]).tiers == 1).all()
    check_books(cache)
    put(cache, 2.0, 280, 3)
    assert free_after(cache) == free - 3, "as much as a put like the last one"
    cache.reconfigure(3.0, Behaviour(), Budgets(0, 300 * PAGE))
    free_after(cache)
    assert not cache.traffic.ahead1, "a tier that has grown needs none"
    check_books(cache)


def test_what_has_nvme_below_it_goes_by_its_water_marks() -> None:
    cache = make(100, l2=300)
    for first in range(0, 200, 20):
        put(cache, 1.0, first, 20)
        before = cache.table.pages
        cache.make_room()
        assert cache.table.pages == before
