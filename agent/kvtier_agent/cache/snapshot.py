"""The cache in plain numbers, and the books checked against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtier_agent.cache.record import MOVING, NO_SLOT, TIER_OF_STATE, Flag, State
from kvtier_agent.cache.results import CacheSnapshot, TierSnapshot

if TYPE_CHECKING:
    from kvtier_agent.cache.cache import Cache

NAMES = ("hbm", "dram", "nvme")


def take_snapshot(cache: Cache, now: float) -> CacheSnapshot:
    """Costs one pass over the records in use."""
    table, shelves, slot = cache.table, cache.shelves, cache.geometry.slot_bytes
    state = table.state[: table.capacity]
    tier_of = TIER_OF_STATE[state]
    pinned = table.pins[: table.capacity] > 0
    moving = MOVING[state]
    lines, traffic = cache.traffic.lines, cache.traffic
    water = (
        (lines.high, lines.low),
        (traffic.lines1.high, traffic.lines1.low),
        (shelves.pools[2].limit, shelves.pools[2].limit),
    )
    tiers = []
    for number, name in enumerate(NAMES):
        here = tier_of == number
        pool = shelves.pools[number]
        size = cache.geometry.nvme_slot_bytes if number == 2 else slot
        tiers.append(
            TierSnapshot(
                name=name,
                capacity_bytes=pool.limit * size,
                used_bytes=pool.used * size,
                pages=int(here.sum()),
                pinned_pages=int((here & pinned).sum()),
                moving_pages=int((here & moving).sum()),
                high_water_bytes=water[number][0] * size,
                low_water_bytes=water[number][1] * size,
                kept_pages=cache.pins.held[number] if number < 2 else 0,
            )
        )
    geometry = cache.geometry
    return CacheSnapshot(
        now=now,
        tiers=tuple(tiers),
        frozen=shelves.frozen.snapshot(slot),
        counters=cache.counters.as_dict(),
        pressure=cache.level.value,
        admitting=cache.behaviour.admitting,
        page_table_bytes=table.used_bytes,
        pages=table.pages,
        leases=len(cache.book.leases),
        reservations=cache.book.reservations,
        clients=len(cache.book.clients()),
        pinned_pages=int(pinned.sum()),
        pending_tickets=sum(1 for lease in cache.book.leases.values() if lease.waiting),
        write_queue_bytes=traffic.write_queue_bytes,
        suspected_segments=len(shelves.pool2.suspects),
        dead_bytes=shelves.pool2.dead * cache.geometry.nvme_slot_bytes,
        tenants=shelves.quotas.snapshot((slot, slot, cache.geometry.nvme_slot_bytes)),
        client_pins=cache.pins.count,
        marked_pages=int(((table.flags[: table.capacity] & Flag.DOOMED) != 0)[state != 0].sum()),
        geometry={
            "page_bytes": geometry.page_bytes,
            "slot_bytes": geometry.slot_bytes,
            "page_tokens": geometry.page_tokens,
        }
        if cache.shaped
        else {},
    )


def check_books(cache: Cache) -> None:
    """Assert that records, slots, pins and budgets tell one story. For tests and `inspect`."""
    table, shelves = cache.table, cache.shelves
    rows = table.live_rows()
    assert len(rows) == table.pages
    for tier in (0, 1, 2):
        slots = shelves.slots[tier][rows]
        owned = slots[slots != NO_SLOT]
        assert len(np.unique(owned)) == len(owned), f"a slot of tier {tier} has two owners"
        extra = cache.traffic.reclaim.at_stake if tier == 2 else 0
        assert shelves.pools[tier].used == len(owned) + extra, f"a slot of tier {tier} leaked"
    pool = shelves.pool2
    mine = rows[table.l2_slot[rows] != NO_SLOT]
    for segment in np.unique(table.l2_slot[mine] // pool.per_segment).tolist():
        there = mine[table.l2_slot[mine] // pool.per_segment == segment]
        in_order = there[np.argsort(table.l2_slot[there])]
        assert (pool.rows(segment) == in_order).all(), "a segment does not know its pages"
    spare = pool.limit - pool.leaving - pool.used - pool.dead
    assert pool.excess or pool.available >= spare, "slots of L2 leaked"
    for tier in (0, 1, 2):
        owners = table.tenant[rows[shelves.slots[tier][rows] != NO_SLOT]]
        used = np.bincount(owners[owners != 0], minlength=len(shelves.quotas.use[tier]))
        assert (used == shelves.quotas.use[tier]).all(), "a tenant's use of a tier is miscounted"
    state = table.state[rows]
    l0, l1, l2 = (shelves.slots[tier][rows] != NO_SLOT for tier in (0, 1, 2))
    copy = (table.tiers[rows] & 4) != 0
    assert (l0 == np.isin(state, (State.IN0, State.DOWN01, State.UP10)) | ((state == 1) & l0)).all()
    assert (
        l1 | ~np.isin(state, (State.IN1, State.DOWN01, State.UP10, State.DOWN12, State.UP21))
    ).all()
    lost = (state == State.IN2) & table.has(rows, Flag.DOOMED)
    expected = np.isin(state, (State.IN2, State.DOWN12, State.UP21)) | copy
    assert (lost | (l2 == expected)).all()
    held: dict[int, int] = {}
    for lease in cache.book.leases.values():
        for row in lease.rows[lease.held[: len(lease.rows)]].tolist():
            held[row] = held.get(row, 0) + 1
    for row, kept in cache.pins.rows.items():
        held[row] = held.get(row, 0) + len(kept.keys)
    pinned = rows[table.pins[rows] > 0]
    assert {int(r): int(table.pins[r]) for r in pinned} == held, "pins and leases differ"
    flagged = rows[table.has(rows, Flag.PINNED)].tolist()
    assert set(flagged) == set(cache.pins.rows), "a pin is not in its record"
    assert sum(cache.pins.held) == len(flagged)
    assert cache.pins.count == sum(len(kept.keys) for kept in cache.pins.rows.values())
    writing = rows[state == State.WRITING]
    promised = {row for mine in cache.book.reserved.values() for row in mine}
    assert set(writing.tolist()) == promised, "a reservation leaked"
    assert len(promised) == cache.book.reservations
    indexed = rows[~table.has(rows, Flag.DOOMED)]
    assert (table.find(table.key[indexed]) == indexed).all(), "the index lost a page"
    assert (table.seq[rows] % 2 == 0).all()
