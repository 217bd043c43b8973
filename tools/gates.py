"""A drive that answers reads when told to, by rings and by calls: what lands first can be seen."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import numpy as np
from kvtier_agent.native import READ, TRANSFER_COLUMNS
from kvtier_agent.storage.fileio import RingIO

_OPERATION = TRANSFER_COLUMNS.index("operation")


class GatedIO(RingIO):
    """`shut`: reads of segments wait. `held`: how many do; `rings`: whether there are any."""

    def __init__(self, *, rings: bool) -> None:
        self.rings = rings
        self.lock = threading.Condition()
        self.shut = False
        self._passes = 0
        self._calls = 0
        self.batches: list[tuple[Any, np.ndarray]] = []
        """Of rings: what was submitted at a time, in this order."""

    @property
    def held(self) -> int:
        with self.lock:
            return self._calls + sum(len(rows) for _, rows in self.batches)

    def let(self, count: int) -> None:
        """Let so many reads through, in the order in which they came or come."""
        with self.lock:
            self._passes += count
            self.lock.notify_all()
            self._go()

    def _go(self) -> None:
        """Batches of rings, as far as they may."""
        while self._passes and self.batches:
            ring, rows = self.batches.pop(0)
            some, rest = rows[: self._passes], rows[self._passes :]
            self._passes -= len(some)
            if len(rest):
                self.batches.insert(0, (ring, rest))
            ring.submit(some, together=True)

    def open_up(self) -> None:
        """All that waits goes, and what comes."""
        with self.lock:
            self.shut = False
            self._passes = 0
            self.lock.notify_all()
            batches, self.batches = self.batches, []
        for ring, rows in batches:
            ring.submit(rows, together=True)

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        if not self.rings:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        made = super().ring(arena, headers, **settings)
        return made if headers is None else _GatedRing(self, made)

    def read(self, fd: int, buffers: Any, offset: int) -> int:
        with self.lock:
            if self.shut:
                self._calls += 1
                self.lock.wait_for(lambda: self._passes or not self.shut, 60)
                self._calls -= 1
                self._passes = max(0, self._passes - 1)
        return super().read(fd, buffers, offset)


class _GatedRing:
    def __init__(self, gate: GatedIO, ring: Any) -> None:
        self._gate, self._ring = gate, ring

    def submit(self, rows: np.ndarray, together: bool = False) -> None:
        with self._gate.lock:
            if self._gate.shut and int(rows[0, _OPERATION]) == READ:
                self._gate.batches.append((self._ring, np.array(rows)))
                self._gate._go()
                return
        self._ring.submit(rows, together=together)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)
