"""The journal of one volume: which page lies in which slot of L2, written down as it happens.

Files in the volume's folder, so that a volume that is lost takes its journal along:

    journal-N.log       events (`journal_format`), appended; the one with the highest N is live
    checkpoint-N.kv     what all logs below N said (`checkpoint.py`)

Order, and with it the promise (`sync`: durability is `sync`):

    a page      bytes -> (sync: flushed) -> PUT -> (sync: log flushed) -> the page counts as stored
    reuse       RESET -> log flushed -> the first byte into a segment that was in use before
    giving up   DEL; nothing waits for it. A page that comes back after a crash is a valid page: it
                is verified by key and checksum when it is read

Several threads that wait for a flush share one (group commit): who comes first flushes for all that
have appended by then, who comes during that flush waits for the next.

What can go wrong: an event that cannot be appended raises, and whatever was written before it
counts as not stored; the next append overwrites what a failed one left. After a flush that failed
the kernel may forget what it could not write, so that log takes no more events: they raise until
the next checkpoint step has begun a new one. Nothing here is called on the cache thread.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal_files import (
    BLOCK,
    GrowingFile,
    JournalSettings,
    Space,
    log_name,
)
from kvtier_agent.storage.journal_format import (
    HEADER_BYTES,
    LOG_MAGIC,
    Events,
    Identity,
    deletions,
    frame,
    in_frames,
    puts,
    resets,
)
from kvtier_agent.storage.segment import PageStamp, SegmentGoneError

MANY_LOGS = 8
"""Restarts leave a log each; so many make a checkpoint due, however short they are."""


@dataclass(slots=True)
class Old:
    """Files that the next checkpoint replaces, with their bytes of blocks."""

    checkpoint: str | None = None
    logs: dict[str, int] = field(default_factory=dict)
    checkpoint_bytes: int = 0

    def files(self) -> list[tuple[str, int]]:
        """(name, bytes): the checkpoint, then the logs in their order."""
        first = [(self.checkpoint, self.checkpoint_bytes)] if self.checkpoint else []
        return [*first, *sorted(self.logs.items())]

    def bytes_of(self, name: str) -> int:
        """Bytes of blocks that one of them takes."""
        return dict(self.files()).get(name, 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks they take."""
        return self.checkpoint_bytes + sum(self.logs.values())


