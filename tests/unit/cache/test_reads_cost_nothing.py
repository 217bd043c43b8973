"""Reading a long past from NVMe costs no page that was not written yet."""

from __future__ import annotations

import numpy as np
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.results import MISS, PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
DRAM, PAGES = 64, 256
KEYS = np.random.default_rng(1).integers(0, 256, (PAGES, 16), dtype=np.uint8)


class World:
    """A cache without L0; of its moves those in `slow` do not end."""

    def __init__(self) -> None:
        self.cache = Cache(
            PageTable(max_pages=1 << 12), GEOMETRY, settings=CacheSettings(max_pages=1 << 12)
        )
        self.slow: set[MoveKind] = set()
        self.now = 1.0
        budgets = Budgets(0, DRAM * PAGE, 1024 * GEOMETRY.nvme_slot_bytes, ("data0",), 0)
        self.cache.reconfigure(self.now, Behaviour(cool_down_seconds=0), budgets)

    def turn(self) -> None:
        while moves := [m for m in self.cache.take_moves() if m.kind not in self.slow]:
            for move in moves:
                self.cache.move_done(self.now, move, Outcome.uniform(move, MoveStatus.OK))

    def put(self, i: int) -> None:
        self.now += 0.01
        key = KEYS[i : i + 1]
        assert self.cache.reserve(self.now, 1, key).status[0] == PutStatus.OFFERED
        self.cache.commit(self.now, 1, key, np.zeros(1, dtype=np.uint64))
        self.turn()

    def read(self, i: int) -> bool:
        self.now += 0.01
        ticket = self.cache.load(self.now, 1, KEYS[i : i + 1], self.now + 5)
        self.turn()
        there = bool(ticket.done and ticket.tier[0] != MISS) or not ticket.done
        self.cache.release(self.now, 1, ticket.lease)
        self.turn()
        return there


def test_every_page_is_there_after_all_were_asked_for_while_the_drive_takes_no_writes() -> None:
    world = World()
    for i in range(PAGES):
        world.put(i)
    before = world.cache.counters.evicted_l1
    world.slow = {MoveKind.WRITE}  # from here on nothing that is only in DRAM can be saved
    found = [world.read(i) for i in range(PAGES)]
    assert all(found)
    assert world.cache.counters.evicted_l1 == before == 0
    assert (world.cache.lookup(KEYS).tiers != MISS).all()
    check_books(world.cache)


def found(world: World, which: range, first: int) -> None:
    """These pages are found on a volume, in slots from `first` on."""
    slots = np.arange(first, first + len(which), dtype=np.uint32)
    numbers = np.zeros(len(which), dtype=np.uint32)
    parents = np.zeros((len(which), 16), dtype=np.uint8)
    keys = KEYS[which.start : which.stop]
    taken = world.cache.adopt(keys, parents, numbers, numbers.astype(np.uint64), slots)
    assert taken.all()


def test_pages_whose_copies_were_found_make_room_for_reads_after_a_restart() -> None:
    world = World()
    world.slow = {MoveKind.WRITE}
    for i in range(60):
        world.put(i)
    segment = 5 * world.cache.shelves.pool2.per_segment
    found(world, range(40, 60), segment)  # the others were never written, and are colder
    found(world, range(100, 120), segment + 20)
    ticket = world.cache.load(world.now, 1, KEYS[100:120], world.now + 5)
    assert ticket.tier.tolist() == [2] * 20
    assert world.cache.counters.evicted_l1 == 0
    assert (world.cache.lookup(KEYS[:60]).tiers != MISS).all()
    check_books(world.cache)


def test_a_copy_that_was_lost_and_found_again_makes_room_once() -> None:
    world = World()
    world.put(0)
    for first in (0, 128):
        found(world, range(1), first)
        rows = world.cache.table.lookup(KEYS[:1])
        if not first:
            world.cache.traffic.leave_l2(rows)
    assert world.cache.shelves.copies(5).tolist() == rows.tolist()


def test_a_read_still_finds_room_where_no_page_has_a_copy() -> None:
    world = World()
    for i in range(PAGES):
        world.put(i)
    world.slow = {MoveKind.WRITE, MoveKind.READ}  # what is read never lands: no copy in DRAM
    for i in range(DRAM):
        world.cache.load(world.now, 1, KEYS[i : i + 1], world.now + 5)
        world.turn()
    assert world.cache.counters.evicted_l1 > 0, "the coldest made room for those who wait"
    check_books(world.cache)
