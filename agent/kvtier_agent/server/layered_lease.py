"""A lease that is read while its pages land: an engine computes with the first layers meanwhile.

    with cache.load(keys, layered=True) as lease:
        for unit in range(lease.units):
            good = lease.copy_units(unit, unit + 1, layers)    # waits until they are there
            ...compute with these layers...

Each unit is verified by itself: by its sum behind the page in the arena, which counts if the sums
there are those of the page's checksum. Those are read once a page.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.units import PageForm
from kvtier_agent.server import protocol as p
from kvtier_agent.server.lease import Lease, rows_from, writable
from kvtier_agent.server.mapping import UnmappedError

if TYPE_CHECKING:
    from kvtier_agent.server.connection import Connection
    from kvtier_agent.server.link import Link


class LayeredLease(Lease):
    """As ``Lease``. ``tier`` is where pages were when they were asked for, and becomes 255 for
    those of which it turns out that they do not come."""

    def __init__(
        self,
        link: Link,
        connection: Connection | None,
        number: int,
        cut: PageForm,
        form: PageForm,
        tier: NDArray[np.uint8],
        arena: NDArray[np.uint8],
        offset: NDArray[np.uint64],
        checksums: NDArray[np.uint64],
        *,
        landed: NDArray[np.uint16],
        until: float,
    ) -> None:
        """``cut``: how the caller's pages are cut; ``form``: how they lie at this agent.
        ``landed``: units of each page; ``until``: the deadline, monotonic seconds."""
        super().__init__(link, connection, number, form, tier, arena, offset, checksums)
        self.units = cut.units
        """Transfer units of a page."""
        self._cut = cut
        self._landed = landed
        self._until = until
        self._sums = np.zeros((len(tier), form.units), np.uint64)
        self._believed = np.zeros(len(tier), bool)
        self._copy: tuple[NDArray[np.uint8], NDArray[np.bool_]] | None = None
        self.tier[landed == p.NOT_COMING] = p.MISS

    def wait_units(self, count: int) -> NDArray[np.bool_]:
        """Wait until the first ``count`` units of every page are there, or are known not to come;
        of which pages they are there, bool[n]. Ends at the deadline of the load.

        Never raises because of the agent, but where the client was made to.
        """
        if not 0 <= count <= self.units:
            raise ValueError(f"{count} units of pages that have {self.units}")
        count = min(count, self._form.units)
        expected = self.tier != p.MISS
        if (self._landed[expected] < count).any():
            self._ask(count)
            self.tier[(self._landed < count) | (self._landed == p.NOT_COMING)] = p.MISS
        there: NDArray[np.bool_] = (self.tier != p.MISS) & ~self._bad
        return there

    def _ask(self, count: int) -> None:
        """How far the agent is, once it is so far; of what it does not say, nothing will come."""
        n, asked = len(self.tier), self._connection
        news = np.empty(0, np.uint16)
        seconds = max(0.0, self._until - time.monotonic()) + self._link.timeout_seconds
        try:
            with self._link.asking(seconds, anyway=True) as (connection, left):
                if asked is not None and connection is asked:
                    message = p.Await(asked.next_id(), asked.welcome.boot, self._number, count)
                    _, columns = asked.request(message, (), left, p.Landed)
                    news = np.frombuffer(columns[0], "<u2")
        finally:
            landed = np.where(self._landed < count, p.NOT_COMING, self._landed).astype(np.uint16)
            landed[: min(n, news.size)] = news[:n]
            self._landed = landed

    def copy_units(self, first: int, last: int, out: Any, rows: Any = None) -> NDArray[np.bool_]:
        """Wait for the units from ``first`` to before ``last`` of the pages, copy them, and verify
        the copies; bool[n], as ``copy_to``.

        ``out``: uint8, as wide as a page, in which they have their place, or as those units
        (``unit_span``), without room for the others.
        """
        if not 0 <= first <= last <= self.units:
            raise ValueError(f"units {first} to {last} of pages that have {self.units}")
        n, (start, end) = len(self.tier), self.unit_span(first, last)
        width = self.page_bytes if _width(out) == self.page_bytes else end - start
        target = writable(out, width, n if rows is None else None)
        numbers = np.arange(n, dtype=np.uint64) if rows is None else rows_from(rows, n, len(out))
        here = np.uint64(start if width == self.page_bytes else 0)
        places = numbers * np.uint64(width) + here
        expected = self.wait_units(last)
        if self._form.units != self.units:
            return self._from_whole(expected, start, end, target, places)
        good = np.zeros(n, bool)
        for number, arena in self._arenas.items():
            mine = np.flatnonzero(expected & (self._arena == number))
            if not mine.size:
                continue
            try:
                mine = self._believe(mine, arena)
                offsets = self._offset[mine]
                units = range(first, last)
                got = arena.read_units(offsets, self._form, units, target, places[mine])
            except UnmappedError:
                self._link.outgrown(self._connection)
                continue
            matches = (got == self._sums[mine, first:last]).all(axis=1)
            good[mine] = matches
            self._bad[mine[~matches]] = True
        return good

    def unit_span(self, first: int, last: int) -> tuple[int, int]:
        """Where in a page these units begin and end, in bytes."""
        return self._cut.start(first), self._cut.start(last)

    def copy_to(self, out: Any, rows: Any = None) -> NDArray[np.bool_]:
        """See ``Lease.copy_to``; waits for all units."""
        self.wait_units(self.units)
        return super().copy_to(out, rows)

    def page(self, index: int) -> NDArray[np.uint8]:
        """See ``Lease.page``; waits for all units."""
        self.wait_units(self.units)
        return super().page(index)

    def _believe(self, mine: NDArray[np.intp], arena: Any) -> NDArray[np.intp]:
        """Those of these pages whose unit sums are right; the others are bad."""
        new = mine[~self._believed[mine]]
        if new.size:
            if self._form.units == 1:
                self._sums[new, 0] = self._checksum[new]
                self._believed[new] = True
            else:
                self._sums[new], sums = arena.left(self._offset[new], self._form)
                self._believed[new] = right = sums == self._checksum[new]
                self._bad[new[~right]] = True
        return mine[self._believed[mine]]

    def _from_whole(
        self,
        expected: NDArray[np.bool_],
        start: int,
        end: int,
        target: memoryview,
        places: NDArray[np.uint64],
    ) -> NDArray[np.bool_]:
        """From an agent that has one checksum for a whole page: copied and verified once."""
        if self._copy is None:
            whole = np.empty((len(self.tier), self.page_bytes), np.uint8)
            self._copy = (whole, super().copy_to(whole))
        whole, right = self._copy
        good = expected & right
        for i in np.flatnonzero(good).tolist():
            place = int(places[i])
            target[place : place + end - start] = whole[i, start:end].data
        return good


def _width(out: Any) -> int:
    """Bytes of a row; -1 where it has none."""
    shape: Any = getattr(out, "shape", ())
    return int(shape[1]) if len(shape) == 2 else -1
