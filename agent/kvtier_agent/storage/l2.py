"""L2: pages in segment files on one or more volumes.

The cache hands out slot numbers, and with each the use of its segment that is meant (its *epoch*)
and how many slots that use has. A slot number is (segment, slot in segment); a segment is one file
on one volume (`placement` says which), made when its first slot is written. It stays
there until it is given back: the first write of a later epoch begins it anew, in the same blocks,
after the journal was told that all it held is void. So this module decides only where segments lie
and whether a write may happen:

    before each write   the epoch is not over; otherwise CANCELLED
    before each write   allocated blocks + what must be laid out <= cap, and the volume's reserve
                        stays free; otherwise NO_SPACE, and nothing was written
    before each write   the bytes in the arena match the record's checksum; otherwise BAD_PAGE
    after each read     header whole, key as asked, payload matches the checksum; else BAD_PAGE, or
                        UNWRITTEN: of an earlier process under `async`, and its slot is blank or
                        has a whole page of another use, as after a power cut

What an earlier process left is found by `recovery`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtier_agent.cache.geometry import Geometry
from kvtier_agent.cache.moves import MoveStatus
from kvtier_agent.cache.segment_sizes import slots_per_segment, slots_within
from kvtier_agent.cache.settings import Durability
from kvtier_agent.cache.units import form_of
from kvtier_agent.storage.batches import neighbours
from kvtier_agent.storage.fileio import FileIO, NoAnswerError
from kvtier_agent.storage.journal_files import JournalSettings
from kvtier_agent.storage.journal_format import Identity
from kvtier_agent.storage.journals import Journals
from kvtier_agent.storage.page_write import PageWrite, Uses
from kvtier_agent.storage.placement import Placement
from kvtier_agent.storage.removal import remove_in_background
from kvtier_agent.storage.segment import (
    HEADER_BYTES,
    HeaderBlock,
    PageStamp,
    Segment,
    SegmentGoneError,
)
from kvtier_agent.storage.segment_table import SegmentTable
from kvtier_agent.storage.volume import Volume

SCRATCH_BYTES = 1 << 20
"""Memory of a thread that compacts: pages are read into it and written from it."""

Slots = NDArray[np.uint32]
Statuses = NDArray[np.uint8]


class L2:
    """Thread-safe: movers read and write at the same time; bookkeeping is under one lock."""

    def __init__(
        self,
        volumes: list[Volume],
        geometry: Geometry,
        *,
        io: FileIO | None = None,
        journal: JournalSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, monotonic; by it volumes that refused rest."""
        self.geometry = geometry
        self.form = form_of(geometry)
        self.stored_as = geometry.stored_as
        self.slot_bytes = geometry.slot_bytes
        """Of the arena."""
        self.payload_bytes = geometry.payload_bytes
        self.stride = HEADER_BYTES + self.payload_bytes
        self.per_segment = slots_per_segment(self.stride)
        self.volumes = list(volumes)
        self.io = io or FileIO()
        self.cap_bytes = 0
        self.segment_cap_bytes = 0
        """The cap less what is set aside for the journals."""
        self.limit_slots = 0
        self.reserve_percent = 0
        self.durability: Durability = "async"
        self.lock = threading.Lock()
        self.segments = SegmentTable()
        self._local = threading.local()
        self.sequence = 1
        identity = Identity(self.stored_as, self.per_segment, self.stride)
        self.journals = Journals(identity, self.io, journal)
        self.placement = Placement(self, clock)

    # -- limits -----------------------------------------------------------------------------

    def slots_within(self, cap_bytes: int) -> int:
        """Slots that fit a cap of allocated bytes. A block per segment is left for the file
        system's own extent records."""
        return slots_within(cap_bytes, self.stride)

    def limit(self, cap_bytes: int, reserve_percent: int, durability: Durability) -> int:
        """New limits; how many slots they allow. Without the lock: whoever holds it may be waiting
        for a drive, and this is the cache thread. A write under way may still have seen the old
        ones, as if it had come before."""
        aside = self.journals.set_aside(
            cap_bytes, self.slots_within(cap_bytes), len(self.volumes), durability
        )
        self.cap_bytes = cap_bytes
        self.segment_cap_bytes = max(0, cap_bytes - aside)
        self.reserve_percent = reserve_percent
        self.durability = durability
        self.limit_slots = self.slots_within(self.segment_cap_bytes) if self.volumes else 0
        return self.limit_slots

    @property
    def allocated_bytes(self) -> int:
        """Bytes of blocks that all segments and journals take."""
        return self.segment_bytes + self.journals.space.used_bytes

    @property
    def segment_bytes(self) -> int:
        """Bytes of blocks that all segments take."""
        return self.segments.bytes

    # -- writing ----------------------------------------------------------------------------

    def write(
        self,
        slots: Slots,
        stamp: PageStamp,
        arena: NDArray[np.uint8],
        rows: Slots,
        uses: Uses | None = None,
    ) -> tuple[Statuses, str]:
        """Write arena rows `rows` to `slots`. `uses`: of their segments, epoch and size per page
        (None: as they are). Statuses per page, and the first error."""
        writing = PageWrite(self, slots, stamp, arena, rows, uses, HeaderBlock(len(slots)))
        for run in writing.runs():
            # A slice, not `[where]`: a copy would not be page aligned.
            block = writing.headers.bytes[run.where[0] : run.where[0] + len(run.where)]
            error: OSError | None = None
            try:
                run.segment.write(run.first, block, self.payloads(arena, rows[run.where]))
            except OSError as problem:
                error = problem
            writing.settle(run, error)
        return writing.status, writing.error

    def payloads(self, arena: NDArray[np.uint8], rows: Slots) -> list[NDArray[np.uint8]]:
        """What of these slots of the arena goes to a file and comes from it."""
        return [arena[row, : self.payload_bytes] for row in rows.tolist()]

    def hangs(self, volume: Volume) -> None:
        """A volume answers no transfer: it counts as failing, and others are used."""
        self.placement.refused(volume, NoAnswerError(waited=True), placing=False)

    def make_last(self, segment: Segment) -> None:
        """The pages to the device and, the first time, the file's name too."""
        segment.flush()
        if not segment.named:
            self.io.flush_folder(segment.path.parent)
            segment.named = True

    # -- reading ----------------------------------------------------------------------------

    def read(
        self,
        slots: Slots,
        keys: NDArray[np.uint8],
        sums: NDArray[np.uint64],
        arena: NDArray[np.uint8],
        rows: Slots,
    ) -> tuple[Statuses, str]:
        """Read `slots` into arena rows `rows`, and verify. Statuses per page, the first error."""
        status = np.full(len(slots), MoveStatus.OK, dtype=np.uint8)
        headers = HeaderBlock(len(slots))
        first_error = ""
        for where, number, first in neighbours(slots, status == MoveStatus.OK, self.per_segment):
            try:
                held = self.segments.get(number)
                if held is None:
                    raise OSError(errno.ENOENT, "the segment is gone")
                block = headers.bytes[where[0] : where[0] + len(where)]
                held[0].read(first, block, self.payloads(arena, rows[where]))
            except OSError as error:
                status[where] = MoveStatus.IO_ERROR
                first_error = first_error or f"read: {error.strerror or error}"
        return self.verify(headers, slots, keys, sums, arena, rows, status, first_error)

    def verify(
        self,
        headers: HeaderBlock,
        slots: Slots,
        keys: NDArray[np.uint8],
        sums: NDArray[np.uint64],
        arena: NDArray[np.uint8],
        rows: Slots,
        status: Statuses,
        error: str,
    ) -> tuple[Statuses, str]:
        """Of pages that were read (`status` OK), header and payload against key and checksum of the
        record. Good ones get their unit sums into the arena. The statuses after that, and the first
        error, `error` if there was one."""
        good = headers.valid(len(rows), self.stored_as, self.form)
        fields = headers.fields[: len(rows)]
        good &= (fields["key"] == keys).all(axis=1)
        good &= fields["checksum"] == sums
        there = (status == MoveStatus.OK) & good
        units = self.form.of_rows(arena, rows[there])
        good[there] = match = self.form.checksums(units) == sums[there]
        self.form.leave(arena, rows[there][match], units[match])
        bad = (status == MoveStatus.OK) & ~good
        if bad.any():
            unwritten = bad & headers.unwritten(len(rows), self._generations(slots, bad))
            status[bad] = MoveStatus.BAD_PAGE
            status[unwritten] = MoveStatus.UNWRITTEN
            if wrong := int(bad.sum()) - int(unwritten.sum()):
                self.io.noticed("read", "checksum", wrong)
            error = error or f"{int(bad.sum())} pages failed verification"
        return status, error

    def _generations(self, slots: Slots, which: NDArray[np.bool_]) -> NDArray[np.uint32]:
        """Of the segments of these pages, where a power cut may have kept them from their slots;
        elsewhere 0."""
        found = np.zeros(len(slots), dtype=np.uint32)
        if self.durability == "async":
            for i in np.flatnonzero(which).tolist():
                held = self.segments.get(int(slots[i]) // self.per_segment)
                if held is not None and held[0].found:
                    found[i] = held[0].use[1]
        return found

    # -- compaction -------------------------------------------------------------------------

    def compact(
        self, source: Slots, target: Slots, stamp: PageStamp, uses: Uses
    ) -> tuple[Statuses, str]:
        """Copy pages from slot to slot, verified on the way. `uses`: of the targets' segments.
        Statuses per page, and the first error: those of a read, and of a write with TARGET_ERROR
        for an error of the drive."""
        status = np.full(len(source), MoveStatus.CANCELLED, dtype=np.uint8)
        first_error = ""
        memory = self._scratch()
        step = len(memory)
        for start in range(0, len(source), step):
            part = np.arange(start, min(start + step, len(source)))
            rows = np.arange(len(part), dtype=np.uint32)
            read, error = self.read(
                source[part], stamp.keys[part], stamp.checksums[part], memory, rows
            )
            first_error = first_error or error
            status[part] = read
            good = part[read == MoveStatus.OK]
            if not good.size:
                continue
            there = rows[read == MoveStatus.OK]
            some = (uses[0][good], uses[1][good])
            wrote, error = self.write(target[good], stamp.some(good), memory, there, some)
            first_error = first_error or error
            wrote[wrote == MoveStatus.IO_ERROR] = MoveStatus.TARGET_ERROR
            wrote[wrote == MoveStatus.BAD_PAGE] = MoveStatus.CANCELLED  # between the two checks
            status[good] = wrote
        return status, first_error

    def _scratch(self) -> NDArray[np.uint8]:
        """Page-aligned memory of this thread, (n, slot_bytes)."""
        held: NDArray[np.uint8] | None = getattr(self._local, "scratch", None)
        if held is None:
            count = max(1, SCRATCH_BYTES // self.slot_bytes)
            memory = mmap.mmap(-1, count * self.slot_bytes)
            held = np.frombuffer(memory, dtype=np.uint8).reshape(count, self.slot_bytes)
            self._local.scratch = held
        return held

    # -- slots without pages ----------------------------------------------------------------

    def forget(self, slots: Slots, epochs: Slots) -> None:
        """These slots, in these uses of their segments, hold no page any more."""
        numbers = slots // self.per_segment
        for number in np.unique(numbers).tolist():
            held = self.segments.get(number)
            if held is not None:
                epoch, generation = held[0].use
                mine = (numbers == number) & (epochs == epoch)
                with contextlib.suppress(OSError):  # it comes back after a crash, a page as any
                    generations = np.full(int(mine.sum()), generation, dtype=np.uint32)
                    self.journals.gone(held[1], slots[mine], generations)

    def give_back(self, numbers: Slots) -> None:
        """Segments that hold nothing go, and their blocks with them."""
        with self.lock:
            for number in numbers.tolist():
                self.drop_segment(number)

    def scrub(self, slots: Slots, uses: Uses | None = None) -> Statuses:
        """Write a pattern to each slot of empty segments, read it back, compare. Statuses per
        slot."""
        status = np.full(len(slots), MoveStatus.IO_ERROR, dtype=np.uint8)
        memory = HeaderBlock(2 * self.stride // HEADER_BYTES).bytes.reshape(2, self.stride)
        for i, slot in enumerate(slots.tolist()):
            number, first = divmod(slot, self.per_segment)
            held = self.segments.get(number)
            try:
                if held is not None and uses is not None:
                    with self.lock:
                        self.placement.begin(*held, (int(uses[0][i]), int(uses[1][i])))
                if held is None or not held[0].laid[first]:
                    status[i] = MoveStatus.OK  # nothing is there: it will be laid out anew
                    continue
                memory[0] = (slot * 37 + 11) % 251
                memory[1] = 0
                with held[0].in_use():
                    offset = first * self.stride
                    wrote = self.io.write(held[0].fd, [memory[0]], offset)
                    got = self.io.read(held[0].fd, [memory[1]], offset)
                if (wrote, got) == (self.stride, self.stride) and (memory[0] == memory[1]).all():
                    status[i] = MoveStatus.OK
                elif wrote != self.stride:
                    self.io.noticed("write", "short")
                else:
                    self.io.noticed("read", "checksum" if got == self.stride else "short")
            except SegmentGoneError:
                status[i] = MoveStatus.CANCELLED
            except OSError:
                pass
        return status

    def give_up_lost(self) -> set[int]:
        """Volumes that go on failing stay in the tier, to be tried again, without their segments.
        One whose rest is over is left alone: what lies there by now is how it is tried. Numbers of
        the segments lost. On the cache thread, as `withdraw`."""
        lost: set[int] = set()
        for volume in self.volumes:
            if self.placement.gives_up(volume):
                lost |= {n for n, held in list(self.segments.items()) if held[1] is volume}
        segments = [held[0] for n in lost if (held := self.segments.pop(n, None)) is not None]
        if segments:
            remove_in_background(segments, [])
        return lost

    def held_bytes(self) -> dict[str, int]:
        """Bytes of blocks that the segments on each volume take, by its name. Any thread."""
        held = {volume.name: 0 for volume in self.volumes}
        for segment, volume in list(self.segments.values()):
            held[volume.name] = held.get(volume.name, 0) + segment.allocated
        return held

    def withdraw(self, names: set[str]) -> set[int]:
        """Volumes leave: their segments are removed. Numbers of the segments lost.

        On the cache thread: nothing of it takes the lock, which a write to a drive that hangs may
        hold, and the files are removed on a thread of their own, waited for only briefly."""
        self.volumes = [v for v in self.volumes if v.name not in names]
        lost = {n for n, (_, volume) in list(self.segments.items()) if volume.name in names}
        segments = [held[0] for n in lost if (held := self.segments.pop(n, None)) is not None]
        journals = self.journals.withdraw(names)
        if segments or journals:
            remove_in_background(segments, journals)
        return lost

    def add(self, volume: Volume) -> None:
        """A volume joins; its folder was cleared by `recovery.clear`."""
        self.journals.rejoin(volume.name)
        self.volumes = [*self.volumes, volume]

    def close(self) -> None:
        """Flush (durability async, sync) or sweep (none)."""
        with self.lock:
            for number, (segment, _) in list(self.segments.items()):
                if self.durability == "none":
                    self.drop_segment(number)
                else:
                    with contextlib.suppress(OSError):
                        segment.flush()
                    segment.close()
            self.segments.clear()
        self.journals.close()

    def drop_segment(self, number: int) -> None:
        """Remove a segment's file, if there is one."""
        held = self.segments.pop(number, None)
        if held is not None:
            held[0].remove()
