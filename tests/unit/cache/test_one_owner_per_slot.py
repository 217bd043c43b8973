"""A slot has one owner, whatever clients ask and however limits move. No bytes are moved here."""

import numpy as np
import pytest
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets, FrozenPrefix
from kvtier_agent.cache.slots import SlotPool
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(5).integers(0, 256, (200, 16), dtype=np.uint8)


def make(l0: int, l1: int, maximum: int = 1 << 16, **behaviour) -> Cache:
    cache = Cache(
        PageTable(None, max_pages=4096), GEOMETRY, maximum_slots=(maximum, maximum, 1 << 20)
    )
    cache.reconfigure(
        0.0, Behaviour(cool_down_seconds=0, **behaviour), Budgets(l0 * PAGE, l1 * PAGE)
    )
    return cache


def settle(cache: Cache, *, hold: tuple[MoveKind, ...] = ()) -> list:
    """Every move succeeds, but for those of the kinds held back, which are returned."""
    held = []
    while moves := cache.take_moves():
        for move in moves:
            if move.kind in hold:
                held.append(move)
            else:
                cache.move_done(1.0, move, Outcome.uniform(move, MoveStatus.OK))
    return held


def put(cache: Cache, keys, **options) -> np.ndarray:
    status = cache.reserve(1.0, 1, keys, **options).status
    offered = keys[status == PutStatus.OFFERED]
    cache.commit(1.0, 1, offered, np.zeros(len(offered), dtype=np.uint64))
    return status


def test_a_held_page_named_twice_as_part_of_a_frozen_prefix_is_promoted_once():
    cache = make(0, 20, frozen=(FrozenPrefix("system", 8 * PAGE),))
    put(cache, KEYS[:2])
    cache.reconfigure(1.0, cache.behaviour, Budgets(10 * PAGE, 20 * PAGE))
    put(cache, KEYS[[0, 0, 1, 0]], frozen="system")
    (prefix,) = cache.snapshot(1.0).frozen
    assert (prefix.exempt_pages, prefix.ordinary_pages) == (2, 0)
    settle(cache)
    check_books(cache)
    assert cache.lookup(KEYS[:2]).tiers.tolist() == [0, 0]


def test_a_slot_cannot_be_given_back_twice_in_one_batch():
    pool = SlotPool(8)
    pool.set_limit(8)
    slot = pool.take(1)
    with pytest.raises(AssertionError):
        pool.give(np.concatenate([slot, slot]))


def test_l0_that_waits_for_its_memory_takes_what_fits_and_sends_the_rest_to_l1():
    cache = make(40, 40, maximum=40)
    cache.reconfigure(1.0, cache.behaviour, Budgets(10 * PAGE, 40 * PAGE))
    (punch,) = settle(cache, hold=(MoveKind.PUNCH_L0,))
    cache.reconfigure(1.0, cache.behaviour, Budgets(40 * PAGE, 40 * PAGE))
    assert (put(cache, KEYS[:30]) == PutStatus.OFFERED).all()
    assert cache.lookup(KEYS[:30]).tiers.tolist() == [0] * 10 + [1] * 20
    cache.move_done(1.0, punch, Outcome.uniform(punch, MoveStatus.OK))
    settle(cache)
    check_books(cache)


def test_memory_whose_return_was_not_carried_out_is_returned_later():
    cache = make(10, 40)
    cache.reconfigure(1.0, cache.behaviour, Budgets(10 * PAGE, 8 * PAGE))
    (punch,) = settle(cache, hold=(MoveKind.PUNCH_L1,))
    cache.move_done(1.0, punch, Outcome.uniform(punch, MoveStatus.CANCELLED))
    (again,) = settle(cache, hold=(MoveKind.PUNCH_L1,))
    assert sorted(again.source) == sorted(punch.source)


def test_orders_about_empty_slots_take_no_place_in_the_queue_of_bytes():
    cache = make(10, 40)
    cache.reconfigure(1.0, cache.behaviour, Budgets(10 * PAGE, 8 * PAGE))
    (punch,) = settle(cache, hold=(MoveKind.PUNCH_L1,))
    assert len(punch) == 32
    assert punch.bytes == 0


def test_a_frozen_page_behind_one_that_is_refused_is_taken_with_its_slot():
    listed = FrozenPrefix("listed", 8 * PAGE, page_keys=(KEYS[1].tobytes(),))
    cache = make(10, 20, frozen=(listed,), threshold_microseconds_per_mib=(10**9,) * 3)
    status = put(cache, KEYS[:3])
    refused, offered = PutStatus.REFUSED_VALUE, PutStatus.OFFERED
    assert status.tolist() == [refused, offered, refused]
    settle(cache)
    check_books(cache)


def test_the_page_table_always_has_a_record_for_every_slot():
    """More slots than records would end in a table that is full and never takes a page again."""
    cache = Cache(PageTable(None, max_pages=1024), GEOMETRY)
    cache.reconfigure(
        0.0, Behaviour(), Budgets(10 * PAGE, 100 * PAGE, 5000 * PAGE, ("data0",)), l2_slots=5000
    )
    limits = [pool.limit for pool in cache.shelves.pools]
    assert limits == [10, 100, 1024 - 110]
