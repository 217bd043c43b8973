"""Frozen prefixes leave room in the tier that keeps them, however small it is or becomes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.frozen import FROZEN_PERCENT, fit_frozen
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.settings import Behaviour, Budgets, CacheSettings, FrozenPrefix
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)


class World:
    """A cache whose moves end well at once."""

    def __init__(self, l0: int, l1: int, *frozen: FrozenPrefix) -> None:
        self.cache = Cache(
            PageTable(max_pages=1 << 14), GEOMETRY, settings=CacheSettings(max_pages=1 << 14)
        )
        self.frozen = frozen
        self.now = 1.0
        self.resize(l0, l1)

    def resize(self, l0: int, l1: int) -> None:
        behaviour = Behaviour(cool_down_seconds=0, frozen=self.frozen)
        self.cache.reconfigure(self.now, behaviour, Budgets(l0 * PAGE, l1 * PAGE))
        self.turn()

    def turn(self) -> None:
        self.now += 0.1
        while moves := self.cache.take_moves():
            for move in moves:
                self.cache.move_done(self.now, move, Outcome.uniform(move, MoveStatus.OK))
        self.cache.tick(self.now)
        check_books(self.cache)

    def put(self, seed: int, count: int, frozen: str | None = None) -> int:
        """How many were taken."""
        status = self.cache.reserve(self.now, 1, keys(seed, count), frozen=frozen).status
        taken = keys(seed, count)[status == PutStatus.OFFERED]
        self.cache.commit(self.now, 1, taken, np.zeros(len(taken), dtype=np.uint64))
        self.turn()
        return len(taken)

    def exempt(self) -> list[int]:
        return [prefix.exempt_pages for prefix in self.cache.snapshot(self.now).frozen]

    def tiers(self, seed: int, count: int) -> list[int]:
        return self.cache.lookup(keys(seed, count)).tiers.tolist()


def keys(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), dtype=np.uint8)


def bot(name: str, pages: int) -> FrozenPrefix:
    return FrozenPrefix(name, pages * PAGE)


def test_an_l0_that_shrinks_below_its_frozen_pages_has_its_size_and_keeps_the_shallowest():
    world = World(160, 400, bot("a", 120))
    world.put(1, 120, "a")
    assert world.tiers(1, 120) == [0] * 120
    world.resize(40, 400)
    assert world.cache.shelves.pools[0].used <= 40
    assert world.exempt() == [36]
    assert world.tiers(1, 120) == [0] * 36 + [1] * 84


def test_frozen_pages_leave_an_l0_that_is_given_up():
    world = World(100, 400, bot("a", 80))
    world.put(1, 80, "a")
    world.resize(0, 400)
    assert world.cache.shelves.pools[0].used == 0
    assert world.exempt() == [80]
    assert world.tiers(1, 80) == [1] * 80
    world.resize(100, 400)
    assert world.tiers(1, 80) == [0] * 80


def test_puts_find_room_in_a_dram_tier_that_is_smaller_than_what_is_to_be_frozen():
    world = World(0, 100, bot("a", 400))
    for seed in range(20):
        world.put(seed, 20, "a")
    assert world.exempt() == [90]
    for seed in range(100, 130):
        assert world.put(seed, 5) == 5
    assert world.exempt() == [90]


def test_prefixes_have_their_room_in_the_order_of_the_policy():
    world = World(100, 400, bot("a", 60), bot("b", 60), bot("c", 60))
    for seed, name in enumerate("abc"):
        world.put(seed, 60, name)
    assert world.exempt() == [60, 30, 0]


@given(st.lists(st.integers(1, 1 << 40), max_size=32), st.integers(0, 1 << 42))
def test_what_is_frozen_fits(sizes, tier):
    given = fit_frozen(sizes, tier)
    assert len(given) == len(sizes)
    assert all(0 <= mine <= size for mine, size in zip(given, sizes, strict=True))
    assert sum(given) == min(sum(sizes), tier * FROZEN_PERCENT // 100)


@pytest.mark.parametrize("shape", [(160, 400), (0, 200)])
def test_a_tier_that_grows_takes_the_frozen_pages_in_again(shape):
    world = World(*shape, bot("a", 120))
    world.put(1, 120, "a")
    world.resize(*(slots // 4 for slots in shape))
    world.resize(*shape)
    assert world.exempt() == [len([t for t in world.tiers(1, 120) if t != 255])]
