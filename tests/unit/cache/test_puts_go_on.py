"""Puts are taken while a drive hangs, and when the page table can take no more records."""

from __future__ import annotations

import numpy as np
import pytest
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.results import MISS, PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books
from kvtier_agent.cache.table_view import TableError

PAGE = 4096
DISK = Geometry.of_page_bytes(PAGE, 16).nvme_slot_bytes


class World:
    """A cache whose moves end well, but for the kinds in `hang`: those never end."""

    def __init__(self, l0=0, l1=0, l2=0, max_pages=1 << 14):
        self.table = PageTable(max_pages=max_pages)
        self.cache = Cache(
            self.table,
            Geometry.of_page_bytes(PAGE, 16),
            settings=CacheSettings(max_pages=max_pages),
        )
        self.hang: set[MoveKind] = set()
        self.now = 1.0
        volumes = ("data0",) if l2 else ()
        budgets = Budgets(l0 * PAGE, l1 * PAGE, l2 * DISK, volumes, 0)
        self.cache.reconfigure(self.now, Behaviour(cool_down_seconds=0), budgets)

    def keys(self, chain, count=8):
        return np.random.default_rng(chain).integers(0, 256, (count, 16), dtype=np.uint8)

    def put(self, chain, count=8):
        """How many pages were taken."""
        self.now += 0.01
        keys = self.keys(chain, count)
        offered = self.cache.reserve(self.now, 1, keys).status == PutStatus.OFFERED
        sums = np.zeros(int(offered.sum()), dtype=np.uint64)
        self.cache.commit(self.now, 1, keys[offered], sums)
        while moves := [m for m in self.cache.take_moves() if m.kind not in self.hang]:
            for move in moves:
                self.cache.move_done(self.now, move, Outcome.uniform(move, MoveStatus.OK))
        return int(offered.sum())

    def held(self, chain):
        return int((self.cache.lookup(self.keys(chain)).tiers != MISS).sum())


@pytest.mark.parametrize("l0", [0, 32])
def test_puts_go_on_while_the_drive_hangs(l0):
    world = World(l0=l0, l1=64, l2=1024)
    world.hang = {MoveKind.WRITE}
    for chain in range(30):
        world.put(chain)  # until the half is on its way, a put waits for slots that are leaving
    assert [world.put(chain) for chain in range(30, 60)] == [8] * 30
    assert world.cache.traffic.leaving1 == 32, "half of the tier, whatever the queue may hold"
    assert world.cache.counters.emergency_evicted > 0
    assert world.held(59) == 8
    check_books(world.cache)


@pytest.mark.parametrize(
    "slots",
    [{"l0": 4096}, {"l1": 4096}, {"l1": 256, "l2": 4096}, {"l0": 128, "l1": 512, "l2": 4096}],
)
def test_the_coldest_make_room_in_a_table_that_is_full(slots):
    world = World(**slots, max_pages=1024)
    assert [world.put(chain) for chain in range(400)] == [8] * 400
    assert world.held(399) == 8
    assert world.held(0) == 0
    assert 1024 - 1024 // 8 <= world.table.pages <= 1024, "no more is dropped than need be"
    check_books(world.cache)


def test_a_table_that_finds_no_memory_makes_room_and_grows_when_there_is_some(monkeypatch):
    world = World(l0=0, l1=8192, max_pages=1 << 14)
    grow, tries = world.table._grow, []

    def refuse(capacity):
        if capacity > world.table.capacity:
            tries.append(world.now)
            raise TableError("no memory")

    monkeypatch.setattr(world.table, "_grow", refuse)
    before = world.table.capacity
    chains = before // 8 + 40
    assert [world.put(chain) for chain in range(chains)] == [8] * chains
    assert world.table.capacity == before
    assert world.held(chains - 1) == 8
    assert len(tries) == 1, "it is not tried for each put"
    monkeypatch.setattr(world.table, "_grow", grow)
    world.now += 10
    for chain in range(chains, chains + 40):
        assert world.put(chain) == 8
    assert world.table.capacity > before


def test_what_is_pinned_stays_and_the_put_is_refused():
    world = World(l1=2048, max_pages=1024)
    for chain in range(128):
        assert world.put(chain) == 8
    for chain in range(128):
        assert world.cache.load(world.now, 1, world.keys(chain), world.now + 5).done
    assert world.put(500) == 0
    assert sum(world.held(chain) for chain in range(128)) == 1024
