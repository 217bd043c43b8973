"""Tenants' shares of the tiers: who uses how much, and what a policy allows.

A tenant is a name that a client gives when it connects. Nobody vouches for it but the group of the
trust domain's socket, so this is accounting between those who trust each other; that tenants do not
share pages is the salt's doing (`identity`), which is in every key.

A record says whose page it is by 16 bits of a hash of the name (`tenant_number`): the same in every
process, so that a restart forgets nobody and no list of names has to be kept. Two tenants whose
names collide count as one. What a tenant uses is slots taken, reservations and copies on their way
included.

A quota is a part of a tier's slots. It is looked at before a page enters a tier, by whatever way:
a tenant at its quota makes room among its own pages, the coldest first, and what finds none is
refused (a put), dropped (on its way down) or stays where it is (on its way up). Pages that are
exempt as part of a frozen prefix have that prefix's budget instead: they count and are not refused.

Only tenants with a quota have an order of their own (`TouchLog`s as those of the tiers); for all
others nothing is done but counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.record import NO_SLOT, Flag, Rows, State
from kvtier_agent.cache.replacement import Stamps, TouchLog
from kvtier_agent.cache.results import TenantSnapshot
from kvtier_agent.cache.settings import TenantQuota
from kvtier_agent.cache.words import has_repeats

Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]

NUMBERS = 1 << 16
NOBODY = 0
UNBOUNDED = 1 << 62
ROOM_AHEAD = 16
"""One in so many slots of a quota is kept free ahead of need."""
HOMES = (State.IN0, State.IN1, State.IN2)
_L2_COPY = np.uint8(1 << 2)
"""In `tiers` of a page of L1: it has its copy in L2, whose slot counts too."""


def tenant_number(name: str) -> int:
    """1 to 65,535 for a name, 0 for none."""
    if not name:
        return NOBODY
    digest = blake2b(name.encode(), digest_size=4, person=b"kvtier-tenant").digest()
    return 1 + int.from_bytes(digest, "little") % (NUMBERS - 1)


@dataclass(slots=True)
class _Share:
    """One listed tenant: slots it may take of each tier, and its own order in each."""

    name: str
    limits: list[int]
    logs: tuple[TouchLog, TouchLog, TouchLog] = field(
        default_factory=lambda: (TouchLog(), TouchLog(), TouchLog())
    )
    refused: int = 0
    evicted: int = 0


class Quotas:
    """Owned by `Shelves`. `use`: slots of each tier by tenant number."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self.use: tuple[Counts, Counts, Counts] = (
            np.zeros(NUMBERS, dtype=np.int64),
            np.zeros(NUMBERS, dtype=np.int64),
            np.zeros(NUMBERS, dtype=np.int64),
        )
        self._leaving: tuple[Counts, Counts] = (
            np.zeros(NUMBERS, dtype=np.int64),
            np.zeros(NUMBERS, dtype=np.int64),
        )
        self.counting = False
        """Some page may have a tenant."""
        self.shares: dict[int, _Share] = {}
        self.stirred: set[int] = set()
        """Listed tenants that used more since they were last looked at, or still use too much."""

    # -- configuration ----------------------------------------------------------------------

    def configure(self, quotas: tuple[TenantQuota, ...], limits: tuple[int, int, int]) -> None:
        """The quotas of a revision; `limits`: slots of the tiers."""
        before, self.shares = self.shares, {}
        for quota in quotas:
            number = tenant_number(quota.tenant)
            slots = [
                UNBOUNDED if percent is None else limit * percent // 100
                for percent, limit in zip(quota.percents, limits, strict=True)
            ]
            twin = self.shares.get(number)
            if twin is not None:  # two names with one number: one account, the narrower of both
                twin.limits = [min(pair) for pair in zip(twin.limits, slots, strict=True)]
                continue
            share = _Share(quota.tenant, slots)
            old = before.get(number)
            if old is not None:
                share.logs, share.refused, share.evicted = old.logs, old.refused, old.evicted
            self.shares[number] = share
        fresh = [number for number in self.shares if number not in before]
        if fresh:
            self._line_up(fresh)
        self.stirred.update(self.shares)
        self.counting = self.counting or bool(self.shares)

    def _line_up(self, numbers: list[int]) -> None:
        """Pages that were there before their tenant had a quota."""
        table = self._table
        rows = table.live_rows()
        rows = rows[np.isin(table.tenant[rows], numbers) & np.isin(table.state[rows], HOMES)]
        rows = rows[np.argsort(table.touch[rows], kind="stable")]
        self.stamped(rows, table.touch[rows])

    def count_all(self) -> None:
        """Pages that were there before the cache."""
        table = self._table
        rows = table.live_rows()
        for tier, slots in enumerate((table.l0_slot, table.l1_slot, table.l2_slot)):
            owners = table.tenant[rows[slots[rows] != NO_SLOT]]
            self.use[tier][:] = np.bincount(owners, minlength=NUMBERS)
            self.use[tier][NOBODY] = 0
        self.counting = bool((table.tenant[rows] != NOBODY).any())

    # -- counting ---------------------------------------------------------------------------

    def took(self, rows: Rows, tier: int, sign: int = 1) -> None:
        """These pages have got a slot of `tier` (`sign` -1: have given theirs back)."""
        owners = self._table.tenant[rows]
        owners = owners[owners != NOBODY]
        if owners.size:
            np.add.at(self.use[tier], owners, sign)
            if sign > 0 and self.shares:
                self._stir(owners)

    def leaves(self, rows: Rows, tier: int, sign: int = 1) -> None:
        """These pages are on their way down from L0 or L1 (`sign` -1: not any more)."""
        owners = self._table.tenant[rows]
        owners = owners[owners != NOBODY]
        if owners.size:
            np.add.at(self._leaving[tier], owners, sign)
            if sign < 0 and self.shares:  # some may be back
                self._stir(owners)

    def _stir(self, owners: NDArray[np.integer]) -> None:
        self.stirred.update(self.shares.keys() & set(np.unique(owners).tolist()))

    # -- order ------------------------------------------------------------------------------

    def stamped(
        self,
        rows: Rows,
        stamps: Stamps,
        *,
        cold: bool = False,
        tiers: tuple[int, ...] = (0, 1, 2),
    ) -> None:
        """Pages were touched, coldest first: those of listed tenants enter their own order of each
        tier they lie in; with `cold` at its cold end."""
        if not self.shares or not rows.size:
            return
        table = self._table
        owners, state = table.tenant[rows], table.state[rows]
        for number in self.shares.keys() & set(np.unique(owners).tolist()):
            logs = self.shares[number].logs
            mine = owners == number
            for tier in tiers:
                here = mine & self._has_slot(rows, state, tier)
                enter = logs[tier].push_cold if cold else logs[tier].append
                enter(rows[here], stamps[here])

    def put_back(self, number: int, tier: int, rows: Rows) -> None:
        """Victims that could not leave after all: they are still the coldest."""
        self.shares[number].logs[tier].push_cold(rows, self._table.touch[rows])

    def victims(self, number: int, tier: int, count: int) -> Rows:
        """Up to `count` of the tenant's coldest pages that may leave `tier`; of L2 also copies of
        pages of L1."""
        rows = self.shares[number].logs[tier].pop(count, self._leaving_test(number, tier))
        if tier == 2 and has_repeats(rows):  # it stood there as a copy, and went down since
            _, firsts = np.unique(rows, return_index=True)
            rows = rows[np.sort(firsts)]
        return rows

    def _has_slot(self, rows: Rows, state: NDArray[np.uint8], tier: int) -> Mask:
        """Which of these pages are at home in `tier`, or have their copy there; idle ones."""
        here: Mask = state == HOMES[tier]
        if tier == 2:
            here |= (state == HOMES[1]) & ((self._table.tiers[rows] & _L2_COPY) != 0)
        return here

    def _leaving_test(self, number: int, tier: int) -> Callable[[Rows, Stamps], Mask]:
        table = self._table

        def leaves(rows: Rows, stamps: Stamps) -> Mask:
            good: Mask = (
                (table.touch[rows] == stamps)
                & self._has_slot(rows, table.state[rows], tier)
                & (table.tenant[rows] == number)
                & (table.pins[rows] == 0)
                & ((table.flags[rows] & np.uint8(Flag.DOOMED | Flag.EXEMPT)) == 0)
            )
            return good

        return leaves

    def compact(self, number: int) -> None:
        """Drop stale entries of the tenant's order."""
        share = self.shares[number]
        for tier, log in enumerate(share.logs):
            log.compact(int(self.use[tier][number]), self._leaving_test(number, tier))

    # -- room -------------------------------------------------------------------------------

    def room(self, number: int, tier: int) -> int:
        """Slots of `tier` that the tenant may still take now; below 0 after a quota shrank."""
        share = self.shares.get(number)
        return UNBOUNDED if share is None else share.limits[tier] - int(self.use[tier][number])

    def excess(self, number: int, tier: int) -> int:
        """Slots of `tier` that the tenant should give up, so that some of its quota is free. What
        is on its way down counts as gone."""
        limit = self.shares[number].limits[tier]
        if limit == UNBOUNDED:
            return 0
        staying = self._staying(number, tier)
        ahead = -(-limit // ROOM_AHEAD) if limit > 1 else 0
        return max(0, staying - (limit - ahead)) if staying > limit - ahead // 2 else 0

    def beyond(self, number: int, tier: int) -> int:
        """Slots of `tier` that the tenant uses past its quota, less what is on its way down."""
        return max(0, self._staying(number, tier) - self.shares[number].limits[tier])

    def _staying(self, number: int, tier: int) -> int:
        use = int(self.use[tier][number])
        return use - int(self._leaving[tier][number]) if tier < 2 else use

    def within(self, rows: Rows, tier: int, *, keep_last: bool = False) -> Mask:
        """Which of these pages, that are about to enter `tier`, their tenants have room for: the
        first ones, or the last ones. Exempt pages ask for none."""
        fits = np.ones(len(rows), dtype=bool)
        if not self.shares or not rows.size:
            return fits
        table = self._table
        owners = table.tenant[rows]
        for number in self.shares.keys() & set(np.unique(owners).tolist()):
            mine = np.flatnonzero((owners == number) & ~table.has(rows, Flag.EXEMPT))
            room = max(0, min(self.room(number, tier), mine.size))
            fits[mine[: mine.size - room] if keep_last else mine[room:]] = False
        return fits

    def lacking(self, rows: Rows, tier: int) -> dict[int, int]:
        """Listed tenants that have too little room in `tier` for these pages, and by how much."""
        if not self.shares or not rows.size:
            return {}
        asking = rows[~self._table.has(rows, Flag.EXEMPT)]
        numbers, counts = np.unique(self._table.tenant[asking], return_counts=True)
        short = {
            number: count - self.room(number, tier)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
            if number in self.shares
        }
        return {number: count for number, count in short.items() if count > 0}

    def dropped(self, rows: Rows) -> None:
        """These pages were lost for a quota's sake."""
        for number in self._table.tenant[rows].tolist():
            share = self.shares.get(number)
            if share is not None:
                share.evicted += 1

    def refused(self, number: int, count: int) -> None:
        """So many pages of a put were refused."""
        share = self.shares.get(number)
        if share is not None:
            share.refused += count

    # -- figures ----------------------------------------------------------------------------

    def snapshot(self, slot_bytes: tuple[int, int, int]) -> tuple[TenantSnapshot, ...]:
        """Listed tenants; quotas in bytes, None where there is none."""
        return tuple(
            TenantSnapshot(
                name=share.name,
                used_bytes=(
                    int(self.use[0][number]) * slot_bytes[0],
                    int(self.use[1][number]) * slot_bytes[1],
                    int(self.use[2][number]) * slot_bytes[2],
                ),
                quota_bytes=(
                    _bytes(share.limits[0], slot_bytes[0]),
                    _bytes(share.limits[1], slot_bytes[1]),
                    _bytes(share.limits[2], slot_bytes[2]),
                ),
                refused_pages=share.refused,
                evicted_pages=share.evicted,
            )
            for number, share in sorted(self.shares.items(), key=lambda item: item[1].name)
        )


def _bytes(limit: int, slot_bytes: int) -> int | None:
    return None if limit == UNBOUNDED else limit * slot_bytes
