"""The same drive behind rings of io_uring: faults are drawn for each transfer of a page."""

from __future__ import annotations

import errno
from typing import Any

from kvtier_agent import native
from kvtier_agent.storage.segment import HEADER
from ring_faults import FaultyRing

from faults.drive import FLIP, SHORT, SLOW, FailingDrive

BLOCK = 4096


class FailingRings(FailingDrive):
    """What `FailingDrive` does to calls, and to transfers of rings too; of those none is slow."""

    hangs = full = False
    pin_error = 0

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        made = native.ring(arena, headers, **settings)
        return made if headers is None else FaultyRing(self, made, arena, headers)

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
