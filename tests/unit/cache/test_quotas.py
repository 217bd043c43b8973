"""A tenant's pages take no more of a tier than its quota, by whatever way they enter it."""

import numpy as np
import pytest
from kvtier_agent.cache import quotas as quotas_module
from kvtier_agent.cache.admission import QUOTA, within_quota
from kvtier_agent.cache.cache import Cache
from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveKind, MoveStatus, Outcome
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.quotas import tenant_number
from kvtier_agent.cache.results import MISS, PutStatus
from kvtier_agent.cache.settings import (
    Behaviour,
    BehaviourError,
    Budgets,
    FrozenPrefix,
    TenantQuota,
)
from kvtier_agent.cache.snapshot import check_books

PAGE = 4096
GEOMETRY = Geometry.of_page_bytes(PAGE, 16)
NVME = GEOMETRY.nvme_slot_bytes
KEYS = np.random.default_rng(7).integers(0, 256, (2000, 16), dtype=np.uint8)
SEARCH, CHAT = tenant_number("search"), tenant_number("chat")


class World:
    """A cache whose moves end well, at once, but for those of a kind that is held back."""

    def __init__(self, l0=0, l1=40, l2=0, **quota):
        self.cache = Cache(
            PageTable(None, max_pages=4096), GEOMETRY, maximum_slots=(1 << 16, 1 << 16, 1 << 20)
        )
        self.now = 1.0
        self.hold = ()
        self.held = []
        self.sizes = (l0, l1, l2)
        self.allow(**quota)

    def allow(self, frozen=(), **quota):
        """What `search` may take."""
        l0, l1, l2 = self.sizes
        listed = (TenantQuota("search", **quota),) if quota else ()
        self.cache.reconfigure(
            self.now, Behaviour(cool_down_seconds=0, quotas=listed, frozen=frozen),
            Budgets(l0 * PAGE, l1 * PAGE, l2 * NVME), l2_slots=l2,
        )  # fmt: skip
        self.settle()

    def settle(self):
        while moves := self.cache.take_moves():
            for move in moves:
                if move.kind in self.hold:
                    self.held.append(move)
                else:
                    self.cache.move_done(self.now, move, Outcome.uniform(move, MoveStatus.OK))

    def put(self, keys, tenant=SEARCH, **options):
        status = self.cache.reserve(self.now, 1, keys, tenant=tenant, **options).status
        check_books(self.cache)
        offered = keys[status == PutStatus.OFFERED]
        self.cache.commit(self.now, 1, offered, np.zeros(len(offered), dtype=np.uint64))
        self.settle()
        check_books(self.cache)
        return status

    def load(self, keys):
        ticket = self.cache.load(self.now, 1, keys, self.now + 5)
        self.settle()
        self.cache.release(self.now, 1, ticket.lease)
        self.settle()
        return ticket

    def used(self, tier, tenant=SEARCH):
        return int(self.cache.shelves.quotas.use[tier][tenant])

    def tiers(self, keys):
        return self.cache.lookup(keys).tiers.tolist()


def in_turns(world, start, count, step=5, **options):
    for first in range(start, start + count, step):
        world.put(KEYS[first : first + step], **options)


def test_a_tenant_at_its_quota_replaces_its_own_coldest_pages():
    world = World(l1=40, dram_percent=50)
    world.put(KEYS[:10], tenant=CHAT)
    for first in range(100, 200, 5):
        world.put(KEYS[first : first + 5])
        assert world.used(1) <= 20
    assert world.tiers(KEYS[:10]) == [1] * 10  # nobody else's pages made room
    assert world.tiers(KEYS[195:200]) == [1] * 5
    assert world.tiers(KEYS[100:105]) == [MISS] * 5
    assert world.used(1, CHAT) == 10


def test_what_finds_no_room_in_a_quota_is_refused_as_such():
    world = World(l1=40, dram_percent=10)
    assert world.put(KEYS[:6]).tolist() == [PutStatus.OFFERED] * 4 + [PutStatus.REFUSED_QUOTA] * 2
    world.cache.load(world.now, 1, KEYS[:4], world.now + 5)  # leased: none of them can go
    assert world.put(KEYS[10:12]).tolist() == [PutStatus.REFUSED_QUOTA] * 2
    assert world.put(KEYS[20:30], tenant=CHAT).tolist() == [PutStatus.OFFERED] * 10
    assert world.cache.counters.refused_quota == 4
    (tenant,) = world.cache.snapshot(world.now).tenants
    assert (tenant.name, tenant.refused_pages) == ("search", 4)
    assert tenant.used_bytes == (0, 4 * PAGE, 0)
    assert tenant.quota_bytes == (None, 4 * PAGE, None)


