"""Rings whose transfers fail or hang when told to: the seam of io_uring for tests."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, Protocol

import numpy as np
from kvtier_agent import native
from kvtier_agent.native import COMPLETION, READ, TRANSFER_COLUMNS
from kvtier_agent.storage.fileio import RingIO

SHORT = 0
"""A fault: a transfer that ends a block early."""

_COLUMN = {name: i for i, name in enumerate(TRANSFER_COLUMNS)}


def why_no_ring() -> str:
    """Why there is no io_uring here; empty where there is."""
    if native.NATIVE is None:
        return f"without the extension: {native.WHY_NOT}"
    try:
        native.ring(bytearray(4096)).close(5)
    except OSError as error:
        return f"no io_uring here: {error}"
    return ""


class Faults(Protocol):
    """What stands before a ring. `hangs`: what is submitted does not begin; `full`: there is no
    place for one more file; `pin_error`: why no memory can be registered, 0: it can."""

    hangs: bool
    full: bool
    pin_error: int

    def outcome(self, operation: str, result: int, payload: Any, header: Any) -> int:
        """What a transfer (`read`, `write`) that went well, of `result` bytes from or to this
        memory, is said to have come to: bytes, or -errno."""


class FaultyRing:
    """A ring before which `faults` stands. What fails has happened all the same, as it may on a
    drive; what hangs has not begun."""

    def __init__(self, faults: Faults, ring: Any, arena: Any, headers: Any) -> None:
        self.real = ring
        self._memory = memoryview(arena).cast("B"), memoryview(headers).cast("B")
        self.pinned: list[tuple[int, int]] = []
        self.broken = 0
        self._faults = faults
        self._lock = threading.Lock()
        self._rows: dict[int, list[int]] = {}
        self._hanging: list[np.ndarray] = []

    def submit(self, rows: np.ndarray, together: bool = False) -> None:
        with self._lock:
            for row in rows.tolist():
                self._rows[row[_COLUMN["tag"]]] = row
            if self._faults.hangs:
                self._hanging.append(np.array(rows))
                return
        self.real.submit(rows, together=together)

    def let_go(self) -> None:
        """The drive answers again."""
        with self._lock:
            hanging, self._hanging = self._hanging, []
        for rows in hanging:
            self.real.submit(rows, together=True)

    def collect(self) -> bytes:
        done = np.frombuffer(self.real.collect(), COMPLETION).copy()
        for completion in done:
            with self._lock:
                row = dict(
                    zip(TRANSFER_COLUMNS, self._rows.pop(int(completion["tag"])), strict=True)
                )
            if completion["result"] > 0:
                arena, headers = self._memory
                completion["result"] = self._faults.outcome(
                    "read" if row["operation"] == READ else "write",
                    int(completion["result"]),
                    arena[row["offset"] :][: row["length"]],
                    headers[row["header_offset"] :][: row["header_length"]],
                )
        return done.tobytes()

    def pin(self, offset: int, length: int) -> int:
        if self._faults.pin_error:
            return self._faults.pin_error
        answer = int(self.real.pin(offset, length))
        if not answer:
            self.pinned.append((offset, length))
        return answer

    def unpin(self, offset: int, length: int) -> None:
        self.real.unpin(offset, length)
        self.pinned = [p for p in self.pinned if p[0] + p[1] <= offset or offset + length <= p[0]]

    def add_file(self, descriptor: int) -> int:
        if self._faults.full:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return int(self.real.add_file(descriptor))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


class RingFaultIO(RingIO):
    """Rings in `rings`, in the order in which they were made, without those of a probe. Each list
    holds a fault for each coming transfer: an error number, `SHORT`, or None for none."""

    def __init__(self) -> None:
        self.reads: list[int | None] = []
        self.writes: list[int | None] = []
        self.hangs = False
        self.full = False
        self.pin_error = 0
        self.rings: list[FaultyRing] = []
        self.seen: list[tuple[str, str]] = []
        """What the storage noticed: operation and fault."""
        self.calls = 0
        """Transfers of pages by calls."""

    def outcome(self, operation: str, result: int, payload: Any, header: Any) -> int:
        faults = self.reads if operation == "read" else self.writes
        fault = faults.pop(0) if faults else None
        if fault is None:
            return result
        return result - 4096 if fault == SHORT else -fault

    def ring(self, arena: Any, headers: Any = None, **settings: int) -> Any:
        made = super().ring(arena, headers, **settings)
        if headers is None:
            return made
        self.rings.append(FaultyRing(self, made, arena, headers))
        return self.rings[-1]

    def noticed(self, operation: str, fault: str, count: int = 1) -> None:
        self.seen += [(operation, fault)] * count

    def read(self, fd: int, buffers: Any, offset: int) -> int:
        self.calls += len(buffers) > 1
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Any, offset: int) -> int:
        self.calls += len(buffers) > 1
        return super().write(fd, buffers, offset)
