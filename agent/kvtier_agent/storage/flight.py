"""One move under way through rings: which of its pages are where, and what became of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.moves import Move, MoveKind, MoveStatus
from kvtier_agent.cache.progress import Units
from kvtier_agent.native import READ, TRANSFER_COLUMNS, WRITE
from kvtier_agent.storage.drive_ring import DriveRing
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.io_errors import name_of
from kvtier_agent.storage.l2 import L2
from kvtier_agent.storage.page_write import PageWrite, Run
from kvtier_agent.storage.segment import Segment, SegmentGoneError
from kvtier_agent.storage.trays import Tray

SENT_BACK = (-errno.EINVAL, -errno.EAGAIN, -errno.EINTR, -errno.ENOMEM, -errno.EOPNOTSUPP)
"""Errors of io_uring, or of O_DIRECT, rather than of the drive: a call tries the same again."""

OPERATION, FILE, FILE_OFFSET, OFFSET, TAG = (
    TRANSFER_COLUMNS.index(c) for c in ("operation", "file", "file_offset", "offset", "tag")
)

Where = NDArray[np.intp]


class Flight:
    """Arrays have an element a page. `results`: bytes moved, or -errno; `left`: transfers that
    have not ended; `seconds`: what the drive took."""

    __slots__ = (
        "counted", "drives", "error", "l2", "left", "move", "results", "rows", "runs", "seconds",
         "segments", "started", "status", "submitted", "tray", "tried", "under_way", "writing",
    )  # fmt: skip

    def __init__(self, move: Move, l2: L2, tray: Tray, started: float) -> None:
        count = len(move)
        self.move, self.l2, self.tray, self.started = move, l2, tray, started
        self.status = np.zeros(count, dtype=np.uint8)
        self.error = ""
        self.results = np.zeros(count, dtype=np.int64)
        self.tried = np.zeros(count, dtype=bool)
        self.under_way = np.zeros(count, dtype=bool)
        """Pages whose transfer has not ended."""
        self.submitted = started
        self.rows = tray.rows[:count]
        """Of `native.TRANSFER_COLUMNS`."""
        self.segments: list[tuple[Where, Segment, int]] = []
        """In use until the end; from which of their slots on the pages lie."""
        self.drives: list[DriveRing] = []
        """Of each of those."""
        self.runs: list[Run] = []
        self.writing: PageWrite | None = None
        self.left = 0
        self.seconds = 0.0
        self.counted: set[int] = set()
        """Pages whose error was counted where it was raised."""

    def add(self, where: Where, segment: Segment, first: int, drive: DriveRing, file: int) -> None:
        """These pages lie, or will, in a segment from slot `first` on; `file`: by which number the
        drive's ring knows it."""
        self.segments.append((where, segment, first))
        self.drives.append(drive)
        # A run of neighbours is one of the batch as well.
        here = slice(int(where[0]), int(where[0]) + where.size)
        self.tried[here] = self.under_way[here] = True
        stride = self.l2.stride
        self.rows[here, FILE] = file
        self.rows[here, FILE_OFFSET] = np.arange(
            first * stride, (first + where.size) * stride, stride, dtype=np.uint64
        )

    def fill(self, tag: np.uint64) -> None:
        """The rows of all transfers, tagged from `tag` on by their numbers."""
        move, rows = self.move, self.rows
        reads = move.kind is MoveKind.READ
        rows[:, OPERATION] = READ if reads else WRITE
        memory = move.target if reads else move.source
        np.multiply(memory, np.uint64(move.slot_bytes), out=rows[:, OFFSET])
        np.add(np.arange(len(move), dtype=np.uint64), tag, out=rows[:, TAG])

    def numbers(self) -> Where:
        """Of all transfers."""
        return np.flatnonzero(self.tried)

    def batches(self) -> Iterator[tuple[DriveRing, Where]]:
        """Numbers of the transfers that each drive is given at a time, in this order."""
        yield from self.by_drive()

    def transfers(self, numbers: Where) -> NDArray[np.uint64]:
        """The rows of some transfers."""
        return self.rows[numbers] if numbers.size < len(self.rows) else self.rows

    def news(self, arena: NDArray[np.uint8]) -> Units | None:
        """What is to be told of pages before all of them have landed; None: nothing new."""
        return None

    def by_drive(self) -> list[tuple[DriveRing, Where]]:
        """Which pages go to which drive."""
        found: dict[DriveRing, list[Where]] = {}
        for (where, _, _), drive in zip(self.segments, self.drives, strict=True):
            found.setdefault(drive, []).append(where)
        return [(drive, np.concatenate(parts)) for drive, parts in found.items()]

    def waits_for(self, drive: DriveRing) -> bool:
        """Has a transfer of this drive not ended?"""
        here = zip(self.segments, self.drives, strict=True)
        return any(its is drive and self.under_way[where].any() for (where, _, _), its in here)

    def fail(self, where: Where, status: MoveStatus, error: str) -> None:
        """These pages are not moved."""
        self.status[where] = status
        self.error = self.error or error

    def ended(self, pages: Where, results: Any) -> bool:
        """Transfers of these numbers (here, of pages) have ended; have all of them?"""
        self.results[pages] = results
        self.under_way[pages] = False
        self.left -= pages.size
        return self.left == 0

    @property
    def light(self) -> bool:
        """Can it be finished without waiting for a drive?"""
        return self.move.kind is MoveKind.READ and not self._sent_back().any()

    def leave(self) -> None:
        """Its segments may be closed."""
        while self.segments:
            self.segments.pop()[1].leave()

    def outcome(self, arena: NDArray[np.uint8], io: FileIO) -> tuple[NDArray[np.uint8], str]:
        """All transfers have ended: status per page, and the first error. `arena` by slots."""
        self._repeat(arena)
        if self.move.kind is MoveKind.READ:
            return self._landed(arena, io)
        return self._written(io)

    def _sent_back(self) -> NDArray[np.bool_]:
        """Transfers that a call is to try again."""
        failed = self.results < 0
        return np.isin(self.results, SENT_BACK) if failed.any() else failed

    def _repeat(self, arena: NDArray[np.uint8]) -> None:
        """What the ring sent back, page by page by calls."""
        back = self._sent_back()
        if not back.any():
            return
        reads = self.move.kind is MoveKind.READ
        slots = self.move.target if reads else self.move.source
        for where, segment, first in self.segments:
            for i in np.flatnonzero(back[where]).tolist():
                page = int(where[i])
                call = segment.read if reads else segment.write
                header = self.tray.headers.bytes[page : page + 1]
                try:
                    call(first + i, header, self.l2.payloads(arena, slots[page : page + 1]))
                    self.results[page] = self.l2.stride
                except OSError as error:
                    self.counted.add(page)
                    self.results[page] = -(error.errno or errno.EIO)

    def _landed(self, arena: NDArray[np.uint8], io: FileIO) -> tuple[NDArray[np.uint8], str]:
        move = self.move
        for page in np.flatnonzero(self.tried & (self.results != self.l2.stride)).tolist():
            error = self._error(page, "read", io)
            status = MoveStatus.IO_ERROR
            if isinstance(error, SegmentGoneError):
                status = MoveStatus.CANCELLED
            self.fail(np.array([page]), status, f"read: {error.strerror}")
        return self.l2.verify(
            self.tray.headers, move.source, move.keys, move.checksums, arena, move.target,
            self.status, self.error,
        )  # fmt: skip

    def _written(self, io: FileIO) -> tuple[NDArray[np.uint8], str]:
        assert self.writing is not None
        for run in self.runs:
            failed = self.results[run.where] != self.l2.stride
            if failed.any():
                errors = [self._error(page, "write", io) for page in run.where[failed].tolist()]
                self.writing.settle(run, errors[0], failed)
            else:
                self.writing.settle(run)
        return self.writing.status, self.writing.error

    def _error(self, page: int, what: str, io: FileIO) -> OSError:
        """Why the transfer of a page failed."""
        result = int(self.results[page])
        if result == -errno.ECANCELED:
            return SegmentGoneError(errno.ECANCELED, "it was called back")
        if result < 0:
            error = OSError(-result, os.strerror(-result))
            if page not in self.counted:
                io.noticed(what, name_of(error))
            return error
        io.noticed(what, "short")
        return OSError(errno.EIO, f"short {what} of {result} instead of {self.l2.stride} bytes")
