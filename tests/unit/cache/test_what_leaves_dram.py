"""A drive that keeps up gets what leaves DRAM, whatever the sizes of tier, queue and page."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.leaving import L1Lines, going_down, l1_lines, queue_room
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.quotas import tenant_number
from kvtier_agent.cache.results import MISS, PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, TenantQuota
from kvtier_agent.cache.snapshot import check_books

MIB = 1 << 20
SEARCH = tenant_number("search")


class World:
    """Metadata only. The drive writes at most `pace` pages a turn, from the front of what
    it was given; all else ends at once."""

    def __init__(
        self,
        l1: int,
        l2: int = 1 << 15,
        *,
        l0: int = 0,
        page: int = 16 * MIB,
        queue: int = 256 * MIB,
    ) -> None:
        self.geometry = Geometry.of_page_bytes(page, 16)
        self.cache = Cache(
            PageTable(max_pages=1 << 17),
            self.geometry,
            settings=CacheSettings(max_pages=1 << 17, write_queue_bytes=queue),
        )
        self.drive: deque[Move] = deque()
        self.pace = 1 << 30
        self.now = 1.0
        self.chains = 0
        self.l0, self.l2 = l0, l2
        self.hold: MoveKind | None = None
        self.held: list[Move] = []
        """Moves of that kind: they do not end."""
        self.resize(l1)

    def resize(self, l1: int, behaviour: Behaviour | None = None) -> None:
        slot = self.geometry.slot_bytes
        l2 = self.l2 * self.geometry.nvme_slot_bytes
        budgets = Budgets(self.l0 * slot, l1 * slot, l2, ("data0",), 0)
        behaviour = behaviour or Behaviour(cool_down_seconds=0)
        self.cache.reconfigure(self.now, behaviour, budgets)
        self.turn()

    def turn(self) -> None:
        left = self.pace
        self.now += 0.01
        while moves := self.cache.take_moves():
            for move in moves:
                if move.kind is self.hold:
                    self.held.append(move)
                elif move.kind is MoveKind.WRITE:
                    self.drive.append(move)
                else:
                    self.end(move)
        while self.drive and left >= len(self.drive[0]):
            left -= len(self.drive[0])
            self.end(self.drive.popleft())
            self.drive.extend(m for m in self.cache.take_moves() if m.kind is MoveKind.WRITE)

    def end(self, move: Move, status: MoveStatus = MoveStatus.OK) -> None:
        self.cache.move_done(self.now, move, Outcome.uniform(move, status))

    def put(self, count: int, tenant: int = 0) -> int:
        """How many of a new chain's pages were taken."""
        self.chains += 1
        keys = np.random.default_rng(self.chains).integers(0, 256, (count, 16), dtype=np.uint8)
        status = self.cache.reserve(self.now, 1, keys, tenant=tenant).status
        taken = keys[status == PutStatus.OFFERED]
        self.cache.commit(self.now, 1, taken, np.zeros(len(taken), dtype=np.uint64))
        self.turn()
        return len(taken)

    @property
    def written_part(self) -> float:
        counters = self.cache.counters
        return counters.stored_l2 / max(1, counters.stored_l2 + counters.evicted_l1)


