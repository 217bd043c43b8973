"""What a client holds for a while: a ``Lease`` on pages to read, a ``Reservation`` to write into.

Both belong to one connection. When that is gone (the agent restarted) they are void: releasing
them does nothing, and what is copied out is still checked, so a stale page is at worst a miss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.results import PutStatus
from kvtier_agent.cache.units import PageForm
from kvtier_agent.server import arguments
from kvtier_agent.server import protocol as p
from kvtier_agent.server.arguments import page_buffer
from kvtier_agent.server.mapping import Mapped, UnmappedError

if TYPE_CHECKING:
    from types import TracebackType

    from kvtier_agent.server.connection import Connection
    from kvtier_agent.server.link import Link


_FIRST = np.zeros(1, np.uint64)


class Lease:
    """Pinned pages, in the order in which they were asked for. Use as a context manager."""

    def __init__(
        self,
        link: Link,
        connection: Connection | None,
        number: int,
        form: PageForm,
        tier: NDArray[np.uint8],
        arena: NDArray[np.uint8],
        offset: NDArray[np.uint64],
        checksums: NDArray[np.uint64],
    ) -> None:
        self.tier = tier
        """Where each page was found: 0 hbm, 1 dram, 2 nvme, 255 = a miss. uint8[n]."""
        self.page_bytes = form.page_bytes
        self._form = form
        self._link = link
        self._connection = connection
        self._number = number
        self._arena = arena
        self._offset = offset
        self._checksum = checksums
        self._bad = np.zeros(len(tier), bool)
        self._arenas: dict[int, Mapped] = connection.arenas if connection is not None else {}

    def __len__(self) -> int:
        return len(self.tier)

    def ok(self, index: int) -> bool:
        """Is page ``index`` there, as far as is known? Final only after ``copy_to``."""
        return bool(self.tier[index] != p.MISS and not self._bad[index])

    @property
    def prefix(self) -> int:
        """How many pages from the first on are there without a gap."""
        gaps = np.flatnonzero((self.tier == p.MISS) | self._bad)
        return int(gaps[0]) if gaps.size else len(self.tier)

    def copy_to(self, out: Any, rows: Any = None) -> NDArray[np.bool_]:
        """Copy the pages into ``out``, (n, page_bytes) uint8, and verify the copies; bool[n].

        A row whose answer is False was not filled with the page: it was missing, or its bytes did
        not match their checksum (then the agent hears of it with the release, and the row must
        not be used). ``rows`` says which row of ``out`` each page goes to, by default its own;
        ``ValueError`` for one that ``out`` does not have, or that is named twice.
        """
        n = len(self.tier)
        target = writable(out, self.page_bytes, n if rows is None else None)
        places = np.arange(n, dtype=np.uint64) if rows is None else rows_from(rows, n, len(out))
        good = np.zeros(n, bool)
        for number, arena in self._arenas.items():
            mine = np.flatnonzero((self.tier != p.MISS) & (self._arena == number) & ~self._bad)
            if not mine.size:
                continue
            try:
                sums = arena.read(self._offset[mine], self._form, target, places[mine])
            except UnmappedError:
                self._link.outgrown(self._connection)
                continue
            matches = sums == self._checksum[mine]
            good[mine] = matches
            self._bad[mine[~matches]] = True
        return good

    def page(self, index: int) -> NDArray[np.uint8]:
        """The page in the arena itself, for a copy of the engine's own; ``verify`` that copy."""
        if not self.ok(index):
            raise KeyError(f"page {index} is not there")
        arena = self._arenas[int(self._arena[index])]
        return arena.view(int(self._offset[index]), self.page_bytes)

    def verify(self, index: int, copy: Any) -> bool:
        """Does ``copy`` (a buffer of page_bytes) hold page ``index``? A bad one is reported;
        ``ValueError`` for a copy of another size, which says nothing about the page."""
        copy = page_buffer("copy", copy, self.page_bytes)
        if not self.ok(index):
            return False
        if self._form.checksum(copy) != int(self._checksum[index]):
            self._bad[index] = True
            return False
        return True

    def release(self) -> None:
        """Give the pages back; a second call does nothing. The pages must not be read after it."""
        connection, self._connection = self._connection, None
        self._arenas = {}
        if connection is not None and self._number:
            bad = np.flatnonzero(self._bad).astype("<u4")
            self._link.end_lease(connection, self._number, bad)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Reservation:
    """Slots for new pages. Fill those with status ``OFFERED``, then ``commit`` or ``abort``."""

    def __init__(
        self,
        link: Link,
        connection: Connection | None,
        keys: NDArray[np.uint8],
        form: PageForm,
        status: NDArray[np.uint8],
        arena: NDArray[np.uint8],
        offset: NDArray[np.uint64],
    ) -> None:
        self.status = status
        """The agent's answer for each page, ``kvtier_agent.cache.results.PutStatus``. uint8[n]."""
        self.offered = np.flatnonzero(status == PutStatus.OFFERED)
        """Indexes of the pages that have a slot."""
        self.page_bytes = form.page_bytes
        self._form = form
        self._link = link
        self._connection = connection
        self._keys = keys
        self._arena = arena
        self._offset = offset
        self._sums = np.zeros(len(keys), np.uint64)
        self._written = np.zeros(len(keys), bool)
        self._arenas: dict[int, Mapped] = connection.arenas if connection is not None else {}

    def __len__(self) -> int:
        return len(self.status)

    def view(self, index: int) -> NDArray[np.uint8]:
        """The slot of page ``index`` in the arena, writable (a file arena only). ``ValueError``
        where it has none."""
        return self._arena_of(index).view(int(self._offset[index]), self.page_bytes)

    def write(self, index: int, page: Any) -> None:
        """Copy ``page`` (a buffer of page_bytes) into the slot of page ``index`` and keep its
        checksum for the commit. ``ValueError`` for another size, or where it has no slot."""
        source = page_buffer("page", page, self.page_bytes)
        arena = self._arena_of(index)
        one = self._offset[index : index + 1]
        self._sums[index] = arena.write(one, self._form, source, _FIRST)[0]
        self._written[index] = True

    def write_rows(self, rows: Any) -> None:
        """Copy row i of ``rows`` (a buffer of page_bytes for each page) into slot i, for every
        offered page. ``ValueError`` for another size."""
        rows = page_buffer("rows", rows, len(self.status) * self.page_bytes)
        if self.offered.size:
            self._arena_of(int(self.offered[0]))
        numbers = self._arena[self.offered]
        for number in np.unique(numbers).tolist():
            mine = self.offered[numbers == number]
            places = mine.astype(np.uint64)
            self._sums[mine] = self._arenas[number].write(
                self._offset[mine], self._form, rows, places
            )
            self._written[mine] = True

    def fill(self, source: Callable[[int, NDArray[np.uint8]], object]) -> None:
        """``source(i, destination)`` gives each offered page; ``destination`` is used again.

        It is not the slot itself: a checksum taken there would vouch for whatever another client
        wrote in between, such as one whose reservation of the slot had run out.
        """
        destination = np.empty(self.page_bytes, np.uint8)
        for i in self.offered.tolist():
            source(i, destination)
            self.write(i, destination.data)

    def commit(self, checksums: Any = None) -> NDArray[np.uint8]:
        """The slots are filled; what became of each page, uint8[n].

        ``checksums`` (uint64[n], XXH3-64) where the engine filled ``view`` by itself: of what it
        wrote, never read back from the slot; where pages have several transfer units those of the
        units, uint64[n, units]. Without it those computed by ``write``,
        ``write_rows`` and ``fill`` are used, and ``ValueError`` is raised if some page was not
        written by them: nothing would vouch for it.
        """
        if checksums is not None:
            sums = arguments.checksums(checksums, len(self.status), self._form.units)
            self._sums = sums if self._form.units == 1 else self._vouched(sums)
        elif self._connection is not None and not self._written[self.offered].all():
            missing = self.offered[~self._written[self.offered]]
            raise ValueError(
                f"page {missing[0]} was not written ({len(missing)} of {len(self.offered)});"
                " write it, give checksums, or abort"
            )
        connection, self._connection = self._connection, None
        self._arenas = {}
        return self._link.commit(connection, self.status, self.offered, self._keys, self._sums)

    def _vouched(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Checksums of pages whose units have these sums, which go behind them in their slots."""
        for number, arena in self._arenas.items():
            mine = self.offered[self._arena[self.offered] == number]
            if mine.size:
                arena.leave(self._offset[mine], self._form, sums[mine])
        return self._form.checksums(sums)

    def outgrown(self) -> None:
        """The slots lie in memory that this connection does not map: the pages are lost."""
        connection, self._connection = self._connection, None
        self._arenas = {}
        self._link.outgrown(connection)

    def _arena_of(self, index: int) -> Mapped:
        """Where the slot of this page is; ``ValueError`` where there is none."""
        if not 0 <= index < len(self.status) or self.status[index] != PutStatus.OFFERED:
            raise ValueError(f"page {index} has no slot; write those in ``offered``")
        if self._connection is None:
            raise ValueError("the reservation has ended; reserve the pages again")
        return self._arenas[int(self._arena[index])]

    def abort(self) -> None:
        """Give the slots back unwritten; nothing happens after ``commit`` or a second call."""
        connection, self._connection = self._connection, None
        self._arenas = {}
        if connection is not None and self.offered.size:
            self._link.abort(connection, self._keys[self.offered])


def rows_from(rows: Any, n: int, limit: int) -> NDArray[np.uint64]:
    """Row numbers as uint64[n], all below ``limit``; raises ``ValueError``."""
    numbers = np.asarray(rows)
    if numbers.shape != (n,) or not (n == 0 or np.issubdtype(numbers.dtype, np.integer)):
        raise ValueError(f"rows of shape {numbers.shape} {numbers.dtype}, write {n} integers")
    if n and (numbers.min() < 0 or numbers.max() >= limit):
        raise ValueError(f"rows must be from 0 to {limit - 1}: out has {limit} rows")
    if len(np.unique(numbers)) != n:
        raise ValueError("rows names a row twice: give each page a row of its own")
    return numbers.astype(np.uint64)


def writable(out: Any, page_bytes: int, n: int | None) -> memoryview:
    """``out`` as a flat writable buffer; raises ``ValueError`` for another shape or layout."""
    if hasattr(out, "detach"):
        if out.is_cuda:
            raise ValueError("copy into host memory, or use page() and verify() for a device copy")
        out = out.detach().numpy()
    if out.dtype != np.uint8 or out.ndim != 2 or out.shape[1] != page_bytes:
        raise ValueError(
            f"out has shape {out.shape} {out.dtype}, write (n, {page_bytes}) uint8 instead"
        )
    if n is not None and out.shape[0] < n:
        raise ValueError(f"out has {out.shape[0]} rows for {n} pages")
    if not out.flags.c_contiguous:
        raise ValueError("out must be contiguous")
    return memoryview(out).cast("B") if out.size else memoryview(bytearray())
