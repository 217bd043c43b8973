"""Reads that bring transfer units up in order: the first ones of all pages, then the second ones.

What is read of a page is cut where units end, rounded up to 4096 bytes, so that O_DIRECT can do it:

    piece 0        header | unit 0, and what of unit 1 lies in its last block
    piece k        up to the end of unit k, likewise

When the first k pieces of a page are there, so are its first k units. Nothing of a page is told
before its header and the unit sums behind it are known to be those of its record; they go behind
the page in the arena then, where whoever reads a unit finds what vouches for it. The page as a
whole is verified at the end, as every page (`L2.verify`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import align_up
from kvtier_agent.cache.moves import Move, MoveStatus
from kvtier_agent.cache.progress import Units
from kvtier_agent.cache.units import PageForm
from kvtier_agent.storage.batches import neighbours
from kvtier_agent.storage.l2 import L2, Statuses
from kvtier_agent.storage.segment import HEADER_BYTES, HeaderBlock, Segment

Announce = Callable[[Move, Units], None]
"""Told of units that have landed of the pages of a move under way; on any thread, and soon back."""


def pieces(form: PageForm) -> NDArray[np.int64]:
    """Where in a page each piece begins, and where the last one ends: (units + 1,) bytes, multiples
    of 4096. A piece may be empty where units are smaller than that."""
    ends = [min(align_up(form.start(unit)), form.trailer) for unit in range(form.units)]
    return np.array([*ends, form.trailer])


class Landing:
    """Which pieces of the pages of a layered move are there. For one thread."""

    def __init__(self, l2: L2, move: Move, headers: HeaderBlock) -> None:
        """`headers`: those of the pages, where they are read to."""
        self._l2, self._move, self._headers = l2, move, headers
        self._there = np.zeros((len(move), l2.form.units), dtype=bool)
        self._there[:, np.diff(pieces(l2.form)) == 0] = True
        self._believed = np.zeros(len(move), dtype=bool)
        self._looked = np.zeros(len(move), dtype=bool)
        self._told = np.zeros(len(move), dtype=np.uint16)

    def landed(self, pages: NDArray[np.intp], units: NDArray[np.intp]) -> None:
        """These pieces of these pages were read."""
        self._there[pages, units] = True

    def news(self, arena: NDArray[np.uint8]) -> Units | None:
        """How many units of each page have landed, if there are more of them than at the last call.
        `arena` by slots."""
        new = self._there[:, 0] & ~self._looked
        if new.any():
            self._looked |= new
            self._believe(np.flatnonzero(new), arena)
        units = np.where(
            self._there.all(axis=1), self._there.shape[1], self._there.argmin(axis=1)
        ).astype(np.uint16)
        units[~self._believed] = 0
        if (units == self._told).all():
            return None
        self._told = units
        return units.copy()

    def _believe(self, new: NDArray[np.intp], arena: NDArray[np.uint8]) -> None:
        """Of these pages the headers have come: are they those of the pages' records?"""
        l2, move, count = self._l2, self._move, len(self._move)
        good = self._headers.valid(count, l2.stored_as, l2.form)
        fields = self._headers.fields[:count]
        good &= (fields["key"] == move.keys).all(axis=1)
        good &= fields["checksum"] == move.checksums
        new = new[good[new]]
        self._believed[new] = True
        sums = self._headers.unit_sums(count, l2.form)[new]
        l2.form.leave(arena, move.target[new], sums)


def read_in_order(
    l2: L2, move: Move, arena: NDArray[np.uint8], announce: Announce
) -> tuple[Statuses, str]:
    """Carry out a layered move by calls, a piece each: as `L2.read`, which it may be instead of."""
    status = np.full(len(move), MoveStatus.OK, dtype=np.uint8)
    headers = HeaderBlock(len(move))
    landing = Landing(l2, move, headers)
    error = ""
    places: list[tuple[Segment | None, int]] = [(None, 0)] * len(move)
    for where, number, first in neighbours(move.source, status == MoveStatus.OK, l2.per_segment):
        held = l2.segments.get(number)
        for i, page in enumerate(where.tolist()):
            places[page] = (None if held is None else held[0], first + i)
    cuts = pieces(l2.form).tolist()
    for unit in range(l2.form.units):
        start, length = cuts[unit], cuts[unit + 1] - cuts[unit]
        if not length:
            continue
        for page in np.flatnonzero(status == MoveStatus.OK).tolist():
            segment, slot = places[page]
            buffers = [arena[move.target[page], start : start + length]]
            try:
                if segment is None:
                    raise OSError(errno.ENOENT, "the segment is gone")
                if unit:
                    segment.read_part(slot, HEADER_BYTES + start, buffers, length)
                else:
                    buffers.insert(0, headers.bytes[page])
                    segment.read_part(slot, 0, buffers, HEADER_BYTES + length)
            except OSError as problem:
                status[page] = MoveStatus.IO_ERROR
                error = error or f"read: {problem.strerror or problem}"
            else:
                landing.landed(np.array([page]), np.array([unit]))
        news = landing.news(arena)
        if news is not None:
            announce(move, news)
    return l2.verify(
        headers, move.source, move.keys, move.checksums, arena, move.target, status, error
    )
