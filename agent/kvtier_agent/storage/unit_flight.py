"""A layered read under way through rings: a transfer for each piece of each page, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.moves import Move
from kvtier_agent.cache.progress import Units
from kvtier_agent.native import READ, TRANSFER_COLUMNS
from kvtier_agent.storage.drive_ring import DriveRing
from kvtier_agent.storage.flight import FILE_OFFSET, OFFSET, OPERATION, TAG, Flight, Where
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.segment import HEADER_BYTES
from kvtier_agent.storage.trays import Tray
from kvtier_agent.storage.units import Landing, pieces

LENGTH, HEADER_OFFSET, HEADER_LENGTH = (
    TRANSFER_COLUMNS.index(c) for c in ("length", "header_offset", "header_length")
)


class UnitFlight(Flight):
    """As `Flight`, with a transfer for each piece (`storage.units`). Piece `k` of page `i` of n has
    number k * n + i. `results`: of a page the bytes of all its pieces, or the first error."""

    __slots__ = ("_all", "_cuts", "_landing", "_pending")

    def __init__(self, move: Move, l2: L2, tray: Tray, started: float) -> None:
        super().__init__(move, l2, tray, started)
        self._cuts = pieces(l2.form)
        self._landing = Landing(l2, move, tray.headers)
        self._pending = np.zeros(len(move), dtype=np.int64)
        """Pieces of each page that have not ended."""
        self._all = self.rows

    def numbers(self) -> Where:
        pages = np.flatnonzero(self.tried)
        units = np.flatnonzero(np.diff(self._cuts))
        return (units[:, None] * len(self.move) + pages).ravel()

    def fill(self, tag: np.uint64) -> None:
        move, count, units = self.move, len(self.move), self._cuts.size - 1
        self._pending[self.tried] = int(np.count_nonzero(np.diff(self._cuts)))
        rows = np.empty((units, count, len(TRANSFER_COLUMNS)), dtype=np.uint64)
        rows[:] = self.rows
        start, length = self._cuts[:-1, None].astype(np.uint64), np.diff(self._cuts)[:, None]
        rows[:, :, OPERATION] = READ
        rows[:, :, OFFSET] = move.target.astype(np.uint64) * np.uint64(move.slot_bytes) + start
        rows[:, :, LENGTH] = length
        rows[1:, :, FILE_OFFSET] += start[1:] + np.uint64(HEADER_BYTES)
        rows[1:, :, HEADER_OFFSET] = 0
        rows[1:, :, HEADER_LENGTH] = 0
        numbers = np.arange(units * count, dtype=np.uint64).reshape(units, count)
        rows[:, :, TAG] = numbers + tag
        self._all = rows.reshape(units * count, -1)

    def batches(self) -> Iterator[tuple[DriveRing, Where]]:
        """A unit at a time: a ring speaks up when a batch has ended."""
        drives = self.by_drive()
        for unit in np.flatnonzero(np.diff(self._cuts)).tolist():
            for drive, pages in drives:
                yield drive, unit * len(self.move) + pages

    def transfers(self, numbers: Where) -> NDArray[np.uint64]:
        return self._all[numbers]

    def ended(self, pages: Where, results: Any) -> bool:
        units, pages = np.divmod(pages, len(self.move))
        results = np.broadcast_to(results, pages.shape)
        failed = results < 0
        so_far = self.results
        np.add.at(so_far, pages[~failed & (so_far[pages] >= 0)],
                  results[~failed & (so_far[pages] >= 0)])  # fmt: skip
        first = failed & (so_far[pages] >= 0)
        so_far[pages[first]] = results[first]
        length = np.diff(self._cuts)[units] + np.where(units == 0, HEADER_BYTES, 0)
        whole = results == length
        self._landing.landed(pages[whole], units[whole])
        np.subtract.at(self._pending, pages, 1)
        self.under_way[pages] = self._pending[pages] > 0
        self.left -= pages.size
        return self.left == 0

    def news(self, arena: NDArray[np.uint8]) -> Units | None:
        return self._landing.news(arena)
