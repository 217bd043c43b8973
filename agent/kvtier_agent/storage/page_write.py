"""A batch of pages on its way into segments: what comes before the bytes, and what comes after.

Whoever moves the bytes (calls of pwritev one after the other, or a ring all at once) goes through
the same steps, so that the same happens to a page whichever it was:

    begin       pages whose bytes do not match their record: BAD_PAGE, and left out
    runs        a run of neighbouring pages gets its blocks and its headers, or its refusal
    settle      the drive's answer for a run: flushed (sync), told to the journal, or refused
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage.batches import neighbours, status_of
from kvtier_agent.storage.segment import HeaderBlock, PageStamp, Segment, SegmentGoneError
from kvtier_agent.storage.volume import Volume

if TYPE_CHECKING:
    from kvtier_agent.storage.l2 import L2

Slots = NDArray[np.uint32]
Uses = tuple[Slots, Slots]
"""Epoch of each page's segment, and how many slots that use of it has (`SegmentPool.uses`)."""


@dataclass(frozen=True, slots=True)
class Run:
    """Pages `where` of the batch are neighbours, from slot `first` of the segment on. `grew`: it
    got new blocks for them."""

    where: NDArray[np.intp]
    number: int
    first: int
    segment: Segment
    volume: Volume
    grew: bool


class PageWrite:
    """`status` per page and `error`, the first one, are what came of it so far."""

    def __init__(
        self,
        l2: L2,
        slots: Slots,
        stamp: PageStamp,
        arena: NDArray[np.uint8],
        rows: Slots,
        uses: Uses | None,
        headers: HeaderBlock,
    ) -> None:
        """Arguments of `L2.write`, and room for as many headers."""
        self.status = np.full(len(slots), MoveStatus.OK, dtype=np.uint8)
        self.error = ""
        self.headers = headers
        self._l2, self._slots, self._stamp, self._uses = l2, slots, stamp, uses
        # Of the bytes themselves: what lies behind the page in memory need not be right for this.
        sums = l2.form.of_rows(arena, rows)
        self.status[l2.form.checksums(sums) != stamp.checksums] = MoveStatus.BAD_PAGE
        with l2.lock:
            self._sequence, l2.sequence = l2.sequence, l2.sequence + len(slots)
        headers.fill(stamp, l2.stored_as, l2.form, sums, self._sequence)

    def runs(self) -> Iterator[Run]:
        """Those that got their blocks, each when it is asked for; others have their status."""
        l2, uses = self._l2, self._uses
        for where, number, first in neighbours(
            self._slots, self.status == MoveStatus.OK, l2.per_segment
        ):
            use = None if uses is None else (int(uses[0][where[0]]), int(uses[1][where[0]]))
            try:
                with l2.lock:
                    before = l2.segments.get(number)
                    had = 0 if before is None else before[0].allocated
                    segment = l2.placement.room_for(number, first, len(where), use)
                    held = l2.segments.get(number)
                    grew = before is None or before[0] is not segment or segment.allocated > had
            except OSError as error:
                self._fail(where, error)
                continue
            if held is None:  # withdrawn in this very moment
                self._fail(where, SegmentGoneError(errno.ENOENT, "the segment is gone"))
                continue
            self.headers.seal(int(where[0]), len(where), segment.use[1])
            yield Run(where, number, first, segment, held[1], grew)

    def settle(
        self, run: Run, error: OSError | None = None, failed: NDArray[np.bool_] | None = None
    ) -> None:
        """The drive has answered for a run. `failed`: which of its pages had the error (None: all
        of them)."""
        if error is None:
            self._keep(run, run.where)
            return
        bad = run.where if failed is None else run.where[failed]
        self._l2.placement.refused(run.volume, error, placing=False)
        self._fail(bad, error)
        written = np.setdiff1d(run.where, bad)
        for part in np.split(written, np.flatnonzero(np.diff(written) != 1) + 1):
            if part.size:
                self._keep(run, part, proof=False)

    def _keep(self, run: Run, where: NDArray[np.intp], *, proof: bool = True) -> None:
        """The bytes of these neighbours are in their slots. `proof`: that says that the volume is
        well; not where others of the same run failed."""
        l2, here = self._l2, slice(int(where[0]), int(where[0]) + where.size)
        stamp = self._stamp.some(here)
        try:
            if l2.durability == "sync":
                l2.make_last(run.segment)
            held = l2.segments.get(run.number)
            if held is None or held[0] is not run.segment:  # another may have its number by now
                raise SegmentGoneError(errno.ENOENT, "the segment is gone")
            l2.journals.stored(run.volume, self._slots[here], stamp, self._sequence + here.start)
            if proof:
                l2.placement.took(run.volume, grew=run.grew)
        except OSError as error:
            # Of the volume it was begun on: by now the segment may have left, or lie on another.
            l2.placement.refused(run.volume, error, placing=False)
            self._fail(where, error)

    def _fail(self, where: NDArray[np.intp], error: OSError) -> None:
        self.status[where] = status_of(error)
        self.error = self.error or f"write: {error.strerror or error}"