@pytest.mark.parametrize(
    ("gib", "page_mib", "chain"), [(96, 16, 20), (16, 16, 8), (96, 64, 4), (8, 1, 64)]
)
def test_a_large_dram_tier_writes_what_leaves_it_if_the_drive_keeps_up(gib, page_mib, chain):
    slots = gib * 1024 // page_mib
    world = World(slots, page=page_mib * MIB)
    world.pace = chain + chain // 4
    for _ in range(slots * 2 // chain):
        assert world.put(chain) == chain
    assert world.cache.counters.stored_l2 > slots // 2
    assert world.written_part >= 0.95
    assert world.cache.counters.emergency_evicted == 0
    check_books(world.cache)


def test_a_burst_falls_to_the_low_line_afterwards_and_nothing_is_dropped():
    world = World(6144)
    lines = world.cache.traffic.lines1
    world.pace = 0
    while world.cache.shelves.pools[1].used <= lines.high:
        world.put(16)
    world.put(16)
    world.pace = 4
    for _ in range(200):
        world.turn()
    assert world.cache.shelves.pools[1].used == lines.low
    assert world.cache.counters.evicted_l1 == 0


def test_while_the_drive_hangs_puts_go_on_and_no_more_is_dropped_than_they_take():
    world = World(6144)
    world.pace = 0
    taken = sum(world.put(16) for _ in range(1000))
    assert taken == 16_000
    lines, pool = world.cache.traffic.lines1, world.cache.shelves.pools[1]
    assert pool.used >= lines.high
    assert world.cache.counters.emergency_evicted == taken - pool.used
    assert (world.cache.lookup(last_keys(world, 16)).tiers != MISS).all()


@pytest.mark.parametrize(("l0", "kind"), [(0, MoveKind.WRITE), (40, MoveKind.DEMOTE)])
def test_pages_whose_move_was_not_tried_go_first_again(l0, kind):
    world = World(100, l0=l0)
    world.hold = kind
    while not world.held:
        world.put(4)
    first, before = world.held[0], len(world.held)
    world.end(first, MoveStatus.CANCELLED)
    for move in world.held[1:before]:
        world.end(move)
    while len(world.held) == before:
        world.put(4)
    assert world.held[before].rows.tolist() == first.rows.tolist()


def last_keys(world: World, count: int) -> np.ndarray:
    return np.random.default_rng(world.chains).integers(0, 256, (count, 16), dtype=np.uint8)


def test_a_tier_that_shrinks_has_its_size_at_once_but_for_what_is_on_its_way():
    world = World(2048)
    world.put(1900)
    world.pace = 0
    world.resize(1024)
    traffic, pool = world.cache.traffic, world.cache.shelves.pools[1]
    assert traffic.leaving1 > 0
    assert pool.used - traffic.leaving1 <= 1024
    check_books(world.cache)


def test_a_quota_of_dram_waits_for_the_write_queue():
    world = World(4096)
    quota = (TenantQuota("search", dram_percent=50),)
    world.resize(4096, Behaviour(cool_down_seconds=0, quotas=quota))
    world.pace = 10
    for _ in range(600):
        assert world.put(8, SEARCH) == 8
    counters = world.cache.counters
    assert counters.stored_l2 > 1000
    assert counters.evicted_l1 + counters.quota_evicted == 0
    check_books(world.cache)


def test_pages_that_only_nvme_admits_are_not_lost_for_a_short_queue():
    world = World(1024)
    floors = (0, 10**9, 0)
    world.resize(1024, Behaviour(cool_down_seconds=0, threshold_microseconds_per_mib=floors))
    for _ in range(4):
        assert world.put(100) == 100
    assert world.cache.counters.evicted_l1 == 0
    check_books(world.cache)


@pytest.mark.parametrize(("page_mib", "queue_mib"), [(256, 256), (350, 256), (16, 1)])
def test_a_page_larger_than_the_write_queue_goes_to_nvme_alone(page_mib, queue_mib):
    world = World(64, page=page_mib * MIB, queue=queue_mib * MIB)
    for _ in range(128):
        assert world.put(1) == 1
        assert len(world.drive) <= 1
    assert world.cache.counters.stored_l2 >= 64
    assert world.written_part == 1.0
    check_books(world.cache)


def test_one_larger_page_waits_for_the_one_before():
    assert queue_room(100, 0, 1000) == 1
    assert queue_room(100, 1000, 1000) == 0
    assert queue_room(100, 0, 30) == 3
    assert queue_room(100, 60, 30) == 1


@given(
    st.integers(0, 20_000), st.booleans(), st.integers(0, 20_000), st.integers(0, 500),
    st.booleans(),
)  # fmt: skip
def test_the_law_never_takes_more_than_there_is_and_leaves_nothing_above_the_brim(
    slots, has_l2, staying, room, falling
):
    lines = l1_lines(slots, has_l2, CacheSettings())
    assert 0 <= lines.low <= lines.high <= lines.brim <= slots
    count, now_falling = going_down(lines, staying, room, falling)
    assert 0 <= count <= staying
    assert staying - count <= lines.brim
    if staying <= lines.brim:
        assert count <= room
    assert now_falling or staying <= lines.high
    assert not now_falling or staying > lines.low


def test_a_falling_tier_falls_until_it_is_low():
    lines = L1Lines(low=90, high=95, brim=97)
    assert going_down(lines, 95, 9, False) == (0, False)
    assert going_down(lines, 96, 3, False) == (3, True)
    assert going_down(lines, 93, 9, True) == (3, True)
    assert going_down(lines, 90, 9, True) == (0, False)
    assert going_down(lines, 97, 0, True) == (0, True)
    assert going_down(lines, 99, 0, True) == (2, True)
