"""Which pages of an earlier process are taken over: pure, over the records it left.

Only what lay in L1 whole and readable counts (IN1, UP10, DOWN12): the earlier process may have
ended at any moment, in the middle of any change, and none of its promises hold any more. Pins,
leases, reservations, client numbers, copies in L2 and the index are not looked at.

A record is dropped, never mended, when

    hbm           the page lay only in HBM, whose contents went with the process
    unfinished    it was being written or just leaving (its slot was given back), or the record
                  was being changed (`seq` odd)
    doomed        it was to go when its last reader had left
    inconsistent  state, flags, size, key, tiers or slot cannot be, or the seal is not the record's
    conflict      another record has the same slot or the same key: neither is believed
    room          the new table has room for fewer pages; the least recently used go

What lay only in L2, or was on its way up from there, is for the recovery of L2 to find. Whether the
bytes are those of the page is another question: every reader checks, and a scrub does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.record import NO_SLOT, READ_L0, READ_L1, READ_L2, Flag, State, seals
from kvtier_agent.cache.words import take_records

HAS_L1 = np.uint8(1 << 1)
MOST_REASON = 200
"""Characters of a reason that are written into the table."""
BEYOND = np.uint8(15)
"""The last state that the masks know; there is none from there on."""
ALL_FLAGS = np.uint8(sum(Flag))

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Survivors:
    """`source`: records, of which these survive: `order`, least recently used first. `dropped`:
    pages by reason, those above that there were."""

    source: NDArray[Any]
    order: NDArray[np.intp]
    dropped: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.order)

    def records(self, first: int = 0, count: int | None = None) -> NDArray[Any]:
        """Copies of `count` of them, all by default, from the `first` on."""
        last = len(self.order) if count is None else first + count
        return take_records(self.source, self.order[first:last])

    def slots(self) -> NDArray[np.uint32]:
        """Where in L1 they lie."""
        found: NDArray[np.uint32] = self.source["l1_slot"][self.order]
        return found


def may_be_in_l1(records: NDArray[Any]) -> Mask:
    """Which records say anything about L1: not what is free, nor what is in L2 alone, which mostly
    is nearly all of a table."""
    state = records["state"]
    in_l2 = (state == int(State.IN2)) & (records["l1_slot"] == NO_SLOT)
    says: Mask = (state != int(State.FREE)) & ~in_l2
    return says


@dataclass(frozen=True, slots=True)
class Restart:
    """What a process found of the one before. `cold`: why nothing was taken over though something
    was there; empty otherwise."""

    taken_over: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    cold: str = ""

    @property
    def dropped_pages(self) -> int:
        return sum(self.dropped.values())

    @property
    def damaged(self) -> bool:
        """Were there records that a process which was killed would not have left?"""
        return bool(self.dropped.get("inconsistent") or self.dropped.get("conflict"))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: `taken_over`, `dropped` (by reason), `cold`."""
        return {
            "taken_over": self.taken_over,
            "dropped": dict(self.dropped),
            "cold": self.cold[:MOST_REASON],
        }

    def say(self) -> str:
        """For people; empty when there was nothing to take over."""
        if self.cold:
            return f"the dram tier started cold: {self.cold}"
        if not self.taken_over and not self.dropped_pages:
            return ""
        why = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return f"{self.taken_over} pages of the dram tier were taken over, " + (
            f"{self.dropped_pages} dropped ({why})" if why else "none dropped"
        )


def choose(records: NDArray[Any], *, page_bytes: int, slots: int, room: int) -> Survivors:
    """What is kept of `records` (of dtype RECORD; others than `may_be_in_l1` do no harm).

    `page_bytes`: what every page has. `slots`: that the arena file has. `room`: most pages kept.
    """
    state = np.minimum(records["state"], BEYOND)
    live = state != State.FREE
    known = state <= max(State)
    readable = READ_L1[state]
    elsewhere = READ_L2[state]
    doomed = readable & ((records["flags"] & np.uint8(Flag.DOOMED)) != 0)
    shared = _slot_shared(records, live) | _key_shared(records, readable & ~doomed)
    reasons = {
        "hbm": READ_L0[state],
        "unfinished": live
        & (
            (records["seq"] % 2 != 0)
            | (state == State.WRITING)
            | (readable & (records["l1_slot"] == NO_SLOT))
        ),
        "doomed": doomed,
        "inconsistent": (live & ~known) | (readable & ~_possible(records, page_bytes, slots)),
        "conflict": readable & shared,
    }
    dropped: dict[str, int] = {}
    settled = ~live | elsewhere
    for reason, which in reasons.items():
        new = which & ~settled
        settled |= which
        if new.any():
            dropped[reason] = int(new.sum())
    rows = np.flatnonzero(readable & ~settled)
    rows = rows[np.argsort(records["touch"][rows], kind="stable")]
    if len(rows) > room:
        dropped["room"] = len(rows) - room
        rows = rows[len(rows) - room :]
    return Survivors(records, rows, dropped)


def _possible(records: NDArray[Any], page_bytes: int, slots: int) -> Mask:
    """Could this be a page in L1? Partial pages never are."""
    flags = records["flags"]
    possible: Mask = (
        (records["l1_slot"] < slots)
        & (records["size"] == page_bytes)
        & (records["key"] != 0).any(axis=1)
        & ((records["tiers"] & HAS_L1) != 0)
        & ((flags & ~ALL_FLAGS) == 0)
        & ((flags & np.uint8(Flag.PARTIAL)) == 0)
        & (records["seal"] == seals(records))
    )
    return possible


def _slot_shared(records: NDArray[Any], live: Mask) -> Mask:
    """Is the record's slot of L1 that of another live one, whatever its state?"""
    slot = records["l1_slot"]
    rows = np.flatnonzero(live & (slot != NO_SLOT))
    shared = np.zeros(len(records), dtype=bool)
    shared[rows] = _repeated(slot[rows])
    return shared


def _key_shared(records: NDArray[Any], readable: Mask) -> Mask:
    rows = np.flatnonzero(readable)
    shared = np.zeros(len(records), dtype=bool)
    # Half a key tells nearly all apart; the few that are left are compared whole.
    rows = rows[_repeated(records["key"][rows, 0])]
    _, group = np.unique(records["key"][rows], axis=0, return_inverse=True)
    shared[rows] = _repeated(group.reshape(-1))
    return shared


def _repeated(values: NDArray[Any]) -> Mask:
    """Which values come more than once?"""
    ordered = np.sort(values)
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    out: Mask = np.isin(values, repeats) if repeats.size else np.zeros(len(values), dtype=bool)
    return out
