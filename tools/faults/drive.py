"""A drive that fails at random, by a seed, and keeps account of what it did."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.segment import HEADER

SHORT, SLOW, FLIP = "short", "slow", "checksum"
"""Faults that are no error of the system, named as the agent counts them."""

FAULTS = {
    "open": ("EIO", "ENOSPC", "EROFS", SLOW),
    "write": ("EIO", "ENOSPC", "EROFS", SHORT, SLOW),
    "read": ("EIO", SHORT, SLOW, FLIP, FLIP),
    "allocate": ("EIO", "ENOSPC", SLOW),
    "flush": ("EIO", "ENOSPC", SLOW),
    "truncate": ("EIO",),
    "rename": ("EIO", "EROFS"),
    "unlink": ("EIO", "EROFS"),
}
"""Operation -> what may happen to one."""


@dataclass(frozen=True, slots=True)
class Chances:
    """`fault`: of one call, 0 to 1. `burst`: that a fault is the first of up to `longest_burst` of
    its kind, as of a drive that is full, read-only or gone. `slow_seconds`: how long a slow call
    takes; `most_slow`: so many and no more, since each costs that long."""

    fault: float = 0.01
    burst: float = 0.15
    longest_burst: int = 5
    slow_seconds: float = 30.0
    most_slow: int = 4


class FailingDrive(FileIO):
    """Works until `failing` is set. Thread-safe; what happens follows from the seed and from the
    order in which calls come.

    A fault is counted in `injected` by (operation, fault) when it happens: an error is raised
    instead of the call, a short transfer leaves out the last of its bytes, a slow one happens after
    a while, and a flipped bit is in what a good read brought, where it matters to the page.
    """

    def __init__(
        self, seed: int, chances: Chances, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.failing = False
        self.injected: Counter[tuple[str, str]] = Counter()
        self._chances = chances
        self._random = random.Random(seed)
        self._sleep = sleep
        self._lock = threading.Lock()
        self._segments: set[int] = set()
        self._burst: dict[str, tuple[str, int]] = {}

    def _draw(self, operation: str, without: tuple[str, ...] = ()) -> str:
        """What happens to this call; "" for nothing."""
        chances, chance = self._chances, self._random
        with self._lock:
            if not self.failing:
                return ""
            fault, left = self._burst.pop(operation, ("", 0))
            if not fault:
                if chance.random() >= chances.fault:
                    return ""
                kinds = [f for f in FAULTS[operation] if f not in without]
                new = [f for f in kinds if (operation, f) not in self.injected]
                fault = chance.choice(new or kinds)  # every kind once, to begin with
                if chance.random() < chances.burst:
                    left = chance.randint(1, chances.longest_burst - 1)
            if fault in without:
                return ""
            if fault == SLOW:
                slow = sum(n for (_, what), n in self.injected.items() if what == SLOW)
                if slow >= chances.most_slow:
                    return ""
                left = 0
            if left:
                self._burst[operation] = (fault, left - 1) if left > 1 else ("", 0)
            if fault != FLIP:
                self.injected[operation, fault] += 1
        if fault == SLOW:
            self._sleep(chances.slow_seconds)
        elif fault not in (SHORT, FLIP):
            raise OSError(getattr(errno, fault), "injected")
        return fault

    def open(self, path: Path, *, create: bool, direct: bool) -> tuple[int, bool]:
        if create:
            self._draw("open")
        fd, bypasses = super().open(path, create=create, direct=direct)
        with self._lock:
            (self._segments.add if direct else self._segments.discard)(fd)
        return fd, bypasses

    def write(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        if self._draw("write") == SHORT:
            return super().write(fd, _less(buffers), offset)
        return super().write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        pages = fd in self._segments and len(buffers) > 1
        # The end of a journal's file is short by nature, and nobody can tell a flipped bit of an
        # empty slot that is being tested from one that was written so.
        fault = self._draw("read", () if pages else (SHORT, FLIP))
        if fault == SHORT:
            return super().read(fd, _less(buffers), offset)
        done = super().read(fd, buffers, offset)
        if fault == FLIP:
            self._flip(buffers)
        return done

    def _flip(self, buffers: Sequence[Any]) -> None:
        """One bit of one page: header and payload by turns, a header's covered part only."""
        with self._lock:
            which = self._random.randrange(len(buffers))
            row = buffers[which]
            bit = self._random.randrange(8 * (len(row) if which % 2 else HEADER.itemsize))
            self.injected["read", FLIP] += 1
        row[bit // 8] ^= 1 << (bit % 8)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._draw("allocate")
        super().allocate(fd, offset, length)

    def flush(self, fd: int) -> None:
        self._draw("flush")
        super().flush(fd)

    def flush_folder(self, folder: Path) -> None:
        self._draw("flush")
        super().flush_folder(folder)

    def truncate(self, fd: int, length: int) -> None:
        self._draw("truncate")
        super().truncate(fd, length)

    def rename(self, source: Path, target: Path) -> None:
        self._draw("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._draw("unlink")
        super().unlink(path)

    def close(self, fd: int) -> None:
        with self._lock:
            self._segments.discard(fd)
        super().close(fd)


def _less(buffers: Sequence[Any]) -> Sequence[Any]:
    """The same without the last of them, or without the last block or half of the only one."""
    if len(buffers) > 1:
        return buffers[:-1]
    (only,) = buffers
    view = memoryview(only)
    return [view[: len(view) // 2 // 4096 * 4096 or max(1, len(view) // 2)]]
