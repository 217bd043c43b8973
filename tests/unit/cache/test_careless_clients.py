"""Lives of a cache whose clients ask for anything and whose movers fail in every way.

Keys come twice in one call, chains overlap and form rings, prefixes are frozen by name and by key,
leases run out, budgets jump, memory is slow to come back, moves end out of order or not at all.
Afterwards every slot has one owner or none, and every count is right.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import Flag
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.settings import MIB, Behaviour, Budgets, CacheSettings, FrozenPrefix
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
CLIENTS = (1, 2, 3)
THRESHOLDS = [(0, 0, 0), (0, 0, 0), (10**9,) * 3, (300, 0, 0), (400, 330, 0)]


class Life:
    """One cache and what happens to it; all of it follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        count = dice.choice([20, 60, 200])
        self.keys = np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)
        settings = CacheSettings(
            lease_seconds=5,
            write_queue_bytes=dice.choice([4 * PAGE, 256 * MIB]),
            move_bytes=dice.choice([PAGE, 7 * PAGE, 8 * MIB]),
            max_leases_per_client=dice.choice([3, 4096]),
        )
        most = dice.choice([8, 20, 64, 1 << 16])
        table = PageTable(None, max_pages=dice.choice([32, 64, 4096]))
        self.cache = Cache(table, GEOMETRY, settings=settings, maximum_slots=(most, most, 1 << 20))
        self.now = 1.0
        self.moves: list[Move] = []
        self.leases: list[tuple[int, int]] = []
        self.reconfigure()

    def reconfigure(self) -> None:
        dice = self.dice
        l0, l1 = dice.choice([0, 0, 3, 8, 20, 64]), dice.choice([0, 4, 10, 30, 64])
        l2 = dice.choice([0, 0, 10, 50, 300])
        frozen = tuple(
            FrozenPrefix(
                name,
                dice.choice([0, 2, 5, 100]) * PAGE,
                tuple(key.tobytes() for key in dice.sample(list(self.keys), dice.choice([0, 3]))),
            )
            for name in dice.sample("abc", dice.choice([0, 1, 2]))
        )
        behaviour = Behaviour(
            threshold_microseconds_per_mib=dice.choice(THRESHOLDS),
            cool_down_seconds=dice.choice([0, 1]),
            tighten_percent=dice.choice([50, 90]),
            frozen=frozen,
            admitting=dice.random() < 0.95,
        )
        volumes = ("data0",) if l2 else ()
        budgets = Budgets(l0 * PAGE, l1 * PAGE, l2 * PAGE, volumes, 0)
        self.cache.reconfigure(self.now, behaviour, budgets, l2_slots=l2)

    def chain(self) -> tuple[np.ndarray, bytes]:
        start, length = self.dice.randrange(len(self.keys)), self.dice.randint(1, 12)
        picks = [(start + i) % len(self.keys) for i in range(length)]
        if self.dice.random() < 0.15:
            picks[self.dice.randrange(length)] = picks[0]
        return self.keys[picks], self.keys[start - 1].tobytes()

    def put(self, client: int) -> None:
        dice, (keys, parent) = self.dice, self.chain()
        status = self.cache.reserve(
            self.now, client, keys,
            parent=dice.choice([parent, bytes(16)]), depth=16 * dice.randint(0, 50),
            partial_last=dice.random() < 0.2, frozen=dice.choice([None, None, "a", "b", "unknown"]),
        ).status  # fmt: skip
        then = dice.random()
        if then < 0.7:
            written = keys if then < 0.35 else keys[status == PutStatus.OFFERED]
            sums = np.arange(len(written), dtype=np.uint64)
            self.cache.commit(self.now, client, written, sums)
        elif then < 0.85:
            self.cache.abort(self.now, client, keys)

    def load(self, client: int) -> None:
        keys, _ = self.chain()
        deadline = self.now + self.dice.choice([0.1, 3])
        frozen = self.dice.choice([None, None, "a"])
        ticket = self.cache.load(self.now, client, keys, deadline, frozen=frozen)
        self.leases.append((client, ticket.lease))

    def release(self) -> None:
        if self.leases:
            client, lease = self.leases.pop(self.dice.randrange(len(self.leases)))
            if self.dice.random() < 0.2:
                bad = np.array([self.dice.randrange(14) for _ in range(2)])
                self.cache.report_bad(self.now, client, lease, bad)
            self.cache.release(self.now, client, lease)

    def finish(self, move: Move) -> None:
        statuses = [MoveStatus.OK] * 3
        if move.kind in (MoveKind.DEMOTE, MoveKind.PROMOTE):
            statuses += [MoveStatus.IO_ERROR, MoveStatus.CANCELLED]
        elif move.kind.carries_pages or move.kind is MoveKind.SCRUB:
            statuses = list(MoveStatus) if self.dice.random() < 0.25 else statuses
        else:
            statuses += [MoveStatus.CANCELLED]
        status = np.array([self.dice.choice(statuses) for _ in range(len(move))], dtype=np.uint8)
        self.cache.move_done(self.now, move, Outcome(status, 0.001))

    def step(self) -> None:
        dice, cache = self.dice, self.cache
        self.now += dice.choice([0, 0.01, 0.3, 2])
        client = dice.choice(CLIENTS)
        events = {
            self.reconfigure: 3,
            self.release: 12,
            lambda: self.put(client): 30,
            lambda: self.load(client): 20,
            lambda: cache.client_gone(self.now, client): 2,
            lambda: cache.tick(self.now): 6,
            lambda: cache.drop_all(self.now): 0.5,
            lambda: cache.lose_segments(self.now, {0, 1}): 0.5,
        }
        dice.choices(list(events), list(events.values()))[0]()
        self.moves += cache.take_moves()
        dice.shuffle(self.moves)
        for _ in range(min(len(self.moves), dice.choice([0, 0, 1, 2, 5]))):
            self.finish(self.moves.pop())

    def end(self) -> None:
        """Every client goes, and every move succeeds."""
        for client in CLIENTS:
            self.cache.client_gone(self.now, client)
        while moves := [*self.moves, *self.cache.take_moves()]:
            self.moves = []
            for move in moves:
                self.cache.move_done(self.now, move, Outcome.uniform(move, MoveStatus.OK, 0.001))


@pytest.mark.parametrize("seed", range(30))
def test_the_books_are_right_after_any_life(seed):
    life = Life(seed)
    for _ in range(300):
        life.step()
        if life.dice.random() < 0.05:
            check_books(life.cache)
    life.end()
    cache = life.cache
    check_books(cache)
    assert not cache.book.leases
    traffic, table = cache.traffic, cache.table
    assert (traffic.in_flight, traffic.leaving0, traffic.leaving1) == (0, 0, 0)
    assert traffic.write_queue_bytes == 0
    for pool in cache.shelves.pools[:2]:
        free = pool._free[: pool.free_count]
        assert np.unique(free).size == free.size
    rows = table.live_rows()
    for number, prefix in cache.shelves.frozen._prefixes.items():
        mine = rows[table.frozen[rows] == number]
        exempt = int(table.has(mine, Flag.EXEMPT).sum())
        assert (prefix.exempt, prefix.ordinary) == (exempt, mine.size - exempt)