class Journal:
    """Thread-safe. `turn` is held by whoever rotates, checkpoints or closes, never for an event."""

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        io: FileIO,
        space: Space,
        settings: JournalSettings | None = None,
        *,
        cap_bytes: int = 0,
        old: Old | None = None,
        number: int = 1,
    ) -> None:
        """Begins log `number`. `old`: what is in the folder already, below that number.
        `cap_bytes`: of the tier. Raises OSError."""
        self.folder = folder
        self.identity = identity
        self.io = io
        self.space = space
        self.settings = settings or JournalSettings()
        self.cap_bytes = cap_bytes
        self.slots = 0
        """Of the tier, at most; 0: not known."""
        self.old = old or Old()
        self.leftover: dict[str, int] = {}
        """Files to be removed, with their bytes of blocks."""
        self.turn = threading.Lock()
        self._changed = threading.Condition()
        self._gone = False
        self._log = self._begin(number)
        space.add(self.old.held_bytes)

    # -- events -----------------------------------------------------------------------------

    def put(
        self,
        slots: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        stamp: PageStamp,
        sequence: int,
        *,
        lasting: bool,
    ) -> None:
        """The pages' bytes are in their slots. `lasting`: return when that survives a power cut.
        Raises OSError: the pages do not count as stored."""
        self._record(puts(slots, generations, stamp, sequence), lasting=lasting)

    def delete(self, slots: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """The slots hold no page any more. Raises OSError, which does no harm."""
        self._record(deletions(slots, generations), lasting=False)

    def reset(self, segment: int, generation: int) -> None:
        """The segment is about to be written anew; returns when that survives a power cut.
        Raises OSError: nothing may be written into it."""
        self._record(resets([segment], [generation]), lasting=True)

    def _record(self, events: Events, *, lasting: bool) -> None:
        log = None
        for part in in_frames(events):
            with self._changed:
                log = self._log
                if self._gone:
                    raise SegmentGoneError(errno.ENOENT, "the journal is gone with its volume")
                if log.failed:
                    raise OSError(errno.EIO, "the journal could not be flushed")
                log.append(frame(part, log.nonce, log.end))
                upto = log.end
        if lasting and log is not None:
            self._flush(log, upto)

    def _flush(self, log: GrowingFile, upto: int) -> None:
        """Return when the log's first `upto` bytes survive a power cut. Raises OSError."""
        with self._changed:
            while log.syncing and log.synced < upto:
                self._changed.wait()
            if log.synced >= upto:
                return
            if log.failed:
                raise OSError(errno.EIO, "the journal could not be flushed")
            log.syncing = True
            end = log.end
        failed = True
        try:
            self.io.flush(log.fd)
            failed = False
        finally:
            with self._changed:
                log.syncing = False
                log.failed |= failed
                if not failed:
                    log.synced = end
                self._changed.notify_all()

    # -- logs and their end -----------------------------------------------------------------

    @property
    def number(self) -> int:
        """Of the live log."""
        return self._log.number

    @property
    def gone(self) -> bool:
        """Was it closed?"""
        return self._gone

    @property
    def failed(self) -> bool:
        """Does the live log take no more events?"""
        return self._log.failed

    @property
    def bytes_to_merge(self) -> int:
        """Bytes that a checkpoint made now reads. For the thread that makes them."""
        return self.old.held_bytes + self._log.end

    @property
    def bytes_to_expect(self) -> int:
        """What a checkpoint made now takes at most, unless the tier has just become smaller."""
        full = self.settings.checkpoint_bytes(self.slots, self.identity.per_segment)
        merged = self.bytes_to_merge
        return BLOCK + (min(merged, full) if self.slots else merged)

    @property
    def due(self) -> bool:
        """Is it time for a checkpoint? For the thread that makes them."""
        written = self.bytes_to_merge - self.old.checkpoint_bytes - HEADER_BYTES
        limit = self.settings.log_limit(self.old.checkpoint_bytes, self.cap_bytes)
        due = self.failed or len(self.old.logs) >= MANY_LOGS or written > limit
        return due and not self._gone

    def rotate(self) -> int:
        """Begin a new log; its number. Holding `turn`. Raises OSError, and nothing has changed."""
        new = self._begin(self._log.number + 1)
        with self._changed:
            log, self._log = self._log, new
        self._finish(log)
        self.old.logs[log.path.name] = log.taken
        return new.number

    def replace_old(self, checkpoint: str, size: int) -> None:
        """This checkpoint (bytes of blocks, counted in `space` by now) stands for all there was
        before the live log. Holding `turn`."""
        before, self.old = self.old, Old(checkpoint, {}, size)
        self.leftover.update(before.files())
        self._sweep()

    def create(self, name: str, magic: bytes, number: int, step: int) -> GrowingFile:
        """A new file of the journal, with its header. Holding `turn`. Raises OSError."""
        self._sweep()
        self.space.add(-self.leftover.pop(name, 0))  # it is written over, and counted anew
        path = self.folder / name
        file = GrowingFile.create(path, magic, number, self.identity, self.io, self.space, step)
        try:
            file.begin()
        except OSError:
            self.discard(file)
            raise
        return file

    def discard(self, file: GrowingFile) -> None:
        """Close and remove it. Holding `turn`."""
        self.io.close(file.fd)
        self.leftover[file.path.name] = file.taken
        self._sweep()

    def remove_files(self, names: list[str]) -> None:
        """Files of the folder that count for nothing any more."""
        with self.turn:
            for name in names:
                with contextlib.suppress(OSError):
                    held = (self.folder / name).stat().st_blocks * 512
                    self.leftover[name] = held
                    self.space.add(held)
            self._sweep()

    def _sweep(self) -> None:
        """Remove what is not needed any more; what cannot go now counts, and is tried again."""
        for name, held in list(self.leftover.items()):
            try:
                self.io.unlink(self.folder / name)
            except FileNotFoundError:
                pass
            except OSError:
                continue
            del self.leftover[name]
            self.space.add(-held)

    def close(self, *, remove: bool = False) -> None:
        """No more events. `remove`: its files go too. May take as long as the drive does."""
        with self._changed:
            first, self._gone = not self._gone, True
        if not first:
            return
        with self.turn:
            self._finish(self._log)
            files = dict([(self._log.path.name, self._log.taken), *self.old.files()])
            if remove:
                # These and no others: the volume may be back by now, with a journal of its own.
                self.leftover.update(files)
                self._sweep()
                with contextlib.suppress(OSError):  # else a power cut may bring them back
                    self.io.flush_folder(self.folder)
                files = {}
            self.space.add(-sum(files.values()) - sum(self.leftover.values()))

    def _finish(self, log: GrowingFile) -> None:
        """Flush and close a log that gets no more events."""
        log.shrink()
        with contextlib.suppress(OSError):
            # What was promised is flushed already; who still waits is answered by this.
            self._flush(log, log.end)
        with self._changed:
            while log.syncing:
                self._changed.wait()
            self.io.close(log.fd)

    def _begin(self, number: int) -> GrowingFile:
        limit = self.settings.log_limit(self.old.checkpoint_bytes, self.cap_bytes)
        step = max(BLOCK, min(limit // 8, 1 << 20) // BLOCK * BLOCK)
        log = self.create(log_name(number), LOG_MAGIC, number, step)
        try:
            self.io.flush(log.fd)
            self.io.flush_folder(self.folder)
        except OSError:
            self.discard(log)
            raise
        log.synced = log.end
        return log
