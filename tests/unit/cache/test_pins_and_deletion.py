"""Pins keep pages in memory, within bounds and a client's life; deleted pages are found no more."""

import numpy as np
import pytest
from kvtier_agent.cache import deletion
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import Flag, State
from kvtier_agent.cache.results import MISS, DeleteStatus, PinStatus, PutStatus
from kvtier_agent.cache.settings import Behaviour, BehaviourError, Budgets, CacheSettings
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
KEYS = np.random.default_rng(6).integers(0, 256, (600, 16), dtype=np.uint8)
NVME = GEOMETRY.nvme_slot_bytes
ENGINE, OTHER = 1, 2


class World:
    """A cache whose moves end well, at once, but for those of a kind that is held back."""

    def __init__(self, l0=0, l1=40, l2=0, **settings):
        self.cache = Cache(
            PageTable(None, max_pages=4096), GEOMETRY, settings=CacheSettings(**settings),
            maximum_slots=(1 << 16, 1 << 16, 1 << 20),
        )  # fmt: skip
        self.now = 1.0
        self.held = []
        self.hold = ()
        self.configure(l0, l1, l2)

    def configure(self, l0, l1, l2=0):
        self.cache.reconfigure(
            self.now, Behaviour(cool_down_seconds=0), Budgets(l0 * PAGE, l1 * PAGE, l2 * NVME),
            l2_slots=l2,
        )  # fmt: skip
        self.settle()

    def settle(self, status=MoveStatus.OK):
        tickets = []
        while moves := self.cache.take_moves():
            for move in moves:
                if move.kind in self.hold:
                    self.held.append(move)
                else:
                    tickets += self.cache.move_done(
                        self.now, move, Outcome.uniform(move, MoveStatus.OK)
                    )
        return tickets

    def finish(self, status):
        held, self.held, self.hold = self.held, [], ()
        for move in held:
            self.cache.move_done(self.now, move, Outcome.uniform(move, status))
        self.settle()

    def put(self, keys, client=ENGINE):
        status = self.cache.reserve(self.now, client, keys).status
        offered = keys[status == PutStatus.OFFERED]
        self.cache.commit(self.now, client, offered, np.zeros(len(offered), dtype=np.uint64))
        self.settle()
        check_books(self.cache)
        return status

    def pin(self, keys, client=ENGINE):
        status = self.cache.pin(self.now, client, keys).status.tolist()
        check_books(self.cache)
        return status

    def tiers(self, keys):
        return self.cache.lookup(keys).tiers.tolist()

    def fill(self, count=300):
        """Very many other pages, a few at a time."""
        for start in range(200, 200 + count, 5):
            self.put(KEYS[start : start + 5])


def test_a_pinned_page_is_neither_evicted_nor_demoted():
    world = World(l1=40, l2=400)
    world.put(KEYS[:8])
    assert world.pin(KEYS[:4]) == [PinStatus.PINNED] * 4
    world.fill()
    assert world.tiers(KEYS[:4]) == [1] * 4
    assert 1 not in world.tiers(KEYS[4:8])


def test_pressure_in_hbm_leaves_pinned_pages_there():
    world = World(l0=20, l1=40)
    world.put(KEYS[:5])
    assert world.tiers(KEYS[:5]) == [0] * 5
    world.pin(KEYS[:5])
    world.fill(60)
    assert world.tiers(KEYS[:5]) == [0] * 5


def test_after_the_last_unpin_a_page_is_as_any_other():
    world = World(l1=40)
    world.put(KEYS[:2])
    world.pin(KEYS[:2])
    world.pin(KEYS[:2], client=OTHER)
    assert world.cache.unpin(world.now, ENGINE, KEYS[:2]) == 2
    assert world.cache.unpin(world.now, ENGINE, KEYS[:2]) == 0
    world.fill()
    assert world.tiers(KEYS[:2]) == [1] * 2
    assert world.cache.unpin(world.now, OTHER, KEYS[:1]) == 1
    world.fill()
    assert world.tiers(KEYS[:2]) == [MISS, 1]


