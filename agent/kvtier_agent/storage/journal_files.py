"""The files of a journal: their names, how large they may get, and how one is written.

Space is taken before it is written to, in steps, so that the tier's cap holds whatever happens and
a full drive is found out before an event is half written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal_format import EVENT, FileHeader, Identity

BLOCK = 4096
FEW_SEGMENTS = 128
"""Small tiers are cut into so many segments, whatever a full segment holds."""
LOG_NAME = re.compile(r"journal-(\d{8})\.log")
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d{8})\.kv")
TEMPORARY = ".new"


def log_name(number: int) -> str:
    return f"journal-{number:08d}.log"


def checkpoint_name(number: int) -> str:
    return f"checkpoint-{number:08d}.kv"


def is_journal_file(name: str) -> bool:
    """Is this a log or a checkpoint?"""
    return bool(LOG_NAME.fullmatch(name) or CHECKPOINT_NAME.fullmatch(name))


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """How large a log grows. Raises ValueError for a value out of its bounds."""

    log_percent: int = 25
    """Size of the live log, in percent of the last checkpoint, at which the next checkpoint is
    due: 5 to 100. Less: shorter recovery, more bytes written by checkpoints."""
    least_log_bytes: int = 1 << 20
    """No checkpoint is due below this: 4 KiB to 1 GiB. A tier of less than 256 times as much takes
    a 256th of its own size."""
    bytes_per_second: int = 64 << 20
    """Pace of a checkpoint, reading and writing together: 1 MiB/s to 16 GiB/s."""

    def __post_init__(self) -> None:
        bounds = {
            "log_percent": (5, 100),
            "least_log_bytes": (BLOCK, 1 << 30),
            "bytes_per_second": (1 << 20, 16 << 30),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}; give {low} to {high}")

    def least_log(self, cap_bytes: int) -> int:
        """The least log of a tier of `cap_bytes`, whole blocks."""
        return max(BLOCK, min(self.least_log_bytes, cap_bytes // 256) // BLOCK * BLOCK)

    def log_limit(self, checkpoint_bytes: int, cap_bytes: int) -> int:
        """Bytes of logs at which a checkpoint is due."""
        return max(self.least_log(cap_bytes), checkpoint_bytes * self.log_percent // 100)

    def checkpoint_bytes(self, slots: int, per_segment: int) -> int:
        """A checkpoint of a tier in which every slot is in use, but for its last block."""
        segments = slots // per_segment + min(slots, FEW_SEGMENTS)
        return (slots + segments) * (EVENT.itemsize + 1)

    def space_bytes(self, slots: int, per_segment: int, volumes: int, cap_bytes: int) -> int:
        """What the journals of a tier of so many slots may take: the old checkpoint and the logs
        that are due to be merged, as much again for the new one, which is laid out before it is
        known how much shorter it will be, and a live log meanwhile. Per volume the least logs and
        the last blocks of files."""
        checkpoint = self.checkpoint_bytes(slots, per_segment)
        each = 3 * self.least_log(cap_bytes) + 8 * BLOCK
        return checkpoint * (200 + 3 * self.log_percent) // 100 + volumes * each


class JournalFullError(OSError):
    """What is set aside of the tier for its journals is used up: no volume's fault."""


class Space:
    """Bytes that the journals of one L2 take together, and may take. Thread-safe."""

    def __init__(self, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._beyond = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> bool:
        """May `count` bytes more be taken? Then they are."""
        with self._lock:
            if self.used_bytes + count > self.limit_bytes + self._beyond:
                return False
            self.used_bytes += count
            return True

    @contextlib.contextmanager
    def beyond(self, count: int) -> Iterator[None]:
        """Meanwhile so many bytes more than the limit may be taken, by whoever comes."""
        with self._lock:
            self._beyond += count
        try:
            yield
        finally:
            with self._lock:
                self._beyond -= count

    def add(self, count: int) -> None:
        """Bytes that are there whatever the limit, or (negative) given back."""
        with self._lock:
            self.used_bytes += count


@dataclass(slots=True, eq=False)
class GrowingFile:
    """A log or checkpoint that is being written. Space is taken before it is written to."""

    path: Path
    magic: bytes
    number: int
    identity: Identity
    nonce: int
    fd: int
    io: FileIO
    space: Space
    step: int
    end: int = 0
    """Where the next frame goes."""
    laid: int = 0
    """Bytes that have blocks."""
    taken: int = 0
    """Bytes of `space` that this file holds."""
    synced: int = 0
    syncing: bool = False
    failed: bool = False

    @classmethod
    def create(
        cls, path: Path, magic: bytes, number: int, identity: Identity, io: FileIO, space: Space,
        step: int,
    ) -> GrowingFile:  # fmt: skip
        """A new file, still without its header. Raises OSError."""
        nonce = int.from_bytes(os.urandom(8), "little")
        fd, _ = io.open(path, create=True, direct=False)
        return cls(path, magic, number, identity, nonce, fd, io, space, step)

    def begin(self) -> None:
        """Write the header. Raises OSError."""
        self.io.truncate(self.fd, 0)  # a step that was cut short may have left something
        header = FileHeader(self.magic, self.identity, self.number, self.nonce)
        self.append(header.encode())

    def append(self, data: bytes) -> None:
        """Write `data` at the end. Raises OSError, and then the end is where it was."""
        self.reserve(self.end + len(data))
        done = self.io.write(self.fd, [data], self.end)
        if done != len(data):
            self.io.noticed("write", "short")
            raise OSError(errno.EIO, f"short write of {done} instead of {len(data)} bytes")
        self.end += len(data)

    def shrink(self) -> None:
        """Give back what was laid out and not written to."""
        with contextlib.suppress(OSError):
            self.io.truncate(self.fd, self.end)
            self.laid = self.end
            self._count()

    def reserve(self, size: int) -> None:
        """Lay out the file's first `size` bytes. Raises OSError (ENOSPC)."""
        need = size - self.laid
        if need <= 0:
            return
        for step in (self.step, BLOCK):
            more = -(-need // step) * step
            if self.space.take(more):
                break
        else:
            raise JournalFullError(errno.ENOSPC, "the journal's part of the tier is full")
        self.taken += more
        try:
            self.io.allocate(self.fd, self.laid, more)
            self.laid += more
        finally:
            self._count()

    def _count(self) -> None:
        """Hold what the file really takes: a file system rounds up, and allocates in part."""
        really = self.io.allocated(self.fd)
        self.space.add(really - self.taken)
        self.taken = really
