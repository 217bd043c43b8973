"""Memory for the headers of pages under way: one block, cut into trays, a tray for each batch."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import layered_pages
from kvtier_agent.native import TRANSFER_COLUMNS
from kvtier_agent.storage.segment import HEADER_BYTES, HeaderBlock

TRAYS_BYTES = 64 << 20
"""Of all trays, address space: only what is used has memory behind it."""
MOST_TRAYS = 64
LEAST_TRAYS = 4
FOR_READS = 4
"""One in so many trays is kept for reads: writes have time."""


@dataclass(frozen=True, slots=True, eq=False)
class Tray:
    """`rows`: a transfer for each page, uint64 of `native.TRANSFER_COLUMNS`, with what is the same
    for every batch; `cut`: which cut of the memory this belongs to."""

    headers: HeaderBlock
    rows: NDArray[np.uint64]
    cut: int


class Trays:
    """Thread-safe. Cut anew when pages get another size and nothing is under way."""

    def __init__(self, move_bytes: int) -> None:
        """`move_bytes`: of a batch of more than one page."""
        self.memory = mmap.mmap(-1, TRAYS_BYTES)
        self._move_bytes = move_bytes
        self._lock = threading.Lock()
        self._cut_for = (0, 0)
        """Bytes and units of a page."""
        self._pages = 0
        self._count = 0
        self._cut = 0
        self._free: list[Tray] = []

    def take(self, geometry: Geometry, pages: int, *, last: bool) -> Tray | None:
        """A tray for a batch of so many pages. `last`: the last ones may be taken too. None: there
        is none, or none is large enough."""
        with self._lock:
            if _shape(geometry) != self._cut_for and len(self._free) == self._count:
                self._cut_up(geometry)
            kept = 0 if last else self._count // FOR_READS
            if _shape(geometry) != self._cut_for or pages > self._pages or len(self._free) <= kept:
                return None
            return self._free.pop()

    def fit(self, geometry: Geometry, pages: int) -> bool:
        """Are they cut for such pages, and large enough for a batch of so many?"""
        return _shape(geometry) == self._cut_for and pages <= self._pages

    def give(self, tray: Tray) -> None:
        """It is not needed any more."""
        with self._lock:
            if tray.cut == self._cut:
                self._free.append(tray)

    def _cut_up(self, geometry: Geometry) -> None:
        most = TRAYS_BYTES // HEADER_BYTES // LEAST_TRAYS
        self._pages = min(most, max(1, self._move_bytes // geometry.page_bytes))
        if geometry.units > 1:
            self._pages = max(self._pages, layered_pages(geometry.page_bytes))
        size = self._pages * HEADER_BYTES
        self._count = min(MOST_TRAYS, TRAYS_BYTES // size)
        self._cut_for = _shape(geometry)
        self._cut += 1
        self._free = [
            self._tray(i * size, geometry.payload_bytes) for i in reversed(range(self._count))
        ]

    def _tray(self, offset: int, payload_bytes: int) -> Tray:
        rows = np.zeros((self._pages, len(TRANSFER_COLUMNS)), dtype=np.uint64)
        columns = dict(zip(TRANSFER_COLUMNS, rows.T, strict=True))
        columns["length"][:] = payload_bytes
        columns["header_offset"][:] = offset + np.arange(self._pages) * HEADER_BYTES
        columns["header_length"][:] = HEADER_BYTES
        return Tray(HeaderBlock(self._pages, self.memory, offset), rows, self._cut)


def _shape(geometry: Geometry) -> tuple[int, int]:
    return geometry.page_bytes, geometry.units