def test_a_page_on_nvme_comes_up_for_its_pin():
    world = World(l1=40, l2=400)
    world.put(KEYS[:4])
    world.fill()
    assert world.tiers(KEYS[:4]) == [2] * 4
    result = world.cache.pin(world.now, ENGINE, KEYS[:4])
    assert result.status.tolist() == [PinStatus.PINNED] * 4
    assert result.tier.tolist() == [2] * 4
    world.settle()
    assert world.tiers(KEYS[:4]) == [1] * 4
    world.fill()
    assert world.tiers(KEYS[:4]) == [1] * 4
    check_books(world.cache)


@pytest.mark.parametrize(
    ("status", "left"), [(MoveStatus.CANCELLED, 2), (MoveStatus.IO_ERROR, MISS)]
)
def test_a_page_that_cannot_be_read_up_is_not_pinned(status, left):
    world = World(l1=40, l2=400)
    world.put(KEYS[:3])
    world.fill()
    world.hold = (MoveKind.READ,)
    assert world.pin(KEYS[:3]) == [PinStatus.PINNED] * 3
    world.settle()
    world.finish(status)
    assert world.tiers(KEYS[:3]) == [left] * 3
    assert world.cache.pins.count == 0
    assert world.cache.counters.lost_pins == 3
    check_books(world.cache)


def test_what_is_not_there_or_not_yet_written_cannot_be_pinned():
    world = World()
    world.cache.reserve(world.now, ENGINE, KEYS[:1])
    assert world.pin(KEYS[:2]) == [PinStatus.ABSENT] * 2
    assert world.cache.pins.next_due() is None


def test_all_pins_together_have_a_share_of_each_tier():
    world = World(l0=0, l1=40, pin_percent=25)
    world.put(KEYS[:12])
    assert world.pin(KEYS[:12]) == [PinStatus.PINNED] * 10 + [PinStatus.REFUSED_SPACE] * 2
    # Of a page that is pinned already another pin costs nothing.
    assert world.pin(KEYS[9:11], client=OTHER) == [PinStatus.PINNED, PinStatus.REFUSED_SPACE]
    assert world.cache.counters.refused_pins == 3
    assert world.cache.snapshot(world.now).tiers[1].kept_pages == 10


def test_one_client_has_so_many_pins():
    world = World(max_pins_per_client=2)
    world.put(KEYS[:4])
    assert world.pin(KEYS[[0, 0, 1, 2]]) == [
        *(PinStatus.PINNED, PinStatus.PINNED, PinStatus.PINNED), PinStatus.REFUSED_LIMIT,
    ]  # fmt: skip
    assert world.pin(KEYS[:3]) == [PinStatus.PINNED, PinStatus.PINNED, PinStatus.REFUSED_LIMIT]
    assert world.pin(KEYS[2:4], client=OTHER) == [PinStatus.PINNED] * 2


def test_the_end_of_a_client_ends_its_pins():
    world = World()
    world.put(KEYS[:4])
    world.pin(KEYS[:4])
    world.cache.client_gone(world.now, ENGINE)
    assert world.cache.pins.count == 0
    assert not (world.cache.table.pins[: world.cache.table.capacity] > 0).any()
    check_books(world.cache)


def test_silence_ends_pins_and_a_sign_of_life_keeps_them():
    world = World(pin_seconds=10)
    world.put(KEYS[:4])
    world.pin(KEYS[:2])
    world.pin(KEYS[2:4], client=OTHER)
    assert world.cache.next_due() == 11
    world.now = 9
    world.cache.pins.heard(world.now, OTHER)
    world.cache.pins.heard(world.now, 77)  # one without pins
    world.now = 11
    world.cache.tick(world.now)
    assert world.cache.counters.expired_pins == 2
    assert world.cache.unpin(world.now, ENGINE, KEYS[:2]) == 0
    assert world.cache.next_due() == 19
    assert world.cache.unpin(world.now, OTHER, KEYS[2:4]) == 2
    assert world.cache.next_due() is None


