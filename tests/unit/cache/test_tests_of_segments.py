"""A test of a suspect segment writes over it: never over one that is in use."""

from __future__ import annotations

import numpy as np
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings

PAGE = 4096
KEYS = np.random.default_rng(3).integers(0, 256, (400, 16), dtype=np.uint8)


class World:
    """A cache without L0; `fail`: how moves of a kind end that do not end well."""

    def __init__(self) -> None:
        self.cache = Cache(
            PageTable(max_pages=4096),
            Geometry.of_page_bytes(PAGE, 16),
            settings=CacheSettings(max_pages=4096),
        )
        self.fail: dict[MoveKind, MoveStatus] = {}
        self.now = 1.0
        disk = self.cache.geometry.nvme_slot_bytes
        budgets = Budgets(0, 32 * PAGE, 64 * disk, ("data0",), 0)
        self.cache.reconfigure(self.now, Behaviour(cool_down_seconds=0), budgets)

    def end(self, moves: list[Move]) -> None:
        for move in moves:
            status = self.fail.get(move.kind, MoveStatus.OK)
            self.cache.move_done(self.now, move, Outcome.uniform(move, status))

    def turn(self) -> list[Move]:
        """The moves that there were."""
        seen = []
        while moves := self.cache.take_moves():
            seen += moves
            self.end(moves)
        return seen

    def put(self, first: int, count: int) -> None:
        for i in range(first, first + count):
            key = KEYS[i : i + 1]
            self.cache.reserve(self.now, 1, key)
            self.cache.commit(self.now, 1, key, np.zeros(1, dtype=np.uint64))
            self.turn()


def test_a_segment_of_a_lost_volume_that_is_used_again_is_not_tested():
    world = World()
    world.put(0, 60)
    cache, pool = world.cache, world.cache.shelves.pool2
    segment = next(s for s in range(8) if pool.live(s) and s != pool.open)
    keys = cache.table.key[pool.rows(segment)].view(np.uint8).reshape(-1, 16)
    world.fail = {MoveKind.READ: MoveStatus.IO_ERROR}
    for key in keys:
        cache.load(world.now, 1, key[None], world.now + 5)
    reads = [move for move in cache.take_moves() if move.kind is MoveKind.READ]
    world.end(reads)
    assert pool.suspects == [segment]
    cache.lose_segments(world.now, {segment})  # its volume is given up at the same time
    world.fail = {}
    world.turn()
    for i in range(100, 400):
        world.put(i, 1)
        if pool.live(segment):
            break
    assert pool.live(segment) > 0
    world.now += 3600
    cache.tick(world.now)
    assert [move for move in world.turn() if move.kind is MoveKind.SCRUB] == []


def test_a_suspect_segment_that_is_empty_is_tested_and_used_again():
    world = World()
    world.put(0, 60)
    pool = world.cache.shelves.pool2
    segment = next(s for s in range(8) if pool.live(s) and s != pool.open)
    pool.suspect(np.array([segment * pool.per_segment], dtype=np.uint32))
    world.cache.delete(world.now, KEYS[:60])
    world.turn()
    world.now += 3600
    world.cache.tick(world.now)
    tests = [move for move in world.turn() if move.kind is MoveKind.SCRUB]
    assert {int(slot) // pool.per_segment for move in tests for slot in move.source} == {segment}
    assert pool.suspects == []
