"""A drive that moves so many bytes a second and no more."""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from kvtier_agent import native
from kvtier_agent.native import READ, TRANSFER_COLUMNS
from kvtier_agent.storage.fileio import FileIO
from ring_faults import why_no_ring

_LENGTHS = [TRANSFER_COLUMNS.index(name) for name in ("length", "header_length")]
_OPERATION = TRANSFER_COLUMNS.index("operation")


class ThrottledIO(FileIO):
    """Reads and writes share `bytes_per_second`; who comes too early waits. Thread-safe."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        """So many bytes have moved, or are about to."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - now))

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().write(fd, buffers, offset)
        self.wait(done)
        return done

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().read(fd, buffers, offset)
        self.wait(done)
        return done


class ThrottledRings(ThrottledIO):
    """The same by rings: a transfer is given to the kernel when its turn has come, reads first."""

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        made = native.ring(arena, headers, **settings)
        return made if headers is None else ThrottledRing(self, made)


class ThrottledRing:
    """A ring before which a thread lets transfers through one by one."""

    def __init__(self, drive: ThrottledRings, ring: Any) -> None:
        self._drive = drive
        self.real = ring
        self._ready = threading.Condition()
        self._waiting: list[tuple[bool, int, np.ndarray]] = []
        self._number = 0
        self._closed = False
        threading.Thread(target=self._run, name="throttle", daemon=True).start()

    def submit(self, rows: np.ndarray, together: bool = False) -> None:
        with self._ready:
            if self._closed:
                raise ValueError("closed")
            for row in rows:
                self._number += 1
                one = (row[_OPERATION] != READ, self._number, row[None].copy())
                heapq.heappush(self._waiting, one)
            self._ready.notify()

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                _, _, row = heapq.heappop(self._waiting)
            with contextlib.suppress(ValueError):  # closed
                self.real.submit(row, together=True)
            self._drive.wait(int(row[0, _LENGTHS].sum()))

    def close(self, seconds: float) -> int:
        """What waits is not made any more."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        return int(self.real.close(seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def throttled(bytes_per_second: float) -> ThrottledIO:
    """The way that production takes here: rings where there are any."""
    kind = ThrottledIO if why_no_ring() else ThrottledRings
    return kind(bytes_per_second)
