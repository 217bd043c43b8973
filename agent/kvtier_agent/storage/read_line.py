"""Reads that wait for a tray. All trays are out where many reads are under way, and then the next
one goes by ring as soon as one is back. A thread that made calls for it instead would be kept by a
drive that hangs for as long as that takes, and a mover has few.

While a drive answers no read, trays may be out for long. Then nothing waits: reads of that drive
are cancelled, and others go by calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvtier_agent.cache.moves import Move
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.trays import Tray, Trays


class ReadLine:
    """Thread-safe. `mute`: names of the volumes whose drives answer no read; `cancel`: what is done
    with a read of those."""

    def __init__(
        self, trays: Trays, mute: Callable[[], set[str]], cancel: Callable[[Move], None]
    ) -> None:
        self._trays, self._mute, self._cancel = trays, mute, cancel
        self._moves: deque[Move] = deque()

    def __len__(self) -> int:
        return len(self._moves)

    def take(self, move: Move, l2: L2) -> bool:
        """Have a read wait, or cancel it. False: it is to go by calls."""
        if not self._trays.fit(l2.geometry, len(move)):
            return False
        mute = self._mute()
        if not mute:
            self._moves.append(move)
            return True
        held = [l2.segments.get(n) for n in np.unique(move.source // l2.per_segment).tolist()]
        if any(one is not None and one[1].name in mute for one in held):
            self._cancel(move)
            return True
        return False

    def go(
        self, l2: L2, begin: Callable[[L2, Move, Tray], bool], by_calls: Callable[[Move], None]
    ) -> None:
        """Begin as many as there are trays for. `begin` gives the tray back also where it says
        False. For one thread."""
        for _ in range(len(self._moves)):
            try:
                move = self._moves.popleft()
            except IndexError:
                return  # cancelled meanwhile
            tray = self._trays.take(l2.geometry, len(move), last=True)
            if tray is None and not self._mute():
                self._moves.appendleft(move)
                return
            if not (self.take(move, l2) if tray is None else begin(l2, move, tray)):
                by_calls(move)

    def end(self) -> None:
        """All that waits is cancelled."""
        while self._moves:
            self._cancel(self._moves.popleft())