def test_who_waits_for_a_load_is_not_silent():
    world = World(l1=10, l2=200, pin_seconds=10.0)
    world.put(KEYS[:4])
    assert world.pin(KEYS[:1]) == [PinStatus.PINNED]
    for start in range(100, 160, 4):
        world.put(KEYS[start : start + 4])
    below = [i for i in range(100, 160) if world.tiers(KEYS[i : i + 1]) == [2]][:2]
    world.hold = (MoveKind.READ,)
    ticket = world.cache.load(world.now, ENGINE, KEYS[below], world.now + 30)
    assert not ticket.done
    world.settle()
    for _ in range(25):
        world.now += 1.0
        assert world.cache.tick(world.now) == []
        assert world.cache.pins.count == 1
    world.finish(MoveStatus.OK)
    world.cache.release(world.now, ENGINE, ticket.lease)
    world.now += 11.0
    world.cache.tick(world.now)
    assert world.cache.pins.count == 0
    check_books(world.cache)


def test_a_tier_that_shrinks_costs_the_pins_made_last():
    world = World(l1=40)
    world.put(KEYS[:10])
    world.pin(KEYS[:10])
    world.configure(0, 16)
    assert world.cache.counters.lost_pins == 6
    assert world.pin(KEYS[:4]) == [PinStatus.PINNED] * 4
    assert world.cache.counters.pinned == 10
    world.fill()
    assert world.tiers(KEYS[:4]) == [1] * 4
    world.configure(0, 0)
    assert world.cache.pins.count == 0
    assert world.tiers(KEYS[:4]) == [MISS] * 4
    check_books(world.cache)


def test_when_everything_is_dropped_pins_are_no_exception():
    world = World()
    world.put(KEYS[:4])
    world.pin(KEYS[:4])
    assert world.cache.drop_all(world.now) == 4
    check_books(world.cache)


def test_a_deleted_page_is_found_no_more_and_its_room_is_free():
    world = World(l1=40, l2=400)
    world.put(KEYS[:6])
    before = world.cache.shelves.pools[1].used
    status = world.cache.delete(world.now, KEYS[[0, 1, 1, 500]])
    assert status.tolist() == [DeleteStatus.DELETED] * 3 + [DeleteStatus.ABSENT]
    assert world.tiers(KEYS[:3]) == [MISS, MISS, 1]
    assert world.cache.shelves.pools[1].used == before - 2
    assert world.cache.counters.deleted_pages == 2
    assert (world.put(KEYS[:2]) == PutStatus.OFFERED).all()


def test_bytes_of_a_deleted_page_stay_for_whoever_holds_it():
    world = World()
    world.put(KEYS[:3])
    table = world.cache.table
    rows = table.lookup(KEYS[:3])
    lease = world.cache.load(world.now, OTHER, KEYS[:1], world.now + 5).lease
    world.pin(KEYS[1:2])
    status = world.cache.delete(world.now, KEYS[:3])
    assert status.tolist() == [DeleteStatus.MARKED] * 2 + [DeleteStatus.DELETED]
    assert table.has(rows[:2], Flag.DOOMED).all()
    assert world.cache.snapshot(world.now).marked_pages == 2
    used = world.cache.shelves.pools[1].used
    assert world.cache.release(world.now, OTHER, lease)
    assert world.cache.unpin(world.now, ENGINE, KEYS[1:2]) == 1
    assert world.cache.shelves.pools[1].used == used - 2
    assert world.cache.snapshot(world.now).marked_pages == 0
    check_books(world.cache)


