"""Reading a journal back: file by file, in pieces, stopping cleanly where a file is torn.

Which files count: the checkpoint with the highest number whose header is whole, and all logs from
that number on. A crash between any two steps of a checkpoint leaves files that this rule ignores.
A log that is torn ends early, and the next log is read all the same: what is missing in between is
covered by the generations (see `journal_replay`) and, at last, by the checksum of each page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal import Old
from kvtier_agent.storage.journal_files import CHECKPOINT_NAME, LOG_NAME
from kvtier_agent.storage.journal_format import (
    CHECKPOINT_MAGIC,
    HEADER_BYTES,
    LOG_MAGIC,
    NO_EVENTS,
    Events,
    FileHeader,
    Identity,
    Scanner,
)
from kvtier_agent.storage.journal_replay import generations_of, merge, pages_of

READ_BYTES = 4 << 20

Live = Callable[[int], None]
"""Called with the bytes that were read or written just now; may wait, and may raise to stop."""


def unseen(_bytes: int) -> None:
    """Nobody watches."""


class JournalFile:
    """One log or checkpoint, open for reading. `header`: None when it has none that is whole."""

    def __init__(self, path: Path, io: FileIO) -> None:
        """Raises OSError, and NewerFormatError when a newer version wrote it."""
        self.path = path
        self.dropped_bytes = 0
        """After reading: bytes from the first frame that is short or wrong to the last that is not
        zero (room that was laid out ahead is zero)."""
        self.complete = False
        """After reading a checkpoint: was its last frame there?"""
        self.unreadable = False
        """Did the drive refuse a part of it?"""
        self._io = io
        self._fd, _ = io.open(path, create=False, direct=False)
        try:
            self.held_bytes = io.allocated(self._fd)
            self._buffer = np.zeros(READ_BYTES, dtype=np.uint8)
            self.header = FileHeader.decode(self._read(0, HEADER_BYTES))
            self.good_bytes = HEADER_BYTES if self.header else 0
        except BaseException:
            io.close(self._fd)
            raise

    def __enter__(self) -> JournalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._io.close(self._fd)

    def events(self, live: Live = unseen) -> Iterator[Events]:
        """Its events, some megabytes at a time. Raises OSError where it cannot be read."""
        if self.header is not None:
            scanner = Scanner(self.header.nonce)
            at = HEADER_BYTES
            while not scanner.ended:
                data = self._read(at, READ_BYTES)
                if not data:
                    break
                live(len(data))
                at += len(data)
                some = scanner.feed(data)
                self.good_bytes = scanner.offset
                if len(some):
                    yield some
            self.complete = scanner.complete
        self._measure()

    def cut(self) -> None:
        """Shorten the file to what could be read of it. Raises OSError."""
        self._io.truncate(self._fd, self.good_bytes)
        self.held_bytes = self._io.allocated(self._fd)

    def _read(self, offset: int, count: int) -> bytes:
        done = self._io.read(self._fd, [self._buffer[:count]], offset)
        return self._buffer[:done].tobytes()

    def _measure(self) -> None:
        at = last = self.good_bytes
        while data := self._read(at, READ_BYTES):
            used = np.flatnonzero(np.frombuffer(data, dtype=np.uint8))
            if used.size:
                last = at + int(used[-1]) + 1
            at += len(data)
        self.dropped_bytes = last - self.good_bytes


@dataclass(slots=True)
class Contents:
    """What a folder's journal says."""

    pages: list[Events] = field(default_factory=list)
    """The PUTs of its records, one per page, in parts."""
    generations: dict[int, int] = field(default_factory=dict)
    """Segment -> its newest one."""
    old: Old = field(default_factory=Old)
    """The files it was read from."""
    number: int = 1
    """The first number that no file has."""
    stale: list[str] = field(default_factory=list)
    """Files that a checkpoint has replaced, or that nobody finished."""
    dropped_bytes: int = 0
    """Behind the first damaged frame of each file."""
    reason: str = ""
    """Why there is nothing, if files are there that cannot be used."""

    def keep(self, records: Iterable[Events]) -> None:
        """Records as `merge` gives them, of which no more than a part is held at a time."""
        for part in records:
            self.generations.update(generations_of(part))
            self.pages.append(pages_of(part))


def read_journal(
    folder: Path, identity: Identity, io: FileIO, live: Live = unseen, *, whole: bool = False
) -> Contents:
    """Everything, merged. `whole`: a part that the drive refuses is an error too, else what comes
    before it is used. Raises NewerFormatError, before anything is touched, and OSError."""
    events_of = JournalFile.events if whole else readable
    found = Contents()
    names = io.names(folder)
    checkpoints = {int(m[1]): n for n in names if (m := CHECKPOINT_NAME.fullmatch(n))}
    logs = {int(m[1]): n for n in names if (m := LOG_NAME.fullmatch(n))}
    found.number = max((0, *checkpoints, *logs)) + 1
    headers: dict[str, FileHeader | None] = {}
    for name in (*checkpoints.values(), *logs.values()):
        with JournalFile(folder / name, io) as file:
            headers[name] = file.header
    others = [h for h in headers.values() if h is not None and h.identity != identity]
    if others:
        theirs = others[-1].identity
        found.reason = (
            f"its journal is about other pages: {theirs.per_segment} slots of {theirs.stride}"
            f" bytes per segment instead of {identity.per_segment} of {identity.stride}"
            if theirs.fingerprint == identity.fingerprint
            else "its journal is about pages of another model or layout"
        )
        return found
    sound = [n for n, name in checkpoints.items() if _is(headers[name], CHECKPOINT_MAGIC, n)]
    base = max(sound, default=0)
    wanted = [logs[n] for n in sorted(logs) if n >= base]
    parts: list[Events] = []
    for name in wanted:
        with JournalFile(folder / name, io) as file:
            if not _is(file.header, LOG_MAGIC, None):
                file.header = None
            parts += events_of(file, live)
            found.dropped_bytes += file.dropped_bytes
            if file.dropped_bytes and not file.unreadable:
                with contextlib.suppress(OSError):
                    file.cut()
            found.old.logs[name] = file.held_bytes
    events = np.concatenate(parts) if parts else NO_EVENTS
    if base:
        name = checkpoints[base]
        with JournalFile(folder / name, io) as file:
            found.keep(merge(events_of(file, live), events, identity.per_segment))
            found.dropped_bytes += file.dropped_bytes
            found.old.checkpoint, found.old.checkpoint_bytes = name, file.held_bytes
    else:
        found.keep(merge((), events, identity.per_segment))
    used = {name for name, _ in found.old.files()}
    found.stale = [name for name in headers if name not in used]
    return found


def readable(file: JournalFile, live: Live) -> Iterator[Events]:
    """Its events up to where it cannot be read."""
    try:
        yield from file.events(live)
    except OSError:
        file.unreadable = True
        file.dropped_bytes = max(0, file.held_bytes - file.good_bytes)


def _is(header: FileHeader | None, magic: bytes, number: int | None) -> bool:
    return header is not None and header.magic == magic and number in (None, header.number)
