"""Which segment of L2 is emptied, what is moved out of it, and at what pace."""

import numpy as np
import pytest
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.compaction import Pace, cost_per_slot, hot, ranks
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.results import MISS, PutStatus
from kvtier_agent.cache.settings import Behaviour, BehaviourError, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(12).integers(0, 256, (600, 16), dtype=np.uint8)
ALONE = np.ones(4, dtype=bool)
SLOTS = 128
"""Of L2: eight segments of sixteen."""


class TestRules:
    def test_ranks_go_from_the_coldest_to_the_hottest(self):
        sample = np.array([10, 20, 30, 40], dtype=np.uint64)
        stamps = np.array([1, 10, 25, 99], dtype=np.uint64)
        assert ranks(sample, stamps).tolist() == [0, 0.25, 0.5, 1]
        assert ranks(sample[:0], stamps).tolist() == [0, 0, 0, 0]

    def test_hot_are_the_most_recent_percent(self):
        rank = np.array([0.1, 0.2, 0.21, 1.0])
        assert hot(rank, 80).tolist() == [False, False, True, True]
        assert not hot(rank, 0).any()

    def test_dead_slots_are_cheapest_then_cold_pages_then_warm_ones(self):
        cold, warm = np.full(4, 0.02), np.full(4, 0.15)
        costs = [
            cost_per_slot(rank, ALONE[: rank.size], 8, 80)
            for rank in (cold[:0], cold[:2], cold, warm)
        ]
        assert costs == sorted(costs)
        assert costs[0] == 0

    def test_cold_pages_among_hot_ones_are_not_kept_for_good(self):
        mixed = np.array([0.0, 0.0, 0.0, 0.9])
        assert cost_per_slot(mixed, ALONE, 4, 80) < cost_per_slot(np.full(4, 0.15), ALONE, 4, 80)

    def test_nothing_is_gained_by_a_segment_of_hot_pages(self):
        assert cost_per_slot(np.full(4, 0.9), ALONE, 4, 80) == float("inf")
        copies = np.zeros(4, dtype=bool)  # these need not be moved
        assert cost_per_slot(np.full(4, 0.9), copies, 4, 80) < 1

    def test_the_pace_is_what_seconds_allow_and_no_more(self):
        pace = Pace(1000, 10)
        assert pace.allowed(5.0) == 1000
        pace.spend(1000)
        assert pace.allowed(5.0) == 0
        assert pace.allowed(5.5) == 500
        assert pace.allowed(4.0) == 500, "a clock that goes back allows nothing"
        assert pace.allowed(99.0) == 1000
        assert Pace(1, 10).allowed(0.0) == 10
        assert Pace(0, 10).allowed(9.0) == 0

    @pytest.mark.parametrize(
        "wrong", [{"compaction_hot_percent": 91}, {"compaction_bytes_per_second": -1}]
    )
    def test_settings_out_of_their_bounds_are_refused(self, wrong):
        with pytest.raises(BehaviourError, match="write a value from 0 to"):
            CacheSettings(**wrong)


def make(**settings) -> Cache:
    cache = Cache(
        PageTable(None, max_pages=4096),
        GEOMETRY,
        settings=CacheSettings(**{"move_bytes": 4 * PAGE, **settings}),
    )
    budgets = Budgets(0, 32 * PAGE, SLOTS * 2 * PAGE, ("data0",), 0)
    cache.reconfigure(0.0, Behaviour(cool_down_seconds=0), budgets, l2_slots=SLOTS)
    return cache


def done(cache: Cache, move: Move, status: MoveStatus = MoveStatus.OK) -> None:
    cache.move_done(1.0, move, Outcome.uniform(move, status, 0.001))


def settle(cache: Cache, *, hold: tuple[MoveKind, ...] = ()) -> list[Move]:
    """Every move succeeds but for those of the kinds held back, which are returned."""
    held = []
    while moves := cache.take_moves():
        for move in moves:
            if move.kind in hold:
                held.append(move)
            else:
                done(cache, move)
    return held


def put(cache: Cache, picks, **options) -> list[Move]:
    held = []
    for pick in picks:
        keys = KEYS[pick : pick + 1]
        assert cache.reserve(1.0, 1, keys).status[0] == PutStatus.OFFERED
        cache.commit(1.0, 1, keys, np.zeros(1, dtype=np.uint64))
        held += settle(cache, **options)
    return held


