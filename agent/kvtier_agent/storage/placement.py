"""On which volume a segment lies, and whether it may have blocks there.

A new segment goes to the volume that holds the least of those that take writes; if that one refuses
(full, its reserve reached, an error) the next one is tried, first for the whole segment, then for
just the slots that are written now. A volume that refused rests (`volume_health`). A segment stays
on its volume until it is given back, or until it is begun anew while its volume fails: then it
moves. One that is begun anew is also how a volume that failed is tried again.

`room_for` and `begin` are called with the lock of `L2` held.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvtier_agent.cache.arena import runs
from kvtier_agent.storage.fileio import NoAnswerError
from kvtier_agent.storage.journal_files import JournalFullError
from kvtier_agent.storage.segment import Segment, SegmentGoneError, segment_name
from kvtier_agent.storage.volume import Volume

if TYPE_CHECKING:
    from kvtier_agent.storage.l2 import L2

Use = tuple[int, int]
"""Epoch of a segment, and how many slots this use of it has."""


class CapError(OSError):
    """The tier's own cap is reached: no volume's fault."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "the cap of the tier is reached")


class Placement:
    """The part of `L2` that finds room."""

    def __init__(self, l2: L2, clock: Callable[[], float]) -> None:
        self._l2 = l2
        self._clock = clock

    def room_for(self, number: int, first: int, count: int, use: Use | None) -> Segment:
        """The segment in its use, with blocks for these slots, inside cap and reserve. Raises
        OSError."""
        held = self._l2.segments.get(number)
        if held is not None and not self._moves(*held, use):
            if held[1].health.hangs(self._clock()):
                raise NoAnswerError(waited=False)
            try:
                self.begin(*held, use)
                return self._lay_out(*held, first, count, use)
            except SegmentGoneError:
                raise
            except OSError as error:
                self.refused(held[1], error)
                begun = use is None or held[0].use[0] == use[0]
                if len(self._l2.volumes) < 2 or (begun and held[0].allocated):
                    raise  # there is no other, or pages of this use may lie there
        if held is not None:
            self._l2.drop_segment(number)
        return self._make(number, first, count, use)

    def refused(self, volume: Volume, error: OSError, *, placing: bool = True) -> None:
        """Note that a volume refused, unless that was not its fault."""
        if not isinstance(error, CapError | JournalFullError | SegmentGoneError):
            volume.health.refused(self._clock(), error, placing=placing)

    def took(self, volume: Volume, *, grew: bool) -> None:
        """A write to a volume succeeded; did it get new blocks for it? One to blocks that were
        there says nothing of how full it is: that is looked at when it has rested."""
        trouble = volume.health.trouble
        if trouble is None or grew or trouble.reason == "VolumeReadOnly":
            volume.health.took()
            return
        volume.health.served()
        if volume.health.rests(self._clock()):
            return
        if trouble.failing:
            if not trouble.placing:
                volume.health.took()
        elif volume.keeps_reserve(self._l2.per_segment * self._l2.stride, self._l2.reserve_percent):
            volume.health.took()
        else:
            self.refused(volume, _reserve_reached())

    def gives_up(self, volume: Volume) -> bool:
        """Is a volume lost, and not being tried just now?"""
        trouble = volume.health.trouble
        return trouble is not None and trouble.given_up(self._clock())

    def begin(self, segment: Segment, volume: Volume, use: Use | None) -> None:
        """Begin a segment anew if this is a later use of it: what it held is void from now on.
        Blocks past its new size go back. Raises OSError, and then nothing has changed."""
        epoch = segment.use[0]
        if use is None or use[0] == epoch:
            return
        if use[0] < epoch:
            raise SegmentGoneError(errno.ENOENT, "that use of the segment is over")
        segment.use = (use[0], self._void(volume, segment.number))
        segment.found = False
        beyond = use[1] + np.flatnonzero(segment.laid[use[1] :])
        for start, length in runs(beyond.astype(np.uint32)):
            segment.punch(start, length)

    def _void(self, volume: Volume, number: int) -> int:
        """Tell the journal that all a segment held is void; its new generation. Raises OSError: the
        journal refused, as it would what is told of a write. Such a write proves it well again."""
        try:
            return self._l2.journals.begin(volume, number)
        except OSError as error:
            self.refused(volume, error, placing=False)
            raise

    def _moves(self, segment: Segment, volume: Volume, use: Use | None) -> bool:
        """Is it begun anew, and better on another volume?"""
        if use is None or use[0] <= segment.use[0] or len(self._l2.volumes) < 2:
            return False
        now, trouble = self._clock(), volume.health.trouble
        if trouble is not None:
            return trouble.failing and volume.health.rests(now)
        return any(other.health.due(now) for other in self._l2.volumes)

    def _make(self, number: int, first: int, count: int, use: Use | None) -> Segment:
        l2 = self._l2
        used = dict.fromkeys((v.name for v in l2.volumes), 0)
        for segment, volume in list(l2.segments.values()):
            used[volume.name] = used.get(volume.name, 0) + segment.allocated
        now = self._clock()
        # If all of them rest the cache's own patience is over by now.
        open_to_all = [v for v in l2.volumes if not v.health.rests(now)] or l2.volumes
        # One that failed and has rested comes first: to be tried is how it gets well.
        least = sorted(open_to_all, key=lambda v: (not v.health.due(now), used[v.name]))
        size = self._size(number, use)
        problem = OSError(errno.ENOSPC, "no volume")
        too_full: dict[str, OSError] = {}
        for whole in (True, False):
            wanted = np.arange(size if whole else 0, dtype=np.uint32)
            wanted = np.union1d(wanted, np.arange(first, first + count, dtype=np.uint32))
            for volume in least:
                try:
                    made = self._create(number, volume, use, wanted)
                except SegmentGoneError:
                    raise
                except CapError as error:
                    problem = error
                    break
                except OSError as error:
                    problem = error
                    if whole and _is_full(error):
                        # It may take some slots yet, if no other volume takes them all.
                        too_full[volume.name] = error
                    else:
                        self.refused(volume, error)
                else:
                    for other in least if whole else []:
                        if other.name in too_full:
                            self.refused(other, too_full[other.name])
                    return made
            least = [v for v in least if v.name in too_full or not v.health.rests(now)]
        raise problem

    def _create(self, number: int, volume: Volume, use: Use | None, wanted: np.ndarray) -> Segment:
        l2 = self._l2
        new = int(wanted.size) * l2.stride
        if l2.segment_bytes + new > l2.segment_cap_bytes:
            raise CapError
        self._keep_reserve(volume, new)
        path = volume.folder / segment_name(number)
        segment = Segment(path, number, l2.per_segment, l2.payload_bytes, l2.io, create=True)
        l2.segments[number] = (segment, volume)
        try:
            if volume not in l2.volumes:  # withdrawn in this very moment
                raise SegmentGoneError(errno.ENOENT, "the volume is gone")
            segment.use = (use[0] if use else 0, self._void(volume, number))
            self._allocate(segment, wanted)
        except OSError:
            l2.drop_segment(number)
            raise
        return segment

    def _lay_out(
        self, segment: Segment, volume: Volume, first: int, count: int, use: Use | None
    ) -> Segment:
        """Blocks for these slots of a segment that is there: all of its slots at once if they fit,
        else just these. Raises OSError."""
        l2 = self._l2
        missing = first + np.flatnonzero(~segment.laid[first : first + count])
        if not missing.size and l2.segment_bytes <= l2.segment_cap_bytes:
            return segment  # blocks that are there already take nothing from the reserve
        rest = np.flatnonzero(~segment.laid[: self._size(segment.number, use)])
        problem: OSError = CapError()
        for wanted in (np.union1d(rest, missing), missing):
            new = int(wanted.size) * l2.stride
            try:
                if l2.segment_bytes + new > l2.segment_cap_bytes:
                    raise CapError
                self._keep_reserve(volume, new)
                self._allocate(segment, wanted.astype(np.uint32))
            except OSError as error:
                if not _is_full(error):
                    raise
                problem = error
            else:
                return segment
        if not segment.allocated:
            l2.drop_segment(segment.number)
        raise problem

    def _allocate(self, segment: Segment, wanted: np.ndarray) -> None:
        for start, length in runs(wanted):
            segment.lay_out(start, length)
        if self._l2.segment_bytes > self._l2.segment_cap_bytes:
            # The file system's own blocks reach the cap: all goes back.
            for start, length in runs(wanted):
                segment.punch(start, length)
            raise CapError

    def _keep_reserve(self, volume: Volume, new: int) -> None:
        if not volume.keeps_reserve(new, self._l2.reserve_percent):
            raise _reserve_reached()

    def _size(self, number: int, use: Use | None) -> int:
        """Slots of a segment that may be laid out ahead."""
        if use is not None:
            return use[1]
        l2 = self._l2
        return max(0, min(l2.per_segment, l2.limit_slots - number * l2.per_segment))


def _reserve_reached() -> OSError:
    return OSError(errno.ENOSPC, "the reserve of the volume is reached")


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
