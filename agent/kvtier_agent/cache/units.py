"""A page and its transfer units: where they lie, and what vouches for them.

    page:  unit 0 | unit 1 | ... | last unit        all of one size, the last one may be shorter
    slot:  page, rounded up to 4096 | unit sums     the second part only where there are several

Every byte is hashed once: a unit's sum is the XXH3-64 of its bytes, the checksum of a page is the
XXH3-64 of its unit sums (uint64, little-endian, in order), and that of a page of one unit is the
sum of that unit, which is the XXH3-64 of the whole page.

So a unit can be verified by itself: by the sums behind the page in the arena (in a segment file,
behind the header), which need no trust. They count if their hash is the checksum that the page's
record gives. For a whole page they are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry, align_up
from kvtier_agent.native import Side, copier

Sums = NDArray[np.uint64]
Places = NDArray[np.uint64]
"""Byte offsets into a buffer."""


@dataclass(frozen=True, slots=True)
class PageForm:
    """`units` in a page of `page_bytes`; `unit_bytes`: of all but the last one."""

    page_bytes: int
    units: int
    unit_bytes: int

    @property
    def trailer(self) -> int:
        """Where in an arena slot the unit sums begin, in bytes. Nothing is there in a slot of a
        page of one unit."""
        return align_up(self.page_bytes)

    @property
    def sums_bytes(self) -> int:
        """Bytes of the unit sums of a page."""
        return 8 * self.units

    @property
    def extent(self) -> int:
        """Bytes of a slot that mean something."""
        return self.page_bytes if self.units == 1 else self.trailer + self.sums_bytes

    def start(self, unit: int) -> int:
        """Where in a page a unit begins; of `units`, the end of the page. In bytes."""
        return min(unit * self.unit_bytes, self.page_bytes)

    # -- bytes ------------------------------------------------------------------------------------

    def copy(
        self,
        source: Any,
        starts: Places,
        target: Any,
        places: Places,
        *,
        private: Side,
        first: int = 0,
        last: int | None = None,
    ) -> Sums:
        """Copy the units from `first` to before `last` (None: all) of n pages, each between two
        places of contiguous buffers: `starts` is where pages begin in the source, `places` where
        those units go in the target. Sums of the copies, (n, units copied). `private` and what is
        raised: as `native.Copier.copy`."""
        last = self.units if last is None else last
        if self.units == 1 == last:
            length = self.page_bytes
            return copier.copy(source, starts, target, places, length, private=private)[:, None]
        sums = np.empty((len(starts), last - first), np.uint64)
        for units, length in self._alike(first, last):
            at = units * np.uint64(self.unit_bytes)
            here = (starts[:, None] + at).ravel()
            there = (places[:, None] + (at - np.uint64(first * self.unit_bytes))).ravel()
            got = copier.copy(source, here, target, there, length, private=private)
            sums[:, units.astype(np.intp) - first] = got.reshape(len(starts), units.size)
        return sums

    def sums(self, memory: Any, starts: Places) -> Sums:
        """Unit sums, (n, units), of n pages that begin at these bytes of a contiguous buffer."""
        if self.units == 1:
            return copier.checksums(memory, starts, self.page_bytes)[:, None]
        sums = np.empty((len(starts), self.units), np.uint64)
        for units, length in self._alike(0, self.units):
            here = (starts[:, None] + units * np.uint64(self.unit_bytes)).ravel()
            got = copier.checksums(memory, here, length)
            sums[:, units.astype(np.intp)] = got.reshape(len(starts), units.size)
        return sums

    def _alike(self, first: int, last: int) -> Iterator[tuple[Places, int]]:
        """Units of one length, and that: the last one of a page is apart where it is shorter."""
        short = self.page_bytes - (self.units - 1) * self.unit_bytes
        apart = last == self.units and short != self.unit_bytes and first < last
        whole = np.arange(first, last - apart, dtype=np.uint64)
        if whole.size:
            yield whole, self.unit_bytes
        if apart:
            yield np.array([last - 1], np.uint64), short

    # -- what vouches for them --------------------------------------------------------------------

    def checksums(self, sums: Sums) -> Sums:
        """Checksums of n pages from their unit sums, (n, units)."""
        if self.units == 1:
            return sums[:, 0]
        flat = np.ascontiguousarray(sums, "<u8")
        starts = np.arange(len(flat), dtype=np.uint64) * np.uint64(self.sums_bytes)
        return copier.checksums(flat, starts, self.sums_bytes)

    def checksum(self, page: Any) -> int:
        """Checksum of a page, a contiguous buffer of `page_bytes`."""
        return int(self.checksums(self.sums(page, np.zeros(1, np.uint64)))[0])

    def of_rows(self, arena: NDArray[np.uint8], rows: NDArray[np.uint32]) -> Sums:
        """Unit sums, (n, units), of the pages in some rows of an arena, (slots, slot_bytes)."""
        return self.sums(arena, rows.astype(np.uint64) * np.uint64(arena.shape[1]))

    def leave(self, arena: NDArray[np.uint8], rows: NDArray[np.uint32], sums: Sums) -> None:
        """Put unit sums, (n, units), behind the pages in some rows of an arena."""
        if self.units > 1 and len(rows):
            raw = np.ascontiguousarray(sums, "<u8").view(np.uint8)
            arena[rows, self.trailer : self.trailer + self.sums_bytes] = raw

    def left(self, arena: NDArray[np.uint8], rows: NDArray[np.uint32]) -> Sums:
        """The unit sums behind those pages, (n, units), whatever they are worth. Of pages of
        several units."""
        raw = arena[rows, self.trailer : self.trailer + self.sums_bytes]
        return np.ascontiguousarray(raw).view("<u8")


def form_of(geometry: Geometry) -> PageForm:
    """How pages of this geometry are cut."""
    return PageForm(geometry.page_bytes, geometry.units, geometry.unit_bytes)


def in_one_piece(page_bytes: int) -> PageForm:
    """A page that is one unit, whatever its geometry: as versions before units kept all of them."""
    return PageForm(page_bytes, 1, page_bytes)