def test_above_a_quota_of_hbm_pages_go_to_dram():
    world = World(l0=40, l1=100, hbm_percent=25)
    in_turns(world, 0, 60)
    assert world.used(0) <= 10
    assert world.used(1) >= 40
    in_turns(world, 100, 20, tenant=CHAT)
    assert world.tiers(KEYS[100:120]) == [0] * 20


def test_a_hit_is_not_promoted_beyond_the_quota():
    world = World(l0=40, l1=100, hbm_percent=25)
    in_turns(world, 0, 60)
    for first in range(0, 60, 4):
        world.load(KEYS[first : first + 4])
        assert world.used(0) <= 10
    check_books(world.cache)


def test_nvme_holds_no_more_than_the_quota_and_the_newest():
    world = World(l1=20, l2=400, nvme_percent=10)
    in_turns(world, 0, 300)
    assert world.used(2) <= 40
    tiers = np.array(world.tiers(KEYS[:300]))
    assert (tiers[:200] == MISS).all()
    assert (tiers[260:] != MISS).sum() > 20
    assert world.cache.counters.quota_evicted > 0
    in_turns(world, 1000, 300, tenant=CHAT)
    assert world.used(2, CHAT) > 200


def test_pages_on_their_way_down_from_hbm_stay_within_the_quota_of_dram():
    world = World(l0=20, l1=100, dram_percent=10)
    in_turns(world, 0, 100)
    assert world.used(1) <= 10
    assert world.used(0) <= 20
    check_books(world.cache)


def test_a_load_from_nvme_stays_within_the_quota_of_dram():
    world = World(l1=40, l2=400, dram_percent=25)
    in_turns(world, 0, 100)
    below = [i for i, tier in enumerate(world.tiers(KEYS[:100])) if tier == 2][:20]
    ticket = world.load(KEYS[below])
    assert 0 < (ticket.tier != MISS).sum() <= 10
    assert world.used(1) <= 10
    check_books(world.cache)


def test_a_quota_that_becomes_smaller_is_kept_at_once_and_one_that_goes_is_forgotten():
    world = World(l1=40, dram_percent=90)
    in_turns(world, 0, 30)
    world.put(KEYS[500:505], tenant=CHAT)
    assert world.used(1) == 30
    world.allow(dram_percent=25)
    assert world.used(1) <= 10
    assert world.tiers(KEYS[25:30]) == [1] * 5  # the coldest went
    world.allow()
    in_turns(world, 100, 30)
    assert world.used(1) > 25
    assert world.cache.snapshot(world.now).tenants == ()


def test_a_tenant_that_goes_on_reading_gives_up_what_a_smaller_quota_takes():
    world = World(l1=40, dram_percent=90)
    world.put(KEYS[:28])
    ticket = world.cache.load(world.now, 1, KEYS[:28], world.now + 60)
    assert (ticket.tier != MISS).all()
    world.allow(dram_percent=10)
    assert world.used(1) == 28  # leased
    world.cache.release(world.now, 1, ticket.lease)
    world.settle()
    assert world.used(1) <= 4
    for _ in range(3):
        world.load(KEYS[:28])
    assert world.used(1) <= 4
    check_books(world.cache)


def test_pages_whose_write_failed_leave_all_the_same():
    world = World(l1=40, l2=100, dram_percent=75)
    in_turns(world, 0, 30)
    world.hold = (MoveKind.WRITE,)
    world.allow(dram_percent=25)
    assert sum(len(move) for move in world.held) > 0
    world.cache.tick(world.now)
    while world.held:
        move = world.held.pop()
        world.cache.move_done(world.now, move, Outcome.uniform(move, MoveStatus.NO_SPACE))
        world.settle()
    assert world.used(1) <= 10
    check_books(world.cache)


