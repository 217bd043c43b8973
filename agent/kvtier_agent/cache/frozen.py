"""Frozen prefixes: which pages are exempt, and the byte budget of each prefix.

A page belongs to a frozen prefix when the request that puts or loads it names the prefix, or else
when the policy lists the page's key (of two prefixes that list it, the first). Up to the prefix's
`max_bytes` its pages are *exempt*: no threshold applies and they are not evicted out of L0 (in
shape `engine`, where L0 is the engine's, not out of L1). Pages past the budget are ordinary, and
`snapshot` says how many. First come, first exempt; a budget that shrinks lets the deepest pages go
first, one that grows takes the shallowest in. All budgets together are at most `FROZEN_PERCENT` of
the tier in which pages are kept: it could not shrink else, nor take any other page; prefixes have
theirs in the order of the policy. An exempt page that had to start in L1 is promoted as soon as L0
has room, without regard to the cool-down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.identity import KEY_BYTES, KeyArray
from kvtier_agent.cache.page_table import PageTable
from kvtier_agent.cache.parts import part_key
from kvtier_agent.cache.record import NO_ROW, NO_SLOT, Flag, Rows, State
from kvtier_agent.cache.results import FrozenSnapshot
from kvtier_agent.cache.settings import FrozenPrefix

FROZEN_PERCENT = 90
"""Part of L0, or in shape `engine` of L1, that frozen prefixes may take together."""


def fit_frozen(sizes: Iterable[int], tier: int) -> list[int]:
    """What each of the prefixes, that ask for these sizes, may take of a tier; the first ones get
    theirs first. In bytes or in slots."""
    left, given = tier * FROZEN_PERCENT // 100, []
    for size in sizes:
        given.append(min(size, left))
        left -= given[-1]
    return given


@dataclass(slots=True)
class _Prefix:
    max_pages: int
    max_bytes: int
    exempt: int = 0
    ordinary: int = 0
    listed: bool = True


class FrozenBook:
    """Ids of the prefixes (kept in the records) and how much of each budget is taken."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._prefixes: dict[int, _Prefix] = {}
        self._by_key: dict[bytes, int] = {}
        self._below: set[int] = set()
        """Rows of exempt pages that are not in L0, or may not be."""
        self.waiting = False
        """There may be some among them that could be promoted."""

    def id_of(self, name: str | None) -> int:
        """0 for a prefix that the policy does not list."""
        number = self._ids.get(name or "", 0)
        return number if number and self._prefixes[number].listed else 0

    def numbers(self, name: str | None, keys: KeyArray) -> NDArray[np.uint16] | None:
        """The prefix of each key: the one that the request names, else the one that lists the
        key, else 0. None where no key has any."""
        named = self.id_of(name)
        if named:
            return np.full(len(keys), named, dtype=np.uint16)
        if not self._by_key:
            return None
        raw, listed = keys.tobytes(), self._by_key
        found = [listed.get(raw[i : i + KEY_BYTES], 0) for i in range(0, len(raw), KEY_BYTES)]
        return np.array(found, dtype=np.uint16) if any(found) else None

    def configure(
        self,
        listed: tuple[FrozenPrefix, ...],
        slot_bytes: int,
        table: PageTable,
        tp: int,
        slots: tuple[int, int],
    ) -> Rows:
        """New budgets; listed keys are of pages, of which `tp` ranks have a part each; `slots`: of
        L0 and L1. Returns the rows that re-enter replacement: those that became ordinary and,
        where there is no L0 any more, those that still lie in it."""
        for prefix in self._prefixes.values():
            prefix.listed = False
            prefix.max_pages = 0
            prefix.max_bytes = 0
        most = fit_frozen((entry.max_bytes // slot_bytes for entry in listed), slots[0] or slots[1])
        for entry, pages in zip(listed, most, strict=True):
            number = self._ids.setdefault(entry.name, len(self._ids) + 1)
            prefix = self._prefixes.setdefault(number, _Prefix(0, 0))
            prefix.listed = True
            prefix.max_bytes = entry.max_bytes
            prefix.max_pages = pages
        self._by_key = {
            part_key(key, rank, tp): self._ids[entry.name]
            for entry in reversed(listed)
            for key in entry.page_keys
            for rank in range(tp)
        }
        self._claim_listed(table)
        rows = table.live_rows()
        rows = rows[table.frozen[rows] != 0]
        was = table.has(rows, Flag.EXEMPT)
        for number, prefix in self._prefixes.items():
            mine = rows[table.frozen[rows] == number]
            mine = mine[np.argsort(table.depth[mine], kind="stable")]
            table.raise_flag(mine[: prefix.max_pages], Flag.EXEMPT)
            table.clear_flag(mine[prefix.max_pages :], Flag.EXEMPT)
            prefix.exempt = min(len(mine), prefix.max_pages)
            prefix.ordinary = len(mine) - prefix.exempt
        exempt = table.has(rows, Flag.EXEMPT)
        self._below.clear()
        self._look_at(rows, table)
        free = was & ~exempt
        if not slots[0]:
            free |= table.state[rows] == int(State.IN0)
        back: Rows = rows[free]
        return back

    @property
    def names(self) -> list[str]:
        """Of the numbers in the records, from 1 on."""
        return sorted(self._ids, key=self._ids.__getitem__)

    def take_over(self, names: list[str], rows: Rows, table: PageTable) -> None:
        """Pages of the process before carry numbers under these names; ordinary ones until
        `configure`. Numbers without a name are none."""
        self._ids = {name: number for number, name in enumerate(names, 1)}
        numbers = table.frozen[rows]
        table.frozen[rows[numbers > len(names)]] = 0
        counts = np.bincount(table.frozen[rows], minlength=len(names) + 1)
        self._prefixes = {
            number: _Prefix(0, 0, ordinary=int(counts[number]), listed=False)
            for number in self._ids.values()
        }

    def _claim_listed(self, table: PageTable) -> None:
        """Pages that were held before their key was listed; `configure` counts them."""
        if not self._by_key:
            return
        keys = np.frombuffer(b"".join(self._by_key), dtype=np.uint8).reshape(-1, KEY_BYTES)
        rows = table.lookup(keys)
        there = rows != NO_ROW
        rows = rows[there]
        free = (table.frozen[rows] == 0) & ~table.has(rows, Flag.PARTIAL)
        numbers = np.fromiter(self._by_key.values(), dtype=np.uint16, count=len(self._by_key))
        table.frozen[rows[free]] = numbers[there][free]

    def room(self, number: int) -> int:
        """Pages of the prefix that may still become exempt."""
        prefix = self._prefixes[number]
        return max(0, prefix.max_pages - prefix.exempt)

    def add(self, number: int, rows: Rows, table: PageTable) -> None:
        """Pages (in prefix order, not of a prefix yet) join; the first ones while there is room."""
        room = self.room(number)
        prefix = self._prefixes[number]
        table.frozen[rows] = number
        table.raise_flag(rows[:room], Flag.EXEMPT)
        self._look_at(rows[:room], table)
        prefix.exempt += min(room, len(rows))
        prefix.ordinary += max(0, len(rows) - room)

    def remove(self, rows: Rows, table: PageTable) -> None:
        """Pages leave the cache."""
        mine = rows[table.frozen[rows] != 0]
        for row in mine.tolist():
            prefix = self._prefixes[int(table.frozen[row])]
            if table.flags[row] & Flag.EXEMPT:
                prefix.exempt -= 1
            else:
                prefix.ordinary -= 1
        table.clear_flag(mine, Flag.EXEMPT)
        table.frozen[mine] = 0
        self._below.difference_update(mine.tolist())

    def stir(self, rows: Rows) -> None:
        """These pages have come to rest, or were let go: exempt ones may be promoted now."""
        if self._below and not self.waiting:
            self.waiting = not self._below.isdisjoint(rows.tolist())

    def waiting_in_dram(self, table: PageTable) -> Rows:
        """Exempt pages that could be promoted, shallowest first. Once there is none the rest is not
        looked at before it is stirred."""
        rows = np.fromiter(self._below, dtype=np.uint32, count=len(self._below))
        rows = rows[_is_below(rows, table)]
        self._below = set(rows.tolist())
        idle = (table.state[rows] == int(State.IN1)) & (table.pins[rows] == 0)
        rows = rows[idle & ~table.has(rows, Flag.DOOMED)]
        self.waiting = bool(rows.size)
        shallow_first: Rows = rows[np.argsort(table.depth[rows], kind="stable")]
        return shallow_first

    def came_up(self, rows: Rows, table: PageTable) -> None:
        """These pages were read from L2 into L1."""
        if self._prefixes:
            self._look_at(rows, table)

    def _look_at(self, rows: Rows, table: PageTable) -> None:
        below = rows[_is_below(rows, table)]
        self._below.update(below.tolist())
        self.waiting = self.waiting or bool(below.size)

    def snapshot(self, slot_bytes: int) -> tuple[FrozenSnapshot, ...]:
        return tuple(
            FrozenSnapshot(
                name=name,
                max_bytes=self._prefixes[number].max_bytes,
                exempt_bytes=self._prefixes[number].exempt * slot_bytes,
                exempt_pages=self._prefixes[number].exempt,
                ordinary_pages=self._prefixes[number].ordinary,
            )
            for name, number in sorted(self._ids.items())
            if self._prefixes[number].listed or self._prefixes[number].ordinary
        )


def _is_below(rows: Rows, table: PageTable) -> NDArray[np.bool_]:
    """Which of these pages are exempt and lie in L1, or may come to lie there. What is being
    written into L0 will not; what lies in L2 counts when it was read."""
    state = table.state[rows]
    below: NDArray[np.bool_] = np.isin(state, (State.DOWN01, State.IN1, State.UP10, State.DOWN12))
    below |= (state == int(State.WRITING)) & (table.l0_slot[rows] == NO_SLOT)
    return below & table.has(rows, Flag.EXEMPT)
