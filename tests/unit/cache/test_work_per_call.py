"""What a call costs follows from what it is about, not from how much the cache holds. Counted in
records looked at and calls made: no test judges speed."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.frozen import FrozenBook
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.loads import Loads
from kvtier_agent.cache.moves import MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.reclaim import Reclaim
from kvtier_agent.cache.replacement import TouchLog
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, FrozenPrefix
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(11).integers(0, 256, (4000, 16), dtype=np.uint8)
Patch = pytest.MonkeyPatch


class World:
    """A cache whose moves end well when they are asked to."""

    def __init__(self, l0: int, l1: int, l2: int = 0, *frozen: FrozenPrefix) -> None:
        self.cache = Cache(
            PageTable(max_pages=1 << 14), GEOMETRY, settings=CacheSettings(max_pages=1 << 14)
        )
        self.now = 1.0
        budgets = Budgets(l0 * PAGE, l1 * PAGE, 1 << 40 if l2 else 0, ("data0",), 0)
        behaviour = Behaviour(cool_down_seconds=0, frozen=frozen)
        self.cache.reconfigure(self.now, behaviour, budgets, l2_slots=l2)

    def turn(self) -> None:
        while moves := self.cache.take_moves():
            for move in moves:
                self.cache.move_done(self.now, move, Outcome.uniform(move, MoveStatus.OK))
        check_books(self.cache)

    def reserve(self, keys: np.ndarray, frozen: str | None = None) -> None:
        self.cache.reserve(self.now, 1, keys, frozen=frozen)

    def put(self, keys: np.ndarray, frozen: str | None = None) -> None:
        self.reserve(keys, frozen)
        self.cache.commit(self.now, 1, keys, np.zeros(len(keys), dtype=np.uint64))
        self.turn()

    def where(self, keys: np.ndarray) -> list[int]:
        return self.cache.lookup(keys).tiers.tolist()


def counted(patch: Patch, owner: type, name: str) -> list[Any]:
    """The first arguments with which a method is called from now on."""
    real: Callable[..., Any] = getattr(owner, name)
    seen: list[Any] = []

    def call(self: Any, *arguments: Any) -> Any:
        seen.append(arguments[0] if arguments else None)
        return real(self, *arguments)

    patch.setattr(owner, name, call)
    return seen


def test_a_victim_costs_a_look_at_some_entries_however_long_the_log_is():
    log, looked = TouchLog(), []
    rows = np.arange(500_000, dtype=np.uint32)
    log.append(rows, rows.astype(np.uint64))

    def valid(rows: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        looked.append(rows.size)
        return rows % 2 == 1

    taken = [log.pop(1, valid).tolist() for _ in range(100)]
    assert taken == [[2 * i + 1] for i in range(100)]
    assert sum(looked) <= 100 * 1024
    assert log.entries == 500_000 - 201  # what is stale before the next one is gone too
    assert log.pop(3000, valid).tolist() == list(range(201, 6201, 2))
    assert log.pop(500_000, valid).size == 250_000 - 3100
    assert log.entries == 0


def test_nobody_looks_for_frozen_pages_while_a_prefix_is_written_into_l0(monkeypatch):
    world = World(100, 100, 0, FrozenPrefix("bot", 50 * PAGE))
    world.turn()
    world.reserve(KEYS[:40], "bot")
    looks = counted(monkeypatch, FrozenBook, "waiting_in_dram")
    for i in range(100, 130):
        world.put(KEYS[i : i + 1])
    assert looks == []
    world.cache.commit(world.now, 1, KEYS[:40], np.zeros(40, dtype=np.uint64))
    assert world.where(KEYS[:40]) == [0] * 40


def test_a_frozen_page_that_is_pinned_in_dram_is_promoted_when_it_is_let_go(monkeypatch):
    world = World(100, 100, 0, FrozenPrefix("bot", 50 * PAGE))
    keys = KEYS[:3]
    world.put(keys)
    world.cache.traffic.demote(world.now, world.cache.shelves.victims(0, 3))
    world.turn()
    assert world.where(keys) == [1] * 3
    world.cache.pin(world.now, 7, keys)
    world.reserve(keys, "bot")
    world.turn()
    looks = counted(monkeypatch, FrozenBook, "waiting_in_dram")
    for i in range(100, 130):
        world.put(KEYS[i : i + 1])
    assert len(looks) <= 1
    assert world.where(keys) == [1] * 3
    world.cache.unpin(world.now, 7, keys)
    world.turn()
    assert world.where(keys) == [0] * 3


def test_frozen_pages_that_had_to_start_in_dram_come_up_when_l0_has_room():
    world = World(20, 100, 0, FrozenPrefix("bot", 18 * PAGE))
    world.put(KEYS[100:110])
    ticket = world.cache.load(world.now, 1, KEYS[100:110], world.now + 5)  # they cannot leave L0
    world.put(KEYS[:18], "bot")
    assert world.where(KEYS[:18]) == [0] * 10 + [1] * 8
    world.cache.release(world.now, 1, ticket.lease)
    world.turn()
    assert world.where(KEYS[:18]) == [0] * 18


def in_nvme(world: World, count: int) -> None:
    """So many pages lie in L2, ten in a segment."""
    numbers = np.arange(count, dtype=np.uint32)
    slots = numbers // 10 * np.uint32(world.cache.shelves.pool2.per_segment) + numbers % 10
    nothing = np.zeros((count, 16), dtype=np.uint8)
    sums = numbers.astype(np.uint64)
    assert world.cache.adopt(KEYS[:count], nothing, numbers, sums, slots).all()


def test_a_move_that_lands_is_booked_once_for_each_lease(monkeypatch):
    world = World(0, 200, 400)
    in_nvme(world, 90)
    tickets = {}
    for first, last in ((0, 60), (0, 50), (60, 90)):
        ticket = world.cache.load(world.now, 1, KEYS[first:last], world.now + 5)
        tickets[ticket.lease] = (first, last)
    moves = [m for m in world.cache.take_moves() if m.kind is MoveKind.READ]
    leases = counted(monkeypatch, Loads, "_point")
    done = []
    for move in moves:
        done += world.cache.move_done(world.now, move, Outcome.uniform(move, MoveStatus.OK))
    assert len(leases) <= len(tickets) * len(moves)
    assert {ticket.lease for ticket in done} == set(tickets)
    assert len(done) == len(tickets)
    for ticket in done:
        first, last = tickets[ticket.lease]
        rows = world.cache.table.lookup(KEYS[first:last])
        slots = world.cache.table.l1_slot[rows].astype(np.uint64)
        assert ticket.tier.tolist() == [2] * (last - first)
        assert ticket.arena.tolist() == [1] * (last - first)
        assert (ticket.offset == slots * np.uint64(GEOMETRY.slot_bytes)).all()


def test_one_segment_that_is_emptied_at_once_is_looked_at_alone(monkeypatch):
    world = World(0, 64, 640)
    in_nvme(world, 640)
    pool = world.cache.shelves.pool2
    assert (pool.available, len(pool.sealed()[0])) == (0, 64)
    looked = counted(monkeypatch, Reclaim, "_idle")
    world.cache.traffic.reclaim.at_once(1)
    assert pool.available > 0
    assert len(looked) == 1


def test_a_page_table_that_grows_asks_for_the_new_part_alone(tmp_path: Path, monkeypatch: Patch):
    asked: list[tuple[int, int]] = []
    real = os.posix_fallocate

    def fallocate(fd: int, offset: int, length: int) -> None:
        asked.append((offset, offset + length))
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    table = PageTable(tmp_path / "table", max_pages=40_000)
    for count in (5000, 9000, 17_000, 33_000, 40_000):
        table.grow_for(count)
    assert table.capacity == 40_000
    asked.sort()
    assert all(before[1] <= after[0] for before, after in pairwise(asked))
    records = [table.used_bytes, sum(end - start for start, end in asked)]
    assert records[0] == records[1]
    keys = np.random.default_rng(1).integers(0, 256, (40_000, 16), dtype=np.uint8)
    rows = table.insert(keys)
    assert (table.lookup(keys) == rows).all()
    table.close()
