"""Which transfer units have landed of pages that are on their way up from L2.

Only layered moves tell of it. What is heard of a move that has ended is old news: its rows may mean
other pages by then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.moves import Move
from kvtier_agent.cache.record import Rows

Units = NDArray[np.uint16]
"""How many units of each page have landed, without a gap from the first one on."""

NOT_COMING = 0xFFFF
"""In place of such a number: the page is not there, and will not be."""


class Progress:
    """Of the moves under way."""

    def __init__(self) -> None:
        self._moves: set[int] = set()
        self._landed: dict[int, int] = {}

    def begin(self, move: Move) -> None:
        """A layered move is handed out."""
        self._moves.add(move.id)

    def heard(self, move: Move, landed: Units, units: int) -> int:
        """So much of each page of a move has landed. How many units are new, and of a page that is
        not complete yet (of `units`)."""
        if move.id not in self._moves:
            return 0
        early = 0
        for row, now in zip(move.rows.tolist(), landed.tolist(), strict=True):
            before = self._landed.get(row, 0)
            if now > before:
                self._landed[row] = now
                early += min(now, units - 1) - min(before, units - 1)
        return early

    def end(self, move: Move) -> None:
        """A move has ended; nothing of its pages is under way."""
        if move.id in self._moves:
            self._moves.discard(move.id)
            for row in move.rows.tolist():
                self._landed.pop(row, None)

    def of(self, rows: Rows) -> Units:
        """What has landed of these pages."""
        return np.array([self._landed.get(row, 0) for row in rows.tolist()], dtype=np.uint16)