def test_copies_in_nvme_of_pages_that_are_read_count_and_go():
    world = World(l1=40, l2=400, nvme_percent=10)
    in_turns(world, 0, 60)
    below = [i for i, tier in enumerate(world.tiers(KEYS[:60])) if tier == 2][:20]
    world.load(KEYS[below])
    here = [i for i in below if world.tiers(KEYS[i : i + 1]) == [1]]
    assert len(here) >= 10  # in DRAM, each with its copy below
    evicted = world.cache.counters.quota_evicted
    world.allow(nvme_percent=1)
    assert world.used(2) <= 4
    assert world.tiers(KEYS[here]) == [1] * len(here)  # a copy less is no page less
    assert world.cache.counters.quota_evicted - evicted <= 60 - len(here)
    assert world.cache.counters.l2_copies_dropped > 0
    in_turns(world, 100, 60)
    world.load(KEYS[100:140])
    assert world.used(2) <= 4
    check_books(world.cache)


def test_pages_that_came_before_the_quota_count_too():
    world = World(l1=40)
    in_turns(world, 0, 30)
    world.allow(dram_percent=50)
    assert world.used(1) <= 20
    assert world.tiers(KEYS[25:30]) == [1] * 5


def test_frozen_pages_have_a_budget_of_their_own():
    world = World(l0=20, l1=40)
    world.allow(frozen=(FrozenPrefix("system", 8 * PAGE),), hbm_percent=20, dram_percent=100)
    status = world.put(KEYS[:8], frozen="system")
    assert status.tolist() == [PutStatus.OFFERED] * 8
    assert world.tiers(KEYS[:8]) == [0] * 8
    assert world.used(0) == 8  # counted, and not refused
    in_turns(world, 100, 20)
    assert world.tiers(KEYS[:8]) == [0] * 8
    assert not set(world.tiers(KEYS[100:120])) & {0}


def test_a_write_that_fails_gives_the_quota_back():
    world = World(l1=20, l2=100, nvme_percent=50)
    world.hold = (MoveKind.WRITE,)
    in_turns(world, 0, 30)
    assert world.held
    assert world.used(2) == sum(len(move) for move in world.held)
    for move in world.held:
        world.cache.move_done(world.now, move, Outcome.uniform(move, MoveStatus.NO_SPACE))
        check_books(world.cache)
    assert world.used(2) == 0


def test_two_tenants_of_one_number_share_the_narrower_quota(monkeypatch):
    monkeypatch.setattr(quotas_module, "tenant_number", lambda name: 7)
    world = World(l1=40)
    world.cache.reconfigure(
        world.now,
        Behaviour(
            quotas=(TenantQuota("a", dram_percent=50), TenantQuota("b", dram_percent=25)),
        ),
        Budgets(0, 40 * PAGE),
    )
    in_turns(world, 0, 40, tenant=7)
    assert world.used(1, 7) <= 10
    assert [tenant.name for tenant in world.cache.snapshot(world.now).tenants] == ["a"]


def test_the_number_of_a_tenant_is_the_same_everywhere():
    assert tenant_number("") == 0
    assert tenant_number("search") == tenant_number("search") != tenant_number("chat")
    numbers = {tenant_number(f"team-{i}") for i in range(1000)}
    assert min(numbers) > 0
    assert max(numbers) < 1 << 16
    assert len(numbers) > 980


def test_places_beyond_a_quota():
    tier = np.array([0, 0, 0, 1, 0, 254], dtype=np.uint8)
    lower = np.array([True, True, False, True, True, True])
    exempt = np.zeros(6, dtype=bool)
    assert within_quota(tier.copy(), lower, exempt, (1, 2)).tolist() == [
        0, 1, QUOTA, 1, QUOTA, 254,
    ]  # fmt: skip
    exempt[:] = True
    assert within_quota(tier.copy(), lower, exempt, (0, 0)).tolist() == tier.tolist()


@pytest.mark.parametrize("wrong", [{"hbm_percent": 101}, {"nvme_percent": -1}])
def test_a_share_that_cannot_be_says_what_to_write(wrong):
    with pytest.raises(BehaviourError, match="write a value from 0 to 100"):
        TenantQuota("search", **wrong)


def test_copies_that_were_found_in_nvme_can_be_given_up_for_the_quota():
    world = World(l1=40, l2=80, nvme_percent=50)
    in_turns(world, 0, 30)
    nothing = np.zeros((30, 16), dtype=np.uint8)
    slots = np.arange(30, dtype=np.uint32)
    taken = world.cache.adopt(KEYS[:30], nothing, slots, np.zeros(30, dtype=np.uint64), slots)
    assert taken.all()
    assert world.used(2) == 30
    world.allow(nvme_percent=25)
    assert world.used(2) <= 20
    victims = world.cache.shelves.quotas.victims(SEARCH, 1, 40)
    assert len(victims) == len(set(victims.tolist())) == 30
