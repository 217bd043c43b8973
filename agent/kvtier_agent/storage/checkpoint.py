"""Checkpoints: the journal made short again, in the background.

    1. a new log is begun, and events go there
    2. the old checkpoint is read in pieces, the closed logs are merged into it (`merge`, what
       recovery uses too), and the result is written to a file with a name of its own
    3. flushed, renamed, the folder flushed: from here on it counts
    4. what it replaces is removed

A try that fails is repeated. Where that goes on for half a minute, what the drive refuses to give
in step 2 is left out: a restart could read no more than the rest, and without checkpoints the logs
grow until nothing can be stored any more. Then the new file may also take more than is set aside,
since logs may have filled that: once it counts, it gives back more.

A crash between any two steps leaves either the old checkpoint with all its logs or the new one with
the logs from it on. Nothing is held in memory but the logs (a share of a checkpoint) and one piece.
No event waits for any of it, except for the exchange of one descriptor in step 1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from kvtier_agent.storage.journal import Journal
from kvtier_agent.storage.journal_files import (
    BLOCK,
    TEMPORARY,
    GrowingFile,
    JournalFullError,
    checkpoint_name,
)
from kvtier_agent.storage.journal_format import (
    CHECKPOINT_MAGIC,
    FRAME_EVENTS,
    NO_EVENTS,
    Events,
    end_frame,
    frame,
)
from kvtier_agent.storage.journal_reader import JournalFile, Live, readable, unseen
from kvtier_agent.storage.journal_replay import merge
from kvtier_agent.storage.mover import STUCK_SECONDS, Start
from kvtier_agent.storage.volume_health import LASTING_SECONDS, OWN_LIMITS
from kvtier_agent.supervise import Heart

LOOK_SECONDS = 0.5
RETRY_SECONDS = 5.0
MANY_TRIES = 3
"""So many in a row that failed are more than a hiccup."""

log = structlog.get_logger("kvtier.storage.checkpoint")


class OldFileError(OSError):
    """A file that is to be merged cannot be read."""


def write_checkpoint(
    journal: Journal, live: Live = unseen, *, whole: bool = True, within: bool = True
) -> None:
    """All four steps. `live` is called with the bytes of each piece, read and written alike.
    `whole`: what cannot be read is an error, else it is left out; `within`: no more room is taken
    than is set aside. Raises OSError (OldFileError where it is the files that are there; or what
    `live` raises): the journal goes on with its logs."""
    with journal.turn:
        if journal.gone:
            return
        more = 0 if within else journal.bytes_to_expect + 4 * BLOCK
        with journal.space.beyond(more):
            new = _begin(journal)
            try:
                journal.rotate()
            except BaseException:
                journal.discard(new)
                raise
        try:
            count = 0
            for events in _full_frames(_merged(journal, live, whole=whole)):
                new.append(frame(events, new.nonce, new.end))
                count += len(events)
                live(events.nbytes)
            new.append(end_frame(count, new.nonce, new.end))
            new.shrink()
            journal.io.flush(new.fd)
            path = new.path.with_name(checkpoint_name(new.number))
            journal.io.rename(new.path, path)
            new.path = path
            journal.io.flush_folder(journal.folder)
        except BaseException:
            journal.discard(new)
            raise
        journal.io.close(new.fd)
        journal.replace_old(path.name, new.taken)


def _begin(journal: Journal) -> GrowingFile:
    """The new file, with room for all it may hold: before the rotation, so that a tier without room
    does not fill with logs instead. Raises OSError."""
    number = journal.number + 1
    new = None
    try:
        name = checkpoint_name(number) + TEMPORARY
        new = journal.create(name, CHECKPOINT_MAGIC, number, BLOCK)
        new.reserve(journal.bytes_to_expect)
    except OSError:
        if new is not None:
            journal.discard(new)
        if journal.failed:
            journal.rotate()  # that at least: the live log takes no more events
        raise
    return new


def _merged(journal: Journal, live: Live, *, whole: bool) -> Iterator[Events]:
    """New records from the old files, whole segments at a time."""
    parts: list[Events] = []
    for name in sorted(journal.old.logs):
        parts += _events(journal, name, live, whole=whole)
    events = np.concatenate(parts) if parts else NO_EVENTS
    per_segment = journal.identity.per_segment
    if journal.old.checkpoint is None:
        yield from merge((), events, per_segment)
        return
    records = _events(journal, journal.old.checkpoint, live, whole=whole)
    yield from merge(records, events, per_segment)


def _events(journal: Journal, name: str, live: Live, *, whole: bool) -> Iterator[Events]:
    """Of one old file. Raises OldFileError; unless `whole`, only for limits of our own."""
    lost: int | None = None
    try:
        with JournalFile(journal.folder / name, journal.io) as file:
            yield from (file.events(live) if whole else readable(file, live))
            if file.unreadable:
                lost = file.dropped_bytes
    except OSError as error:
        if whole or error.errno in OWN_LIMITS:
            raise OldFileError(error.errno, error.strerror or str(error)) from error
        lost = journal.old.bytes_of(name)
    if lost is not None:
        log.error(
            "a part of the journal cannot be read; the pages it names are lost at the next start",
            file=str(journal.folder / name), bytes=lost,
        )  # fmt: skip


def _full_frames(parts: Iterable[Events]) -> Iterator[Events]:
    """The same events in pieces that fill a frame."""
    held = NO_EVENTS
    for part in parts:
        held = np.concatenate([held, part]) if len(held) else part
        while len(held) >= FRAME_EVENTS:
            yield held[:FRAME_EVENTS]
            held = held[FRAME_EVENTS:]
    if len(held):
        yield held


@dataclass(frozen=True, slots=True)
class Failed:
    """Tries of one journal that failed in a row, the first at `since`, the last with `error` (not
    that the logs have used up the room: that follows from the others); `unread` of them because of
    what was to be merged."""

    times: int = 0
    since: float = 0.0
    unread: int = 0
    error: OSError | None = None

    def again(self, now: float, error: OSError) -> Failed:
        """One more."""
        unread = isinstance(error, OldFileError) and error.errno not in OWN_LIMITS
        since = self.since if self.times else now
        if isinstance(error, JournalFullError) and self.error is not None:
            error = self.error
        return Failed(self.times + 1, since, self.unread + unread, error)

    def lasting(self, now: float) -> bool:
        """Is it more than a hiccup?"""
        return self.times >= MANY_TRIES and now - self.since >= LASTING_SECONDS


class Checkpointer:
    """The loop that writes checkpoints when they are due. `journals`: those of the tier now."""

    def __init__(
        self,
        journals: Callable[[], list[Journal]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, monotonic."""
        self._journals = journals
        self._clock = clock
        self._heart = Heart(time.monotonic)
        self.checkpoints = 0
        self.failures = 0
        self.error = ""
        """Why the last one failed; empty after one that did not."""
        self._failed: dict[Path, Failed] = {}

    def trouble(self, folder: Path) -> OSError | None:
        """Why the journal in this folder can have no checkpoint; None: it can, or it is not yet
        certain. Any thread."""
        failed = self._failed.get(folder)
        return None if failed is None or failed.times < MANY_TRIES else failed.error

    def start(self, start: Start | None, name: str) -> None:
        """Run the loop: under a supervisor, if there is one, else until `close`."""
        if start is not None:
            start(name, self.run)
            return
        threading.Thread(target=self.run, args=(self._heart,), name=name, daemon=True).start()

    def close(self) -> None:
        """End a loop that no supervisor ends. Never waits."""
        self._heart.stopping.set()

    def tend(self) -> None:
        """Write what is due, on the caller's thread: for a tier without threads."""
        self.step(self._heart)

    def run(self, heart: Heart) -> None:
        """A supervised loop."""
        while not heart.wait(LOOK_SECONDS):
            if self.step(heart):
                continue
            urgent = any(journal.failed for journal in self._journals())
            if heart.wait(LOOK_SECONDS if urgent else RETRY_SECONDS):
                return

    def step(self, heart: Heart) -> bool:
        """Write what is due. False: something failed, and is to be tried again later."""
        good = True
        # One that takes no events comes first: a long checkpoint of another must not keep it so.
        for journal in sorted(self._journals(), key=lambda one: not one.failed):
            if not journal.due:
                self._failed.pop(journal.folder, None)
                continue
            before = self._failed.get(journal.folder, Failed())
            try:
                with heart.allowing(STUCK_SECONDS):
                    patient = not before.lasting(self._clock())
                    whole = patient or before.unread < MANY_TRIES
                    pace = _Pace(journal, heart)
                    write_checkpoint(journal, pace, whole=whole, within=patient)
            except _StoppedError:
                continue
            except OSError as error:
                good = False
                self.failures += 1
                self._failed[journal.folder] = before.again(self._clock(), error)
                text = f"{journal.folder}: {error.strerror or error}"
                if text != self.error:
                    log.warning("no checkpoint", folder=str(journal.folder), error=str(error))
                self.error = text
            else:
                self.checkpoints += 1
                self.error = ""
                self._failed.pop(journal.folder, None)
        return good


class _StoppedError(Exception):
    """The journal or the process is closing."""


class _Pace:
    """Beats, waits so that no more than the journal's bytes per second pass, stops when asked."""

    def __init__(self, journal: Journal, heart: Heart) -> None:
        self._journal = journal
        self._heart = heart

    def __call__(self, count: int) -> None:
        seconds = count / self._journal.settings.bytes_per_second
        if self._heart.wait(seconds) or self._journal.gone:
            raise _StoppedError
