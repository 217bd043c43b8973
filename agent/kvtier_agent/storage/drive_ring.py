"""The ring of one volume: its files by number, what is under way, what memory it has registered.

One for each volume, so that what is in flight is bounded per drive, and a drive that hangs keeps
nobody waiting but those who want its pages.

Registered memory saves the kernel a look-up of pages with each transfer, and cannot be given back
meanwhile: only what has memory behind it is registered, from the start of the arena on, in pieces
of at most 1 GiB that end between slots, and what is about to be given back is let go before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from kvtier_agent.cache.moves import MoveKind
from kvtier_agent.native import COMPLETION
from kvtier_agent.storage.segment import Segment
from kvtier_agent.storage.volume import Volume

PIECE_BYTES = 1 << 30
"""The kernel registers no larger piece at a time."""

SLOW_FACTOR = 4
"""So many times as long is waited for one transfer while others of its kind end."""

log = structlog.get_logger("kvtier.storage.ring")


class DriveRing:
    """`ring`: as `native.ring` makes it. Thread-safe, but for `expect` and `ended`."""

    def __init__(self, volume: Volume, ring: Any) -> None:
        self.volume = volume
        self.ring = ring
        self.waiting = 0
        """Transfers that have not ended."""
        self.since = 0.0
        """When one last ended, or the first of these was submitted."""
        self.answered: dict[MoveKind, float] = {}
        """When it last ended a transfer of each kind."""
        self.said = 0.0
        """When it was last said that it hangs."""
        self.stalls = False
        """Has it left a transfer unanswered for so long that it is to get no more writes?"""
        self.mute = False
        """Has it answered no read for so long that it is to get no more of them?"""
        self._files = threading.Lock()
        self._pins = threading.Lock()
        self._pinned = 0
        self._pieces: list[int] = []
        """Where each piece begins that is registered; they end where the next one begins."""
        self._slot_bytes = 0
        self._refused = False

    @property
    def broken(self) -> bool:
        """Did the kernel give it up?"""
        return bool(self.ring.broken)

    def file_of(self, segment: Segment) -> int | None:
        """The number of a segment in use; the segment lets it go at its end. None: the table is
        full, or the segment is known to another ring."""
        with self._files:
            if segment.ring_file is None:
                try:
                    segment.ring_file = (self, int(self.ring.add_file(segment.fd)))
                except (OSError, ValueError):
                    return None
            ring, number = segment.ring_file
            return number if ring is self else None

    def drop_file(self, number: int) -> None:
        """No transfer of it is under way any more."""
        with contextlib.suppress(ValueError, IndexError):  # closed, and all its files with it
            self.ring.drop_file(number)

    # -- transfers --------------------------------------------------------------------------

    def expect(self, count: int, now: float) -> None:
        """So many transfers are about to be submitted."""
        if not self.waiting:
            self.since = now
        self.waiting += count

    def ended(self, count: int, now: float) -> float:
        """So many have ended; when some did before."""
        self.waiting -= count
        before, self.since = self.since, now
        return before

    def unanswered(self, kind: MoveKind, submitted: float, now: float) -> float:
        """Seconds for which it has ended no transfer of this kind, though one waits."""
        return now - max(submitted, self.answered.get(kind, submitted))

    def silent(self, kind: MoveKind, submitted: float, now: float) -> float:
        """Seconds for which it has been silent to one that waits for transfers of this kind. Those
        of the other kind that it ends say nothing: reads may go on while writes hang. Those of the
        same kind say that it is slow, as one busy with reads is with writes, which is not believed
        for ever."""
        return max(self.unanswered(kind, submitted, now), (now - submitted) / SLOW_FACTOR)

    def hangs(self, silent: float, now: float, seconds: float) -> bool:
        """Has it been silent for so long, and was that not said in so long?"""
        return min(silent, now - self.said) > seconds

    def submit(self, rows: NDArray[np.uint64]) -> OSError | None:
        """Queue transfers (rows of `native.TRANSFER_COLUMNS`), all or none; why none."""
        try:
            self.ring.submit(rows, together=True)
        except ValueError:
            return OSError(errno.ECANCELED, "the ring is closed")
        except OSError as error:
            return error
        return None

    def cancel(self, tags: NDArray[np.uint64]) -> None:
        """Ask for the end of transfers; each ends all the same."""
        with contextlib.suppress(ValueError):  # closed: asked for already
            self.ring.cancel(tags)

    def collect(self) -> NDArray[Any]:
        """What has ended since the last call: `native.COMPLETION`."""
        return np.frombuffer(self.ring.collect(), COMPLETION)

    # -- registered memory ------------------------------------------------------------------

    def pin_more(self, backed: Callable[[], int], slot_bytes: int) -> bool:
        """Register one more piece of the arena, whose first `backed()` bytes have memory behind
        them; False where there is none."""
        with self._pins:
            if slot_bytes != self._slot_bytes:
                self._let_go(0)
                self._slot_bytes = slot_bytes
            most = max(PIECE_BYTES // slot_bytes, 1) * slot_bytes
            length = min(backed() // slot_bytes * slot_bytes - self._pinned, most)
            if length <= 0 or self._refused:
                return False
            try:
                problem = self.ring.pin(self._pinned, length)
            except ValueError:
                return False  # closed
            if problem:
                self._refused = True
                log.warning(
                    "memory cannot be registered for transfers, which costs processor time;"
                    " raise RLIMIT_MEMLOCK, or give the agent IPC_LOCK",
                    volume=self.volume.name, error=os.strerror(problem),
                )  # fmt: skip
                return False
            self._pieces.append(self._pinned)
            self._pinned += length
            return True

    def unpin_from(self, start: int) -> None:
        """What lies behind `start` in the arena is about to be given back. Returns when nothing of
        it is registered."""
        with self._pins:
            self._let_go(start)

    def _let_go(self, start: int) -> None:
        """Of every piece that reaches behind `start`."""
        end = self._pinned
        while self._pieces and self._pinned > start:
            self._pinned = self._pieces.pop()
        if self._pinned < end:
            with contextlib.suppress(ValueError):  # closed
                self.ring.unpin(self._pinned, end - self._pinned)