def test_a_page_that_was_put_anew_is_another_page():
    world = World()
    world.put(KEYS[:1])
    world.pin(KEYS[:1])
    world.cache.delete(world.now, KEYS[:1])
    world.put(KEYS[:1], client=OTHER)
    assert world.cache.shelves.pools[1].used == 2
    assert world.pin(KEYS[:1]) == [PinStatus.PINNED]  # of the new one; the old one goes
    assert world.cache.shelves.pools[1].used == 1
    assert world.cache.unpin(world.now, ENGINE, KEYS[:1]) == 1
    check_books(world.cache)


def test_a_page_being_written_is_not_there_to_be_deleted():
    world = World()
    world.cache.reserve(world.now, ENGINE, KEYS[:1])
    assert world.cache.delete(world.now, KEYS[:1]).tolist() == [DeleteStatus.ABSENT]
    world.cache.commit(world.now, ENGINE, KEYS[:1], np.zeros(1, dtype=np.uint64))
    assert world.tiers(KEYS[:1]) == [1]


@pytest.mark.parametrize("kind", [MoveKind.WRITE, MoveKind.DEMOTE, MoveKind.PROMOTE])
def test_a_page_that_is_moving_goes_when_it_has_arrived(kind):
    world = World(l0=20, l1=40, l2=400)
    world.hold = (kind,)
    world.fill()
    if kind is MoveKind.PROMOTE:
        hit = next(key for key in KEYS if world.tiers(key[None]) == [1])[None]
        world.cache.release(
            world.now, ENGINE, world.cache.load(world.now, ENGINE, hit, world.now + 5).lease
        )
        world.settle()
    state = world.cache.table.state
    rows = np.concatenate([move.rows for move in world.held])
    assert world.held
    keys = np.concatenate([move.keys for move in world.held])
    moving = np.isin(state[rows], (State.DOWN12, State.DOWN01, State.UP10))
    assert moving.all()
    assert (world.cache.delete(world.now, keys) == DeleteStatus.MARKED).all()
    world.finish(MoveStatus.OK)
    assert world.tiers(keys) == [MISS] * len(keys)
    assert world.cache.snapshot(world.now).marked_pages == 0
    check_books(world.cache)


def test_very_many_pages_are_collected_in_batches(monkeypatch):
    monkeypatch.setattr(deletion.Deletion.collect, "__defaults__", (7,))
    world = World(l1=100)
    world.put(KEYS[:60])
    assert (world.cache.delete(world.now, KEYS[:50]) == DeleteStatus.DELETED).all()
    assert world.tiers(KEYS[:60]) == [MISS] * 50 + [1] * 10
    assert world.cache.deletion.waiting == 43
    assert world.cache.next_due() == world.now  # the clock goes on with it, nobody has to ask
    check_books(world.cache)
    turns = 0
    while world.cache.next_due() is not None:
        world.cache.tick(world.now)
        turns += 1
    assert turns == 7
    assert world.cache.shelves.pools[1].used == world.cache.table.pages == 10
    check_books(world.cache)


def test_pages_dropped_while_they_wait_for_collection_are_not_collected_twice(monkeypatch):
    monkeypatch.setattr(deletion.Deletion.collect, "__defaults__", (5,))
    world = World(l1=100)
    world.put(KEYS[:30])
    world.cache.delete(world.now, KEYS[:30])
    world.cache.drop_all(world.now)
    world.put(KEYS[100:120])  # in the same rows
    for _ in range(10):
        world.cache.tick(world.now)
    assert world.tiers(KEYS[100:120]) == [1] * 20
    assert world.cache.deletion.waiting == 0
    check_books(world.cache)


@pytest.mark.parametrize(
    "wrong", [{"pin_seconds": 0}, {"pin_percent": 91}, {"max_pins_per_client": -1}]
)
def test_settings_out_of_bounds_say_what_to_write(wrong):
    with pytest.raises(BehaviourError, match="write a value from"):
        CacheSettings(**wrong)
