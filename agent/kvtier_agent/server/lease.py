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
from kvtier_agent.server import protocol as p
from kvtier_agent.server.mapping import Mapped, UnmappedError, checksum

if TYPE_CHECKING:
    from types import TracebackType

    from kvtier_agent.server.connection import Connection
    from kvtier_agent.server.link import Link


class Lease:
    """Pinned pages, in the order in which they were asked for. Use as a context manager."""

    def __init__(
        self,
        link: Link,
        connection: Connection | None,
        number: int,
        page_bytes: int,
        tier: NDArray[np.uint8],
        arena: NDArray[np.uint8],
        offset: NDArray[np.uint64],
        checksums: NDArray[np.uint64],
    ) -> None:
        self.tier = tier
        """Where each page was found: 0 hbm, 1 dram, 2 nvme, 255 = a miss. uint8[n]."""
        self.page_bytes = page_bytes
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
        not be used). ``rows`` says which row of ``out`` each page goes to, by default its own.
        """
        n = len(self.tier)
        target = _writable(out, self.page_bytes, n if rows is None else None)
        places = np.arange(n) if rows is None else np.asarray(rows, np.int64)
        good = np.zeros(n, bool)
        for number, arena in self._arenas.items():
            mine = np.flatnonzero((self.tier != p.MISS) & (self._arena == number) & ~self._bad)
            if not mine.size:
                continue
            try:
                sums = arena.read(
                    self._offset[mine].tolist(), self.page_bytes, target, places[mine].tolist()
                )
            except UnmappedError:
                self._link.outgrown(self._connection)
                continue
            matches = np.array(sums, np.uint64) == self._checksum[mine]
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
        """Does ``copy`` (any contiguous buffer) hold page ``index``? A bad one is reported."""
        if not self.ok(index):
            return False
        if checksum(copy) != int(self._checksum[index]):
            self._bad[index] = True
            return False
        return True

    def reject(self, index: int) -> None:
        """Report page ``index`` as bad: the engine found out by other means."""
        self._bad[index] = True

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
        page_bytes: int,
        status: NDArray[np.uint8],
        arena: NDArray[np.uint8],
        offset: NDArray[np.uint64],
    ) -> None:
        self.status = status
        """The agent's answer for each page, ``kvtier_agent.cache.results.PutStatus``. uint8[n]."""
        self.offered = np.flatnonzero(status == PutStatus.OFFERED)
        """Indexes of the pages that have a slot."""
        self.page_bytes = page_bytes
        self._link = link
        self._connection = connection
        self._keys = keys
        self._arena = arena
        self._offset = offset
        self._sums = np.zeros(len(keys), np.uint64)
        self._arenas: dict[int, Mapped] = connection.arenas if connection is not None else {}

    def __len__(self) -> int:
        return len(self.status)

    def view(self, index: int) -> NDArray[np.uint8]:
        """The slot of page ``index`` in the arena, writable (a file arena only)."""
        arena = self._arenas[int(self._arena[index])]
        return arena.view(int(self._offset[index]), self.page_bytes)

    def write(self, index: int, page: memoryview) -> None:
        """Copy ``page`` into the slot of page ``index`` and keep its checksum for the commit."""
        arena = self._arenas[int(self._arena[index])]
        self._sums[index] = arena.write(int(self._offset[index]), page)

    def write_rows(self, rows: memoryview) -> None:
        """Copy row i of ``rows`` (page_bytes each) into slot i, for every offered page."""
        length = self.page_bytes
        arenas = self._arena.tolist()
        offsets = self._offset.tolist()
        sums = self._sums
        for i in self.offered.tolist():
            page = rows[i * length : (i + 1) * length]
            sums[i] = self._arenas[arenas[i]].write(offsets[i], page)

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
        wrote, never read back from the slot. Without it those computed by ``write``,
        ``write_rows`` and ``fill`` are used.
        """
        connection, self._connection = self._connection, None
        self._arenas = {}
        if checksums is not None:
            self._sums = np.ascontiguousarray(checksums, "<u8")
        return self._link.commit(connection, self.status, self.offered, self._keys, self._sums)

    def outgrown(self) -> None:
        """The slots lie in memory that this connection does not map: the pages are lost."""
        self._link.outgrown(self._connection)

    def abort(self) -> None:
        """Give the slots back unwritten; nothing happens after ``commit`` or a second call."""
        connection, self._connection = self._connection, None
        self._arenas = {}
        if connection is not None and self.offered.size:
            self._link.abort(connection, self._keys[self.offered])


def _writable(out: Any, page_bytes: int, n: int | None) -> memoryview:
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