def touch(cache: Cache, picks, **options) -> None:
    for pick in picks:
        ticket = cache.load(1.0, 1, KEYS[pick : pick + 1], 9.0)
        settle(cache, **options)
        cache.release(1.0, 1, ticket.lease)
        settle(cache, **options)


def in_cache(cache: Cache, picks) -> int:
    return int((cache.lookup(KEYS[list(picks)]).tiers != MISS).sum())


def filled(**settings) -> tuple[Cache, list[Move]]:
    """L2 full to the brim, with every fourth page of its older half touched again, and the first
    compactions waiting."""
    cache = make(**settings)
    held = put(cache, range(128), hold=(MoveKind.COMPACT,))
    touch(cache, HOT, hold=(MoveKind.COMPACT,))
    pick = 200
    while not held:
        held += put(cache, [pick], hold=(MoveKind.COMPACT,))
        pick += 1
        assert pick < 400, "nothing was ever compacted"
    return cache, held


HOT = range(0, 64, 4)


def test_pages_that_were_read_again_outlive_those_around_them():
    cache = make()
    put(cache, range(128))
    touch(cache, HOT)
    put(cache, range(200, 240))
    counters = cache.counters
    assert counters.compacted_pages > 0
    assert counters.compacted_bytes == counters.compacted_pages * PAGE
    assert counters.stored_bytes_l2 == counters.stored_l2 * PAGE
    assert counters.stored_l2 > counters.compacted_pages
    others = [pick for pick in range(64) if pick not in HOT]
    assert in_cache(cache, HOT) == len(HOT)
    assert in_cache(cache, others) < len(others) // 2
    check_books(cache)


def test_without_a_budget_nothing_is_moved():
    cache = make(compaction_bytes_per_second=0)
    put(cache, range(128))
    touch(cache, HOT)
    put(cache, range(200, 240))
    assert cache.counters.compacted_pages == 0
    assert cache.counters.evicted_l2 > 0
    check_books(cache)


def test_a_page_is_readable_where_it_was_until_its_copy_is_there():
    cache, held = filled()
    move = held[0]
    rows = cache.table.lookup(move.keys)
    assert (cache.table.l2_slot[rows] == move.source).all()
    assert (cache.lookup(move.keys).tiers == 2).all()
    done(cache, move)
    assert (cache.table.l2_slot[rows] == move.target).all()
    check_books(cache)


def test_a_page_that_is_being_read_stays_where_its_reader_finds_it():
    cache, held = filled()
    move = held[0]
    ticket = cache.load(1.0, 1, move.keys[:1], 9.0)
    reads = settle(cache, hold=(MoveKind.READ, MoveKind.COMPACT))
    reads = [one for one in reads if one.kind is MoveKind.READ]
    assert reads[0].source[0] == move.source[0]
    done(cache, move)
    row = cache.table.lookup(move.keys[:1])
    assert cache.table.l2_slot[row[0]] == move.source[0], "the copy is given up"
    check_books(cache)
    done(cache, reads[0])
    assert cache.release(1.0, 1, ticket.lease)
    settle(cache)
    check_books(cache)


