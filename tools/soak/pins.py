"""What clients pin and delete, as rules for the state machine of the cache.

A part of `machine.CacheMachine`, beside a plain model of its own: a dictionary of what each client
has pinned. `cache`, `now`, `turn()` and `keys_of` are the machine's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from kvtier_agent.cache.record import MOVING, READ_L2, Flag
from kvtier_agent.cache.results import MISS, DeleteStatus, PinStatus

CLIENTS = st.integers(1, 3)
CHAINS = st.integers(0, 5)


class PinRules:
    """Mixed into a `RuleBasedStateMachine`. `pinned`: client -> key -> the row it pinned."""

    cache: Any
    now: float

    def turn(self) -> None:
        raise NotImplementedError

    def keys_of(self, chain: int, count: int) -> np.ndarray:
        raise NotImplementedError

    @property
    def pinned(self) -> dict[int, dict[bytes, int]]:
        model = self.__dict__.setdefault("_model", _Model())
        if model.of is not self.cache.pins:  # a new process, a new geometry: no pin is left
            model.of, model.pinned, model.ended = self.cache.pins, {}, _ended(self.cache)
        return model.pinned

    @rule(client=CLIENTS, chain=CHAINS, count=st.integers(1, 10))
    def pin(self, client: int, chain: int, count: int) -> None:
        self.forget_lost()
        keys, table = self.keys_of(chain, count), self.cache.table
        before = self.cache.lookup(keys)
        mine = self.pinned.setdefault(client, {})
        for key, row, tier in zip(keys, table.lookup(keys), before.tiers, strict=True):
            if tier != MISS and mine.get(key.tobytes(), row) != row:
                del mine[key.tobytes()]  # of a page that was deleted since: this is another
        result = self.cache.pin(self.now, client, keys)
        self.forget_lost()  # room that was made for some may be no pin of ours
        assert (result.tier == before.tiers).all()
        for key, tier, status in zip(keys, before.tiers, result.status, strict=True):
            name = key.tobytes()
            row = int(table.lookup(key[None])[0])
            if status == PinStatus.PINNED:
                assert tier != MISS
                mine[name] = row
            else:
                assert mine.get(name) != row or tier == MISS, "a pin was refused and is there"
            assert (status == PinStatus.ABSENT) == (tier == MISS)
        self.pins_are_what_they_should()
        self.turn()
        self.forget_lost()

    @rule(client=CLIENTS, chain=CHAINS, count=st.integers(1, 10))
    def unpin(self, client: int, chain: int, count: int) -> None:
        self.forget_lost()
        keys = self.keys_of(chain, count)
        mine = self.pinned.get(client, {})
        held = [key.tobytes() for key in keys if key.tobytes() in mine]
        assert self.cache.unpin(self.now, client + 10, keys) == 0
        assert self.cache.unpin(self.now, client, keys) == len(held)
        for name in held:
            del mine[name]
        self.turn()

    @rule(chain=CHAINS, count=st.integers(1, 6), skip=st.sampled_from([0, 0, 3]))
    def delete(self, chain: int, count: int, skip: int) -> None:
        keys = self.keys_of(chain, count + skip)[skip:]
        table = self.cache.table
        before = self.cache.lookup(keys)
        rows = table.lookup(keys)
        there = before.tiers != MISS
        held = np.zeros(len(keys), dtype=bool)
        held[there] = (table.pins[rows[there]] > 0) | MOVING[table.state[rows[there]]]
        status = self.cache.delete(self.now, keys)
        assert (status[~there] == DeleteStatus.ABSENT).all()
        assert (status[there & held] == DeleteStatus.MARKED).all()
        assert (status[there & ~held] == DeleteStatus.DELETED).all()
        assert (self.cache.lookup(keys).tiers == MISS).all(), "a deleted page was found"
        # Who holds a page keeps its bytes: its record is still there, out of the index.
        assert table.has(rows[there & held], Flag.DOOMED).all()
        assert not self.cache.deletion.waiting  # so few go at once
        self.turn()

    @rule(client=CLIENTS)
    def is_heard_of(self, client: int) -> None:
        self.cache.pins.heard(self.now, client)

    @invariant()
    def pins_are_what_they_should(self) -> None:
        """Every pin that the cache did not end holds its page in memory, found or deleted."""
        self.forget_lost()
        table, settings = self.cache.table, self.cache.settings
        for client, mine in self.pinned.items():
            assert len(mine) <= settings.max_pins_per_client
            for name, row in mine.items():
                assert table.pins[row] > 0
                assert table.key[row].tobytes() == name
                assert not READ_L2[table.state[row]] or MOVING[table.state[row]]
                assert client in self.cache.pins.rows[row].keys
        for tier in (0, 1):
            room = self.cache.shelves.pools[tier].limit * settings.pin_percent // 100
            assert self.cache.pins.held[tier] <= room
        assert self.cache.pins.count == sum(map(len, self.pinned.values()))

    def forget_lost(self) -> None:
        """Take out of the model what the cache says it ended: counted, and never more than that."""
        there = self.cache.pins.rows
        ended = 0
        for client, mine in self.pinned.items():
            for name, row in list(mine.items()):
                if row not in there or there[row].keys.get(client) != name:
                    del mine[name]
                    ended += 1
        model, told = self.__dict__["_model"], _ended(self.cache)
        assert ended <= told - model.ended, "a pin went and nobody was told"
        model.ended = told

    def client_took_its_pins_along(self, client: int) -> None:
        """Call when a client is gone."""
        self.pinned.pop(client, None)
        assert client not in {
            owner for held in self.cache.pins.rows.values() for owner in held.keys
        }

    def keep_or_delete(self, rng: random.Random) -> None:
        """One of these at random, for long runs."""
        client, chain, count = rng.randint(1, 3), rng.randint(0, 5), rng.randint(1, 10)
        action = rng.random()
        if action < 0.5:
            self.pin(client, chain, count)
        elif action < 0.7:
            self.unpin(client, chain, count)
        elif action < 0.85:
            self.delete(chain, count, rng.choice([0, 3]))
        else:
            self.is_heard_of(client)
        self.pins_are_what_they_should()


@dataclass
class _Model:
    """What is pinned, by which cache, and how many pins that has ended so far."""

    of: Any = None
    pinned: dict[int, dict[bytes, int]] = field(default_factory=dict)
    ended: int = 0


def _ended(cache: Any) -> int:
    ended: int = cache.counters.lost_pins + cache.counters.expired_pins
    return ended
