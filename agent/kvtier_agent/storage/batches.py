"""What a batch of pages is cut into before the drive sees it, and what its errors mean."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.storage.segment import SegmentGoneError


def neighbours(
    slots: NDArray[np.uint32], wanted: NDArray[np.bool_], per_segment: int
) -> Iterator[tuple[NDArray[np.intp], int, int]]:
    """Runs of wanted pages that are neighbours in the batch and in one segment:
    (indexes, segment, first slot)."""
    indexes = np.flatnonzero(wanted)
    if not indexes.size:
        return
    mine = slots[indexes].astype(np.int64)
    first, last = int(mine[0]), int(mine[-1])
    if last - first == int(indexes[-1]) - int(indexes[0]) == mine.size - 1 and (
        first // per_segment == last // per_segment and (mine[1:] > mine[:-1]).all()
    ):
        yield indexes, *divmod(first, per_segment)  # one run, as most batches are
        return
    cut = (np.diff(mine) != 1) | (np.diff(indexes) != 1) | (np.diff(mine // per_segment) != 0)
    for part in np.split(indexes, np.flatnonzero(cut) + 1):
        number, first = divmod(int(slots[part[0]]), per_segment)
        yield part, number, first


NOTHING_WRITTEN = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE),
    errno.ETIMEDOUT,  # it hangs: the slot is not to be used again until its segment is begun anew
)


def status_of(error: OSError) -> MoveStatus:
    """How a page ends whose transfer raised this."""
    if isinstance(error, SegmentGoneError):
        return MoveStatus.CANCELLED
    if error.errno in NOTHING_WRITTEN:
        return MoveStatus.NO_SPACE
    if error.errno == errno.EROFS:
        return MoveStatus.READ_ONLY
    return MoveStatus.IO_ERROR
