"""The same drive behind rings of io_uring: faults are drawn for each transfer of a page."""

from __future__ import annotations

import contextlib
import errno
import threading
from typing import Any

import numpy as np
from kvtier_agent import native
from kvtier_agent.storage.segment import HEADER
from ring_faults import FaultyRing

from faults.drive import FLIP, SHORT, SLOW, FailingDrive

BLOCK = 4096


class FailingRings(FailingDrive):
    """What `FailingDrive` does to calls, and to transfers of rings too. A slow transfer is `late`:
    the agent counts slow calls only, and counts no transfer as slow."""

    late = 0
    """Transfers that began `slow_seconds` after they were asked for."""
    hangs = full = False
    pin_error = 0

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        made = native.ring(arena, headers, **settings)
        return made if headers is None else LateRing(self, made, arena, headers)

    def draw_late(self) -> bool:
        """Is this transfer late?"""
        with self._lock:
            late = (
                self.failing
                and self.late < self._chances.most_slow
                and self._random.random() < self._chances.fault
            )
            self.late += late
            return late

    @property
    def slow_seconds(self) -> float:
        return self._chances.slow_seconds

    def outcome(self, operation: str, result: int, payload: Any, header: Any) -> int:
        """Of a transfer that went well: see `FaultyRing`."""
        try:
            fault = self._draw(operation, (SLOW,))
        except OSError as error:
            return -(error.errno or errno.EIO)
        if fault == SHORT:
            return result - BLOCK
        if fault == FLIP:
            with self._lock:
                self.injected["read", FLIP] += 1
                row = header if self._random.random() < 0.5 else payload
                bits = 8 * (HEADER.itemsize if row is header else len(row))
                bit = self._random.randrange(bits)
            row[bit // 8] ^= 1 << (bit % 8)
        return result


class LateRing(FaultyRing):
    """A `FaultyRing` of which some transfers begin late. To call one back is of no use."""

    def __init__(self, drive: FailingRings, ring: Any, arena: Any, headers: Any) -> None:
        super().__init__(drive, ring, arena, headers)
        self._drive = drive
        self._late: dict[int, np.ndarray] = {}
        self._batches = 0

    def submit(self, rows: np.ndarray, together: bool = False) -> None:
        late = np.fromiter((self._drive.draw_late() for _ in rows), bool, len(rows))
        if not late.all():
            super().submit(rows[~late], together=together)
        if late.any():
            with self._lock:
                batch, self._batches = self._batches, self._batches + 1
                self._late[batch] = rows[late].copy()
            timer = threading.Timer(self._drive.slow_seconds, self._begin, (batch,))
            timer.daemon = True
            timer.start()

    def _begin(self, batch: int) -> None:
        with self._lock:
            rows = self._late.pop(batch, None)
        if rows is not None:
            with contextlib.suppress(ValueError):  # closed
                super().submit(rows, together=True)

    def close(self, seconds: float) -> int:
        """What has not begun by now begins at once."""
        for batch in list(self._late):
            self._begin(batch)
        return int(self.real.close(seconds))