def test_a_segment_is_not_used_again_while_pages_are_read_out_of_it():
    cache, held = filled()
    segments = {int(slot) // cache.shelves.pool2.per_segment for slot in held[0].source}
    cache.drop_all(1.0)
    assert all(cache.shelves.pool2.in_use(segment) for segment in segments)
    later = held + put(cache, range(300, 420), hold=(MoveKind.COMPACT,))
    check_books(cache)
    for move in later:
        done(cache, move)
    settle(cache)
    check_books(cache)


def test_a_page_that_left_meanwhile_is_not_brought_back():
    cache, held = filled()
    cache.drop_all(1.0)
    for move in held:
        done(cache, move)
    settle(cache)
    assert in_cache(cache, range(64)) == 0
    check_books(cache)
    assert cache.shelves.pool2.used == 0


@pytest.mark.parametrize("how", ["lost", "shrunk"])
def test_a_segment_that_goes_while_pages_are_moved_out_of_it_goes_once_they_are_moved(how):
    """Also those of its pages that were being read just then."""
    cache, held = filled()
    pool = cache.shelves.pool2
    segment = int(held[0].source[0]) // pool.per_segment
    ticket = cache.load(1.0, 1, held[0].keys[:1], 9.0)
    reads = [one for one in cache.take_moves() if one.kind is MoveKind.READ]
    assert int(reads[0].source[0]) // pool.per_segment == segment
    if how == "lost":
        cache.lose_segments(1.0, {segment})
    else:
        budgets = Budgets(0, 32 * PAGE, 2 * PAGE, ("data0",), 0)
        cache.reconfigure(1.0, cache.behaviour, budgets, l2_slots=1)
    for move in held:
        done(cache, move)
    done(cache, reads[0])
    assert cache.release(1.0, 1, ticket.lease)
    settle(cache)
    cache.make_room()
    cache.reconfigure(2.0, cache.behaviour, cache.budgets, l2_slots=cache.l2_slots)
    settle(cache)
    check_books(cache)
    assert not pool.in_use(segment)
    assert all(one.moving >= 0 for one in cache.traffic.reclaim.emptying.values())


@pytest.mark.parametrize("status", [MoveStatus.BAD_PAGE, MoveStatus.IO_ERROR])
def test_a_page_that_cannot_be_read_to_be_moved_is_gone_and_its_segment_suspect(status):
    cache, held = filled()
    done(cache, held[0], status)
    assert (cache.lookup(held[0].keys).tiers == MISS).all()
    assert cache.counters.quarantined_pages == len(held[0])
    assert cache.snapshot(1.0).suspected_segments == 1
    settle(cache)
    check_books(cache)


@pytest.mark.parametrize(
    ("status", "suspects"), [(MoveStatus.TARGET_ERROR, 1), (MoveStatus.NO_SPACE, 0)]
)
def test_a_page_whose_new_place_fails_stays_where_it_was(status, suspects):
    cache, held = filled()
    done(cache, held[0], status)
    rows = cache.table.lookup(held[0].keys)
    assert (cache.table.l2_slot[rows] == held[0].source).all()
    assert cache.traffic.pause_until > 1.0
    assert cache.snapshot(1.0).suspected_segments == suspects
    for move in held[1:]:
        done(cache, move)
    settle(cache)
    check_books(cache)


def test_compaction_is_bounded_in_flight():
    _, held = filled()
    assert sum(len(move) for move in held) <= 2 * 4


def test_a_suspect_segment_is_emptied_tested_and_used_again():
    cache = make()
    put(cache, range(128))
    pick = next(p for p in range(64) if cache.lookup(KEYS[p : p + 1]).tiers[0] == 2)
    row = cache.table.lookup(KEYS[pick : pick + 1])
    segment = int(cache.table.l2_slot[row[0]]) // cache.shelves.pool2.per_segment
    ticket = cache.load(1.0, 1, KEYS[pick : pick + 1], 9.0)
    (read,) = [m for m in settle(cache, hold=(MoveKind.READ,)) if m.kind is MoveKind.READ]
    done(cache, read, MoveStatus.BAD_PAGE)
    cache.release(1.0, 1, ticket.lease)
    assert cache.snapshot(1.0).suspected_segments == 1
    put(cache, range(200, 400))
    assert not cache.shelves.pool2.in_use(segment), "it got nothing new"
    assert cache.snapshot(1.0).suspected_segments == 1
    tested = []
    for now in (10.0, 20.0, 30.0, 40.0):
        cache.tick(now)
        while moves := cache.take_moves():
            tested += [slot for m in moves if m.kind is MoveKind.SCRUB for slot in m.source]
            for move in moves:
                cache.move_done(now, move, Outcome.uniform(move, MoveStatus.OK, 0.001))
    start = segment * cache.shelves.pool2.per_segment
    assert tested == list(range(start, start + 16))
    assert cache.snapshot(40.0).suspected_segments == 0
    assert cache.counters.scrubbed_segments == 1
    check_books(cache)


def test_a_tier_that_shrinks_gives_whole_segments_back():
    cache = make()
    put(cache, range(128))
    too_much = cache.shelves.pool2.backed - 64
    assert too_much > 0
    budgets = Budgets(0, 32 * PAGE, 64 * 2 * PAGE, ("data0",), 0)
    cache.reconfigure(2.0, cache.behaviour, budgets, l2_slots=64)
    punches = settle(cache, hold=(MoveKind.PUNCH_L2,))
    assert sum(len(move) for move in punches) == too_much // 16
    for move in punches:
        done(cache, move)
    pool = cache.shelves.pool2
    assert (pool.excess, pool.leaving) == (0, 0)
    assert pool.backed <= 64
    check_books(cache)
