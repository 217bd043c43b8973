"""How much of L1 goes down ahead of need: the control law.

Let s = slots of L1 in use, less what is on its way down already, and room = pages that the write
queue takes now.

    falling     From `high` on the coldest go down until `low` is reached, but no more of them at a
                time than there is room for: the rest wait in L1, readable, until a write has ended.
                A drive that keeps up so gets everything, however large the tier and however small
                the queue.
    brim        What lies above it leaves at once: what finds no room is dropped, for the drive does
                not keep up (or the tier has become smaller) and puts and loads need slots. It lies
                half way between `high` and what puts may fill at most.

A tier with nothing below it drops when it is full, and needs no room.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_agent.cache.settings import CacheSettings

NEAR_BOUND = 0.9
"""Part of `write_queue_bytes` from which nothing more is queued."""


@dataclass(frozen=True, slots=True)
class L1Lines:
    """The lines of L1, in slots."""

    low: int
    high: int
    brim: int


def l1_lines(slots: int, has_l2: bool, settings: CacheSettings) -> L1Lines:
    """The lines of an L1 of so many slots."""
    if not has_l2:
        return L1Lines(slots, slots, slots)
    # A small tier keeps some slots free as well, so that a chain finds room at once.
    high = min(slots * settings.dram_high_percent // 100, slots - min(slots // 8, 32))
    low = min(slots * settings.dram_low_percent // 100, slots - min(slots // 4, 64))
    for_puts = slots - kept_for_loads(slots, settings)
    return L1Lines(low, high, max(high, (high + for_puts) // 2))


def kept_for_loads(slots: int, settings: CacheSettings) -> int:
    """Slots of an L1 of so many that puts may not take."""
    return slots * settings.dram_load_reserve_percent // 100


def queue_room(bound_bytes: int, queued_bytes: int, page_bytes: int) -> int:
    """Pages that may be queued for writing now. One larger than the bound goes alone."""
    room = max(0, int(bound_bytes * NEAR_BOUND) - queued_bytes) // page_bytes
    return room if queued_bytes else max(1, room)


def going_down(lines: L1Lines, staying: int, room: int, falling: bool) -> tuple[int, bool]:
    """How many of the coldest leave L1 now, and whether it is falling; `falling`: was it?"""
    falling = staying > lines.high or (falling and staying > lines.low)
    ahead = min(staying - lines.low, room) if falling else 0
    return max(ahead, staying - lines.brim, 0), falling
