"""The journals of one L2, a journal per volume: what `L2` tells them, and when there are any.

Durability `none` has no journal. A revision may turn it on or off at any time; that is carried out
by the next write, since the cache thread, where revisions come into force, waits for no drive.
Pages that were written before the journal began are in nobody's records: they are served until the
agent ends, and are not found again.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.settings import Durability
from kvtier_agent.storage.fileio import FileIO
from kvtier_agent.storage.journal import Journal, Old
from kvtier_agent.storage.journal_files import BLOCK, JournalSettings, Space
from kvtier_agent.storage.journal_format import Identity
from kvtier_agent.storage.journal_reader import Contents
from kvtier_agent.storage.segment import PageStamp, SegmentGoneError
from kvtier_agent.storage.volume import Volume

UNLIMITED = 1 << 62

Slots = NDArray[np.uint32]


class Journals:
    """Thread-safe. `generations`: of each segment that was ever written to, the newest."""

    def __init__(
        self, identity: Identity, io: FileIO, settings: JournalSettings | None = None
    ) -> None:
        self.identity = identity
        self.settings = settings or JournalSettings()
        self.space = Space(UNLIMITED)
        self.generations: dict[int, int] = {}
        self.start = 0
        """Which start of the tier this is, as the manifests of its volumes say (`manifest`)."""
        self.durability: Durability = "async"
        self.cap_bytes = 0
        self.slots = 0
        self.found: Slots = np.empty(0, dtype=np.uint32)
        """Slots of the pages found at start, until it is settled which of them are kept."""
        self._io = io
        self._held: dict[str, Journal] = {}
        self._left: dict[str, int] = {}
        """Volumes that left -> the first number that a journal on them may have again."""
        self._first: dict[str, int] = {}
        self._turn = threading.Lock()

    def set_aside(self, cap_bytes: int, slots: int, volumes: int, durability: Durability) -> int:
        """New limits; what of a tier of at most `slots` slots is for its journals, bytes. A tier
        that shrinks keeps room for the checkpoint by which its journals shrink too."""
        self.durability = durability
        self.cap_bytes, self.slots = cap_bytes, slots
        for journal in list(self._held.values()):
            journal.cap_bytes, journal.slots = cap_bytes, slots
        used = self.space.used_bytes
        limit = used
        if durability != "none":
            per_segment = self.identity.per_segment
            need = self.settings.space_bytes(slots, per_segment, volumes, cap_bytes)
            full = self.settings.checkpoint_bytes(slots, per_segment)
            limit = max(need, used + full + self.settings.log_limit(full, cap_bytes) + 4 * BLOCK)
        self.space.limit_bytes = limit
        return limit

    # -- what is told to them. All of it raises OSError ---------------------------------------

    def begin(self, volume: Volume, segment: int) -> int:
        """A segment is about to be written from its front, for the first time or anew: all that
        was said about it is void, and that lasts. Its new generation."""
        generation = self.generations.get(segment, 0) + 1
        journal = self._of(volume)
        if journal is not None:
            journal.reset(segment, generation)
        self.generations[segment] = generation
        return generation

    def stored(self, volume: Volume, slots: Slots, stamp: PageStamp, sequence: int) -> None:
        """Pages lie in these slots (flushed already under `sync`)."""
        journal = self._of(volume)
        if journal is not None:
            lasting = self.durability == "sync"
            journal.put(slots, self._generations(slots), stamp, sequence, lasting=lasting)

    def gone(self, volume: Volume, slots: Slots, generations: Slots | None = None) -> None:
        """These slots hold no page any more. `generations`: of each slot's segment when it held
        one, where the segment may have been begun anew since (default: the newest)."""
        journal = self._of(volume)
        if journal is not None and slots.size:
            known = self._generations(slots) if generations is None else generations
            journal.delete(slots, known)

    # -- their life ---------------------------------------------------------------------------

    def open(self, volume: Volume, contents: Contents) -> None:
        """Go on where an earlier process ended. Raises OSError."""
        with self._turn:
            journal = self._open(volume, contents.old, contents.number)
            journal.remove_files(contents.stale)

    def all(self) -> list[Journal]:
        """Those that there are, for the checkpoints."""
        return list(self._held.values())

    def withdraw(self, names: Iterable[str]) -> list[Journal]:
        """Volumes leave. Their journals, to be closed and removed where waiting does no harm."""
        gone = []
        for name in names:
            journal = self._held.pop(name, None)
            # A checkpoint under way may still begin one more log.
            self._left[name] = 2 + (journal.number if journal else self._first.get(name, 0))
            gone += [journal] if journal else []
        return gone

    def rejoin(self, name: str) -> None:
        """A volume is back, with a folder that was cleared; its old files may still be going."""
        self._first[name] = self._left.pop(name, 1)

    def close(self) -> None:
        """No more events. With durability none nothing of them stays."""
        with self._turn:
            journals, self._held = list(self._held.values()), {}
        for journal in journals:
            journal.close(remove=self.durability == "none")

    def _of(self, volume: Volume) -> Journal | None:
        journal = self._held.get(volume.name)
        wanted = self.durability != "none"
        if (journal is not None) == wanted:
            return journal
        with self._turn:
            journal = self._held.get(volume.name)
            if journal is not None and not wanted:
                del self._held[volume.name]
                self._first[volume.name] = journal.number + 2
                journal.close(remove=True)
                return None
            if journal is None and wanted:
                if volume.name in self._left:
                    raise SegmentGoneError(errno.ENOENT, "the volume has left")
                journal = self._open(volume, None, self._first.get(volume.name, 1))
        return journal

    def _open(self, volume: Volume, old: Old | None, number: int) -> Journal:
        journal = Journal(
            volume.folder,
            self.identity,
            self._io,
            self.space,
            self.settings,
            cap_bytes=self.cap_bytes,
            old=old,
            number=number,
        )
        journal.slots = self.slots
        self._held[volume.name] = journal
        return journal

    def _generations(self, slots: Slots) -> NDArray[np.uint32]:
        numbers = slots // self.identity.per_segment
        one_each = [self.generations.get(number, 0) for number in numbers.tolist()]
        return np.array(one_each, dtype=np.uint32)
