"""A drive that moves so many bytes a second and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvtier_agent.storage.fileio import FileIO


class ThrottledIO(FileIO):
    """Reads and writes share `bytes_per_second`; who comes too early waits. Thread-safe."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def _wait(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
            until = self._free_at
        time.sleep(max(0.0, until - now))

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().write(fd, buffers, offset)
        self._wait(done)
        return done

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        done = super().read(fd, buffers, offset)
        self._wait(done)
        return done
